"""Draws one lane of a block: weights and collectives in rows, with labels under them, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardconv_runtime.format.dims import Dim, axes_of, size
from shardconv_runtime.format.plan import ParameterPlan, Plan, global_shape, local_shape

from ..reporting.summary import human_bytes
from .lanes import Bar, Block, Cell, Lane
from .stretches import Coordinates, HeldSegment, Holders, holders, stretches
from .svg import (
    COLLECTIVE_COLORS,
    INNER_WIDTH,
    INNER_X,
    LANE_WIDTH,
    LANE_X,
    RANK_COLORS,
    TIMES,
    Row,
    element,
    fitted,
    moved,
    rect,
    text,
    text_width,
    title,
)

# A weight is drawn as a rectangle, divided where its dims are sharded and colored by rank.

LONGEST = 92.0
"""Length in the picture of the longest dim in a block."""

SHORTEST = 16.0
THIN, APART = 8.0, 4.0
"""Width of the vectors next to a matrix, and their distance."""

SMALL_DIM = 16
"""Dims up to this size are not drawn of a tensor with more than two dims."""

MAX_SHEETS = 5


@dataclass(slots=True)
class Paint:
    """The colors of ranks, and the patterns in use so far."""

    plan: Plan
    patterns: dict[str, str] = field(default_factory=dict)
    """Id -> markup, in the order of first use."""

    def rank(self, rank: int) -> str:
        """Return the color of a rank; of more ranks than colors, the first three and the last differ from the
        rest."""
        tp, colors = self.plan.tp, RANK_COLORS
        if tp <= len(colors) or rank < 3:
            return colors[rank]
        return colors[-1] if rank == tp - 1 else colors[3 + rank % 4]

    def held(self, held: Holders) -> str:
        """Return the fill for these ranks: the color of one rank, or stripes of the first and the last."""
        if held.count == 1:
            return self.rank(held.first)
        if self.plan.tp <= 8:
            first, last = self.rank(held.first), self.rank(held.last)
        else:
            first, last = RANK_COLORS[held.first // held.count % len(RANK_COLORS)], "#ffffff"
        key = f"sc-{first[1:]}-{last[1:]}"
        stripe = rect(0, 0, 6, 12, fill=last, fill_opacity=1 if self.plan.tp <= 8 else 0.45)
        ground = rect(0, 0, 12, 12, fill=first)
        self.patterns[key] = element(
            "pattern", ground + stripe, id=key, width=12, height=12,
            patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
        )  # fmt: skip
        return f"url(#{key})"

    def hatch(self) -> str:
        """Return the overlay of partial parameters, which are zero on all ranks but some."""
        line = element("line", x1=0, y1=0, x2=0, y2=6, class_="hatch")
        self.patterns["sc-hatch"] = element(
            "pattern", line, id="sc-hatch", width=6, height=6,
            patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
        )  # fmt: skip
        return "url(#sc-hatch)"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Markup at (0, 0), and its size."""

    markup: str
    width: float
    height: float


def draw(cell: Cell, paint: Paint, longest: int) -> Drawn:
    """Draw the tensors of a cell.

    Args:
        cell: a weight and its vectors.
        paint: colors; patterns that are used are added.
        longest: size of the dim that is ``LONGEST`` long in the picture.
    """
    if cell.is_small:  # vectors below one another
        parts: list[str] = []
        height = 0.0
        for tensor in cell.tensors[:4]:
            parts += _sharded_vector(tensor.plan, (0.0, height, LONGEST, 13.0), paint, is_row=False)
            height += 13.0 + APART
        return Drawn("".join(parts), LONGEST, height - APART)
    matrix, *vectors = (tensor.plan for tensor in cell.tensors)
    return _matrix(matrix, vectors, paint, longest)


