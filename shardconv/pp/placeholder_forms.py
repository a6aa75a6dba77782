"""Results of placeholders for units, and their updates of caches, derived from the tape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, axes_of, size
from shardconv_runtime.format.dims import leaves as dim_leaves
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.format.pipeline_stages import (
    CacheArgument,
    CacheCall,
    PlaceholderDim,
    PlaceholderItem,
    PlaceholderTensor,
    PortDim,
)
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..dim_analysis.rules import RULES
from ..inputs.trace_inputs import TraceInputs
from ..planning.layout import Layouts
from ..simulation.model_runs import continuation
from ..tracing.fold import Folded
from ..tracing.tape import CacheUpdate, Mark, Ref, Returned, Tape, depending_on, prefixes
from ..tracing.trace import trace
from .tape_units import TapeUnits, Unit

# Shapes of a second call, which continues the first; query and key lengths differ in it.


Shape = tuple[int, ...]


@dataclass(frozen=True)
class SecondCall:
    """The inputs and results of modules in a second call of the model."""

    shapes: dict[tuple[str, str], Shape] = field(default_factory=dict)
    """(FQN, port) -> shape, in the first call of the module."""
    returned: dict[str, Returned] = field(default_factory=dict)
    updates: dict[str, list[tuple[CacheUpdate, list[Shape]]]] = field(default_factory=dict)
    """FQN -> updates of the caches that the module was given, and the shapes of the tensors in each."""

    def called(self, fqn: str) -> bool:
        """Return whether the module was called."""
        return fqn in self.returned


def second_call(model: nn.Module, inputs: TraceInputs) -> SecondCall:
    """Trace a call with one more token, given the cache that the first call returned.

    Returns:
        An empty result if the model returns no cache or cannot be called again.
    """
    for keeps_encoded in (True, False):
        try:
            twice = _Twice(model, inputs, keeps_encoded)
            return _read(trace(twice, inputs.tensors, RULES, few_chosen=inputs.few_chosen))
        except SolveError:
            continue
    return SecondCall()


class _Twice(nn.Module):
    """A model that is called twice."""

    def __init__(self, model: nn.Module, inputs: TraceInputs, keeps_encoded: bool) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs
        self._keeps_encoded = keeps_encoded

    def forward(self, **tensors: Tensor) -> Any:
        """Return the results of the second call."""
        first = self.model(**tensors, **self._inputs.options)
        arguments = continuation(self.model, replace(self._inputs, tensors=tensors), first)
        encoded = getattr(first, "encoder_last_hidden_state", None)
        if self._keeps_encoded and encoded is not None:
            arguments = {**arguments, "encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}
        return self.model(**arguments)


def _read(tape: Tape) -> SecondCall:
    """Collect the calls of modules inside the second call of the model."""
    (second,) = [i for i, call in enumerate(tape.calls) if call.fqn == "model" and call.index == 1]
    names: dict[int, str] = {}
    for index, made in enumerate(tape.calls[second:], second):
        fqn = made.fqn.removeprefix("model").removeprefix(".")
        if fqn not in names.values():
            names[index] = fqn
    second_call = SecondCall()
    for event in tape.events:
        if isinstance(event, Mark) and event.call in names:
            for port in event.ports:
                tid = event.target if event.is_output else event.source
                second_call.shapes[names[event.call], port] = tape.tensors[tid].shape
    second_call.returned.update({fqn: tape.returned[i] for i, fqn in names.items() if i in tape.returned})
    for update in tape.cache_updates:
        for call in update.givers:
            if call in names:
                second_call.updates.setdefault(names[call], []).append(
                    (update, [tape.tensors[tid].shape for tid in tensors_of_update(update)])
                )
    return second_call


def tensors_of_update(update: CacheUpdate) -> Sequence[int]:
    """Return the tensors that an update of a cache is given, in order."""
    return [v.tid for v in (*update.args, *update.kwargs.values()) if isinstance(v, Ref)]


_KEPT_LAST = "update_conv_state"
"""A cache method that reads the last size of its argument, which is the size of the convolution kernel."""


@dataclass(frozen=True)
class _Argument:
    """A tensor that a unit is given."""

    port: str
    tid: int
    is_weighted: bool
    """Whether it depends on parameters. Such a tensor is always passed, while a mask may be left out."""


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a dim in both calls; the second is None if there was none."""

    first: int
    second: int | None


