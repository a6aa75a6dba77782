"""Find the attribute overrides with which the model's own code runs on local shapes.

Every torch call whose arguments come from attributes or tensor sizes is recorded in the trace. On meta
tensors of the local shapes, it must return the local shapes. If it does not, attributes that it reads have to
change. The smallest set of changes that makes every call right is searched among a few candidates for each
attribute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import leaves
from ..tracing.fold import NUMBERED
from ..tracing.functions import Expr, evaluate, sources, traced_ints
from ..tracing.tape import Ref, Tape, TracedIntCall, prefixes
from .conflict import Conflict, joined
from .layout import Layouts, Shapes

Attribute = tuple[str, str]
"""(module FQN, attribute)."""
MAX_TRIALS = 4096
"""Most sets of overrides that are tried for attributes that must be chosen together."""


@dataclass(frozen=True, slots=True)
class SolvedOverride:
    """An attribute's global value and its local ones: one for all ranks, or one for each."""

    value: int
    local: tuple[int, ...]


def localize(layouts: Layouts) -> dict[Attribute, SolvedOverride] | Conflict:
    """Find the overrides for all ranks; a conflict if no overrides make some call right."""
    ranks = range(math.prod(layouts.mesh)) if layouts.ranks_differ() else range(1)
    per_rank: list[dict[Attribute, Change]] = []
    for rank in ranks:
        changes = localized(layouts, rank)
        if isinstance(changes, Conflict):
            return changes
        per_rank.append(changes)
    values = {attribute: change.value for changes in per_rank for attribute, change in changes.items()}
    out = {}
    for attribute, value in values.items():
        local = tuple(c[attribute].local if attribute in c else value for c in per_rank)
        out[attribute] = SolvedOverride(value, local[:1] if len(set(local)) == 1 else local)
    return out


def localized(
    shapes: Shapes, rank: int = 0, given: Mapping[Attribute, int] | None = None
) -> dict[Attribute, Change] | Conflict:
    """Find the changes with which every recorded call gives a rank's shapes; a conflict if there are none."""
    return _Localizer(shapes, rank, given or {}).changes()


