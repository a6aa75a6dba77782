"""Finds the attribute edits under which the model's own code runs on local shapes.

Every torch call whose arguments came from attributes or tensor sizes was recorded. On meta tensors of
the local shapes it must give the local result: where it does not, attributes that it reads have to
change. The smallest set of changes that makes every call right is searched among a few candidates for
each attribute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shardconv_runtime.format import dims, slices
from torch.utils import _pytree as pytree

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node, leaves
from ..tracing.ints import Expr, evaluate, sources, traced_ints
from ..tracing.tape import Ref, Replay, Tape
from .layout import Layouts

Attribute = tuple[str, str]
"""(module FQN, attribute)."""
_MAX_TRIALS = 4096


@dataclass(frozen=True, slots=True)
class AttributeEdit:
    """An attribute's global value and its local one: for all ranks, or for each."""

    value: int
    local: tuple[int, ...]


class Unlocalizable(Exception):
    """No edit makes a call right; these dims must stay whole."""

    def __init__(self, nodes: list[Node], where: str) -> None:
        super().__init__(where)
        self.nodes = nodes
        self.where = where


def localize(layouts: Layouts) -> dict[Attribute, AttributeEdit]:
    """The edits for all ranks.

    Raises:
        Unlocalizable: some call cannot be made right.
    """
    ranks = range(math.prod(layouts.mesh)) if layouts.ranks_differ() else range(1)
    per_rank = [_Localizer(layouts, rank).edits() for rank in ranks]
    values: dict[Attribute, int] = {}
    for edits in per_rank:
        values |= {a: v for a, (v, _) in edits.items()}
    out = {}
    for attribute, value in values.items():
        local = tuple(edits.get(attribute, (value, value))[1] for edits in per_rank)
        out[attribute] = AttributeEdit(value, local[:1] if len(set(local)) == 1 else local)
    return out