class UnitForms:
    """The forms of the units of one tape."""

    def __init__(self, units: TapeUnits, layouts: Layouts, folded: Folded, second: SecondCall) -> None:
        self.units = units
        self.tape = units.tape
        self._layouts = layouts
        self._representatives = folded.representatives()
        self._folded = folded.tape
        self._second = second
        self._model_dtype = _model_dtype(self.tape)
        self._input_sizes = {n for t in self.tape.inputs for n in self.tape.tensors[t].shape}

    def returned(self, unit: Unit) -> tuple[str, tuple[PlaceholderItem, ...]]:
        """Return the form of a unit's results, and its items."""
        forms = {self.tape.returned.get(call, Returned("other")) for call in unit.calls}
        if self._second.called(unit.fqn):
            forms.add(self._second.returned[unit.fqn])
        form = forms.pop()
        if forms:
            raise _no_placeholder(unit, "returns values of several kinds")
        if form.kind == "other" or any(item.is_other for item in form.items):
            raise _no_placeholder(unit, "returns a value that is not a tensor")
        outputs = self._outputs.get(unit.calls[0], {})
        items = []
        for index, item in enumerate(form.items):
            port = "output" if form.kind == "tensor" else f"output.{index}"
            tensor = self._tensor(unit, port, outputs[port]) if item.is_tensor else None
            items.append(PlaceholderItem(tensor, item.argument))
        return form.kind, tuple(items)

    def is_called_again(self, fqn: str) -> bool:
        """Return whether a module is called in the second call too. Models without one count as called
        again."""
        return self._second.called(fqn) or not self._second.returned

    def has_own_inputs(self, unit: Unit) -> bool:
        """Return whether no input of a unit depends on parameters, so that every stage can run it."""
        return not any(argument.is_weighted for call in unit.calls for argument in self._inputs.get(call, ()))

    def has_placeholder(self, unit: Unit) -> bool:
        """Return whether a placeholder can return the results of a unit."""
        try:
            self.returned(unit)
        except SolveError:
            return False
        return True

    def cache_calls(self, unit: Unit) -> tuple[CacheCall, ...]:
        """Return the updates of caches in a call of a unit.

        Updates that only the first call makes, for example with keys of an encoder, are made whenever the
        unit is given the tensor that they are computed from. If the second call is given it as well, they are
        omitted.
        """
        again = self._second.updates.get(unit.fqn, [])
        calls = []
        for update in (u for u in self.tape.cache_updates if unit.calls[0] in u.givers):
            giver = update.givers[unit.calls[0]]
            same = [shapes for u, shapes in again if _key(u) == _key(update) and giver in u.givers.values()]
            arguments = self._cache_arguments(unit, update, same[0] if same else None)
            tensors = [a.tensor for a in arguments if a.tensor is not None]
            if same or all(any(dim.of for dim in tensor.dims) for tensor in tensors):
                calls.append(CacheCall(update.method, *giver, arguments))
        return tuple(calls)

    def _cache_arguments(
        self, unit: Unit, update: CacheUpdate, second: Sequence[Shape] | None
    ) -> tuple[CacheArgument, ...]:
        values = [("", value) for value in update.args] + list(update.kwargs.items())
        tids = tensors_of_update(update)
        none: list[Shape | None] = [None] * len(tids)
        shapes = dict(zip(tids, second or none, strict=False))
        arguments = []
        for name, value in values:
            if isinstance(value, Ref):
                tensor = self._cached(unit, value.tid, shapes[value.tid], update.method == _KEPT_LAST)
                arguments.append(CacheArgument(name, tensor))
            elif type(value) is int:
                arguments.append(CacheArgument(name, numbers=(value,)))
            elif not name:
                raise _no_placeholder(unit, f"gives {update.method} of its cache a {type(value).__name__}")
        return tuple(arguments)

    def _cached(self, unit: Unit, tid: int, second: Shape | None, keeps_last: bool) -> PlaceholderTensor:
        """Describe a tensor for a cache: it has the true length, but one head of one element."""
        first = self.tape.tensors[tid].shape
        arguments = self._arguments(unit)
        if second is None and self._second.called(unit.fqn):
            arguments = [a for a in arguments if (unit.fqn, a.port) not in self._second.shapes]
        dims = []
        for index, sizes in enumerate(_pairs(first, second)):
            is_kept = keeps_last and index == len(first) - 1
            of = self._dims_of(arguments, unit, sizes, index)
            dims.append(PlaceholderDim(of, None if of else Leaf(sizes.first if is_kept else 1)))
        return PlaceholderTensor(tuple(dims), self._dtype(tid))

    # Shapes ----------------------------------------------------------------------------------

    def _tensor(self, unit: Unit, port: str, mark: Mark) -> PlaceholderTensor:
        """Describe a result of a unit as its caller gets it."""
        shown = self._marks.get((self._shown(unit.fqn), port))
        nodes = self._layouts.analysis.dims.get(shown.target) if shown is not None else None
        layouts = [self._layouts.dim(node) for node in nodes] if nodes else []
        shape = self.tape.tensors[mark.target].shape
        dims = []
        for index, sizes in enumerate(_pairs(shape, self._second.shapes.get((unit.fqn, port)))):
            layout = layouts[index] if layouts else Leaf(sizes.first)
            of = self._dims_of(self._arguments(unit), unit, sizes, index, layout)
            part = PlaceholderDim(of)
            if not of and self._is_open(unit, port, index):
                part = self._part_of(unit, sizes, index, layout)
                of = part.of
            changes = sizes.second not in (None, sizes.first) or self._is_open(unit, port, index)
            if not of and changes:
                problem = (
                    f"returns a tensor {list(shape)} whose dim {index} is no product of dims of its inputs"
                )
                raise _no_placeholder(unit, problem)
            dims.append(part if of else PlaceholderDim((), layout))
        return PlaceholderTensor(tuple(dims), self._dtype(mark.target))

    def _part_of(self, unit: Unit, wanted: _Sizes, index: int, layout: Dim) -> PlaceholderDim:
        """Find a dim of an argument that is sharded where this one is not, or the other way round. This
        happens to the sequence dim in the sequence-parallel form."""
        mesh = self._layouts.mesh
        for given in sorted(self._arguments(unit), key=lambda given: not given.is_weighted):
            for dim, sizes in enumerate(self._sizes(unit, given)):
                part = self._given_layout(unit, given, dim)
                if part is None or not _agree(sizes, wanted) or _whole(part) != _whole(layout):
                    continue
                has, wants = axes_of(part), axes_of(layout)
                times = math.prod(mesh[axis] for axis in has - wants)
                over = math.prod(mesh[axis] for axis in wants - has)
                return PlaceholderDim((PortDim(given.port, dim),), None, times, over)
        return PlaceholderDim()

    def _dims_of(
        self,
        arguments: Sequence[_Argument],
        unit: Unit,
        wanted: _Sizes,
        index: int,
        layout: Dim | None = None,
    ) -> tuple[PortDim, ...]:
        """Return the dims of one argument whose product is the size in both calls, with the same layout.

        The result is empty if there are none. Tensors that depend on parameters are preferred, then dims at
        the same index. Without a layout, only dims whose sizes come from the model's inputs are considered.
        """
        if wanted.first < 2:
            return ()
        candidates = []
        for argument in arguments:
            for dim, sizes in enumerate(self._sizes(unit, argument)):
                is_input = sizes.first in self._input_sizes
                is_meant = is_input or (argument.is_weighted and layout is not None)
                if not is_meant or not _agree(sizes, wanted):
                    continue
                if (
                    layout is None
                    or (self._given_layout(unit, argument, dim) or Leaf(size(layout))) == layout
                ):
                    candidates.append((not argument.is_weighted, dim != index, PortDim(argument.port, dim)))
        if candidates:
            return (min(candidates, key=lambda c: c[:2])[2],)
        return self._pair_of_dims(arguments, unit, wanted)

    def _pair_of_dims(
        self, arguments: Sequence[_Argument], unit: Unit, wanted: _Sizes
    ) -> tuple[PortDim, ...]:
        """Return two dims of an argument that multiply to the size, and come from the model's inputs."""
        for argument in arguments:
            dims = [(d, s) for d, s in enumerate(self._sizes(unit, argument)) if s.first in self._input_sizes]
            for (d, a), (e, b) in itertools.combinations(dims, 2):
                second = None if a.second is None or b.second is None else a.second * b.second
                if _agree(_Sizes(a.first * b.first, second), wanted):
                    return PortDim(argument.port, d), PortDim(argument.port, e)
        return ()

    def _sizes(self, unit: Unit, given: _Argument) -> Sequence[_Sizes]:
        return _pairs(self.tape.tensors[given.tid].shape, self._second.shapes.get((unit.fqn, given.port)))

    def _given_layout(self, unit: Unit, given: _Argument, dim: int) -> Dim | None:
        """Return the layout of a dim of an argument on the caller's side; None if it was not analyzed."""
        mark = self._marks.get((self._shown(unit.fqn), given.port))
        nodes = self._layouts.analysis.dims.get(mark.source) if mark is not None else None
        return self._layouts.dim(nodes[dim]) if nodes else None

    def _is_open(self, unit: Unit, port: str, index: int) -> bool:
        """Return whether the inputs of the model determine the size of a dim."""
        mark = self._marks.get((self._shown(unit.fqn), port))
        nodes = self._layouts.analysis.dims.get(mark.target) if mark is not None else None
        return nodes is not None and any(
            not leaf.size for leaf in dim_leaves(self._layouts.open_dim(nodes[index]))
        )

    def _dtype(self, tid: int) -> str:
        dtype = self.tape.tensors[tid].dtype
        return "" if dtype == self._model_dtype else dtype_name(dtype)

    # Marks -----------------------------------------------------------------------------------

    def _arguments(self, unit: Unit) -> Sequence[_Argument]:
        return self._inputs.get(unit.calls[0], ())

    @cached_property
    def _inputs(self) -> Mapping[int, Sequence[_Argument]]:
        stored = (t for t, info in enumerate(self.tape.tensors) if info.kind in ("parameter", "buffer"))
        weighted = depending_on(self.tape, stored)
        inputs: dict[int, list[_Argument]] = {}
        for mark in _marks_of(self.tape):
            if not mark.is_output:
                argument = _Argument(mark.ports[0], mark.source, mark.source in weighted)
                inputs.setdefault(mark.call, []).append(argument)
        return inputs

    @cached_property
    def _outputs(self) -> Mapping[int, Mapping[str, Mark]]:
        outputs: dict[int, dict[str, Mark]] = {}
        for mark in _marks_of(self.tape):
            if mark.is_output:
                outputs.setdefault(mark.call, {}).update(dict.fromkeys(mark.ports, mark))
        return outputs

    @cached_property
    def _marks(self) -> Mapping[tuple[str, str], Mark]:
        """The marks of the folded tape, by module and port."""
        marks: dict[tuple[str, str], Mark] = {}
        for mark in _marks_of(self._folded):
            for port in mark.ports:
                marks.setdefault((self._folded.calls[mark.call].fqn, port), mark)
        return marks

    def _shown(self, fqn: str) -> str:
        """Return the module of the folded tape that represents another."""
        for layer in prefixes(fqn):
            if layer in self._representatives:
                return self._representatives[layer] + fqn[len(layer) :]
        return fqn


