"""Describes the parts of a layer as *lanes*: weights (*cells*) and collectives (*bars*) in running order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, islice

from shardconv_runtime.format.header import item_bytes
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import ModulePlan, ParameterPlan, Plan, by_name, module_plans
from shardconv_runtime.format.stored_layout import is_common

from ..reporting.summary import collective_steps, local_bytes

# Plans list modules in the order in which they run; an *order* is an index in that list, or lies between two.


NO_LAYER = ("", -1)
"""The key of parameters and modules that are in no layer."""

MOSTLY_ALIKE = 3
"""A layer that lacks at most this many parts of another layer is drawn as that layer."""

MAX_COMPARED = 128
"""Kinds of layers, the largest, with which others are compared."""


@dataclass(slots=True)
class LayerParts:
    """The parts of one layer: names relative to the layer, in the order of the plan."""

    tensors: dict[str, ParameterPlan]
    modules: dict[str, tuple[float, ModulePlan]]
    """The modules, with the order in which they run."""
    tied: dict[str, str]
    """Tensor -> FQN of the parameter that it is tied to."""
    after: dict[str, str] = field(default_factory=dict)
    """Outside of layers: tensor -> the stack of layers that the plan lists before it."""


@dataclass(slots=True)
class AlikeLayers:
    """Layers of one stack that are drawn as one block."""

    stack: str
    """FQN of the layers without their number."""
    numbers: list[int]
    layer: LayerParts
    """The layer that has most parts."""
    frequency: Mapping[str, int] | None = None
    """Tensor or module -> number of layers that have it; None: all have everything."""


def layers_of(plan: Plan) -> dict[tuple[str, int], LayerParts]:
    """Return the parts of each layer by (stack, number), and those outside of layers by ``NO_LAYER``."""
    layers: dict[tuple[str, int], LayerParts] = {}

    def at(name: str, depth: int) -> tuple[LayerParts, str]:
        stack, number, rest = _split(name, depth)
        return layers.setdefault((stack, number), LayerParts({}, {}, {})), rest

    parameters = by_name("parameters", plan.parameters)
    stack = ""
    for name, entry in parameters.items():
        layer, rest = at(name, 2)
        layer.tensors[rest] = entry
        if rest == name:
            layer.after[name] = stack
        else:
            stack = _split(name, 2)[0]
    orders = {module: index for index, module in enumerate(plan.modules)}
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
        layer.modules[rest] = orders[module], module
    return layers


def _split(name: str, depth: int) -> tuple[str, int, str]:
    """Return (stack, number, rest) at the first number with at least ``depth`` - 1 components after it."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal() and index and len(parts) - index > depth:
            return ".".join(parts[:index]), int(part), ".".join(parts[index + 1 :])
        if part.isdecimal() and index and depth == 1 and index == len(parts) - 1:
            return ".".join(parts[:index]), int(part), ""
    return "", -1, name


def kinds_of(layers: Mapping[tuple[str, int], LayerParts]) -> list[AlikeLayers]:
    """Group the layers of each stack that look alike, or lack only a few parts of others."""
    # Give modules that only later kinds of a stack have the order of the modules that these kinds lack.
    # A plan lists a module of all layers where the first layer runs it, so a module that only later layers
    # have is listed after all modules of the first layer.
    kinds = _kinds(layers)
    first: dict[str, AlikeLayers] = {}
    for kind in sorted(kinds, key=lambda kind: min(kind.numbers)):
        earlier = first.setdefault(kind.stack, kind).layer.modules
        known = {order for order, _ in earlier.values()}
        other = min((o for name, (o, _) in earlier.items() if name not in kind.layer.modules), default=None)
        own = sorted({order for order, _ in kind.layer.modules.values()} - known)
        if other is not None and own:
            moved = {order: other + index / (len(own) + 1) for index, order in enumerate(own)}
            modules = kind.layer.modules.items()
            kind.layer.modules = {name: (moved.get(order, order), m) for name, (order, m) in modules}
    return kinds


