"""A plan as a column of blocks, from the first weights to the last: the content of a picture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import Plan

from ..reporting.summary import local_bytes
from .alike_layers import NO_LAYER, AlikeLayers, LayerParts, kinds_of, layers_of
from .lanes import Cell, Lane, bars_of, cells_of, lanes_of


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