def faces(entry: ParameterPlan) -> tuple[int, ...]:
    """Return the indices of the dims that are drawn: height and width, after the sheets if there are
    three."""
    kept = list(range(len(entry.dims)))
    sizes = global_shape(entry)
    sharded = {index for index in kept if axes_of(entry.dims[index])}
    for index in sorted(kept, key=lambda i: (i == 0 and sizes[i] > 1, sizes[i], -i)):
        is_stack = index == 0 and sizes[0] > 1 and all(sizes[i] > SMALL_DIM for i in kept[1:])
        is_small = sizes[index] <= SMALL_DIM and not is_stack
        if len(kept) > 2 and index not in sharded and (is_small or len(kept) > 3):
            kept.remove(index)
    return tuple(kept[-3:])


def shape_lines(entry: ParameterPlan, plan: Plan) -> tuple[str, str]:
    """Return the global shape and the local one as text; the second is "" if they are equal."""
    shape = global_shape(entry)
    first, last = (local_shape(entry, plan.mesh, rank) for rank in (0, plan.tp - 1))
    if first == shape:
        return _times(shape), ""
    each = [str(a) if a == b else f"≤ {max(a, b)}" for a, b in zip(first, last, strict=True)]
    return _times(shape), "→ " + f" {TIMES} ".join(each)


def _times(shape: Sequence[int]) -> str:
    return f" {TIMES} ".join(map(str, shape)) or "scalar"


def _matrix(entry: ParameterPlan, vectors: Sequence[ParameterPlan], paint: Paint, longest: int) -> Drawn:
    *sheets, rows, columns = faces(entry)
    dims = entry.dims
    lengths = [LONGEST * (max(size(dims[i]), 1) / max(longest, 1)) ** 0.38 for i in (rows, columns)]
    height, width = (float(min(max(SHORTEST, length), LONGEST)) for length in lengths)
    behind = _sheets(dims[sheets[0]], paint) if sheets else [("", {})]
    shift = 6.0 if len(behind) > 1 else 0.0
    parts = []
    for depth in range(len(behind) - 1, -1, -1):
        gap, coordinates = behind[depth]
        x, y = depth * shift, (len(behind) - 1 - depth) * shift
        if gap:
            parts.append(rect(x, y, width, height, class_="gap"))
        else:
            parts += _sharded_rectangle(
                entry, (rows, columns), coordinates, (x, y, width, height), paint, depth == 0
            )
        parts.append(rect(x, y, width, height, class_="edge"))
    total_width, total_height = (length + (len(behind) - 1) * shift for length in (width, height))
    for vector in vectors:
        # A vector lies along one side of the matrix: right of its rows, or below its columns.
        is_row = bool(vector.dims) and size(vector.dims[0]) == size(dims[rows])
        if is_row:
            frame = (total_width + APART, (len(behind) - 1) * 6.0, THIN, height)
            total_width += APART + THIN
        else:
            frame = (0.0, total_height + APART, width, THIN)
            total_height += APART + THIN
        parts += _sharded_vector(vector, frame, paint, is_row=is_row)
    return Drawn("".join(parts), total_width, total_height)


def _sheets(dim: Dim, paint: Paint) -> list[tuple[str, Coordinates]]:
    """Return the sheets from front to back: "gap" or "", and the coordinates of the holders."""
    if not axes_of(dim):
        return [("", {})] * min(3, size(dim))
    found = stretches(dim, paint.plan.mesh)
    if len(found) > MAX_SHEETS:
        found = (*found[:3], HeldSegment(0, 1, None), found[-1])
    return [("gap" if sheet.coordinates is None else "", sheet.coordinates or {}) for sheet in found]


_Frame = tuple[float, float, float, float]
"""x, y, width, height of a rectangle."""


def _sharded_rectangle(
    entry: ParameterPlan,
    faces: tuple[int, int],
    around: Coordinates,
    frame: _Frame,
    paint: Paint,
    is_front: bool,
) -> Iterator[str]:
    x, y, width, height = frame
    mesh = paint.plan.mesh
    down, across = (stretches(entry.dims[index], mesh) for index in faces)
    for row in down:
        for column in across:
            where = (
                x + column.start * width,
                y + row.start * height,
                (column.stop - column.start) * width,
                (row.stop - row.start) * height,
            )
            if row.coordinates is None or column.coordinates is None:
                yield _gap(where, is_row=row.coordinates is None)
            else:
                yield _shard(
                    entry, {**around, **row.coordinates, **column.coordinates}, where, paint, is_front
                )


