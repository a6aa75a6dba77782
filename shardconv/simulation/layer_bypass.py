"""Leaves out layers that others stand for, so that a deep model can be run on numbers.

A layer whose outputs, if anybody reads them, are handed on to the next one as some of its arguments, can be
bypassed by returning these arguments. It is bypassed if it is planned as the layer that stands for it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.fused_groups import fused_groups
from shardconv_runtime.format.plan import Plan, module_plans, parameter_plans
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.parallel.stage_model import Results, placeholder_for, swap_for_placeholder
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..inputs.trace_inputs import TraceInputs
from ..tracing.tape import Event, Mark, Tape, last_calls, prefixes, reads_and_writes, starred
from ..tracing.trace import trace

# Modules of a layer that nothing outside looks into.
#
# A layer of which more than its result is read (the scores of its router) must be run, even where another
# layer stands for it. But only shapes are wanted of it: its closed modules return what those of the other
# layer returned, as tensors of these shapes.

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
    for like in set(modules.values()):
        recorded = _RecordedResult()
        model.get_submodule(like).register_forward_hook(recorded.note)
        for fqn in (fqn for fqn, other in modules.items() if other == like):
            swap_for_placeholder(model, fqn, recorded)


class _RecordedResult:
    """What a module has returned, given again as tensors of the same form."""

    def __init__(self) -> None:
        self._result: Any = None

    def note(self, module: nn.Module, args: Any, result: Any) -> None:
        """A forward hook of the module."""
        self._result = pytree.tree_map_only(Tensor, _Geometry, result)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(_Geometry, _Geometry.made, self._result)


class _Geometry:
    """How a tensor lies in memory."""

    def __init__(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.shape, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def made(self) -> Tensor:
        """A new tensor of that shape."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Bypass:
    """How to leave out a layer: it returns some of its arguments."""

    arguments: tuple[tuple[str, str], ...]
    """(slot of an output, name of the argument in the signature of its forward): ``output`` is the one
    result, ``output.1`` the second of a tuple, whose other items are ``unread`` or None."""
    length: int
    """Number of items of the tuple that it returns."""
    unread: tuple[int, ...]
    """Those of them that are tensors which nobody reads; they become empty ones."""
    like: str
    """FQN of the layer that stands for it, and is run."""
    kind: type[tuple[Any, ...]] = tuple
    """Of the tuple that it returns, which may be a named one."""
    is_read_elsewhere: bool = False
    """Whether more than its result is read, as by a loss from the logits of routers, or its result together
    with those of other layers, as by an encoder that returns all hidden states."""
    closed: tuple[str, ...] = ()
    """Where more than the result is read: names of modules in the layer of which only the results are."""


def find_bypasses(tape: Tape, layers: Mapping[str, str]) -> dict[str, Bypass]:
    """How each of these layers is bypassed; those of a stack are left out unless all of them can be.

    Args:
        tape: of all layers, not folded.
        layers: FQNs of layers of a stack, each with the layer that stands for it; each one follows
            another layer of that stack.
    """
    returned: dict[int, Mark] = {}
    entries: dict[str, list[Mark]] = {}
    exits: dict[str, list[Mark]] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            fqn = tape.calls[event.call].fqn
            (exits if event.is_output else entries).setdefault(fqn, []).append(event)
            if event.is_output:
                returned[event.target] = event
    read = set(tape.outputs)
    for event in tape.events:
        read.update((event.source,) if isinstance(event, Mark) else event.inputs)
    stacks = {fqn.rpartition(".")[0] for fqn in layers}
    elsewhere = _read_elsewhere(tape, {c.fqn for c in tape.calls if c.fqn.rpartition(".")[0] in stacks})
    out: dict[str, Bypass] = {}
    failed: set[str] = set()
    for fqn, like in layers.items():
        stack = fqn.rpartition(".")[0]
        passed: dict[str, str] = {}
        for mark in entries.get(fqn, ()):
            before = returned.get(mark.source)
            argument = mark.slots[0].partition(".")[2]
            if before and tape.calls[before.call].fqn.rpartition(".")[0] == stack and "." not in argument:
                passed[before.slots[0]] = argument
        results = [slot for mark in exits.get(fqn, ()) if mark.target in read for slot in mark.slots]
        if results and all(slot in passed and _is_plain(slot) for slot in results):
            slots = {slot: _index(slot) for mark in exits[fqn] for slot in mark.slots if _is_plain(slot)}
            kind, length = tape.result_tuples.get(exits[fqn][0].call, (tuple, 0))
            length = max(length, 1 + max(slots.values()))
            arguments = tuple((slot, passed[slot]) for slot in results)
            unread = tuple(index for slot, index in slots.items() if slot not in results and index >= 0)
            out[fqn] = Bypass(arguments, length, unread, like, kind, is_read_elsewhere=fqn in elsewhere)
        else:
            failed.add(stack)
    found = {fqn: how for fqn, how in out.items() if fqn.rpartition(".")[0] not in failed}
    closed = closed_modules(tape, {fqn for fqn, how in found.items() if how.is_read_elsewhere})
    return {fqn: replace(how, closed=closed.get(fqn, ())) for fqn, how in found.items()}