def _kinds(layers: Mapping[tuple[str, int], LayerParts]) -> list[AlikeLayers]:
    """Return the kinds of layers, with the orders of their modules in the plan."""
    alike: dict[tuple[str, frozenset[Hashable]], list[int]] = {}
    for (stack, number), layer in layers.items():
        looks: set[Hashable] = {(name, layout_of(entry)) for name, entry in layer.tensors.items()}
        for name, (_, module) in layer.modules.items():
            if steps := tuple(collective_steps(module, "uint8")):
                looks.add((name, steps))
        alike.setdefault((stack, frozenset(looks)), []).append(number)
    largest = sorted(alike, key=lambda key: (-len(key[1]), min(alike[key])))
    taken: dict[tuple[str, frozenset[Hashable]], list[tuple[str, frozenset[Hashable]]]] = {}
    for key in largest:
        known = islice(taken, MAX_COMPARED)
        over = (k for k in known if k[0] == key[0] and key[1] < k[1] and len(k[1] - key[1]) <= MOSTLY_ALIKE)
        taken.setdefault(next(over, key), []).append(key)
    kinds = []
    for (stack, _), members in taken.items():
        numbers = sorted(number for member in members for number in alike[member])
        fullest = layers[stack, min(alike[members[0]])]
        kind = AlikeLayers(stack, numbers, fullest)
        if len(members) > 1:
            having = [(len(alike[m]), layers[stack, alike[m][0]]) for m in members]
            kind.frequency = {
                name: sum(count for count, layer in having if name in layer.tensors or name in layer.modules)
                for name in (*fullest.tensors, *fullest.modules)
            }
        kinds.append(kind)
    return kinds


def layout_of(entry: ParameterPlan) -> Hashable:
    """Return everything about a tensor that a picture shows."""
    return entry.dims, entry.dtype, entry.partial, entry.packing


@dataclass(frozen=True, slots=True)
class CellTensor:
    """A parameter of a cell."""

    name: str
    """The name within its module, such as ``weight``."""
    plan: ParameterPlan


