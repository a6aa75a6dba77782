"""Stages of a plan: the cuts between them, and the tensors that cross the cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardconv_runtime.errors import RefusedCallError, ShardconvError, SolveError
from shardconv_runtime.format.names import compress, expand_all
from shardconv_runtime.format.pipeline_stages import CacheCall, SentValue, StagedModule, StagesPlan

from ..dim_analysis.rules import traits_of
from ..planning.layout import Layouts
from ..tracing.fold import Folded
from ..tracing.tape import Op, Tape, reads_and_writes, starred
from .placeholder_forms import SecondCall, UnitForms
from .tape_units import Crossings, TapeUnits, Unit

# The cuts are at the borders that distribute bytes and work most evenly.


@dataclass(frozen=True)
class StageLoad:
    """The load between two borders."""

    num_bytes: int
    """Bytes of parameters."""
    work: float
    """Multiplications per token."""

    def __add__(self, other: StageLoad) -> StageLoad:
        return StageLoad(self.num_bytes + other.num_bytes, self.work + other.work)


NOTHING = StageLoad(0, 0.0)


def balanced(loads: Sequence[StageLoad], allowed: Sequence[bool], num_stages: int) -> list[int]:
    """Return the cuts that minimize the largest load of a stage.

    The load of a stage is the larger of its share of all bytes and its share of all work. Ties are broken by
    the smallest sum of squares. The result is exact, by dynamic programming.

    Returns:
        Indices of borders, ascending.
    """
    if sum(allowed) < num_stages - 1:
        raise RefusedCallError(
            f"the model can be cut at {sum(allowed)} places, which makes {sum(allowed) + 1} stages at most, "
            f"not {num_stages}; give a smaller --pp"
        )
    sums = list(itertools.accumulate(loads, initial=NOTHING))
    total = sums[-1]

    def cost(start: int, stop: int) -> float:
        num_bytes = (sums[stop].num_bytes - sums[start].num_bytes) / max(1, total.num_bytes)
        return max(num_bytes, (sums[stop].work - sums[start].work) / max(1.0, total.work))

    places = [0, *(i + 1 for i, ok in enumerate(allowed) if ok), len(loads)]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        cheapest: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in places[1:] if stage < num_stages - 1 else places[-1:]:
            for start, (worst, squares, cuts) in best.items():
                if start < stop:
                    stage_cost = cost(start, stop)
                    candidate = (max(worst, stage_cost), squares + stage_cost * stage_cost, (*cuts, stop))
                    cheapest[stop] = min(cheapest.get(stop, candidate), candidate)
        best = cheapest
    return [stop - 1 for stop in best[len(loads)][2][:-1]]


def parse_stages(text: str, num_layers: int) -> list[int]:
    """Parse stages that are given as ``0-39,40-79``.

    Returns:
        The index of the last layer of each stage except the last.
    """
    expected, borders = 0, []
    for item in text.split(","):
        first, _, last = item.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(first) != expected:
            raise _malformed(text, num_layers)
        expected = int(last or first) + 1
        borders.append(expected - 1)
        if expected <= int(first):
            raise _malformed(text, num_layers)
    if expected != num_layers:
        raise _malformed(text, num_layers)
    return borders[:-1]


def _malformed(text: str, num_layers: int) -> ShardconvError:
    return ShardconvError(
        f"{text!r} does not share out the {num_layers} layers 0 to {num_layers - 1}; give the layers of each "
        f"stage, as 0-{num_layers // 2 - 1},{num_layers // 2}-{num_layers - 1}"
    )


@dataclass(frozen=True)
class StageOptions:
    """How a model is cut into stages."""

    count: int
    layers: str = ""
    """First and last layer of each stage, as ``0-39,40-79``; empty: balanced."""


def stages_plan(
    options: StageOptions,
    tape: Tape,
    layouts: Layouts,
    folded: Folded,
    parameters: Mapping[str, int],
    tied: Sequence[tuple[str, str]],
    second: SecondCall,
) -> StagesPlan:
    """Cut a model into stages."""
    names = {name: name for name in parameters} | dict(tied)
    units = TapeUnits(tape, names)
    forms = UnitForms(units, layouts, folded, second)
    # Units without a placeholder that depend on no parameters run on every stage: for example position
    # tables, which are looked up by the length of a sequence.
    layers = [tape.calls[call].fqn for call in units.layers]
    free = (u for u in units.units.values() if u.fqn not in layers and forms.has_own_inputs(u))
    units = TapeUnits(tape, names, frozenset(u.fqn for u in free if not forms.has_placeholder(u)))
    crossings = Crossings(units)
    if not units.borders:
        raise SolveError("the model has no stack of layers that could be cut into stages")
    layers = [tape.calls[call].fqn for call in units.layers]
    again = next((fqn for fqn in layers if layers.count(fqn) > 1), "")
    problem = crossings.unanswerable()
    if not problem and again:
        problem = f"{again} is called more than once: its layers are a loop"
    if problem:
        raise SolveError(f"the model cannot be cut into stages: {problem}")
    cuts = _cuts(options, units, crossings, parameters)
    positions = [0, *(units.borders[cut].position for cut in cuts), len(tape.events)]
    return _Stages(units, forms, crossings, positions, layouts).plan()


def _cuts(
    options: StageOptions, units: TapeUnits, crossings: Crossings, parameters: Mapping[str, int]
) -> list[int]:
    """Return the indices of the borders to cut at."""
    conflicts = [crossings.conflict(border.position) for border in units.borders[:-1]]
    if options.layers:
        cuts = parse_stages(options.layers, len(units.borders))
        if len(cuts) + 1 != options.count:
            raise SolveError(f"{options.layers!r} are {len(cuts) + 1} stages, not {options.count}")
        if wrong := [cut for cut in cuts if conflicts[cut]]:
            raise SolveError(
                f"the model cannot be cut behind {units.borders[wrong[0]].layer}: {conflicts[wrong[0]]}"
            )
        return cuts
    if conflicts and all(conflicts):
        raise SolveError(f"the model cannot be cut into stages: {conflicts[len(conflicts) // 2]}")
    # Loads between borders. The last border is the end of the model and closes none.
    positions = [border.position for border in units.borders[:-1]]
    loads = [NOTHING] * (len(positions) + 1)

    def add(position: int, load: StageLoad) -> None:
        index = sum(1 for p in positions if p <= position)
        loads[index] += load

    for unit in units.units.values():
        add(unit.starts[0], StageLoad(sum(parameters[name] for name in unit.parameters), 0.0))
    weights = {t for t, info in enumerate(units.tape.tensors) if info.kind == "parameter"}
    for position, event in enumerate(units.tape.events):
        inputs, outputs = reads_and_writes(event)
        if inputs and weights.issuperset(inputs):
            weights.update(outputs)
        elif isinstance(event, Op) and outputs:
            add(position, StageLoad(0, _work(units.tape, event, weights)))
    return balanced(loads, [not o for o in conflicts], options.count)


def _work(tape: Tape, op: Op, weights: Collection[int]) -> float:
    """Count the multiplications of a product with weights (parameters or views of them)."""
    if not traits_of(op.name).is_product or not op.inputs:
        return 0.0
    is_weight = [t in weights and len(tape.tensors[t].shape) > 1 for t in op.inputs]
    if any(is_weight):
        shapes = [tape.tensors[t].shape for t, w in zip(op.inputs, is_weight, strict=True) if not w]
        shape = next((shape for shape in shapes if len(shape) > 1), ())  # not a bias
        return float(math.prod(tape.tensors[op.outputs[0]].shape) * (shape[-1] if shape else 1))
    return 0.0


class _Stages:
    """The stages for one choice of cuts."""

    def __init__(
        self,
        units: TapeUnits,
        forms: UnitForms,
        crossings: Crossings,
        positions: Sequence[int],
        layouts: Layouts,
    ) -> None:
        self.units = units
        self.forms = forms
        self.positions = positions
        self.count = len(positions) - 1
        self.tokens = layouts.num_tokens
        self.received = [crossings.needed(start, stop) for start, stop in itertools.pairwise(positions)]

    def plan(self) -> StagesPlan:
        """Return all stages; units that differ only in their numbers share an entry."""
        entries: dict[tuple[str, StagedModule], list[tuple[str, tuple[CacheCall, ...]]]] = {}
        for unit in self.units.units.values():
            entry = self._entry(unit)
            # Calls of caches differ in the number of the layer; `_joined` puts these back together.
            numberless = tuple(
                replace(c, arguments=tuple(replace(a, numbers=(0,) * len(a.numbers)) for a in c.arguments))
                for c in entry.cache
            )
            key = starred(unit.fqn), replace(entry, cache=numberless)
            entries.setdefault(key, []).append((unit.fqn, entry.cache))
        modules = []
        for (_, entry), members in entries.items():
            names = compress(name for name, _ in members)
            ordered = sorted(members, key=lambda m: expand_all(names).index(m[0]))
            modules.append(replace(entry, names=names, cache=_joined([cache for _, cache in ordered])))
        stages = [self._stage(border.position - 1) for border in self.units.borders]
        firsts = [sum(1 for s in stages if s < stage) for stage in range(self.count + 1)]
        # Modules without parameters that contain no unit run on every stage.
        calls = self.units.tape.calls
        outer = {i for i, call in enumerate(calls) if i not in self.units.unit_of}
        parents = {calls[i].parent for i in (*outer, *self.units.unit_of)}
        return StagesPlan(
            self.count,
            tuple((first, last - 1) for first, last in itertools.pairwise(firsts)),
            tuple(modules),
            computed_again=tuple(dict.fromkeys(calls[i].fqn for i in sorted(outer - parents))),
        )

    def _entry(self, unit: Unit) -> StagedModule:
        stages = tuple(sorted({self._stage(start) for start in unit.starts}))
        returns, items = self.forms.returned(unit)
        values = dict.fromkeys(v for received in self.received for v in received if v.unit == unit.fqn)
        if values and len(unit.calls) > 1:
            raise SolveError(f"{unit.fqn} is called more than once, and another stage needs its results")
        sent = []
        for value in values:
            to = tuple(stage for stage, received in enumerate(self.received) if value in received)
            item = int(value.port.partition(".")[2] or 0)
            per_token = math.ceil(math.prod(self.units.tape.tensors[value.tid].shape) / self.tokens)
            sent.append(SentValue(item, to, per_token, self.forms.is_called_again(value.unit)))
        takes_cache = any(call in self.units.tape.given_caches for call in unit.calls)
        cache = self.forms.cache_calls(unit)
        return StagedModule((), stages, returns, items, takes_cache, cache, tuple(sent))

    def _stage(self, position: int) -> int:
        return sum(1 for border in self.positions[1:-1] if border <= position)


def _joined(members: Sequence[Sequence[CacheCall]]) -> tuple[CacheCall, ...]:
    """Merge the cache calls of the members of an entry; if their numbers differ, each member has one."""
    out = []
    for index, call in enumerate(members[0]):
        arguments = []
        for position, argument in enumerate(call.arguments):
            numbers = tuple(n for member in members for n in member[index].arguments[position].numbers)
            arguments.append(replace(argument, numbers=numbers[:1] if len(set(numbers)) == 1 else numbers))
        out.append(replace(call, arguments=tuple(arguments)))
    return tuple(out)
