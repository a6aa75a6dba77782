"""Running the graph of a step again and again, and learning from the device when to end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

# A compiled function that is called again and again with the same objects, whose guards hold meanwhile.
#
# Dynamo evaluates the guards of a graph before each call: in a deep model, most of the time of a token on the
# host. ``torch.compiler.set_stance(skip_guard_eval_unsafe=True)`` would leave them out in all threads of the
# process, and a function with several graphs may then take the wrong one. Here the graph whose guards hold
# is looked up once, and its code is called.


class CompiledStep:
    """A compiled function."""

    def __init__(self, function: Callable[..., None], compile: Callable[[Any], Any]) -> None:
        assert isinstance(function, FunctionType)
        # Dynamo keeps graphs by code object. With a separate code object, graphs of other models are apart.
        self._function = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        self._compiled = compile(self._function)

    def __call__(self, *args: Any) -> None:
        """Evaluate the guards; capture a graph if the guards of no other one hold."""
        self._compiled(*args)

    def captured(self, *args: Any) -> CapturedStep | None:
        """Return the graph whose guards hold for these arguments now; None if there is none."""
        # Private, but nothing public tells which graph a call would run.
        for entry in _debug_get_cache_entry_list(self._function.__code__):
            step = CapturedStep(self._function, entry.code, entry.guard_manager)
            if not entry.code.co_freevars and step.holds(*args):
                return step
        return None


class CapturedStep:
    """One graph of a compiled function; calls evaluate no guards.

    Guards look at Python objects: modules, shapes, types, modes of torch. Values of tensors are free.
    """

    def __init__(self, function: FunctionType, code: CodeType, guards: Any) -> None:
        # The names of the graph are among the globals; in a copy they outlive torch._dynamo.reset().
        self._function = FunctionType(code, {**function.__globals__})
        self._names = function.__code__.co_varnames
        self._guards = guards

    def holds(self, *args: Any) -> bool:
        """Return whether the guards hold."""
        return bool(self._guards.check(dict(zip(self._names, args, strict=False))))

    def __call__(self, *args: Any) -> None:
        """Run the graph."""
        self._function(*args)


WARM_UP_RUNS = 3


class Replay:
    """A step that can be run again: recorded as a CUDA graph, or a compiled function.

    The step runs at least once here, on any contents of its tensors.
    """

    def __init__(self, step: CompiledStep, args: tuple[Any, ...], records: bool) -> None:
        self._step = step
        self._args = args
        run = partial(step, *args)
        self._graph = _record(run) if records else None
        self._recorded: CapturedStep | None = None
        if not records:
            run()

    def begins_calls(self) -> None:
        """Note that the arguments are now as they are at the beginning of a call, see ``holds``."""
        if self._graph is not None:
            self._recorded = self._step.captured(*self._args)

    def holds(self) -> bool:
        """Return whether the step is still valid at the beginning of a call.

        Another active adapter makes it invalid, for example, and the recorded graph would not notice. A
        compiled function evaluates its guards itself.
        """
        return self._recorded is None or self._recorded.holds(*self._args)

    def steps_of_call(self) -> Callable[[], None]:
        """Return a function that runs a step, again and again, while only values of tensors change.

        Guards are evaluated before the first step and after it, since that one may differ.
        """
        if self._graph is not None:
            return self._graph.replay
        captured: CapturedStep | None = None
        num_run = 0

        def next_step() -> None:
            nonlocal captured, num_run
            if num_run == 1:
                captured = self._step.captured(*self._args)
            num_run += 1
            (captured or self._step)(*self._args)

        return next_step


def _record(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record a CUDA graph; the watchdog of nccl must be left out of the capture's error mode."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


class StopFlag:
    """Reads whether all rows have ended, and the tokens for a streamer, without waiting for the device.

    On an asynchronous device, the results of a step are read while the next one runs. If all rows had already
    ended, the caller drops the extra step.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors
        self._is_late = tensors[0].device.type == "cuda"
        self._pending: tuple[list[Tensor], Any] | None = None
        if self._is_late:
            self._pinned = [
                [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors] for _ in range(2)
            ]
            self._events: list[Any] = [torch.Event(tensors[0].device) for _ in range(2)]
            self._turn = 0

    def after_step(self) -> tuple[Tensor, ...] | None:
        """Return the values after the last step that is known to have run; None if none is."""
        if not self._is_late:
            return self._tensors
        before = self._pending
        self._turn ^= 1
        pinned, event = self._pinned[self._turn], self._events[self._turn]
        for host, tensor in zip(pinned, self._tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        event.record()
        self._pending = (pinned, event)
        return self._read(before)

    def last(self) -> tuple[Tensor, ...] | None:
        """Return the values that ``after_step`` has not returned yet."""
        pending, self._pending = self._pending, None
        return self._read(pending)

    @staticmethod
    def _read(pending: tuple[list[Tensor], Any] | None) -> tuple[Tensor, ...] | None:
        if pending is None:
            return None
        pending[1].synchronize()
        return tuple(pending[0])
