"""A plan as one picture: how each kind of layer is split over the ranks, and where the collectives are.

The SVG stands alone: no scripts, no fonts or images from elsewhere, colours for light and dark surroundings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from shardconv_runtime.format.block_scales import factors_entry
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import Plan, global_shape

from ..reporting.report import human_bytes, human_count
from ..reporting.summary import COMMUNICATING, Summary, summarize
from .outline import Bar, Block, Cell, Lane, outline
from .svg import (
    COLLECTIVE_COLOURS,
    CSS,
    RANK_COLOURS,
    TIMES,
    element,
    fitted,
    marked,
    printable,
    rect,
    text,
    text_width,
    title,
)
from .weight_picture import Drawn, Paint, draw, longest_dim, shape_lines

WIDTH = 800
MARGIN, PAD = 22.0, 14.0
CARD_X, CARD_WIDTH = MARGIN, WIDTH - 2 * MARGIN
LANE_X, LANE_WIDTH = CARD_X + PAD, CARD_WIDTH - 2 * PAD
INNER_X, INNER_WIDTH = LANE_X + 12.0, LANE_WIDTH - 24.0

CELL_WIDTH, MAX_CELL_WIDTH, BAR_WIDTH, GAP = 100.0, 148.0, 56.0, 8.0

MAX_BLOCKS, MAX_ITEMS, MAX_CHIPS = 24, 40, 14
"""Most of each that are drawn; what is left out is counted."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Markup that begins at y = 0, and how high it is."""

    markup: str
    height: float


def picture(plan: Plan) -> str:
    """Draw a plan.

    Args:
        plan: any plan; nothing else is read.

    Returns:
        A standalone SVG document, 800 wide, that ends with a newline. The same plan gives the same text.
    """
    summary = summarize(plan)
    blocks = outline(plan)
    paint = Paint(plan)
    parts = [_header(plan, summary), _legend(plan, blocks, paint)]
    shown = blocks if len(blocks) <= MAX_BLOCKS else (*blocks[: MAX_BLOCKS - 2], blocks[-1])
    for index, block in enumerate(shown):
        if len(shown) < len(blocks) and index == len(shown) - 1:
            parts += [_arrow(), _left_out(len(blocks) - len(shown))]
        if index:
            parts.append(_arrow())
        parts.append(_block(block, plan, paint))
    body, y = [], MARGIN
    for part in parts:
        body.append(_moved(0, y, part.markup))
        y += part.height
    return _document(plan, summary, paint, body, y + MARGIN)


def _document(plan: Plan, summary: Summary, paint: Paint, body: Sequence[str], height: float) -> str:
    name = _name(plan)
    label = f"{name} over {plan.tp} ranks"
    page = rect(0.5, 0.5, WIDTH - 1, height - 1, rx=12, class_="page")
    content = marked(
        "",
        title(label),
        element("desc", escape(printable(_told(plan, summary)))),
        element("style", CSS),
        element("defs", "".join(paint.patterns.values())) if paint.patterns else "",
        page,
        *body,
    )
    svg = element(
        "svg",
        content + "\n",
        xmlns="http://www.w3.org/2000/svg",
        width=WIDTH,
        height=height,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        class_="sc",
        role="img",
    )
    return svg + "\n"


def _told(plan: Plan, summary: Summary) -> str:
    """The picture in words."""
    largest = human_bytes(max(summary.rank_bytes))
    said = [
        f"How the weights of {_name(plan)} are split over {plan.tp} ranks, from the first layer to the last.",
        f"Each rank holds {largest} of {human_bytes(summary.total_bytes)}.",
    ]
    for op in COMMUNICATING:
        found = [c for c in summary.collectives if c.op == op]
        if found:
            num_bytes = human_bytes(sum(c.token_bytes for c in found))
            said.append(f"{sum(c.count for c in found)} {op} of {num_bytes} for each token.")
    for kind in summary.kinds:
        if kind.category and kind.tensors:
            said.append(f"{', '.join(kind.names[:2]) or 'the model'}: {kind.category}.")
    return " ".join(said[:40])