def _marks_of(tape: Tape) -> Iterator[Mark]:
    return (event for event in tape.events if isinstance(event, Mark))


def _key(update: CacheUpdate) -> tuple[object, ...]:
    """Identify the layer and the state of a cache that an update changes."""
    numbers = [v for v in (*update.args, *update.kwargs.values()) if type(v) is int]
    return (update.method, *numbers)


def _pairs(first: Shape, second: Shape | None) -> list[_Sizes]:
    if second is None or len(second) != len(first):
        return [_Sizes(extent, None) for extent in first]
    return list(map(_Sizes, first, second))


def _agree(found: _Sizes, wanted: _Sizes) -> bool:
    """Return whether a size equals another in both calls. A size that is missing in the second call does not
    count."""
    return found.first == wanted.first and (wanted.second is None or found.second == wanted.second)


def _whole(dim: Dim) -> Dim:
    """Return the dim without sharding."""
    if isinstance(dim, Leaf):
        return Leaf(dim.size)
    if isinstance(dim, Product):
        return Product(tuple(map(_whole, dim.factors)))
    return Sum(tuple(map(_whole, dim.segments)))


def _no_placeholder(unit: Unit, problem: str) -> SolveError:
    return SolveError(f"the model cannot be cut into stages: {unit.fqn} {problem}")


def _model_dtype(tape: Tape) -> object:
    """Return the dtype of most floating point parameters."""
    dtypes = [i.dtype for i in tape.tensors if i.kind == "parameter" and i.dtype.is_floating_point]
    return max(set(dtypes), key=dtypes.count, default=None)