class Change(NamedTuple):
    """An attribute's global value, and its value on one rank."""

    value: int
    local: int


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A recorded call that shards affect, and the attributes that its arguments came from."""

    replay: TracedIntCall
    attributes: Mapping[Attribute, int]
    """Attributes with their global values."""


class _Localizer:
    """The search for one rank."""

    def __init__(self, shapes: Shapes, rank: int, given: Mapping[Attribute, int]) -> None:
        self.shapes = shapes
        self.analysis: Analysis = shapes.analysis
        self.tape: Tape = shapes.analysis.tape
        self.rank = rank
        self.given = given
        # Tensors that are made inside of norms have no dims.
        numbers = [
            r for r in self.tape.replays if all(t in self.analysis.dims for t in (*r.outputs, *_refs(r)))
        ]
        self.calls = [_Call(r, _attributes(r, given)) for r in numbers if self._matters(r)]
        self.others = [_Call(r, a) for r in numbers if not self._matters(r) and (a := _attributes(r, given))]
        """Calls whose tensors keep their shapes. Overrides must not break them."""
        self.values = {a: value for call in self.calls for a, value in call.attributes.items()}
        self.num_trials = 0
        self.memo: dict[tuple[_Call, tuple[tuple[Attribute, int], ...]], bool] = {}

    def changes(self) -> dict[Attribute, Change] | Conflict:
        """Find the attributes whose local value differs from the global one; a conflict if no values are
        right."""
        failing = [call for call in self.calls if not self._holds(call, {})]
        conflicts = [self._conflict(call) for call in failing if not call.attributes]
        out: dict[Attribute, Change] = {}
        pending = {a for call in failing for a in call.attributes}
        while pending and not (conflicts and self.num_trials >= MAX_TRIALS):
            # Attributes that failing calls read together must be chosen together.
            start = min(pending)
            group = {start}
            grown = True
            while grown:
                grown = False
                for call in self.calls:
                    new = (call.attributes.keys() & pending) - group
                    if call.attributes.keys() & group and new:
                        group |= new
                        grown = True
            chosen = self._search(sorted(group), self._concerned(group))
            if isinstance(chosen, Conflict):
                reading = (call for call in self.calls if group & call.attributes.keys())
                wider = {a for call in reading for a in call.attributes} - out.keys()
                if wider != group:
                    group = wider
                    chosen = self._search(sorted(group), self._concerned(group))
            pending -= group
            if isinstance(chosen, Conflict):
                conflicts.append(chosen)
            else:
                out |= {a: Change(self.values[a], v) for a, v in chosen.items() if v != self.values[a]}
        # Keep the first conflict of each layer: the dims that it rules out may help other calls of the layer.
        first: dict[str, Conflict] = {}
        for conflict in conflicts:
            first.setdefault(_layer_of(conflict.where), conflict)
        return joined(first.values()) or out

    def _matters(self, replay: TracedIntCall) -> bool:
        dims = self.analysis.dims
        touched = [t for t in (*replay.outputs, *_refs(replay), *_sized(replay)) if t in dims]
        return any(self.shapes.is_changed(t) for t in touched)

    def _concerned(self, group: set[Attribute]) -> list[_Call]:
        """Return the calls that read some of these attributes. They may be right only without overrides."""
        return [call for call in (*self.calls, *self.others) if group & call.attributes.keys()]

    # Search ----------------------------------------------------------------------------------

    def _search(self, group: Sequence[Attribute], calls: Sequence[_Call]) -> dict[Attribute, int] | Conflict:
        """Return the fewest changes that make every call right, among the first ``MAX_TRIALS``."""
        candidates = {attribute: self._candidates(attribute, calls) for attribute in group}
        for overrides in itertools.islice(_trials(candidates), MAX_TRIALS):
            self.num_trials += 1
            if all(self._holds(call, overrides) for call in calls):
                return overrides
        return self._conflict(next(call for call in calls if not self._holds(call, {})))

    def _candidates(self, attribute: Attribute, calls: Sequence[_Call]) -> list[int]:
        """Return local sizes of dims of the attribute's value, and quotients by parts of the mesh."""
        value = self.values[attribute]
        candidates: dict[int, None] = {}
        for call in calls:
            if attribute in call.attributes:
                for tid in (*call.replay.outputs, *_refs(call.replay)):
                    if tid in self.analysis.dims:
                        candidates |= dict.fromkeys(self.shapes.local_sizes(tid, value, self.rank))
        for parts in self.shapes.divisors:
            if value % parts == 0:
                candidates[value // parts] = None
        # The value in proportion to changed leaves that divide it, for example heads in proportion to groups.
        tids = {t for c in calls if attribute in c.attributes for t in (*c.replay.outputs, *_refs(c.replay))}
        for tid in sorted(tids & self.analysis.dims.keys()):
            candidates |= dict.fromkeys(self.shapes.local_multiples(tid, value, self.rank))
        candidates.pop(value, None)
        return [v for v in candidates if v > 0]

    def _holds(self, call: _Call, overrides: Mapping[Attribute, int]) -> bool:
        """Return whether the call returns the local shapes with these overrides."""
        key = (call, tuple((a, overrides[a]) for a in call.attributes if a in overrides))
        outcome = self.memo.get(key)
        if outcome is None:
            outcome = self.memo[key] = self._run(call.replay, overrides)
        return outcome

    def _run(self, replay: TracedIntCall, overrides: Mapping[Attribute, int]) -> bool:
        def lookup(source: Expr) -> int:
            if source[0] == "attr":
                attribute = (source[1], source[2])
                return overrides.get(attribute, self.given.get(attribute, int(source[3])))
            return self.shapes.local_shape(source[1], self.rank)[source[2]]

        def load(ref: Ref) -> torch.Tensor:
            dtype = self.tape.tensors[ref.tid].dtype
            return torch.empty(self.shapes.local_shape(ref.tid, self.rank), dtype=dtype, device="meta")

        args, kwargs = evaluate(replay.args, lookup), evaluate(replay.kwargs, lookup)
        args, kwargs = pytree.tree_map_only(Ref, load, (args, kwargs))
        try:
            with torch.inference_mode(), torch.device("meta"):
                result = replay.function(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError, AssertionError):
            return False  # some torch functions assert on their arguments
        results = result if isinstance(result, (tuple, list)) else (result,)
        got = [tuple(t.shape) for t in results if isinstance(t, torch.Tensor)]
        return got == [self.shapes.local_shape(t, self.rank) for t in replay.outputs]

    def _conflict(self, call: _Call) -> Conflict:
        """Return the changed leaves of the tensors that a call reads and returns."""
        replay = call.replay
        tids = [t for t in (*replay.outputs, *_refs(replay), *_sized(replay)) if t in self.analysis.dims]
        nodes = dict.fromkeys(x for t in tids for dim in self.analysis.dims[t] for x in leaves(dim))
        changed = tuple(x for x in nodes if self.shapes.changed(x))
        function = getattr(replay.function, "__name__", str(replay.function))
        return Conflict(changed, f"{replay.fqn}: {function}")


def _layer_of(where: str) -> str:
    """Return the innermost numbered module around a call."""
    return next((fqn for fqn in prefixes(where.partition(":")[0]) if NUMBERED.fullmatch(fqn)), "")


def _trials(candidates: Mapping[Attribute, Sequence[int]]) -> Iterator[dict[Attribute, int]]:
    """Yield all ways to change some attributes, fewest changes first."""
    for changed in range(1, len(candidates) + 1):
        for subset in itertools.combinations(candidates, changed):
            for values in itertools.product(*(candidates[attribute] for attribute in subset)):
                yield dict(zip(subset, values, strict=True))


def _attributes(replay: TracedIntCall, given: Collection[Attribute]) -> dict[Attribute, int]:
    """Return the attributes in a call's ints that are not known, with their global values."""
    numbers = traced_ints((replay.args, replay.kwargs))
    attributes = [source for number in numbers for source in sources(number.expr) if source[0] == "attr"]
    return {(fqn, name): value for _, fqn, name, value in attributes if (fqn, name) not in given}


def _refs(replay: TracedIntCall) -> Iterable[int]:
    return [r.tid for r in pytree.tree_leaves((replay.args, replay.kwargs)) if isinstance(r, Ref)]


def _sized(replay: TracedIntCall) -> Iterable[int]:
    """Return the tensors whose sizes are arguments of the call."""
    numbers = traced_ints((replay.args, replay.kwargs))
    return [source[1] for number in numbers for source in sources(number.expr) if source[0] == "size"]
