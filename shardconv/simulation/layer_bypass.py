"""Bypass layers that are represented by others, so that a deep model can be run on numbers.

A layer can be bypassed by returning some of its arguments, if all outputs that are read are passed to the
next layer as these arguments. It is bypassed if its plan equals the plan of the layer that represents it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, NoneType
from typing import Any, TypeVar

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.fused_groups import fused_groups
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import (
    AttentionPlan,
    FusedPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    module_plans,
    parameter_plans,
)
from shardconv_runtime.parallel.boundary import forward_signature
from shardconv_runtime.parallel.build import check_names, parallelize
from shardconv_runtime.pp.placeholders import Results, placeholder_for, swap_for_placeholder
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..inputs.trace_inputs import TraceInputs
from ..tracing.tape import Event, Mark, Tape, last_calls, prefixes, reads_and_writes, starred
from ..tracing.trace import trace

# A module is closed if nothing outside reads its intermediate tensors.
#
# A layer must run if more than its result is read (for example the scores of its router), even where another
# layer represents it. Only shapes are needed then, so its closed modules return empty tensors with the shapes
# of the other layer's results.

FEWEST_EVENTS = 24
"""Smaller modules are not worth leaving out."""


def closed_modules(tape: Tape, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Find the outermost modules in each layer of which only the results are read.

    They are called once, get no cache, return only tensors, and have many events.
    """
    last = last_calls(tape)
    # Calls of which more than the results is read, and calls with a cache.
    looked_into: set[int] = set()
    maker: dict[int, Event] = {}
    for event in tape.events:
        read, made = reads_and_writes(event)
        for tid in read:
            looked_into.update(_left(tape, last, maker, tid, event.call))
        maker.update(dict.fromkeys(made, event))
    for tid in (*tape.outputs, *tape.handed_back):
        looked_into.update(_left(tape, last, maker, tid, -1))
    for call in (*tape.given_caches, *(update.call for update in tape.cache_updates)):
        looked_into.update(_around(tape, call))
    # Events of each call and of the calls in it. Inner calls have larger indices than the ones around them.
    sizes = [0] * len(tape.calls)
    for event in tape.events:
        sizes[event.call] += 1
    for index in range(len(tape.calls) - 1, 0, -1):
        if tape.calls[index].parent >= 0:
            sizes[tape.calls[index].parent] += sizes[index]
    several = {call.fqn for call in tape.calls if call.index}
    out: dict[str, tuple[str, ...]] = {}
    for index, outer in enumerate(tape.calls):
        if outer.fqn in layers:
            closed, inner = [], index + 1
            while inner <= last[index]:
                fqn, returned = tape.calls[inner].fqn, tape.returned.get(inner)
                is_closed = inner not in looked_into and fqn not in several
                items = returned.items if returned is not None else ()
                is_closed &= bool(items) and all(item.is_tensor for item in items)
                if is_closed and fqn.startswith(f"{outer.fqn}."):
                    if sizes[inner] >= FEWEST_EVENTS:
                        closed.append(fqn[len(outer.fqn) + 1 :])
                    inner = last[inner]
                inner += 1
            out[outer.fqn] = tuple(closed)
    return out


def _left(tape: Tape, last: list[int], maker: Mapping[int, Event], tid: int, reader: int) -> Iterator[int]:
    """Yield the calls that a tensor leaves on its way to the call that reads it, except as their result.

    Only the caller reads a result as such. Any other reader may have got the tensor in another way, through a
    hook on one of the modules that passed it on.
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
    """Yield a call and the calls around it, innermost first."""
    while call >= 0:
        yield call
        call = tape.calls[call].parent


def repeat_results(model: nn.Module, modules: Mapping[str, str]) -> None:
    """Replace modules, in place, by placeholders that return tensors like the results of other modules."""
    for like in set(modules.values()):
        recorded = _RecordedResult()
        model.get_submodule(like).register_forward_hook(recorded.note)
        for fqn in (fqn for fqn, other in modules.items() if other == like):
            swap_for_placeholder(model, fqn, recorded)


class _RecordedResult:
    """The form of a module's last result, from which new tensors are made."""

    def __init__(self) -> None:
        self._result: Any = None

    def note(self, module: nn.Module, args: Any, result: Any) -> None:
        """Record the result, as a forward hook of the module."""
        self._result = pytree.tree_map_only(Tensor, _Geometry, result)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(_Geometry, _Geometry.made, self._result)


class _Geometry:
    """The shape, strides and dtype of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.shape, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def made(self) -> Tensor:
        """Return a new tensor on meta."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Bypass:
    """How to bypass a layer: it returns some of its arguments."""

    arguments: tuple[tuple[str, str], ...]
    """(port of an output, name of the argument in the signature of its forward). ``output`` is a single
    result, ``output.1`` the second item of a tuple, whose other items are ``unread`` or None."""
    length: int
    """Number of items of the tuple that it returns."""
    unread: tuple[int, ...]
    """Indices of items that are tensors and are never read; they become empty tensors."""
    like: str
    """FQN of the layer that represents it, and is run."""
    kind: type[tuple[Any, ...]] = tuple
    """Type of the tuple that it returns, which may be a named tuple."""
    is_read_elsewhere: bool = False
    """Whether more than its result is read (for example by a loss of router logits), or its result together
    with results of other layers (for example by an encoder that returns all hidden states)."""
    closed: tuple[str, ...] = ()
    """If ``is_read_elsewhere``: names of the closed modules in the layer."""