class _Localizer:
    """The search for one rank."""

    def __init__(self, layouts: Layouts, rank: int) -> None:
        self.layouts = layouts
        self.analysis: Analysis = layouts.analysis
        self.tape: Tape = layouts.analysis.tape
        self.rank = rank
        self.attributes: dict[int, list[Attribute]] = {}
        self.values: dict[Attribute, int] = {}
        self.memo: dict[Any, bool] = {}

    def edits(self) -> dict[Attribute, tuple[int, int]]:
        """Attribute -> (global value, local value), only where they differ."""
        replays = [r for r in self.tape.replays if self._matters(r)]
        for replay in replays:
            self.attributes[id(replay)] = self._attributes(replay)
        failing = [r for r in replays if not self._holds(r, {})]
        out: dict[Attribute, tuple[int, int]] = {}
        pending = {a for r in failing for a in self.attributes[id(r)]}
        for replay in failing:
            if not self.attributes[id(replay)]:
                raise Unlocalizable(self._sharded(replay), f"{replay.fqn}: {_name(replay)}")
        while pending:
            group = self._component(min(pending), pending, replays)
            pending -= group
            concerned = [r for r in replays if group & set(self.attributes[id(r)])]
            chosen = self._search(sorted(group), concerned)
            out |= {a: (self.values[a], v) for a, v in chosen.items() if v != self.values[a]}
        return out

    def _matters(self, replay: Replay) -> bool:
        known = self.analysis.dims
        touched = [t for t in (*replay.outputs, *_refs(replay), *_sized(replay)) if t in known]
        return all(t in known for t in replay.outputs) and any(self.layouts.is_sharded(t) for t in touched)

    def _attributes(self, replay: Replay) -> list[Attribute]:
        found: dict[Attribute, int] = {}
        for number in traced_ints((replay.args, replay.kwargs)):
            for source in sources(number.expr):
                if source[0] == "attr":
                    found[source[1], source[2]] = source[3]
        self.values |= found
        return list(found)

    def _component(self, start: Attribute, pending: set[Attribute], replays: list[Replay]) -> set[Attribute]:
        """Attributes that must be chosen together: those that failing calls read with this one."""
        group = {start}
        grown = True
        while grown:
            grown = False
            for replay in replays:
                mine = set(self.attributes[id(replay)])
                new = (mine & pending) - group
                if mine & group and new:
                    group |= new
                    grown = True
        return group

    # Search ----------------------------------------------------------------------------------

    def _search(self, group: list[Attribute], replays: list[Replay]) -> dict[Attribute, int]:
        candidates = [self._candidates(a, replays) for a in group]
        trials = 0
        for changed in range(1, len(group) + 1):
            for subset in itertools.combinations(range(len(group)), changed):
                for values in itertools.product(*(candidates[i] for i in subset)):
                    trials += 1
                    edits = {group[i]: v for i, v in zip(subset, values, strict=True)}
                    if all(self._holds(r, edits) for r in replays):
                        return edits
                    if trials > _MAX_TRIALS:
                        break
        failing = next(r for r in replays if not self._holds(r, {}))
        raise Unlocalizable(self._sharded(failing), f"{failing.fqn}: {_name(failing)}")

    def _candidates(self, attribute: Attribute, replays: list[Replay]) -> list[int]:
        """Local sizes of dims of the attribute's value, and its quotients by parts of the mesh."""
        value = self.values[attribute]
        found: dict[int, None] = {}
        for replay in replays:
            if attribute in self.attributes[id(replay)]:
                for tid in (*replay.outputs, *_refs(replay)):
                    if tid in self.analysis.dims:
                        found |= dict.fromkeys(self._local_sizes_of(tid, value))
        for parts in _products(self.layouts.mesh):
            if value % parts == 0:
                found[value // parts] = None
        found.pop(value, None)
        return [v for v in found if v > 0]

    def _local_sizes_of(self, tid: int, value: int) -> Iterator[int]:
        for dim, layout in zip(self.analysis.dims[tid], self.layouts.dims(tid), strict=True):
            if dim.size == value:
                yield slices.local_size(layout, self.layouts.mesh, self.rank)
            for leaf in dims.leaves(layout):
                if leaf.size == value:
                    yield slices.local_size(leaf, self.layouts.mesh, self.rank)

    def _holds(self, replay: Replay, edits: dict[Attribute, int]) -> bool:
        """Whether the call gives the local result under these edits."""
        mine = tuple((a, edits[a]) for a in self.attributes[id(replay)] if a in edits)
        key = (id(replay), mine)
        known = self.memo.get(key)
        if known is None:
            known = self.memo[key] = self._run(replay, edits)
        return known

    def _run(self, replay: Replay, edits: dict[Attribute, int]) -> bool:
        def lookup(source: Expr) -> int:
            if source[0] == "attr":
                value = edits.get((source[1], source[2]))
                return int(source[3]) if value is None else value
            return self.layouts.local_shape(source[1], self.rank)[source[2]]

        def load(ref: Ref) -> torch.Tensor:
            dtype = self.tape.tensors[ref.tid].dtype
            return torch.empty(self.layouts.local_shape(ref.tid, self.rank), dtype=dtype, device="meta")

        args, kwargs = evaluate(replay.args, lookup), evaluate(replay.kwargs, lookup)
        args, kwargs = pytree.tree_map_only(Ref, load, (args, kwargs))
        try:
            with torch.inference_mode(), torch.device("meta"):
                result = replay.function(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError):
            return False
        got = [
            t
            for t in (result if isinstance(result, (tuple, list)) else (result,))
            if isinstance(t, torch.Tensor)
        ]
        want = [self.layouts.local_shape(t, self.rank) for t in replay.outputs]
        return [tuple(t.shape) for t in got] == want

    def _sharded(self, replay: Replay) -> list[Node]:
        tids = [t for t in (*replay.outputs, *_refs(replay), *_sized(replay)) if t in self.analysis.dims]
        nodes = [x for t in tids for dim in self.analysis.dims[t] for x in leaves(dim)]
        return [x for x in dict.fromkeys(nodes) if self.layouts.assignment.axes(x)]


def _name(replay: Replay) -> str:
    return getattr(replay.function, "__name__", str(replay.function))


def _refs(replay: Replay) -> Iterable[int]:
    return [r.tid for r in pytree.tree_leaves((replay.args, replay.kwargs)) if isinstance(r, Ref)]


def _sized(replay: Replay) -> Iterable[int]:
    """The tensors whose sizes the call was given."""
    numbers = traced_ints((replay.args, replay.kwargs))
    return [source[1] for number in numbers for source in sources(number.expr) if source[0] == "size"]


def _products(mesh: Sequence[int]) -> list[int]:
    """Products of some of the mesh axes, largest first."""
    out = {1}
    for extent in mesh:
        out |= {p * extent for p in out}
    return sorted(out - {1}, reverse=True)
