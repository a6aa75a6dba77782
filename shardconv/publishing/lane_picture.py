"""One lane of a block: weights and collectives in rows, with labels under them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import Plan

from ..reporting.human_numbers import human_bytes
from .lanes import Bar, Cell, Lane
from .outline import Block
from .svg import (
    COLLECTIVE_COLORS,
    INNER_WIDTH,
    INNER_X,
    LANE_WIDTH,
    LANE_X,
    Row,
    element,
    fitted,
    moved,
    rect,
    text,
    text_width,
    title,
)
from .weight_picture import Drawn, Paint, draw, shape_lines

CELL_WIDTH, MAX_CELL_WIDTH, BAR_WIDTH, GAP = 100.0, 148.0, 56.0, 8.0


def lane_picture(lane: Lane, block: Block, plan: Plan, paint: Paint, longest: int, budget: int) -> Row:
    """Draw a lane.

    Args:
        lane: cells and bars.
        block: the lane's block.
        plan: the block's plan.
        paint: colors; patterns that are used are added.
        longest: size of the longest dim that is drawn in the block.
        budget: most cells and bars to draw.
    """
    y = 10.0
    parts = []
    if lane.title:
        parts.append(
            text(INNER_X, 18, fitted(lane.title, 12, INNER_WIDTH), 12, font_weight="600", class_="muted")
        )
        y = 28.0
    units = _units(lane.items[:budget])
    for row in _rows([[_item(item, lane, block, plan, paint, longest) for item in unit] for unit in units]):
        height = max(drawn.height for drawn, _ in row)
        below = max(labels.height for _, labels in row)
        x = INNER_X + (INNER_WIDTH - sum(drawn.width + GAP for drawn, _ in row) + GAP) / 2
        for drawn, labels in row:
            parts.append(moved(x, y + (height - drawn.height) / 2, drawn.markup))
            parts.append(moved(x, y + height + 4, labels.markup))
            x += drawn.width + GAP
        y += height + below + 12
    return Row(rect(LANE_X, 0, LANE_WIDTH, y, rx=7, class_="lane") + "".join(parts), y)


_Item = tuple[Drawn, Row]
"""A drawing, as wide as its column in the row, and the labels under it."""


def _rows(units: Sequence[Sequence[_Item]]) -> Iterator[list[_Item]]:
    """Rows of about equal length; a unit is never divided."""
    lengths = [sum(drawn.width + GAP for drawn, _ in unit) for unit in units]
    count = math.ceil(sum(lengths) / (INNER_WIDTH + GAP))
    row: list[_Item] = []
    used, done, made = 0.0, 0.0, 0
    for unit, length in zip(units, lengths, strict=True):
        middle = (done + length / 2) * count / sum(lengths)
        if row and (used + length > INNER_WIDTH + GAP or middle > made + 1):
            yield row
            row, used, made = [], 0.0, made + 1
        row += unit
        used += length
        done += length
    if row:
        yield row


def _units(items: Sequence[Cell | Bar]) -> list[list[Cell | Bar]]:
    """Each cell with the collectives after it."""
    units: list[list[Cell | Bar]] = []
    for item in items:
        if isinstance(item, Cell) and units and any(isinstance(other, Cell) for other in units[-1]):
            units.append([])
        units = units or [[]]
        units[-1].append(item)
    return units


def _item(item: Cell | Bar, lane: Lane, block: Block, plan: Plan, paint: Paint, longest: int) -> _Item:
    if isinstance(item, Bar):
        return _bar(item, block)
    drawn = draw(item, paint, longest)
    lines = list(_cell_lines(item, lane, block, plan))
    wanted = max(text_width(line, size, bold=is_name) for line, size, is_name in lines)
    width = max(CELL_WIDTH, drawn.width, min(wanted + 4, MAX_CELL_WIDTH))
    leaves = ", ".join(tensor.name for tensor in item.tensors)
    name = ".".join(part for part in (block.title, item.path, leaves) if part)
    markup = element("g", title(name) + moved((width - drawn.width) / 2, 0, drawn.markup))
    return Drawn(markup, width, drawn.height), _centered(lines, width)


_Line = tuple[str, float, bool]
"""Text, its size, whether it is the name."""


def _cell_lines(cell: Cell, lane: Lane, block: Block, plan: Plan) -> Iterator[_Line]:
    """The labels under a cell."""
    leaves = [tensor.name for tensor in cell.tensors] if cell.is_small else [cell.tensors[0].name]
    path = cell.path.removeprefix(lane.title).lstrip(".") if lane.title else cell.path
    if not path or leaves[0] != "weight":
        path = f"{path}.{', '.join(leaves)}".lstrip(".")
    around, _, name = path.rpartition(".")
    shape, local = shape_lines(cell.tensors[0].plan, plan)
    if around:
        yield around, 9.5, False
    yield name, 11.5, True
    yield from ((line, 10, False) for line in (shape, local, *_notes(cell, block, plan)) if line)


def _centered(lines: Sequence[_Line], width: float) -> Row:
    y, parts = 0.0, []
    for line, size, is_name in lines:
        y += size + 2.8
        shown = fitted(line, size, width, bold=is_name)
        kind = {"font_weight": "650"} if is_name else {"class_": "muted"}
        parts.append(text(width / 2, y, shown, size, text_anchor="middle", **kind))
    return Row("".join(parts), y + 2)


def _notes(cell: Cell, block: Block, plan: Plan) -> Iterator[str]:
    entry = cell.tensors[0].plan
    if cell.tied_to:
        yield f"is {cell.tied_to.removesuffix('.weight')}"
    if cell.count > 1:
        yield f"{cell.count} in each layer"
    if cell.in_layers < block.count:
        yield f"in {cell.in_layers} of {block.count} layers"
    if entry.partial:
        yield "partial"
    num_shards = math.prod(plan.mesh[axis] for axis in {a for dim in entry.dims for a in axes_of(dim)})
    if 1 < num_shards < plan.tp and not entry.partial:
        yield f"each shard on {plan.tp // num_shards} ranks"
    if cell.is_replicated and plan.tp > 1 and not cell.is_small:
        yield "replicated"
    if entry.packing is not None:
        yield f"packed ({entry.packing.method}, {len(entry.packing.tensors)} tensors)"


_BAR_LINES = ({"font_weight": "650"}, {"class_": "muted"}, {"class_": "muted"})


def _bar(bar: Bar, block: Block) -> _Item:
    """A collective: a bar between weights."""
    length = max(92.0, text_width(bar.op, 11.5) + 16)
    middle = BAR_WIDTH / 2
    where = f"{'.'.join(p for p in (block.title, bar.path) if p) or 'the model'} {bar.slot}"
    label = text(0, 4, bar.op, 11.5, text_anchor="middle", font_weight="650", class_="bar")
    turned = element("g", label, transform=f"translate({middle:g} {length / 2:g}) rotate(-90)")
    color = COLLECTIVE_COLORS[bar.op]
    markup = title(f"{bar.op}: {where}") + rect(middle - 10, 0, 20, length, rx=10, fill=color) + turned
    lines = [human_bytes(bar.token_bytes), "per token"]
    if bar.in_layers < block.count:
        lines.append(f"{bar.in_layers} of {block.count}")
    labels = "".join(
        text(middle, 14 + 12.8 * i, line, 10, text_anchor="middle", **kind)
        for i, (line, kind) in enumerate(zip(lines, _BAR_LINES, strict=False))
    )
    return Drawn(element("g", markup), BAR_WIDTH, length), Row(labels, 14 + 12.8 * len(lines))
