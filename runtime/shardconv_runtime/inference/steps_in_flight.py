"""transformers' scheduler where several steps are under way, whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class StepsInFlight:
    """Has a scheduler leave requests alone of which a step is in flight, in place.

    Args:
        scheduler: of transformers.
        most_steps: that are in flight at a time; each gets its share of the requests.
    """

    def __init__(self, scheduler: Any, most_steps: int) -> None:
        self._scheduler = scheduler
        self._most_steps = most_steps
        self._requests: set[str] = set()
        self._schedule_batch = scheduler.schedule_batch
        self._clear_cancelled = scheduler.clear_cancelled_requests
        scheduler.schedule_batch = self._next_step
        scheduler.clear_cancelled_requests = self._clear_cancelled_requests

    def reset(self) -> None:
        """No step is in flight."""
        self._requests.clear()

    def end(self, requests: Iterable[Any]) -> None:
        """The step of these requests is over."""
        self._requests.difference_update(each.state.request_id for each in requests)

    def _next_step(self, *budgets: int) -> tuple[Any, ...]:
        """The next step, of a share of the requests that are in none; as transformers' ``schedule_batch``."""
        scheduler, busy = self._scheduler, self._requests
        active, most = scheduler.active_requests, scheduler.max_requests_per_batch
        share = -(-(len(active) + len(scheduler.waiting_requests)) // self._most_steps)
        scheduler.active_requests = {name: state for name, state in active.items() if name not in busy}
        scheduler.max_requests_per_batch = min(most, share)
        try:
            requests, *sizes = self._schedule_batch(*budgets)
        finally:
            free, scheduler.max_requests_per_batch = scheduler.active_requests, most
            kept = {name: state for name, state in active.items() if name in busy or name in free}
            scheduler.active_requests = kept | free
        if requests is None and busy:
            requests = []  # there will be room in the cache when others have ended
        busy.update(each.state.request_id for each in requests or ())
        return requests, *sizes

    def _clear_cancelled_requests(self) -> list[Any]:
        """Those in flight are cancelled when their step is over."""
        scheduler = self._scheduler
        later = scheduler._requests_to_cancel & self._requests
        scheduler._requests_to_cancel -= later
        cleared: list[Any] = self._clear_cancelled()
        scheduler._requests_to_cancel |= later
        return cleared