def _name(plan: Plan) -> str:
    return plan.model.class_name.partition(":")[2]


def _moved(x: float, y: float, markup: str) -> str:
    return element("g", markup, transform=f"translate({x:g} {round(y, 2):g})")


def _header(plan: Plan, summary: Summary) -> _Part:
    mesh = f" {TIMES} ".join(map(str, plan.mesh))
    ranks = "1 rank" if plan.tp == 1 else f"{plan.tp} ranks"
    facts = [
        f"{human_count(plan.model.num_parameters)} parameters",
        plan.model.dtype,
        ranks + (f" (mesh {mesh})" if len(plan.mesh) > 1 else ""),
    ]
    costs = [f"{human_bytes(max(summary.rank_bytes))} of {human_bytes(summary.total_bytes)} on each rank"]
    count = sum(c.count for c in summary.collectives)
    if count:
        sent = human_bytes(sum(c.token_bytes for c in summary.collectives))
        costs.append(f"{count} collectives of {sent} for each token")
    markup = text(CARD_X, 24, fitted(_name(plan), 23, CARD_WIDTH, bold=True), 23, font_weight="700")
    for y, line in ((46, facts), (65, costs)):
        markup += text(CARD_X, y, fitted(" · ".join(line), 13, CARD_WIDTH), 13, class_="muted")
    return _Part(markup, 82)


def _legend(plan: Plan, blocks: Sequence[Block], paint: Paint) -> _Part:
    """The ranks' colours, and what else is in the picture."""
    entries: list[tuple[str, str]] = []
    if plan.tp > 1:
        entries += [
            (rect(0, 0, 13, 13, rx=2, fill=paint.rank(r)), f"rank {r}") for r in _legend_ranks(plan.tp)
        ]
    entries.append((rect(0, 0, 13, 13, rx=2, class_="whole"), "whole on every rank"))
    tensors = [t.plan for b in blocks for item in _items(b) if isinstance(item, Cell) for t in item.tensors]
    if any(entry.partial for entry in tensors):
        ground = rect(0, 0, 13, 13, rx=2, fill=RANK_COLOURS[0])
        entries.append((ground + rect(0, 0, 13, 13, fill=paint.hatch()), "whole on one rank, zero on others"))
    ops = {item.op for b in blocks for item in _items(b) if isinstance(item, Bar)}
    entries += [
        (rect(3, -1, 7, 15, rx=3.5, fill=COLLECTIVE_COLOURS[op]), op) for op in COMMUNICATING if op in ops
    ]
    x, y, parts = CARD_X, 0.0, []
    for mark, label in entries:
        width = 18 + text_width(label, 11.5) + 14
        if x + width > CARD_X + CARD_WIDTH + 14:
            x, y = CARD_X, y + 20
        parts.append(_moved(x, y, mark + text(18, 10.5, label, 11.5, class_="muted")))
        x += width
    return _Part("".join(parts), y + 30)


def _legend_ranks(tp: int) -> Sequence[int]:
    return range(tp) if tp <= len(RANK_COLOURS) else (0, 1, 2, tp - 1)


def _items(block: Block) -> Iterator[Cell | Bar]:
    for lane in block.lanes:
        yield from lane.items


def _arrow() -> _Part:
    middle = WIDTH / 2
    line = element("line", x1=middle, y1=2, x2=middle, y2=13, stroke_width=2, class_="line")
    tip = element("path", d=f"M{middle - 5:g} 12h10l-5 7z", class_="tip")
    return _Part(line + tip, 22)


def _left_out(count: int) -> _Part:
    return _Part(
        text(WIDTH / 2, 16, f"… {count} more kinds of layers …", 12, text_anchor="middle", class_="muted"), 22
    )


