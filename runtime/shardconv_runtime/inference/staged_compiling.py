"""``load(compile=True)`` on a stage of a pipeline: one graph of its forward pass, between receives and sends.

A graph holds no messages between stages. What a stage receives comes in before, what it sends goes out after.
Which messages a call has is seen in the first call of its shapes, which runs uncompiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..comm.agreement import agree
from ..comm.mesh import Launch
from ..comm.stage_link import StageLink
from ..errors import PlanError
from ..parallel.fused_products import refresh_fused
from .compiling import as_one_graph, decode_from_static_cache, first_line, is_allocated
from .decoding import NOT_ONE_GRAPH

COMPILE_TIMEOUT_S = 3600
"""How long a stage waits for the others to have compiled theirs."""

Forms = tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
"""Stage, shape and dtype of tensors."""


@dataclass(frozen=True)
class Messages:
    """What a stage exchanges with others in a call."""

    received: Forms
    sent: Forms


def compile_stage(model: nn.Module, start: Launch, link: StageLink, *, same_bits: bool) -> None:
    """Compile every later call of a stage's model, in place, but those of continuous batching.

    Hooks of the model itself, which look after calls and share results, run uncompiled. So does a call that
    allocates a cache of fixed size.

    Args:
        model: of this rank.
        start: the ranks of all stages.
        link: to the other stages.
        same_bits: on each rank, see ``compile_model``.
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
        self._plain, self._start, self._link = plain, start, link
        self._known: dict[Any, Messages] = {}
        self._compiled: set[Any] = set()

        def between(received: list[Tensor], *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
            """What is computed between the messages; and what is to be sent."""
            sent: list[tuple[Tensor, tuple[int, ...]]] = []
            link.inbox, link.outbox = received, sent
            output = plain(*args, **kwargs)
            link.inbox = link.outbox = None
            return output, sent

        self._between = as_one_graph(between, same_bits=same_bits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if getattr(value, "is_compileable", False)]
        if not all(map(is_allocated, caches)):
            return self._plain(*args, **kwargs)
        shapes = _shapes(args, kwargs)
        if shapes not in self._known:
            # An uncompiled call: its messages, and its result.
            link = self._link
            received: list[tuple[int, Tensor]] = []
            sent: list[tuple[int, Any, Tensor]] = []
            link.received, link.outgoing = received, sent
            try:
                output = self._plain(*args, **kwargs)
            finally:
                link.received = link.outgoing = None
            for _, work, _ in sent:
                work.wait()
            self._known[shapes] = Messages(
                tuple((stage, tuple(x.shape), x.dtype) for stage, x in received),
                tuple((stage, tuple(x.shape), x.dtype) for stage, _, x in sent),
            )
            return output
        if shapes in self._compiled:
            return self._graph(self._known[shapes], args, kwargs)
        output = self._first_graph(self._known[shapes], args, kwargs)
        self._compiled.add(shapes)
        return output

    def _graph(self, messages: Messages, args: Any, kwargs: Any) -> Any:
        device = self._start.device
        received = [
            self._link.receive(shape, dtype, device, stage) for stage, shape, dtype in messages.received
        ]
        try:
            output, sent = self._between(received, *args, **kwargs)
        finally:
            self._link.inbox = self._link.outbox = None
        for x, stages in sent:
            self._link.send(x, stages)
        return output

    def _first_graph(self, messages: Messages, args: Any, kwargs: Any) -> Any:
        """The first call that runs as a graph: an error of one stage is raised on all."""
        output, error = None, None
        try:
            output = self._graph(messages, args, kwargs)
        except NOT_ONE_GRAPH as failure:
            error = PlanError(
                "compile=True makes one graph of what a stage computes, and the model's code cannot be "
                f"captured as one: {first_line(failure)}; load without compile=True"
            )
            error.__cause__ = failure
            for stage, shape, dtype in messages.sent:  # the others wait for something
                self._link.send(torch.zeros(shape, dtype=dtype, device=self._start.device), [stage])
        agree(self._start, error, COMPILE_TIMEOUT_S)
        return output


def _shapes(args: Any, kwargs: Any) -> Any:
    """What the messages of a call depend on; alike on all stages."""
    leaves, _ = pytree.tree_flatten((args, sorted(kwargs.items())), is_leaf=_is_cache)
    return tuple(map(_shape, leaves))


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if _is_cache(value):  # one of fixed size is as long in every call
        return type(value), None if getattr(value, "is_compileable", False) else int(value.get_seq_length())
    return value if isinstance(value, bool | int | str | None) else type(value)
