"""Modules of a layer that nothing outside looks into.

A layer of which more than its result is read (the scores of its router) must be run, even where another layer
stands for it. But only shapes are wanted of it: its closed modules return what those of the other layer
returned, as tensors of these shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...tracing.tape import Event, Mark, Tape, last_calls, reads_and_writes

FEWEST_EVENTS = 24
"""Of a module that is worth leaving out."""


def closed_modules(tape: Tape, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The outermost modules in each layer of which only the results are read.

    They are called once, are given no cache, return tensors alone, and do much.

    Args:
        tape: of all layers, not folded.
        layers: their FQNs.

    Returns:
        For each layer the names of such modules, relative to it.
    """
    last = last_calls(tape)
    looked_into = _looked_into(tape, last)
    sizes = _num_events(tape)
    several = {call.fqn for call in tape.calls if call.index}
    out: dict[str, tuple[str, ...]] = {}
    for index, call in enumerate(tape.calls):
        if call.fqn in layers:
            found, inner = [], index + 1
            while inner <= last[index]:
                fqn = tape.calls[inner].fqn
                is_closed = inner not in looked_into and fqn not in several and _returns_tensors(tape, inner)
                if is_closed and fqn.startswith(f"{call.fqn}."):
                    if sizes[inner] >= FEWEST_EVENTS:
                        found.append(fqn[len(call.fqn) + 1 :])
                    inner = last[inner]
                inner += 1
            out[call.fqn] = tuple(found)
    return out


def _num_events(tape: Tape) -> list[int]:
    """Of each call and the calls in it."""
    sizes = [0] * len(tape.calls)
    for event in tape.events:
        sizes[event.call] += 1
    for index in range(len(tape.calls) - 1, 0, -1):
        if tape.calls[index].parent >= 0:
            sizes[tape.calls[index].parent] += sizes[index]
    return sizes


def _looked_into(tape: Tape, last: list[int]) -> set[int]:
    """The calls with tensors that are read outside of them, beside their results, and those with a cache."""
    maker: dict[int, Event] = {}
    found: set[int] = set()
    for event in tape.events:
        read, made = reads_and_writes(event)
        for tid in read:
            found.update(_left(tape, last, maker, tid, event.call))
        maker.update(dict.fromkeys(made, event))
    for tid in (*tape.outputs, *tape.handed_back):
        found.update(_left(tape, last, maker, tid, -1))
    for call in (*tape.given_caches, *(update.call for update in tape.cache_updates)):
        found.update(_around(tape, call))
    return found


def _left(tape: Tape, last: list[int], maker: Mapping[int, Event], tid: int, reader: int) -> Iterator[int]:
    """The calls that a tensor leaves on its way to the call that reads it.

    Where it is a result that the caller reads, that call is none of them. Any other reader may have got it in
    another way, by a hook on one of the modules that handed it on.
    """
    made = maker.get(tid)
    if made is None:
        return
    for call in _around(tape, made.call):
        if call <= reader <= last[call]:
            return
        is_result = isinstance(made, Mark) and made.is_output and call == made.call
        if is_result and tape.calls[call].parent <= reader <= last[tape.calls[call].parent]:
            return
        yield call
    if isinstance(made, Mark):
        yield from _left(tape, last, maker, made.source, reader)


def _around(tape: Tape, call: int) -> Iterator[int]:
    """A call and those that it is in, innermost first."""
    while call >= 0:
        yield call
        call = tape.calls[call].parent


def _returns_tensors(tape: Tape, call: int) -> bool:
    returned = tape.returned.get(call)
    return returned is not None and bool(returned.items) and all(item.is_tensor for item in returned.items)


def repeat_results(model: nn.Module, modules: Mapping[str, str]) -> None:
    """Have modules return tensors like those that others have returned, in place.

    Args:
        model: on meta.
        modules: FQN -> that of a module of another layer, which is run.
    """
    results: dict[str, Any] = {}
    for like in set(modules.values()):
        _keep_result(model.get_submodule(like), like, results)
    for fqn, like in modules.items():
        _give_result(model.get_submodule(fqn), like, results)


def _keep_result(module: nn.Module, name: str, results: dict[str, Any]) -> None:
    forward = module.forward

    @functools.wraps(forward)  # the tracer asks for the names of its arguments
    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        results[name] = pytree.tree_map_only(Tensor, _Geometry, result)
        return result

    module.__dict__["forward"] = run


def _give_result(module: nn.Module, name: str, results: Mapping[str, Any]) -> None:
    forward = module.forward

    @functools.wraps(forward)  # the tracer asks for the names of its arguments
    def run(*args: Any, **kwargs: Any) -> Any:
        if name not in results:
            return forward(*args, **kwargs)
        return pytree.tree_map_only(_Geometry, _Geometry.made, results[name])

    module.__dict__["forward"] = run


class _Geometry:
    """How a tensor lies in memory."""

    def __init__(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.shape, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def made(self) -> Tensor:
        """A new tensor of that shape."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