def _block(block: Block, plan: Plan, paint: Paint) -> _Part:
    head = _block_head(block)
    y, inside = head.height, [head.markup]
    cells = [item for item in _items(block) if isinstance(item, Cell)]
    longest = longest_dim(cells)
    budget = MAX_ITEMS
    for lane in block.lanes:
        if budget <= 0:
            continue
        drawn = _lane(lane, block, plan, paint, longest, budget)
        budget -= len(lane.items)
        inside.append(_moved(0, y, drawn.markup))
        y += drawn.height + 8
    left = sum(len(lane.items) for lane in block.lanes) - MAX_ITEMS
    if left > 0:
        inside.append(text(INNER_X, y + 12, f"… and {left} more", 11.5, class_="muted"))
        y += 22
    if block.whole:
        chips = _chips(block)
        inside.append(_moved(0, y, chips.markup))
        y += chips.height
    height = y + PAD - 8
    cards = [rect(CARD_X, 0, CARD_WIDTH, height, rx=10, class_="card")]
    if block.count > 1:
        cards = [rect(CARD_X + d, d, CARD_WIDTH, height, rx=10, class_="card") for d in (8.0, 4.0)] + cards
    return _Part("".join([*cards, *inside]), height + (8 if block.count > 1 else 0))


def _block_head(block: Block) -> _Part:
    if not block.title:
        return _Part("", PAD)
    size, x, markup = human_bytes(block.rank_bytes) + " per rank", LANE_X, ""
    if block.count > 1:
        label = f"{TIMES} {block.count}"
        width = text_width(label, 12.5) + 18
        markup += rect(x, 11, width, 20, rx=10, class_="pill")
        markup += text(x + width / 2, 25.5, label, 12.5, text_anchor="middle", font_weight="700")
        x += width + 8
    name = fitted(block.title, 14.5, LANE_X + LANE_WIDTH - x - text_width(size, 12) - 12, bold=True)
    markup += element("g", title(block.title) + text(x, 25.5, name, 14.5, font_weight="650"))
    markup += text(LANE_X + LANE_WIDTH, 25, size, 12, text_anchor="end", class_="muted")
    return _Part(markup, 38)


def _lane(lane: Lane, block: Block, plan: Plan, paint: Paint, longest: int, budget: int) -> _Part:
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
            parts.append(_moved(x, y + (height - drawn.height) / 2, drawn.markup))
            parts.append(_moved(x, y + height + 4, labels.markup))
            x += drawn.width + GAP
        y += height + below + 12
    return _Part(rect(LANE_X, 0, LANE_WIDTH, y, rx=7, class_="lane") + "".join(parts), y)


_Item = tuple[Drawn, _Part]
"""What is drawn, as wide as its place in the row, and the labels under it."""


def _rows(units: Sequence[Sequence[_Item]]) -> Iterator[list[_Item]]:
    """Rows that are about equally long; a unit stays together."""
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
    """Each cell with the collectives behind it."""
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
    moved = element("g", title(name) + _moved((width - drawn.width) / 2, 0, drawn.markup))
    return Drawn(moved, width, drawn.height), _centred(lines, width)


_Line = tuple[str, float, bool]
"""Text, its size, and whether it is the name."""


def _cell_lines(cell: Cell, lane: Lane, block: Block, plan: Plan) -> Iterator[_Line]:
    """What stands under a cell."""
    leaves = [tensor.name for tensor in cell.tensors] if cell.is_small else [cell.tensors[0].name]
    path = cell.path.removeprefix(lane.title).lstrip(".") if lane.title else cell.path
    if not path or leaves[0] != "weight":
        path = f"{path}.{', '.join(leaves)}".lstrip(".")
    around, _, name = path.rpartition(".")
    whole, local = shape_lines(cell.tensors[0].plan, plan)
    if around:
        yield around, 9.5, False
    yield name, 11.5, True
    yield from ((line, 10, False) for line in (whole, local, *_notes(cell, block, plan)) if line)


def _centred(lines: Sequence[_Line], width: float) -> _Part:
    y, parts = 0.0, []
    for line, size, is_name in lines:
        y += size + 2.8
        shown = fitted(line, size, width, bold=is_name)
        kind = {"font_weight": "650"} if is_name else {"class_": "muted"}
        parts.append(text(width / 2, y, shown, size, text_anchor="middle", **kind))
    return _Part("".join(parts), y + 2)