def working_bypasses(
    model: nn.Module, inputs: TraceInputs, tape: Tape, layers: Mapping[str, str]
) -> dict[str, Bypass]:
    """``find_bypasses`` of a traced model, or none if it does not run with them.

    Code may count its layers: one that keeps a list with an item for each layer finds too few.

    Args:
        model: on meta; it is copied.
        inputs: of its trace.
        tape: of all layers, not folded.
        layers: as for ``find_bypasses``.
    """
    found = find_bypasses(tape, layers)
    try:
        if found:
            copied = bypassed_copy(model, found)
            trace(copied, inputs.tensors, (), inputs.options, few_chosen=inputs.few_chosen)
    except SolveError:
        return {}
    return found


def _read_elsewhere(tape: Tape, layers: Collection[str]) -> set[str]:
    """Those of the layers of which other tensors than their results are read, or these by a collector."""
    inside = {index: _layer_of(call.fqn, layers) for index, call in enumerate(tape.calls)}
    made_in: dict[int, str] = {}
    result_of: dict[int, str] = {}
    readers: dict[tuple[int, bool], set[str]] = {}
    found: set[str] = set()
    for event in tape.events:
        layer = inside.get(event.call, "")
        read, made = reads_and_writes(event)
        found.update(made_in[tid] for tid in read if made_in.get(tid, layer) != layer)
        if isinstance(event, Mark) and event.source in result_of:
            readers.setdefault((event.call, event.is_output), set()).add(result_of[event.source])
        is_result = isinstance(event, Mark) and event.is_output and tape.calls[event.call].fqn == layer
        if layer:
            (result_of if is_result else made_in).update(dict.fromkeys(made, layer))
    return found.union(*(several for several in readers.values() if len(several) > 1))


def _layer_of(fqn: str, layers: Collection[str]) -> str:
    return next((name for name in prefixes(fqn) if name in layers), "")


def _is_plain(slot: str) -> bool:
    """Whether an output is the result of a module, or an item of a tuple that is."""
    name, _, index = slot.partition(".")
    return name == "output" and (not index or index.isdigit())


def _index(slot: str) -> int:
    """Of an item of a tuple; -1 for the one result of a module."""
    return int(slot.partition(".")[2] or -1)


def planned_alike(plan: Plan, layers: Mapping[str, Bypass]) -> dict[str, Bypass]:
    """Those of the layers for which the plan is that of the layer that stands for them."""
    modules, parameters = module_plans(plan), parameter_plans(plan)
    said: dict[str, object] = {name: replace(entry, names=()) for name, entry in modules.items()}
    said |= {f"{name}=": replace(entry, names=()) for name, entry in parameters.items()}
    said |= {f"{alias}=": name for alias, name in plan.tied}
    said |= {f"{fqn}+": tuple(map(starred, group)) for group in fused_groups(plan) for fqn in group}
    inside: dict[str, dict[str, object]] = {}
    wanted = {fqn for layer, how in layers.items() for fqn in (layer, how.like)}
    for name, entry in said.items():
        for layer in wanted.intersection(prefixes(name)):
            inside.setdefault(layer, {})[name[len(layer) :]] = entry
    return {fqn: how for fqn, how in layers.items() if inside.get(fqn) == inside.get(how.like)}


def bypassed_copy(model: nn.Module, layers: Mapping[str, Bypass]) -> nn.Module:
    """A deep copy of ``model`` in which these layers are bypassed; they are not copied."""
    memo: dict[int, object] = {}
    for fqn, how in layers.items():
        layer = model.get_submodule(fqn)
        memo[id(layer)] = placeholder_for(layer, _passing_on(layer, how))
    return copy.deepcopy(model, memo)


def bypass(model: nn.Module, layers: Mapping[str, Bypass]) -> nn.Module:
    """Replace these layers of ``model``, in place."""
    for fqn, how in layers.items():
        swap_for_placeholder(model, fqn, _passing_on(model.get_submodule(fqn), how))
    return model


def _passing_on(layer: nn.Module, how: Bypass) -> Results:
    """The arguments that a layer would have changed, in the form in which it returns them."""
    names = list(forward_signature(layer).parameters)
    outputs = [
        (_index(slot), name, int(name) if name.isdigit() else names.index(name))
        for slot, name in how.arguments
    ]
    tuple_of = getattr(how.kind, "_make", tuple)  # of a named tuple

    def results(*args: Any, **kwargs: Any) -> Any:
        found = {
            index: kwargs[argument] if argument in kwargs else args[position]
            for index, argument, position in outputs
        }
        if -1 in found:
            return found[-1]
        like = next(value for value in found.values() if isinstance(value, Tensor))
        found |= {index: like.new_zeros(0) for index in how.unread}
        return tuple_of(found.get(i) for i in range(how.length))

    return results