def find_bypasses(tape: Tape, layers: Mapping[str, str]) -> dict[str, Bypass]:
    """Find out how to bypass layers. Layers of a stack are bypassed together or not at all."""
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
            argument = mark.ports[0].partition(".")[2]
            if before and tape.calls[before.call].fqn.rpartition(".")[0] == stack and "." not in argument:
                passed[before.ports[0]] = argument
        results = [port for mark in exits.get(fqn, ()) if mark.target in read for port in mark.ports]
        if results and all(port in passed and _is_plain(port) for port in results):
            ports = {port: _index(port) for mark in exits[fqn] for port in mark.ports if _is_plain(port)}
            kind, length = tape.result_tuples.get(exits[fqn][0].call, (tuple, 0))
            length = max(length, 1 + max(ports.values()))
            arguments = tuple((port, passed[port]) for port in results)
            unread = tuple(index for port, index in ports.items() if port not in results and index >= 0)
            out[fqn] = Bypass(arguments, length, unread, like, kind, is_read_elsewhere=fqn in elsewhere)
        else:
            failed.add(stack)
    bypasses = {fqn: how for fqn, how in out.items() if fqn.rpartition(".")[0] not in failed}
    closed = closed_modules(tape, {fqn for fqn, how in bypasses.items() if how.is_read_elsewhere})
    return {fqn: replace(how, closed=closed.get(fqn, ())) for fqn, how in bypasses.items()}


def working_bypasses(
    model: nn.Module, inputs: TraceInputs, tape: Tape, layers: Mapping[str, str]
) -> dict[str, Bypass]:
    """Call ``find_bypasses`` for a traced model. The result is empty if the model does not run with the
    bypasses.

    For example, a model that collects a list with an item for each layer may fail when it finds too few.
    """
    bypasses = find_bypasses(tape, layers)
    try:
        if bypasses:
            copied = bypassed_copy(model, bypasses)
            trace(copied, inputs.tensors, (), inputs.options, few_chosen=inputs.few_chosen)
    except SolveError:
        return {}
    return bypasses


def _read_elsewhere(tape: Tape, layers: Collection[str]) -> set[str]:
    """Find layers of which other tensors than their results are read, or whose results are collected."""
    inside = {
        index: next((name for name in prefixes(call.fqn) if name in layers), "")
        for index, call in enumerate(tape.calls)
    }
    made_in: dict[int, str] = {}
    result_of: dict[int, str] = {}
    readers: dict[tuple[int, bool], set[str]] = {}
    read_names: set[str] = set()
    for event in tape.events:
        layer = inside.get(event.call, "")
        read, made = reads_and_writes(event)
        read_names.update(made_in[tid] for tid in read if made_in.get(tid, layer) != layer)
        if isinstance(event, Mark) and event.source in result_of:
            readers.setdefault((event.call, event.is_output), set()).add(result_of[event.source])
        is_result = isinstance(event, Mark) and event.is_output and tape.calls[event.call].fqn == layer
        if layer:
            (result_of if is_result else made_in).update(dict.fromkeys(made, layer))
    return read_names.union(*(several for several in readers.values() if len(several) > 1))


def _is_plain(port: str) -> bool:
    """Return whether an output port is the result of a module, or an item of its tuple."""
    name, _, index = port.partition(".")
    return name == "output" and (not index or index.isdigit())


def _index(port: str) -> int:
    """Return the index of an item of a tuple; -1 for a single result."""
    return int(port.partition(".")[2] or -1)


def planned_alike(plan: Plan, layers: Mapping[str, Bypass]) -> dict[str, Bypass]:
    """Return the layers whose plan equals the plan of the layer that represents them."""
    said: dict[str, object] = {}
    entries: tuple[ModulePlan | ParameterPlan, ...] = (*plan.modules, *plan.parameters)
    for entry in entries:
        sign = "=" if isinstance(entry, ParameterPlan) else ""
        said |= dict.fromkeys((name + sign for name in expand_all(entry.names)), replace(entry, names=()))
    said |= {f"{alias}=": name for alias, name in plan.tied}
    said |= {f"{fqn}+": tuple(map(starred, group)) for group in fused_groups(plan) for fqn in group}
    inside: dict[str, dict[str, object]] = {}
    names = {fqn for layer, how in layers.items() for fqn in (layer, how.like)}
    for name, what in said.items():
        for layer in names.intersection(prefixes(name)):
            inside.setdefault(layer, {})[name[len(layer) :]] = what
    return {fqn: how for fqn, how in layers.items() if inside.get(fqn) == inside.get(how.like)}


