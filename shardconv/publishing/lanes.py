"""The parts of a layer as *lanes*: weights (*cells*) and collectives (*bars*) in running order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import ParameterPlan, Plan
from shardconv_runtime.format.stored_layout import is_common

from ..reporting.summary import collective_steps, item_bytes, local_bytes
from .alike_layers import NO_LAYER, AlikeLayers, LayerParts, kinds_of, layers_of, layout_of


@dataclass(frozen=True, slots=True)
class CellTensor:
    """A parameter of a cell."""

    name: str
    """Within its module, as ``weight``."""
    plan: ParameterPlan


@dataclass(frozen=True, slots=True)
class Cell:
    """A weight, and the vectors that belong to it."""

    path: str
    """Of the module, relative to the block; a pattern for several alike modules."""
    tensors: tuple[CellTensor, ...]
    count: int
    """Modules of one layer that the cell stands for."""
    in_layers: int
    """Layers of the block that have it."""
    tied_to: str = ""
    """FQN of the parameter that it is tied to; empty if it is not tied."""

    @property
    def is_replicated(self) -> bool:
        """All of its tensors are replicated."""
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
    """Of its module, relative to the block."""
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
    """The cells of ``count`` layers like this one, each with its order; None: its module has no entry."""
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
        for drawn in _per_matrix(owners[owner]):
            yield order, Cell(path, drawn, len(members), layers, layer.tied.get(first, ""))


def _skeleton(name: str) -> tuple[str, ...]:
    """A name without its numbers."""
    return tuple("#" if part.isdecimal() else part for part in name.split("."))


def _per_matrix(tensors: Sequence[CellTensor]) -> Iterator[tuple[CellTensor, ...]]:
    """The tensors of one module, one group for each matrix; the vectors belong to the first."""
    vectors = tuple(t for t in tensors if len(t.plan.dims) < 2)
    matrices = [t for t in tensors if len(t.plan.dims) >= 2]
    if not matrices:
        yield vectors
    for index, matrix in enumerate(matrices):
        yield (matrix, *(vectors if index == 0 else ()))


def bars_of(
    plan: Plan, layer: LayerParts, frequency: Mapping[str, int], count: int
) -> Iterator[tuple[float, Bar]]:
    """(order, bar) of the collectives of ``count`` layers like this one; alike modules share a bar."""
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
    """Cells and bars by the part of the layer that they are in; outside of layers there is one lane."""
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
    yield from _divided(_with_bars([(order, parts[cell.path], cell) for order, cell in ordered], bars))


def _part(path: str) -> str:
    """The first component of a path, with a number after it; empty for a module without parts."""
    parts = path.split(".")
    depth = 2 if len(parts) > 1 and (parts[1].isdecimal() or parts[1].startswith("{")) else 1
    return ".".join(parts[:depth]) if len(parts) > depth else ""


def _with_bars(
    ordered: Sequence[tuple[float, str, Cell]], bars: Sequence[tuple[float, Bar]]
) -> list[tuple[str, Cell | Bar]]:
    """Put each bar before the first cell of its module if it is at an input, else after the last.

    Args:
        ordered: (order, part that it is in, cell).
        bars: (order, bar).

    Returns:
        (part, cell or bar).
    """
    at: dict[int, list[Bar]] = {}
    for order, bar in bars:
        at.setdefault(_index(ordered, order, bar), []).append(bar)
    out: list[tuple[str, Cell | Bar]] = []
    title = ordered[0][1] if ordered else ""
    for index, (_, own, cell) in enumerate(ordered):
        for bar in at.get(index, ()):
            out.append((own if _is_at_input(bar) and _is_in(cell.path, bar.path) else title, bar))
        out.append((own, cell))
        title = own
    return [*out, *((title, bar) for bar in at.get(len(ordered), ()))]


def _index(ordered: Sequence[tuple[float, str, Cell]], order: float, bar: Bar) -> int:
    """The index of the cell before which a bar is drawn."""
    inside = [index for index, (_, _, cell) in enumerate(ordered) if _is_in(cell.path, bar.path)]
    if inside:
        return inside[0] if _is_at_input(bar) else inside[-1] + 1
    earlier = [index for index, (when, _, _) in enumerate(ordered) if when <= order]
    return earlier[-1] + 1 if earlier else 0


def _is_at_input(bar: Bar) -> bool:
    return bar.slot.startswith("input")


def _is_in(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


def _divided(items: Sequence[tuple[str, Cell | Bar]]) -> Iterator[Lane]:
    """A lane for each run of items of one part."""
    lane: list[Cell | Bar] = []
    for index, (title, item) in enumerate(items):
        lane.append(item)
        if index + 1 == len(items) or items[index + 1][0] != title:
            yield Lane(title, tuple(lane))
            lane = []


# A plan as a column of blocks, from the first weights to the last: the content of a picture.


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
    """Of all ``count`` layers together, on rank 0, which holds most."""


def outline(plan: Plan) -> tuple[Block, ...]:
    """The blocks of a plan, in the order in which they run."""
    layers = layers_of(plan)
    rest = layers.pop(NO_LAYER, None)
    kinds = [(_order(plan, kind.layer), kind) for kind in kinds_of(layers)]
    if rest is not None:
        ends: dict[str, float] = {}
        for order, kind in kinds:
            ends[kind.stack] = max(order, ends.get(kind.stack, order))
        kinds += [(order, AlikeLayers("", [-1], part)) for order, part in _runs_between(rest, ends)]
    kinds.sort(key=lambda pair: (pair[0], min(pair[1].numbers)))
    return tuple(_block(plan, kind) for _, kind in kinds)


def _order(plan: Plan, layer: LayerParts) -> float:
    """The order of a layer: that of its first module."""
    return min((order for order, _ in layer.modules.values()), default=len(plan.modules))


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
    """Divide the parts outside of layers where layers run in between; (order, part).

    Args:
        rest: the parts outside of layers.
        ends: stack -> order of the last kind of its layers.
    """
    edges = sorted(set(ends.values()))
    orders = {name: order for name, (order, _) in rest.modules.items()}
    runs: dict[int, LayerParts] = {}
    for name, entry in rest.tensors.items():
        order = _order_of_tensor(name, orders, ends.get(rest.after[name], -1))
        run = runs.setdefault(bisect_left(edges, order), LayerParts({}, {}, {}))
        run.tensors[name] = entry
        if name in rest.tied:
            run.tied[name] = rest.tied[name]
    for name, (order, module) in rest.modules.items():
        runs.setdefault(bisect_left(edges, order), LayerParts({}, {}, {})).modules[name] = order, module
    for index, run in runs.items():
        yield (edges[index - 1] + 1 if index else -1), run


def _order_of_tensor(name: str, orders: Mapping[str, float], end: float) -> float:
    """The order of a tensor's module or of one around it, else after the layers listed before it."""
    owner = name.rpartition(".")[0]
    while owner:
        if owner in orders:
            return orders[owner]
        owner = owner.rpartition(".")[0]
    return end + 1