@dataclass(frozen=True, slots=True)
class Cell:
    """A weight, and the vectors that belong to it."""

    path: str
    """The path of the module, relative to the block; a pattern for several alike modules."""
    tensors: tuple[CellTensor, ...]
    count: int
    """Number of modules of one layer that the cell represents."""
    in_layers: int
    """Number of layers of the block that have it."""
    tied_to: str = ""
    """FQN of the parameter that it is tied to; empty if it is not tied."""

    @property
    def is_replicated(self) -> bool:
        """Whether all of its tensors are replicated."""
        return all(is_common(tensor.plan) for tensor in self.tensors)

    @property
    def is_small(self) -> bool:
        """Whether it has vectors only."""
        return all(len(tensor.plan.dims) < 2 for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Bar:
    """A collective."""

    op: str
    path: str
    """The path of its module, relative to the block."""
    slot: str
    token_bytes: int
    """Bytes of the global tensor for each token, in one layer."""
    in_layers: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One part of a block."""

    title: str
    items: tuple[Cell | Bar, ...]


def cells_of(
    layer: LayerParts, frequency: Mapping[str, int], count: int
) -> Iterator[tuple[float | None, Cell]]:
    """Yield the cells of ``count`` layers like this one, with their orders; None if a module has no entry."""
    owners: dict[str, list[CellTensor]] = {}
    for name, entry in layer.tensors.items():
        owner, _, leaf = name.rpartition(".")
        owners.setdefault(owner, []).append(CellTensor(leaf, entry))
    alike: dict[Hashable, list[str]] = {}
    for owner, tensors in owners.items():
        key = _skeleton(owner), tuple((tensor.name, layout_of(tensor.plan)) for tensor in tensors)
        alike.setdefault(key, []).append(owner)
    for members in alike.values():
        owner = members[0]
        order = layer.modules[owner][0] if owner in layer.modules else None
        first = f"{owner}.{owners[owner][0].name}".lstrip(".")
        path = ", ".join(compress(members)) if owner else ""
        layers = frequency.get(first, count)
        # Each matrix of a module is a cell; the vectors belong to the first one.
        vectors = tuple(t for t in owners[owner] if len(t.plan.dims) < 2)
        matrices = [t for t in owners[owner] if len(t.plan.dims) >= 2]
        for drawn in ((*matrices[:1], *vectors), *((matrix,) for matrix in matrices[1:])):
            yield order, Cell(path, drawn, len(members), layers, layer.tied.get(first, ""))


def _skeleton(name: str) -> tuple[str, ...]:
    """Return a name without its numbers."""
    return tuple("#" if part.isdecimal() else part for part in name.split("."))


def bars_of(
    plan: Plan, layer: LayerParts, frequency: Mapping[str, int], count: int
) -> Iterator[tuple[float, Bar]]:
    """Yield (order, bar) for the collectives of ``count`` layers like this one; alike modules share a bar."""
    alike: dict[Hashable, list[str]] = {}
    for name, (order, _) in layer.modules.items():
        alike.setdefault((order, _skeleton(name)), []).append(name)
    for members in alike.values():
        order, module = layer.modules[members[0]]
        path = ", ".join(compress(members)) if members[0] else ""
        for op, slot, elements, dtype in collective_steps(module, plan.model.dtype):
            num_bytes = len(members) * elements * item_bytes(dtype)
            yield order, Bar(op, path, slot, num_bytes, frequency.get(members[0], count))


def lanes_of(
    cells: Sequence[tuple[float | None, Cell]], bars: Sequence[tuple[float, Bar]], in_layer: bool
) -> Iterator[Lane]:
    """Yield cells and bars by the part of the layer that they are in; outside of layers there is one lane."""
    parts = {cell.path: _part(cell.path) if in_layer else "" for _, cell in cells}
    parts |= {path: path for path in set(parts.values()) & set(parts)}
    groups: dict[str, list[tuple[float, Cell]]] = {}
    last = -1.0
    for order, cell in cells:
        key = parts[cell.path] or (cell.path if in_layer else "")
        known = [o for o, c in cells if o is not None and (c.path == key or c.path.startswith(key + "."))]
        if order is not None:
            last = order
        elif key not in groups and known:
            last = min(known) - 0.5
        groups.setdefault(key, []).append((last, cell))
    running = sorted(groups.values(), key=lambda members: min(order for order, _ in members))
    ordered = [pair for members in running for pair in sorted(members, key=lambda pair: pair[0])]
    # A lane for each run of items of one part.
    items = _with_bars([(order, parts[cell.path], cell) for order, cell in ordered], bars)
    for title, run in groupby(items, lambda pair: pair[0]):
        yield Lane(title, tuple(item for _, item in run))


def _part(path: str) -> str:
    """Return the first component of a path, with a number after it; "" for a module without parts."""
    parts = path.split(".")
    depth = 2 if len(parts) > 1 and (parts[1].isdecimal() or parts[1].startswith("{")) else 1
    return ".".join(parts[:depth]) if len(parts) > depth else ""


def _with_bars(
    ordered: Sequence[tuple[float, str, Cell]], bars: Sequence[tuple[float, Bar]]
) -> list[tuple[str, Cell | Bar]]:
    """Put each bar before the first cell of its module if it is at an input, otherwise after the last.

    Args:
        ordered: (order, part that it is in, cell).
        bars: (order, bar).

    Returns:
        (part, cell or bar).
    """
    at: dict[int, list[Bar]] = {}
    for order, bar in bars:
        inside = [index for index, (_, _, cell) in enumerate(ordered) if _is_in(cell.path, bar.path)]
        earlier = [index for index, (when, _, _) in enumerate(ordered) if when <= order]
        if inside and _is_at_input(bar):
            place = inside[0]
        else:
            place = max(inside or earlier, default=-1) + 1
        at.setdefault(place, []).append(bar)
    out: list[tuple[str, Cell | Bar]] = []
    title = ordered[0][1] if ordered else ""
    for index, (_, own, cell) in enumerate(ordered):
        for bar in at.get(index, ()):
            out.append((own if _is_at_input(bar) and _is_in(cell.path, bar.path) else title, bar))
        out.append((own, cell))
        title = own
    return [*out, *((title, bar) for bar in at.get(len(ordered), ()))]


def _is_at_input(bar: Bar) -> bool:
    return bar.slot.startswith("input")


def _is_in(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


@dataclass(frozen=True, slots=True)
class Block:
    """A kind of layer, or the modules between layers."""

    title: str
    """Pattern of the layers' names; empty outside of layers."""
    count: int
    lanes: tuple[Lane, ...]
    replicated: tuple[Cell, ...]
    """Replicated vectors of modules without collectives."""
    rank_bytes: int
    """Bytes of all ``count`` layers together on rank 0, which holds most."""


def outline(plan: Plan) -> tuple[Block, ...]:
    """Return the blocks of a plan in the order in which they run, which are the content of a picture."""
    layers = layers_of(plan)
    rest = layers.pop(NO_LAYER, None)
    kinds = []
    for kind in kinds_of(layers):
        first = min((order for order, _ in kind.layer.modules.values()), default=len(plan.modules))
        kinds.append((first, kind))
    if rest is not None:
        ends: dict[str, float] = {}
        for order, kind in kinds:
            ends[kind.stack] = max(order, ends.get(kind.stack, order))
        kinds += [(order, AlikeLayers("", [-1], part)) for order, part in _runs_between(rest, ends)]
    kinds.sort(key=lambda pair: (pair[0], min(pair[1].numbers)))
    return tuple(_block(plan, kind) for _, kind in kinds)


def _block(plan: Plan, kind: AlikeLayers) -> Block:
    layer, count = kind.layer, len(kind.numbers)
    frequency = kind.frequency or {}
    cells = list(cells_of(layer, frequency, count))
    bars = list(bars_of(plan, layer, frequency, count))
    barred = {bar.path for _, bar in bars}
    replicated = tuple(
        cell
        for _, cell in cells
        if cell.is_replicated and cell.is_small and not cell.tied_to and cell.path not in barred
    )
    names = compress(f"{kind.stack}.{number}" for number in kind.numbers) if kind.stack else ()
    local = cache(lambda entry: local_bytes(entry, plan, 0))
    num_bytes = sum(
        frequency.get(name, count) * local(entry)
        for name, entry in layer.tensors.items()
        if name not in layer.tied
    )
    others = [(order, cell) for order, cell in cells if cell not in replicated]
    return Block(
        ", ".join(names), count, tuple(lanes_of(others, bars, bool(kind.stack))), replicated, num_bytes
    )


def _runs_between(rest: LayerParts, ends: Mapping[str, float]) -> Iterator[tuple[float, LayerParts]]:
    """Divide the parts outside of layers where layers run in between, and yield (order, part).

    Args:
        rest: the parts outside of layers.
        ends: stack -> order of the last kind of its layers.
    """
    edges = sorted(set(ends.values()))
    orders = {name: order for name, (order, _) in rest.modules.items()}
    runs: dict[int, LayerParts] = {}
    for name, entry in rest.tensors.items():
        # It gets the order of its module or of one around it, otherwise a place after earlier listed layers.
        owner = name.rpartition(".")[0]
        while owner and owner not in orders:
            owner = owner.rpartition(".")[0]
        order = orders[owner] if owner else ends.get(rest.after[name], -1) + 1
        run = runs.setdefault(bisect_left(edges, order), LayerParts({}, {}, {}))
        run.tensors[name] = entry
        if name in rest.tied:
            run.tied[name] = rest.tied[name]
    for name, (order, module) in rest.modules.items():
        runs.setdefault(bisect_left(edges, order), LayerParts({}, {}, {})).modules[name] = order, module
    for index, run in runs.items():
        yield (edges[index - 1] + 1 if index else -1), run
