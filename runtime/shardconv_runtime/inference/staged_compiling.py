"""``load(compile=True)`` on a stage of a pipeline: one graph of its forward pass, between receives and sends.

A graph holds no messages between stages. They are received before it runs, and sent afterwards.
Which messages a call has is seen in the first call of its shapes, which runs uncompiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..comm.agreement import agree
from ..comm.mesh import Launch
from ..comm.stage_link import Crossing, StageLink, Transport
from ..comm.stage_processes import AsyncTransport, ProcessTransport, Traffic
from ..errors import PlanError
from ..parallel.fused_products import refresh_fused
from .compiling import as_one_graph, decode_from_static_cache, first_line, is_allocated
from .decoding import NOT_ONE_GRAPH

COMPILE_TIMEOUT_S = 3600
"""How long a stage waits for the others to have compiled theirs."""


class HeldTransport(Transport):
    """Returns values that were received before the call, and holds those to be sent after it.

    Args:
        received: the tensors, in the order in which the call takes them.
    """

    def __init__(self, received: list[Tensor]) -> None:
        self._received = received
        self.held: list[tuple[Crossing, Tensor, tuple[int, ...]]] = []
        """Values to be sent: each value, its tensor, and the stages to which it goes."""

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Hold a value."""
        self.held.append((crossing, x, tuple(stages)))

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the next tensor."""
        return self._received.pop(0)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: a hook of the model, outside of the graph, shares the results."""
        raise AssertionError("no result is shared within a graph")


def compile_stage(model: nn.Module, start: Launch, link: StageLink, *, same_bits: bool) -> None:
    """Compile every later call of a stage's model, in place, except the calls of continuous batching.

    Hooks of the model itself, which look after calls and share results, run uncompiled. A call that
    allocates a cache of fixed size runs uncompiled too.

    Args:
        model: the model of this rank.
        start: the ranks of all stages.
        link: the link to the other stages.
        same_bits: get equal bits on each rank, see ``compile_model``.
    """
    call: Callable[..., Any] = model._call_impl
    plain: Callable[..., Any] = model.forward
    staged = _StagedForward(plain, start, link, same_bits)

    @functools.wraps(plain)  # code may ask for the names of its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        return staged(*args, **kwargs)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        refresh_fused(model)
        model.forward = forward  # type: ignore[method-assign]
        try:
            return call(*args, **kwargs)
        finally:
            del model.forward

    model._compiled_call_impl = compiled
    decode_from_static_cache(model)


class _StagedForward:
    """The forward pass of a stage, without the hooks of its model."""

    def __init__(self, plain: Callable[..., Any], start: Launch, link: StageLink, same_bits: bool) -> None:
        assert isinstance(link.transport, ProcessTransport), "compiled models run on processes"
        self._plain, self._start, self._link, self._processes = plain, start, link, link.transport
        self._known: dict[Any, Traffic] = {}
        self._compiled: set[Any] = set()

        def between(received: list[Tensor], *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
            """Compute the values between the messages, and return those to be sent."""
            transport = HeldTransport(received)
            with link.through(transport):
                output = plain(*args, **kwargs)
            return output, transport.held

        self._between = as_one_graph(between, same_bits=same_bits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if getattr(value, "is_compileable", False)]
        if not all(map(is_allocated, caches)):
            return self._plain(*args, **kwargs)
        # The messages of a call depend on these, which are the same on all stages.
        leaves, _ = pytree.tree_flatten((args, sorted(kwargs.items())), is_leaf=_is_cache)
        shapes = tuple(map(_shape, leaves))
        if shapes not in self._known:
            # An uncompiled call: its messages, and its result.
            transport = AsyncTransport(self._processes)
            with self._link.through(transport):
                output = self._plain(*args, **kwargs)
            transport.wait()
            self._known[shapes] = transport.traffic
            return output
        if shapes in self._compiled:
            return self._graph(self._known[shapes], args, kwargs)
        output = self._first_graph(self._known[shapes], args, kwargs)
        self._compiled.add(shapes)
        return output

    def _graph(self, traffic: Traffic, args: Any, kwargs: Any) -> Any:
        processes = self._processes
        received = [processes.receive(m.crossing, m.shape, m.dtype, m.stage) for m in traffic.received]
        output, held = self._between(received, *args, **kwargs)
        for crossing, x, stages in held:
            processes.send(crossing, x, stages)
        return output

    def _first_graph(self, traffic: Traffic, args: Any, kwargs: Any) -> Any:
        """Return the first call that runs as a graph: an error of one stage is raised on all."""
        output, error = None, None
        try:
            output = self._graph(traffic, args, kwargs)
        except NOT_ONE_GRAPH as failure:
            error = PlanError(
                "compile=True makes one graph of what a stage computes, and the model's code cannot be "
                f"captured as one: {first_line(failure)}; load without compile=True"
            )
            error.__cause__ = failure
            for m in traffic.sent:  # the others wait for something
                nothing = torch.zeros(m.shape, dtype=m.dtype, device=self._start.device)
                self._processes.send(m.crossing, nothing, [m.stage])
        agree(self._start, error, COMPILE_TIMEOUT_S)
        return output


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if _is_cache(value):  # one of fixed size is as long in every call
        return type(value), None if getattr(value, "is_compileable", False) else int(value.get_seq_length())
    return value if isinstance(value, bool | int | str | None) else type(value)
