"""A plan as a column of blocks, from the first weights to the last: what a picture shows, without its looks.

Layers that are alike are one block. In it, *lanes* are its parts in the order in which they run (plans list
modules in that order), a lane has *cells* (weights) and *bars* (collectives).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from shardconv_runtime.format.layout_hash import is_common
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import ModulePlan, ParameterPlan, Plan, by_name, module_plans

from ..reporting.summary import collective_steps, item_bytes, local_bytes

ALONE = ("", -1)
"""The key of what is in no layer."""

MOSTLY_ALIKE = 3
"""Layers that lack so few of another layer's parts are drawn as that layer."""


MAX_COMPARED = 128
"""Kinds of layers, the largest, with which others are compared."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of a cell."""

    name: str
    """Within its module, as ``weight``."""
    plan: ParameterPlan


@dataclass(frozen=True, slots=True)
class Cell:
    """A weight, and the vectors that belong to it."""

    path: str
    """Of the module, from the block on; a pattern where several are alike."""
    tensors: tuple[Tensor, ...]
    count: int
    """Modules of one layer that the cell stands for."""
    in_layers: int
    """Layers of the block that have it."""
    is_tied: str = ""
    """The name of the tensor that this one is."""

    @property
    def is_whole(self) -> bool:
        """Every rank holds all of it."""
        return all(is_common(tensor.plan) for tensor in self.tensors)

    @property
    def is_small(self) -> bool:
        """It has vectors only."""
        return all(len(tensor.plan.dims) < 2 for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Bar:
    """A collective."""

    op: str
    path: str
    """Of the module at which it is, from the block on."""
    slot: str
    token_bytes: int
    """Of one layer, for each token."""
    in_layers: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One part of a block."""

    title: str
    items: tuple[Cell | Bar, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A kind of layer, or what lies between layers."""

    title: str
    """Pattern of the layers' names; empty for what is in no layer."""
    count: int
    lanes: tuple[Lane, ...]
    whole: tuple[Cell, ...]
    """Vectors that every rank holds whole, with no collective at them."""
    rank_bytes: int
    """Of all ``count`` layers together, on rank 0, which holds most."""


def outline(plan: Plan) -> tuple[Block, ...]:
    """The blocks of a plan, in the order in which they run."""
    layers = _layers(plan)
    alone = layers.pop(ALONE, None)
    kinds = [(_place(plan, kind.layer), kind) for kind in _aligned(list(_kinds(layers)))]
    if alone is not None:
        ends: dict[str, float] = {}
        for place, kind in kinds:
            ends[kind.stack] = max(place, ends.get(kind.stack, place))
        kinds += [(place, _Kind("", [-1], part)) for place, part in _runs_between(alone, ends)]
    kinds.sort(key=lambda pair: (pair[0], min(pair[1].numbers)))
    return tuple(_block(plan, kind) for _, kind in kinds)


@dataclass(slots=True)
class _Layer:
    """What one layer has: paths from the layer on, in the order of the plan."""

    tensors: dict[str, ParameterPlan]
    modules: dict[str, tuple[float, ModulePlan]]
    """With the place in the order in which they run."""
    tied: dict[str, str]
    after: dict[str, str] = field(default_factory=dict)
    """For what is in no layer: tensor -> the stack of layers that the plan lists before it."""


@dataclass(slots=True)
class _Kind:
    stack: str
    numbers: list[int]
    layer: _Layer
    frequency: Mapping[str, int] | None = None
    """Tensor or module -> layers that have it; None: all have everything."""


def _layers(plan: Plan) -> dict[tuple[str, int], _Layer]:
    """(stack, number) -> what is in that layer; ``ALONE`` -> what is in none."""
    layers: dict[tuple[str, int], _Layer] = {}

    def at(name: str, depth: int) -> tuple[_Layer, str]:
        stack, number, rest = _split(name, depth)
        return layers.setdefault((stack, number), _Layer({}, {}, {})), rest

    parameters = by_name("parameters", plan.parameters)
    stack = ""
    for name, entry in parameters.items():
        layer, rest = at(name, 2)
        layer.tensors[rest] = entry
        if rest == name:
            layer.after[name] = stack
        else:
            stack = _split(name, 2)[0]
    places = {id(module): index for index, module in enumerate(plan.modules)}
    modules = module_plans(plan)
    for alias, name in plan.tied:
        if alias.rpartition(".")[0] in modules and name in parameters:
            layer, rest = at(alias, 2)
            layer.tensors[rest] = parameters[name]
            layer.tied[rest] = name
            layer.after.setdefault(rest, "")
    for name, module in modules.items():
        stack, number, _ = _split(name, 1)
        layer, rest = at(name, 1) if (stack, number) in layers else at(name, 10**6)
        layer.modules[rest] = places[id(module)], module
    return layers


def _split(name: str, depth: int) -> tuple[str, int, str]:
    """(stack, number, rest) at the first number that has ``depth`` - 1 more components or more behind it."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal() and index and len(parts) - index > depth:
            return ".".join(parts[:index]), int(part), ".".join(parts[index + 1 :])
        if part.isdecimal() and index and depth == 1 and index == len(parts) - 1:
            return ".".join(parts[:index]), int(part), ""
    return "", -1, name


def _kinds(layers: Mapping[tuple[str, int], _Layer]) -> Iterator[_Kind]:
    """Layers of one stack that look alike, or lack little of others."""
    alike: dict[tuple[str, frozenset[Hashable]], list[int]] = {}
    for (stack, number), layer in layers.items():
        alike.setdefault((stack, frozenset(_looks(layer))), []).append(number)
    largest = sorted(alike, key=lambda key: (-len(key[1]), min(alike[key])))
    taken: dict[tuple[str, frozenset[Hashable]], list[tuple[str, frozenset[Hashable]]]] = {}
    for key in largest:
        known = islice(taken, MAX_COMPARED)
        over = (k for k in known if k[0] == key[0] and key[1] < k[1] and len(k[1] - key[1]) <= MOSTLY_ALIKE)
        taken.setdefault(next(over, key), []).append(key)
    for (stack, _), members in taken.items():
        numbers = sorted(number for member in members for number in alike[member])
        fullest = layers[stack, min(alike[members[0]])]
        frequency = None
        if len(members) > 1:
            having = [(len(alike[m]), layers[stack, alike[m][0]]) for m in members]
            frequency = {
                name: sum(n for n, layer in having if name in layer.tensors or name in layer.modules)
                for name in (*fullest.tensors, *fullest.modules)
            }
        yield _Kind(stack, numbers, fullest, frequency)


def _looks(layer: _Layer) -> Iterator[Hashable]:
    for name, entry in layer.tensors.items():
        yield name, _layout(entry)
    for name, (_, module) in layer.modules.items():
        if steps := tuple(collective_steps(module, "uint8")):
            yield name, steps


def _layout(entry: ParameterPlan) -> Hashable:
    return entry.dims, entry.dtype, entry.partial, entry.block


def _aligned(kinds: list[_Kind]) -> list[_Kind]:
    """Let what only later kinds of a stack have run where the first kind has something else.

    A plan lists a module of all layers where the first layer runs it, so that what begins in a later layer
    comes behind all that the first one has.
    """
    first: dict[str, _Kind] = {}
    for kind in sorted(kinds, key=lambda kind: min(kind.numbers)):
        earlier = first.setdefault(kind.stack, kind).layer.modules
        known = {place for place, _ in earlier.values()}
        other = min((p for name, (p, _) in earlier.items() if name not in kind.layer.modules), default=None)
        own = sorted({place for place, _ in kind.layer.modules.values()} - known)
        if other is not None and own:
            moved = {place: other + index / (len(own) + 1) for index, place in enumerate(own)}
            modules = kind.layer.modules.items()
            kind.layer.modules = {name: (moved.get(place, place), m) for name, (place, m) in modules}
    return kinds


def _place(plan: Plan, layer: _Layer) -> float:
    """When a layer runs."""
    return min((index for index, _ in layer.modules.values()), default=len(plan.modules))


def _block(plan: Plan, kind: _Kind) -> Block:
    layer, count = kind.layer, len(kind.numbers)
    frequency = kind.frequency or {}
    cells = list(_cells(layer, frequency, count))
    bars = list(_bars(plan, layer, frequency, count))
    barred = {bar.path for _, bar, _ in bars}
    whole = tuple(c for _, c in cells if c.is_whole and c.is_small and not c.is_tied and c.path not in barred)
    names = compress(f"{kind.stack}.{number}" for number in kind.numbers) if kind.stack else ()
    local = cache(lambda entry: local_bytes(entry, plan, 0))
    num_bytes = sum(
        frequency.get(name, count) * local(entry)
        for name, entry in layer.tensors.items()
        if name not in layer.tied
    )
    lanes = tuple(_lanes([(at, cell) for at, cell in cells if cell not in whole], bars, bool(kind.stack)))
    return Block(", ".join(names), count, lanes, whole, num_bytes)


def _runs_between(alone: _Layer, ends: Mapping[str, float]) -> Iterator[tuple[float, _Layer]]:
    """What is in no layer, cut where layers run in between; each part with when it runs.

    Args:
        ends: stack -> when the last kind of its layers begins.
    """
    edges = sorted(set(ends.values()))
    at = {name: index for name, (index, _) in alone.modules.items()}
    runs: dict[int, _Layer] = {}
    for name, entry in alone.tensors.items():
        place = _runs_at(name, at, ends.get(alone.after[name], -1))
        layer = runs.setdefault(bisect_left(edges, place), _Layer({}, {}, {}))
        layer.tensors[name] = entry
        if name in alone.tied:
            layer.tied[name] = alone.tied[name]
    for name, (index, module) in alone.modules.items():
        runs.setdefault(bisect_left(edges, index), _Layer({}, {}, {})).modules[name] = index, module
    for run, layer in runs.items():
        yield (edges[run - 1] + 1 if run else -1), layer


def _runs_at(name: str, at: Mapping[str, float], end: float) -> float:
    """When a tensor is used: with its module or one around it, else after the layers before it."""
    owner = name.rpartition(".")[0]
    while owner:
        if owner in at:
            return at[owner]
        owner = owner.rpartition(".")[0]
    return end + 1


def _cells(layer: _Layer, frequency: Mapping[str, int], count: int) -> Iterator[tuple[float | None, Cell]]:
    """Cells, each with when it runs, where that is known."""
    owners: dict[str, list[Tensor]] = {}
    for name, entry in layer.tensors.items():
        owner, _, leaf = name.rpartition(".")
        owners.setdefault(owner, []).append(Tensor(leaf, entry))
    alike: dict[Hashable, list[str]] = {}
    for owner, tensors in owners.items():
        skeleton = tuple("#" if part.isdecimal() else part for part in owner.split("."))
        key = skeleton, tuple((tensor.name, _layout(tensor.plan)) for tensor in tensors)
        alike.setdefault(key, []).append(owner)
    for members in alike.values():
        owner = members[0]
        place = layer.modules[owner][0] if owner in layer.modules else None
        first = f"{owner}.{owners[owner][0].name}".lstrip(".")
        path = ", ".join(compress(members)) if owner else ""
        layers = frequency.get(first, count)
        for drawn in _pictured(owners[owner]):
            yield place, Cell(path, drawn, len(members), layers, layer.tied.get(first, ""))


def _pictured(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of one module: each matrix is a cell, with the vectors at the first."""
    vectors = tuple(t for t in tensors if len(t.plan.dims) < 2)
    matrices = [t for t in tensors if len(t.plan.dims) >= 2]
    if not matrices:
        yield vectors
    for index, matrix in enumerate(matrices):
        yield (matrix, *(vectors if index == 0 else ()))


def _bars(
    plan: Plan, layer: _Layer, frequency: Mapping[str, int], count: int
) -> Iterator[tuple[bool, Bar, float]]:
    """(it is at an input, the bar, when its module runs); alike modules of a layer have one bar."""
    alike: dict[Hashable, list[str]] = {}
    for name, (place, _) in layer.modules.items():
        skeleton = tuple("#" if part.isdecimal() else part for part in name.split("."))
        alike.setdefault((place, skeleton), []).append(name)
    for members in alike.values():
        place, module = layer.modules[members[0]]
        path = ", ".join(compress(members)) if members[0] else ""
        for op, slot, elements, dtype in collective_steps(module, plan.model.dtype):
            num_bytes = len(members) * elements * item_bytes(dtype)
            layers = frequency.get(members[0], count)
            yield slot.startswith("input"), Bar(op, path, slot, num_bytes, layers), place


def _lanes(
    cells: Sequence[tuple[float | None, Cell]], bars: Sequence[tuple[bool, Bar, float]], in_layer: bool
) -> Iterator[Lane]:
    """Cells and bars by the part of the layer that they are in; outside of layers there is one lane."""
    parts = {cell.path: _part(cell.path) if in_layer else "" for _, cell in cells}
    parts |= {path: path for path in set(parts.values()) & set(parts)}
    groups: dict[str, list[tuple[float, Cell]]] = {}
    last = -1.0
    for place, cell in cells:
        key = parts[cell.path] or (cell.path if in_layer else "")
        known = [p for p, c in cells if p is not None and (c.path == key or c.path.startswith(key + "."))]
        if place is not None:
            last = place
        elif key not in groups and known:
            last = min(known) - 0.5
        groups.setdefault(key, []).append((last, cell))
    running = sorted(groups.values(), key=lambda members: min(place for place, _ in members))
    ordered = [pair for members in running for pair in sorted(members, key=lambda pair: pair[0])]
    yield from _cut(_with_bars([(place, parts[cell.path], cell) for place, cell in ordered], bars))


def _part(path: str) -> str:
    """The first component of a path, with the number behind it; none for a module that has no parts."""
    parts = path.split(".")
    depth = 2 if len(parts) > 1 and (parts[1].isdecimal() or parts[1].startswith("{")) else 1
    return ".".join(parts[:depth]) if len(parts) > depth else ""


def _with_bars(
    ordered: Sequence[tuple[float, str, Cell]], bars: Sequence[tuple[bool, Bar, float]]
) -> list[tuple[str, Cell | Bar]]:
    """Put each bar before the first cell of its module, or behind the last.

    Args:
        ordered: when a cell runs, the part that it is in, and the cell.
        bars: whether it is at an input, the bar, and when it runs.
    """
    at: dict[int, list[Bar]] = {}
    for is_input, bar, place in bars:
        paths = [cell.path for _, _, cell in ordered]
        inside = [i for i, path in enumerate(paths) if _is_in(path, bar.path)]
        earlier = [i for i, (when, _, _) in enumerate(ordered) if when <= place]
        if inside:
            where = inside[0] if is_input else inside[-1] + 1
        else:
            where = earlier[-1] + 1 if earlier else 0
        at.setdefault(where, []).append(bar)
    out: list[tuple[str, Cell | Bar]] = []
    title = ordered[0][1] if ordered else ""
    for index, (_, own, cell) in enumerate(ordered):
        for bar in at.get(index, ()):
            out.append((own if bar.slot.startswith("input") and _is_in(cell.path, bar.path) else title, bar))
        out.append((own, cell))
        title = own
    return [*out, *((title, bar) for bar in at.get(len(ordered), ()))]


def _is_in(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


def _cut(items: Sequence[tuple[str, Cell | Bar]]) -> Iterator[Lane]:
    lane: list[Cell | Bar] = []
    for index, (title, item) in enumerate(items):
        lane.append(item)
        if index + 1 == len(items) or items[index + 1][0] != title:
            yield Lane(title, tuple(lane))
            lane = []
