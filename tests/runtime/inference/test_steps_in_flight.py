"""A scheduler with steps in flight: their requests are left alone, and the others share what is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardconv_runtime.inference.stage_batching import StepsInFlight


class Scheduler:
    """As far as transformers' is used: every request fits, until ``is_full``."""

    def __init__(self, names: str) -> None:
        self.active_requests: dict[str, Any] = {}
        self.waiting_requests = {name: SimpleNamespace(request_id=name) for name in names}
        self.max_requests_per_batch = 100
        self.is_full = False
        self.cancelled: set[str] = set()

    def schedule_batch(self, *budgets: int) -> tuple[Any, ...]:
        names = [*self.active_requests, *self.waiting_requests][: self.max_requests_per_batch]
        if self.is_full:
            return None, *budgets
        for name in names:
            self.active_requests.setdefault(name, self.waiting_requests.pop(name, None))
        return [SimpleNamespace(state=self.active_requests[name]) for name in names], *budgets

    def set_request_cancellation(self, name: str) -> None:
        self.cancelled.add(name)

    def clear_cancelled_requests(self) -> list[str]:
        cleared, self.cancelled = sorted(self.cancelled), set()
        return cleared


def names(step: tuple[Any, ...]) -> str:
    return "".join(each.state.request_id for each in step[0])


def test_each_step_gets_its_share_of_requests_that_are_in_none() -> None:
    scheduler = Scheduler("abcde")
    steps = StepsInFlight(scheduler, 2)
    first, second = scheduler.schedule_batch(7), scheduler.schedule_batch(7)
    assert (names(first), names(second), first[1]) == ("abc", "de", 7)
    assert names(scheduler.schedule_batch(7)) == ""
    assert list(scheduler.active_requests) == list("abcde")
    assert scheduler.max_requests_per_batch == 100
    steps.end(first[0])
    del scheduler.active_requests["b"]
    assert names(scheduler.schedule_batch(7)) == "ac"
    steps.reset()
    assert names(scheduler.schedule_batch(7)) == "ac"


def test_a_full_cache_waits_for_steps_in_flight() -> None:
    scheduler = Scheduler("abcd")
    steps = StepsInFlight(scheduler, 2)
    first = scheduler.schedule_batch()
    scheduler.is_full = True
    assert scheduler.schedule_batch()[0] == []
    steps.end(first[0])
    assert scheduler.schedule_batch()[0] is None, "transformers makes room"


def test_a_request_in_flight_is_cancelled_later() -> None:
    scheduler = Scheduler("abcd")
    steps = StepsInFlight(scheduler, 2)
    first = scheduler.schedule_batch()
    for name in "ad":
        scheduler.set_request_cancellation(name)
    assert scheduler.clear_cancelled_requests() == ["d"]
    steps.end(first[0])
    assert scheduler.clear_cancelled_requests() == ["a"]
