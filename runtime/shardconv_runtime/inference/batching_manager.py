"""transformers' manager of continuous batching on a rank: rank 0 has the requests and errors are raised."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from transformers import ContinuousBatchingConfig

# The imports take seconds, so this module is imported only when a manager is made.
from transformers.generation.continuous_batching import ContinuousBatchingManager, model_runner
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter

from ..comm.agreement import agree, exchange
from ..comm.call_agreement import PAGED
from ..comm.deadline import raise_lost_rank
from ..comm.mesh import Launch
from ..comm.rank_0 import share_rng_state
from ..comm.step_coordinator import StepCoordinator
from ..default_modes import in_one_thread
from ..errors import LaunchError, RefusedCallError, ShardconvError
from .paged_model import PagedModel, RequestCheck, attempt

_names = inspect.signature(ContinuousBatchingConfig).parameters
PAGE_SIZE = "page_size" if "page_size" in _names else "block_size"
"""The option of transformers' ``ContinuousBatchingConfig``, which 5.17 has under its earlier name."""

WAIT_S = 0.01
"""Seconds between two looks of another rank at whether rank 0 has stopped the loop."""

_running: WeakKeyDictionary[dist.ProcessGroup, RankBatchingManager] = WeakKeyDictionary()
"""The manager whose loop uses a process group: a second one would mix up their collectives."""


def may_draw(manager: Any) -> bool:
    """Return whether random numbers may choose tokens: of the manager, or of a processor of one request."""
    config = manager.continuous_batching_config
    return bool(manager.generation_config.do_sample or config.per_request_processors)