def _notes(cell: Cell, block: Block, plan: Plan) -> Iterator[str]:
    entry = cell.tensors[0].plan
    if cell.is_tied:
        yield f"is {cell.is_tied.removesuffix('.weight')}"
    if cell.count > 1:
        yield f"{cell.count} in each layer"
    if cell.in_layers < block.count:
        yield f"in {cell.in_layers} of {block.count} layers"
    if entry.partial:
        yield "a term of a sum"
    parts = math.prod(plan.mesh[axis] for axis in {a for dim in entry.dims for a in axes_of(dim)})
    if 1 < parts < plan.tp and not entry.partial:
        yield f"each part on {plan.tp // parts} ranks"
    if cell.is_whole and plan.tp > 1 and not cell.is_small:
        yield "whole"
    if entry.block:
        factors = f" {TIMES} ".join(map(str, global_shape(factors_entry(entry))))
        yield f"float8, factors {factors}"


_BAR_LINES = ({"font_weight": "650"}, {"class_": "muted"}, {"class_": "muted"})


def _bar(bar: Bar, block: Block) -> _Item:
    """A collective, as a bar between weights."""
    length = max(92.0, text_width(bar.op, 11.5) + 16)
    middle = BAR_WIDTH / 2
    where = f"{'.'.join(p for p in (block.title, bar.path) if p) or 'the model'} {bar.slot}"
    label = text(0, 4, bar.op, 11.5, text_anchor="middle", font_weight="650", class_="bar")
    turned = element("g", label, transform=f"translate({middle:g} {length / 2:g}) rotate(-90)")
    colour = COLLECTIVE_COLOURS[bar.op]
    markup = title(f"{bar.op}: {where}") + rect(middle - 10, 0, 20, length, rx=10, fill=colour) + turned
    lines = [human_bytes(bar.token_bytes), "per token"]
    if bar.in_layers < block.count:
        lines.append(f"{bar.in_layers} of {block.count}")
    labels = "".join(
        text(middle, 14 + 12.8 * i, line, 10, text_anchor="middle", **kind)
        for i, (line, kind) in enumerate(zip(lines, _BAR_LINES, strict=False))
    )
    return Drawn(element("g", markup), BAR_WIDTH, length), _Part(labels, 14 + 12.8 * len(lines))


def _chips(block: Block) -> _Part:
    """Vectors that every rank holds whole, in words."""
    labels = [_chip(cell, block) for cell in block.whole[:MAX_CHIPS]]
    if len(block.whole) > MAX_CHIPS:
        labels.append(f"and {len(block.whole) - MAX_CHIPS} more")
    x, y, parts = LANE_X, 0.0, []
    for label in labels:
        shown = fitted(label, 10.5, LANE_WIDTH - 24)
        width = text_width(shown, 10.5) + 24
        if x + width > LANE_X + LANE_WIDTH and x > LANE_X:
            x, y = LANE_X, y + 24
        swatch = rect(8, 6, 8, 8, rx=2, class_="whole")
        chip = rect(0, 0, width, 20, rx=6, class_="lane") + swatch + text(21, 14, shown, 10.5, class_="muted")
        parts.append(_moved(x, y, element("g", title(label) + chip)))
        x += width + 6
    return _Part("".join(parts), y + 28)


def _chip(cell: Cell, block: Block) -> str:
    leaves = [tensor.name for tensor in cell.tensors]
    named = cell.path if leaves == ["weight"] else f"{cell.path} {', '.join(leaves)}".strip()
    shape = ", ".join(map(str, global_shape(cell.tensors[0].plan)))
    many = f" {TIMES} {cell.count}" if cell.count > 1 else ""
    some = f", in {cell.in_layers} of {block.count}" if cell.in_layers < block.count else ""
    return f"{named} [{shape}]{many}{some}"