def _shard(
    entry: ParameterPlan, coordinates: Coordinates, frame: _Frame, paint: Paint, is_labeled: bool = True
) -> str:
    x, y, width, height = frame
    if entry.partial:
        at_zero = {**coordinates, **dict.fromkeys(entry.partial, 0)}
        held = holders(at_zero, paint.plan.mesh)
        ground = rect(x, y, width, height, fill=paint.held(held))
        return ground + rect(x, y, width, height, fill=paint.hatch())
    if not coordinates:
        return rect(x, y, width, height, class_="replicated")
    held = holders(coordinates, paint.plan.mesh)
    shape = rect(x, y, width, height, fill=paint.held(held), class_="shard" if min(width, height) > 3 else "")
    shape = shape.replace(' class=""', "")
    label = str(held.first) if held.count == 1 else f"{held.first}-{held.last}"
    if held.count > 1 and held.last - held.first + 1 != held.count:
        label = f"{held.first}…{held.last}"
    if not is_labeled or height < 9.5 or width < 5.2 * len(label) + 3:
        return shape
    middle = x + width / 2, y + height / 2 + 2.9
    return shape + text(*middle, label, 8.2, text_anchor="middle", class_="on")


def _gap(frame: _Frame, *, is_row: bool) -> str:
    x, y, width, height = frame
    dots = rect(x, y, width, height, class_="gap")
    if (height if is_row else width) < 9:
        return dots
    for step in (-1, 0, 1):
        moved = (0.0, step * 4.5) if is_row else (step * 4.5, 0.0)
        dots += element(
            "circle", cx=x + width / 2 + moved[0], cy=y + height / 2 + moved[1], r=1.1, class_="muted"
        )
    return dots


def _sharded_vector(vector: ParameterPlan, frame: _Frame, paint: Paint, *, is_row: bool) -> Iterator[str]:
    x, y, width, height = frame
    found = stretches(vector.dims[0], paint.plan.mesh) if vector.dims else (HeldSegment(0.0, 1.0, {}),)
    for stretch in found:
        along = stretch.stop - stretch.start
        if is_row:
            where = (x, y + stretch.start * height, width, along * height)
        else:
            where = (x + stretch.start * width, y, along * width, height)
        if stretch.coordinates is None:
            yield _gap(where, is_row=is_row)
        else:
            yield _shard(vector, stretch.coordinates, where, paint)
    yield rect(x, y, width, height, class_="edge")


def longest_dim(cells: Sequence[Cell]) -> int:
    """Return the largest size of a dim that is drawn of a matrix in the cells."""
    entries = [tensor.plan for cell in cells for tensor in cell.tensors if len(tensor.plan.dims) >= 2]
    return max((size(entry.dims[i]) for entry in entries for i in faces(entry)[-2:]), default=1)


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
    units: list[list[_Item]] = []  # each cell with the collectives after it
    has_cell = False
    for item in lane.items[:budget]:
        if not units or (isinstance(item, Cell) and has_cell):
            units.append([])
            has_cell = False
        has_cell = has_cell or isinstance(item, Cell)
        units[-1].append(_item(item, lane, block, plan, paint, longest))
    for row in _rows(units):
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
    """Yield rows of about equal length; a unit is never divided."""
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
    y, parts = 0.0, []
    for line, points, is_name in lines:
        y += points + 2.8
        shown = fitted(line, points, width, bold=is_name)
        kind = {"font_weight": "650"} if is_name else {"class_": "muted"}
        parts.append(text(width / 2, y, shown, points, text_anchor="middle", **kind))
    return Drawn(markup, width, drawn.height), Row("".join(parts), y + 2)


_Line = tuple[str, float, bool]
"""Text, its size, whether it is the name."""


def _cell_lines(cell: Cell, lane: Lane, block: Block, plan: Plan) -> Iterator[_Line]:
    """Yield the labels under a cell."""
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


def _notes(cell: Cell, block: Block, plan: Plan) -> Iterator[str]:
    """Yield the other facts about a cell as labels."""
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
    """Draw a collective as a bar between weights."""
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