def bypassed_copy(
    model: nn.Module, layers: Mapping[str, Bypass], note: Callable[[Any], None] | None = None
) -> nn.Module:
    """Deep copy ``model`` with these layers bypassed; the layers themselves are not copied.

    Args:
        note: is called with each attribute of a bypassed layer that is read.
    """
    memo: dict[int, object] = {}
    for fqn, how in layers.items():
        layer = model.get_submodule(fqn)
        memo[id(layer)] = placeholder_for(layer, _passing_on(layer, how), note)
    return copy.deepcopy(model, memo)


# The plan is applied only to those layers of a rank's model that run. A layer that is left out stays
# unsharded, so that its sizes may not be those of a rank. If code reads any of them from outside, the plan is
# applied to all layers.

_SAME_ON_RANKS = (str, bool, float, NoneType, FunctionType, MethodType)
"""Types of attributes that a plan does not change."""


class BypassedRank:
    """The model of one rank on meta, with layers bypassed.

    Args:
        plan: the plan of the model.
        model: global, on meta; it is copied.
        layers: layers to bypass, whose plan equals the plan of the layers that represent them.
        comm: the communicator of the rank.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, layers: Mapping[str, Bypass], comm: Communicator
    ) -> None:
        check_names(model, plan, parameter_plans(plan))
        built = _built_alike(plan, model, layers)
        self.is_exact = True
        """Whether code has read nothing of a bypassed layer that a rank's layer may have otherwise."""
        self.module = parallelize(bypassed_copy(model, built, self._note), _without(plan, built), comm)
        bypass(self.module, {fqn: how for fqn, how in layers.items() if fqn not in built})
        self.is_exact = True

    def _note(self, value: object) -> None:
        self.is_exact = self.is_exact and isinstance(value, _SAME_ON_RANKS)


def _built_alike(plan: Plan, model: nn.Module, layers: Mapping[str, Bypass]) -> dict[str, Bypass]:
    """Return the layers in which a plan changes the same modules as in the layers that represent them."""
    changed: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, entry in module_plans(plan).items():
        for layer in {how.like for how in layers.values()}.intersection(prefixes(name)):
            attributes = (*(override.attribute for override in entry.overrides), *entry.flags)
            changed.setdefault(layer, {})[name[len(layer) + 1 :]] = attributes

    def form(fqn: str, like: str) -> list[object]:
        attributes = changed.get(like, {})
        return [
            (name, type(module), [_attribute(module, path) for path in attributes.get(name, ())])
            for name, module in model.get_submodule(fqn).named_modules()
        ]

    forms = {like: form(like, like) for like in {how.like for how in layers.values()}}
    return {fqn: how for fqn, how in layers.items() if form(fqn, how.like) == forms[how.like]}


def _attribute(owner: Any, path: str) -> object:
    """Return an attribute of a module by the path of an override; None if there is none."""
    for name in path.split("."):
        is_item = isinstance(owner, (list, tuple)) and name.isdigit() and int(name) < len(owner)
        owner = owner[int(name)] if is_item else getattr(owner, name, None)
    return owner


_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, AttentionPlan)


def _without(plan: Plan, layers: Collection[str]) -> Plan:
    """Return the plan of a model for inference without some layers."""

    left_out = frozenset(layers)

    def outside(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if left_out.isdisjoint(prefixes(name)))

    def left(entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
        named = ((entry, outside(expand_all(entry.names))) for entry in entries)
        return tuple(replace(entry, names=names) for entry, names in named if names)

    groups = (group for group in fused_groups(plan) if outside(group) == group)
    return replace(
        plan,
        parameters=left(plan.parameters),
        modules=left(plan.modules),
        tied=tuple(pair for pair in plan.tied if outside(pair) == pair),
        fused=tuple(FusedPlan(tuple((fqn,) for fqn in group)) for group in groups),
        attentions=left(plan.attentions),
    )


def bypass(model: nn.Module, layers: Mapping[str, Bypass]) -> nn.Module:
    """Bypass these layers of ``model``, in place."""
    for fqn, how in layers.items():
        swap_for_placeholder(model, fqn, _passing_on(model.get_submodule(fqn), how))
    return model


def _passing_on(layer: nn.Module, how: Bypass) -> Results:
    """Make a forward that returns the arguments that a layer would have changed, in the form of its
    results."""
    names = list(forward_signature(layer).parameters)
    outputs = [
        (_index(port), name, int(name) if name.isdigit() else names.index(name))
        for port, name in how.arguments
    ]
    tuple_of = getattr(how.kind, "_make", tuple)  # of a named tuple

    def results(*args: Any, **kwargs: Any) -> Any:
        values = {
            index: kwargs[argument] if argument in kwargs else args[position]
            for index, argument, position in outputs
        }
        if -1 in values:
            return values[-1]
        like = next(value for value in values.values() if isinstance(value, Tensor))
        values |= {index: like.new_zeros(0) for index in how.unread}
        return tuple_of(values.get(i) for i in range(how.length))

    return results