class RankBatchingManager(ContinuousBatchingManager):  # type: ignore[misc]
    """The manager of one rank; made from transformers' own by ``adopt``.

    Only rank 0 takes requests and returns answers. On other ranks ``add_request`` does nothing, no answers
    come, and ``stop`` waits until rank 0 stops.
    """

    num_microbatches = 1
    most_blocks: int | None = None
    """Blocks that the cache needs at most; None: as many as the memory has room for."""
    batch_processor: Any
    _start: Launch
    _model: PagedModel
    _room: int | None
    _check: RequestCheck
    _refusal: Any
    _attention: str

    @classmethod
    def adopt(cls, manager: Any, start: Launch, attention: str) -> RankBatchingManager:
        """Turn a manager that has not started into one of a rank, in place.

        Args:
            attention: the model's implementation of attention before the manager was made.
        """
        manager.__class__ = cls
        manager._start, manager._model = start, manager.model
        manager._room, manager._refusal, manager._attention = None, None, attention
        manager._check = RequestCheck.of(manager._model.unwrapped)
        if start.world_size > 1:
            timeout_s = manager.continuous_batching_config.cpu_group_timeout
            manager.distributed_helper = StepCoordinator(start, timeout_s, may_draw(manager))
            manager.is_tp_driver = start.rank == 0
        if start.rank:
            setattr(manager, _name_of_waker(manager), _AlwaysSet())
            manager.output_router = _NoAnswers()
        adopted: RankBatchingManager = manager
        return adopted

    def start(self) -> None:
        """Start the loop; all ranks call this."""
        if self.is_running():
            return
        if self.batch_processor is None:
            self.batch_processor = self._create_batch_processor()
        # The model, and other managers of these ranks, refuse to run meanwhile.
        group = self._start.group
        if group is not None and self._start.world_size > 1:
            require_idle(self._start)
            _running[group] = self

            def refuse(module: nn.Module, args: object) -> None:
                is_paused = bool(getattr(self.background_thread_status, "_paused", False))
                if not PAGED.get() and self.is_running() and not is_paused:
                    raise LaunchError(
                        "the model was called while its ranks answer requests of continuous batching, which "
                        "use the same process group; stop the manager first"
                    )

            self._refusal = self._model.unwrapped.register_forward_pre_hook(refuse, prepend=True)
        share_rng_state(self._start)
        super().start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the loop once all requests are answered, or at once; other ranks wait for rank 0 to do so.

        Arguments as of transformers' method.
        """
        is_handling = sys.exception() is not None
        if not self.is_tp_driver and not hard_stop and not is_handling:
            while self.is_running():
                time.sleep(WAIT_S)
        super().stop(block, timeout, keep_for_next_session and self.failure is None, hard_stop)
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
        if keep_for_next_session and self.failure is None:
            self._model.unwrapped._cached_continuous_batching_manager = self
        if self.failure is not None and not is_handling:
            raise self.failure

    def add_request(
        self, input_ids: Any, request_id: str | None = None, max_new_tokens: int | None = None, **options: Any
    ) -> Any:
        """Add a request on rank 0; see transformers' method. Without a limit, the cache is the limit."""
        if self.failure is not None:
            raise self.failure
        if max_new_tokens is None:
            max_new_tokens = self.generation_config.max_new_tokens
        num_tokens = len(input_ids) + (1 if max_new_tokens is None else max_new_tokens)
        self._check.require(input_ids, max_new_tokens)
        room = self.room if max_new_tokens is None else self._room
        if room is not None and num_tokens > room:
            raise RefusedCallError(
                f"a request for {len(input_ids)} tokens and {max_new_tokens or 1} new ones does not fit in "
                f"the cache, which holds {room}; ask for fewer, or set more num_blocks in the "
                "ContinuousBatchingConfig"
            )
        if max_new_tokens is None and room is not None:
            max_new_tokens = room - len(input_ids)
        return super().add_request(input_ids, request_id, max_new_tokens, **options)

    @property
    def room(self) -> int | None:
        """Return the most tokens of one request, new ones included; None if nothing limits them."""
        limit = self._check.limit  # of tokens that are computed with: the last new one is not
        limits = (self._room, None if limit is None else limit + 1)
        return min((each for each in limits if each is not None), default=None)

    @property
    def waker(self) -> Any:
        """Return the event that is set when there is something to do."""
        return getattr(self, _name_of_waker(self))

    @property
    def cache_use(self) -> float | None:
        """Return the share of the cache that requests hold; None if transformers does not tell."""
        cache = getattr(self.batch_processor, "cache", None)
        allocators = getattr(cache, "cache_allocators", None)
        if not allocators:
            if cache is None or not hasattr(cache, "get_num_free_blocks"):
                return None
            return 1.0 - float(cache.get_num_free_blocks() / cache.num_blocks)  # in earlier versions
        # The loop's thread adds and removes requests meanwhile: the lists are copied first.
        blocks = [(list(each.block_table.values()), each.num_blocks) for each in allocators.values()]
        shares = [len({page for pages in tables for page in pages}) / count for tables, count in blocks]
        return float(max(shares))

    def count_cached_tokens(self) -> dict[str, int] | None:
        """Begin to count the tokens of prompts whose keys and values the cache has from other requests.

        Returns:
            Name of a request -> tokens; the caller adds requests with 0 before they begin. None if the cache
            shares nothing.
        """
        cache: Any = getattr(self.batch_processor, "cache", None)
        if not getattr(cache, "use_prefix_sharing", False):
            return None
        counts: dict[str, int] = {}
        search = cache.search_prefix_match

        def search_and_count(request_id: str, prompt_ids: list[int]) -> int:
            count: int = search(request_id, prompt_ids)
            if request_id in counts:
                counts[request_id] = count
            return count

        cache.search_prefix_match = search_and_count
        return counts

    def follow_in_pauses(self, run: Callable[[Any], None]) -> None:
        """Call ``run`` on a rank other than 0 with the value that rank 0 shares in each pause of the loop."""
        status = self.background_thread_status

        def follow() -> None:
            status._paused = True  # the model may be called
            try:
                run(self.distributed_helper.tp_broadcast_object_from_rank_0(None))
            finally:
                status._paused = False

        status.pause_and_wait = follow

    def share_in_pause(self, value: Any) -> None:
        """Send a value of rank 0 to the other ranks, which wait for it in a pause."""
        if self._start.world_size > 1:
            self.distributed_helper.tp_broadcast_object_from_rank_0(value)

    def exchange_in_pause(self, value: Any) -> list[Any]:
        """Return the value of each rank; the loops of all ranks pause."""
        return exchange(self._start, value)

    def answer_on_all_ranks(self) -> None:
        """Have ranks other than 0 get the answers, too; all ranks call this, before requests are added."""
        if isinstance(self.output_router, _NoAnswers):
            self.output_router.keeps = True
        exchange(self._start, None)

    @property
    def failure(self) -> BaseException | None:
        """Return the error with which the loop has ended."""
        error: BaseException | None = self.background_thread_status.fatal_error
        return error

    def require_running(self) -> None:
        """Raise the error of the loop, or ``LaunchError`` if it has ended without one."""
        if self.failure is not None:
            raise self.failure
        if not self.is_running():
            raise LaunchError("the manager was stopped before all requests were answered")

    def _create_batch_processor(self) -> Any:
        """Return the processor with its cache; an error of one rank is raised on all."""
        if self.batch_processor is not None:
            return super()._create_batch_processor()
        try:
            made = self._new_processor()
            _require_same_sizes(self._start, made.cache)
        except Exception:
            self._model.set_attn_implementation(self._attention)
            raise
        # The most tokens of one request for which the empty cache has room.
        if hasattr(model_runner, "infer_max_single_request_tokens"):
            self._room = int(model_runner.infer_max_single_request_tokens(made.cache))
        else:  # transformers 5.17
            self._room = int(made.cache.num_blocks // made.cache.num_groups * made.cache.block_size)
        return made

    def _new_processor(self) -> Any:
        """Return a processor whose cache is as large as is needed, or else as there is room for."""
        config = self.continuous_batching_config
        if self.most_blocks is not None:
            config.num_blocks = self.most_blocks
            try:
                return self._agreed_processor()
            except ShardconvError:  # on all ranks: one of them has less memory
                config.num_blocks = None
        return self._agreed_processor()

    def _agreed_processor(self) -> Any:
        """Return a processor; an error of one rank is raised on all."""
        helper = self.distributed_helper
        with in_one_thread():  # the cache is filled; see ``cached_heads``
            made, failure = attempt(super()._create_batch_processor)
        if failure is not None and isinstance(helper, StepCoordinator) and helper.has_disagreed:
            helper.has_disagreed = False
            raise failure
        agree(self._start, failure)
        return made

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        """Fail the requests, keep the error for the caller, and tell the other ranks."""
        rank, status = self._start.rank, self.background_thread_status
        if isinstance(error, RuntimeError):
            try:
                raise_lost_rank(error, self._start)
            except LaunchError as lost:
                error = lost
        status.request_stop(BackgroundThreadStatus.HARD_STOP, rank)
        # Recorded first: a reader of the answer of a failed request then looks for the error of the loop.
        status.record_fatal_error(error)
        self._fail_all_remaining_requests(error, batch_processor)
        if isinstance(self.distributed_helper, StepCoordinator):
            self.distributed_helper.tell_failure()


def require_idle(start: Launch) -> None:
    """Check that no manager runs on these ranks: all use the same process group."""
    other = None if start.group is None else _running.get(start.group)
    if other is not None and other.is_running():
        raise LaunchError("another manager runs on these ranks; stop it first")


class _NoAnswers(OutputRouter):  # type: ignore[misc]
    """Where answers go on ranks that nobody asks for them: they would fill the memory."""

    keeps = False

    def deliver(self, output: Any) -> None:
        """Keep an answer if it is asked for."""
        if self.keeps:
            super().deliver(output)

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Keep answers if they are asked for."""
        if self.keeps:
            super().deliver_batch(outputs)


class _AlwaysSet(threading.Event):
    """The event for which the loop of other ranks waits: they wait for the next message of rank 0 instead."""

    def __init__(self) -> None:
        super().__init__()
        self.set()

    def clear(self) -> None:
        """Do nothing."""


def _name_of_waker(manager: Any) -> str:
    """Return the attribute with the event for which the loop waits; transformers renamed it after 5.17."""
    names = ("_wake_up_loop", "_has_new_requests")
    return next(name for name in names if hasattr(manager, name))


def _require_same_sizes(start: Launch, cache: Any) -> None:
    """Check that all ranks take the same steps."""
    allocators = getattr(cache, "cache_allocators", {})
    sizes = (
        cache.num_blocks,
        cache.max_batch_tokens,
        list(allocators),
        getattr(cache, "tokens_per_sector", None),
        [getattr(allocator, "blocks_per_sector", None) for allocator in allocators.values()],
    )
    if any(other != sizes for other in exchange(start, sizes)):
        raise RefusedCallError(
            "the cache is divided differently on ranks with different numbers of key/value heads; choose a "
            f"{PAGE_SIZE} of the ContinuousBatchingConfig for which the bytes of a page are a multiple of "
            "128 on every rank, for example 256"
        )
