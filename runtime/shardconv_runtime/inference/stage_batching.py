"""Continuous batching on the stages of a pipeline: several groups of requests are computed at a time.

All stages take the same steps in the same order, and schedule them alike. A step is of a group of requests;
the next one begins, with other requests, before the tokens of this one are known, so that the first stage
computes it while the second one computes this. When as many steps are in flight as there may be, the oldest
one is ended: its tokens come from the last stage.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

from ..comm.mesh import Launch
from ..comm.step_coordinator import Message, StageCoordinator
from ..errors import RanksTimeoutError
from ..pp.stage_link import StageLink
from ..pp.stage_processes import AsyncTransport, ProcessTransport
from .batching_manager import RankBatchingManager, may_draw

# transformers' scheduler if several steps are under way, whose tokens are not known yet.


class StepsInFlight:
    """Makes a scheduler skip requests with a step in flight, in place."""

    def __init__(self, scheduler: Any, most_steps: int) -> None:
        self._scheduler = scheduler
        self._most_steps = most_steps
        self._requests: set[str] = set()
        self._schedule_batch = scheduler.schedule_batch
        self._cancelled: set[str] = set()
        self._set_cancellation = scheduler.set_request_cancellation
        self._clear_cancelled = scheduler.clear_cancelled_requests
        scheduler.schedule_batch = self._next_step
        scheduler.set_request_cancellation = self._cancelled.add
        scheduler.clear_cancelled_requests = self._clear_cancelled_requests

    def reset(self) -> None:
        """Forget all steps."""
        self._requests.clear()

    def end(self, requests: Iterable[Any]) -> None:
        """Note that the step of these requests is over."""
        self._requests.difference_update(each.state.request_id for each in requests)

    def _next_step(self, *budgets: int) -> tuple[Any, ...]:
        """Schedule a share of the requests that are in no step, like ``schedule_batch`` of transformers."""
        scheduler, busy = self._scheduler, self._requests
        active, most = scheduler.active_requests, scheduler.max_requests_per_batch
        share = -(-(len(active) + len(scheduler.waiting_requests)) // self._most_steps)
        scheduler.active_requests = {name: state for name, state in active.items() if name not in busy}
        scheduler.max_requests_per_batch = min(most, share)
        try:
            requests, *sizes = self._schedule_batch(*budgets)
        finally:
            free, scheduler.max_requests_per_batch = scheduler.active_requests, most
            states = {name: state for name, state in active.items() if name in busy or name in free}
            scheduler.active_requests = states | free
        if requests is None and busy:
            requests = []  # there will be room in the cache when others have ended
        busy.update(each.state.request_id for each in requests or ())
        return requests, *sizes

    def _clear_cancelled_requests(self) -> list[Any]:
        """Cancel requests; a request in flight is cancelled when its step is over."""
        now = self._cancelled - self._requests
        self._cancelled -= now
        for name in now:
            self._set_cancellation(name)
        cleared: list[Any] = self._clear_cancelled()
        return cleared


FIRST_FAILURE = 2**31 - 64
"""In place of a token, this number and those above say that the request failed, and why."""


class Failures(Protocol):
    """The requests that failed, on the last stage and on rank 0."""

    def take_failure(self, name: str) -> int | None:
        """Return a number below 64 if a request failed since the last call."""

    def note_failure(self, name: str, number: int) -> None:
        """Hear on every stage that a request failed."""


@dataclass(frozen=True)
class _Step:
    """A step in flight.

    Attributes:
        requests: transformers' requests, as they will be when the tokens are known.
        tokens: the tokens of the last stage, int32 ``[1 or 2, requests]``, and the messages that they need.
        transport: the transport that is sending hidden states.
    """

    requests: list[Any]
    tokens: Tensor
    messages: list[Message]
    transport: AsyncTransport


class StagedBatchingManager(RankBatchingManager):
    """The manager of a rank of a stage; made from transformers' own by ``on_stage``."""

    _link: StageLink
    _processes: ProcessTransport
    _is_early: bool
    _flight: deque[_Step]
    _in_flight: StepsInFlight
    distributed_helper: StageCoordinator
    failures: Failures | None = None
    """Set it on every rank if some requests may fail and others go on."""

    @classmethod
    def on_stage(
        cls, manager: Any, start: Launch, attention: str, link: StageLink, num_microbatches: int
    ) -> StagedBatchingManager:
        """Turn a manager that has not started into one of a stage, in place."""
        made = cls.adopt(manager, start, attention)
        assert isinstance(made, cls)
        assert isinstance(link.transport, ProcessTransport), "requests are answered by processes"
        made._link, made._processes = link, link.transport
        made._flight, made._is_early = deque(), False
        made.num_microbatches = num_microbatches
        timeout_s = made.continuous_batching_config.cpu_group_timeout
        draws = link.is_last and may_draw(made)
        made.distributed_helper = StageCoordinator(start, timeout_s, draws=draws, most_steps=num_microbatches)
        return made

    def _create_batch_processor(self) -> Any:
        is_new = self.batch_processor is None
        made = super()._create_batch_processor()
        if is_new:
            self._model.number_layers(made.cache)
            self._in_flight = StepsInFlight(made.scheduler, self.num_microbatches)
        self._in_flight.reset()
        return made

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        """Take the next step, if there are requests for one; whether the loop goes on."""
        if len(self._flight) == self.num_microbatches:
            self._end_step()
        if batch_processor.prepare_next_batch():
            self._generation_step()
            self.current_batch += 1
            return True
        status = self.background_thread_status.tp_status
        is_stopped = status == BackgroundThreadStatus.HARD_STOP
        if self._flight and not is_stopped:
            self._end_step()
            return True
        if is_stopped or (
            status == BackgroundThreadStatus.FLUSH_AND_STOP and not batch_processor.has_pending_requests()
        ):
            while self._flight:
                self._end_step()
            self._processes.stop_early()
            self._is_early = False
            self.distributed_helper.close()
            return False
        self.waker.wait(timeout=0.1)
        self.waker.clear()
        return True

    def _generation_step(self) -> None:
        """Run this stage's part of a step. The last stage chooses tokens, the others receive them."""
        tokens = self.batch_processor.inputs_and_outputs.output_ids
        shape = tokens.shape[0], self.batch_processor.inputs_and_outputs.num_request_in_batch
        transport = AsyncTransport(self._processes)
        try:
            with self._link.through(transport):
                if self._link.is_last:
                    super()._generation_step()
                else:
                    inputs_and_outputs = self.batch_processor.inputs_and_outputs
                    inputs = inputs_and_outputs.get_model_kwargs()
                    if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
                        inputs["logits_to_keep"] = inputs["logits_indices"]
                    with torch.no_grad(), torch.cuda.stream(inputs_and_outputs.compute_stream):
                        self._model(**inputs)
                    inputs_and_outputs.retrieve_device_outputs()
        except Exception:
            if self._link.is_last:  # the others wait for tokens
                self._send_tokens(torch.full(shape, -1 - self._start.rank, dtype=torch.int32))
            raise
        if self._link.is_last:
            local_tokens = tokens[:, : shape[1]].to("cpu", torch.int32, copy=True)
            self._mark_failures(local_tokens)
            messages = self._send_tokens(local_tokens)
        else:
            messages = [self.distributed_helper.receive_tokens(shape, self._peers[-1])]
            local_tokens = messages[0].content
        if not self._is_early:
            # Prepare to receive the messages of the next steps: as in the first one, for more tokens.
            num_tokens = self.batch_processor.inputs_and_outputs.num_q_tokens
            most_tokens, num_calls = self.batch_processor.max_batch_tokens, self.num_microbatches
            self._processes.receive_early(transport.traffic, num_tokens, most_tokens, num_calls)
            self._is_early = True
        requests = self.batch_processor.inputs_and_outputs.requests_in_batch
        self._flight.append(_Step(requests, local_tokens, messages, transport))

    def _mark_failures(self, tokens: Tensor) -> None:
        """Put failures in the place of tokens ``[1 or 2, requests]``."""
        if self.failures is not None:
            for row, request in enumerate(self.batch_processor.inputs_and_outputs.requests_in_batch):
                number = self.failures.take_failure(request.state.request_id)
                if number is not None:
                    tokens[0, row] = FIRST_FAILURE + number

    @property
    def _peers(self) -> range:
        """Return the ranks of this one's place, on each stage."""
        tp = self._start.world_size // self._link.count
        return range(self._start.rank % tp, self._start.world_size, tp)

    def _send_tokens(self, tokens: Tensor) -> list[Message]:
        return self.distributed_helper.send_tokens(tokens, self._peers[:-1])

    def _end_step(self) -> None:
        """Give the oldest step its tokens."""
        step = self._flight.popleft()
        for message in step.messages:
            self.distributed_helper.await_message(message)
        first = int(step.tokens[0, 0])
        if first < 0:
            raise RanksTimeoutError(
                f"rank {-1 - first} failed while it answered requests; its own output says why"
            )
        for row in (step.tokens[0] >= FIRST_FAILURE).nonzero().flatten().tolist():
            assert self.failures is not None
            number = int(step.tokens[0, row]) - FIRST_FAILURE
            self.failures.note_failure(step.requests[row].state.request_id, number)
            step.tokens[0, row] = 0  # of no use, but the same on all stages
        step.transport.wait()
        processor = self.batch_processor
        outputs, number = processor.inputs_and_outputs, len(step.requests)
        outputs.requests_in_batch, outputs.num_request_in_batch = step.requests, number
        outputs.output_ids[:, :number].copy_(step.tokens)
        self._in_flight.end(step.requests)
        processor.update_batch()

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        """Handle the error as every rank does; messages in flight are lost, so refuse further calls."""
        super()._handle_critical_error(error, batch_processor)
        self._flight.clear()

        def refuse(module: nn.Module, args: object) -> None:
            raise RanksTimeoutError(
                "a rank of this model failed while its stages answered requests; start the program again"
            )

        self._model.unwrapped.register_forward_pre_hook(refuse, prepend=True)
