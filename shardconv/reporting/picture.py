"""Draws a plan as one picture: how each kind of layer is sharded over the ranks, and where the collectives
are.

The SVG is self-contained (no scripts, fonts or images) and has colors for light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stored_layout import is_common

from .blocks import Bar, Block, Cell, Lane, layer_names, outline
from .plan_lines import crossing_bytes, layers_text
from .report import tensor_cells
from .summary import (
    COMMUNICATING,
    Summary,
    human_bytes,
    human_count,
    stage_bytes,
    summarize,
    weights_text,
)
from .svg import (
    CARD_WIDTH,
    CARD_X,
    COLLECTIVE_COLORS,
    CSS,
    INNER_WIDTH,
    INNER_X,
    LANE_WIDTH,
    LANE_X,
    MARGIN,
    PAD,
    RANK_COLORS,
    TIMES,
    WIDTH,
    Row,
    element,
    fitted,
    moved,
    printable,
    rect,
    text,
    text_width,
    title,
)
from .weights import Drawn, Paint, draw, longest_dim

MAX_BLOCKS, MAX_ITEMS, MAX_CHIPS, MAX_STAGES = 24, 40, 14, 5
"""Most of each that are drawn; the rest is counted."""


def picture(plan: Plan) -> str:
    """Draw a plan as a self-contained SVG document, 800 wide; the same plan gives the same bytes."""
    summary = summarize(plan)
    blocks = outline(plan, summary)
    paint = Paint(plan)
    rows = [_header(plan, summary), _stages(plan), _legend(plan, blocks, paint)]
    shown = blocks if len(blocks) <= MAX_BLOCKS else (*blocks[: MAX_BLOCKS - 2], blocks[-1])
    for index, block in enumerate(shown):
        if len(shown) < len(blocks) and index == len(shown) - 1:
            label = f"… {len(blocks) - len(shown)} more kinds of layers …"
            left_out = text(WIDTH / 2, 16, label, 12, text_anchor="middle", class_="muted")
            rows += [_arrow(), Row(left_out, 22)]
        rows += [_arrow()] * (index > 0) + [_block(block, plan, paint)]
    body, height = _stacked(rows)
    height += 2 * MARGIN
    name = _name(plan)
    content = (
        "",
        title(f"{name} sharded over {plan.tp} ranks"),
        element("desc", escape(printable(" ".join(_sentences(plan, summary))))),
        element("style", CSS),
        element("defs", "".join(paint.patterns.values())) if paint.patterns else "",
        rect(0.5, 0.5, WIDTH - 1, height - 1, rx=12, class_="page"),
        moved(0, MARGIN, body),
        "",
    )
    svg = element(
        "svg",
        "\n".join(content),
        xmlns="http://www.w3.org/2000/svg",
        width=WIDTH,
        height=height,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        class_="sc",
        role="img",
    )
    return svg + "\n"


def _name(plan: Plan) -> str:
    return plan.model.class_name.partition(":")[2]


def _sentences(plan: Plan, summary: Summary) -> list[str]:
    """Return the picture as text, for screen readers."""
    largest = human_bytes(max(summary.rank_bytes))
    sentences = [
        f"How the weights of {_name(plan)} are sharded over {plan.tp} ranks, in the order of the layers.",
        f"Each rank holds {largest} of {human_bytes(summary.total_bytes)}.",
    ]
    for op in COMMUNICATING:
        alike = [c for c in summary.collectives if c.op == op]
        if alike:
            num_bytes = human_bytes(sum(c.token_bytes for c in alike))
            sentences.append(f"{sum(c.count for c in alike)} {op} of {num_bytes} per token.")
    kinds = (kind for kind in summary.kinds if kind.category and kind.tensors)
    return [*sentences, *(f"{', '.join(k.names[:2]) or 'the model'}: {k.category}." for k in kinds)][:40]


def _stacked(rows: Iterable[Row], gap: float = 0.0) -> tuple[str, float]:
    """Return rows below one another, and their height."""
    markup, y = [], 0.0
    for row in rows:
        markup.append(moved(0, y, row.markup))
        y += row.height + gap
    return "".join(markup), y


def _in_lines(items: Iterable[tuple[str, float]], left: float, width: float, line: float, gap: float) -> Row:
    """Put elements of given widths one after another, in as many lines as they need."""
    x, y, parts = left, 0.0, []
    for markup, own_width in items:
        if x + own_width > left + width and x > left:
            x, y = left, y + line
        parts.append(moved(x, y, markup))
        x += own_width + gap
    return Row("".join(parts), y + line)


def _header(plan: Plan, summary: Summary) -> Row:
    mesh = f" {TIMES} ".join(map(str, plan.mesh))
    ranks = "1 rank" if plan.tp == 1 else f"{plan.tp} ranks"
    ranks = f"{plan.stages.count} stages of {ranks}" if plan.stages else ranks
    ranks += f" (mesh {mesh})" if len(plan.mesh) > 1 else ""
    facts = [f"{human_count(plan.model.num_parameters)} parameters", weights_text(plan), ranks]
    costs = [f"{human_bytes(max(summary.rank_bytes))} of {human_bytes(summary.total_bytes)} on each rank"]
    if count := sum(c.count for c in summary.collectives):
        sent = human_bytes(sum(c.token_bytes for c in summary.collectives))
        costs.append(f"{count} collectives of {sent} per token")
    markup = text(CARD_X, 24, fitted(_name(plan), 23, CARD_WIDTH, bold=True), 23, font_weight="700")
    for y, line in ((46, facts), (65, costs)):
        markup += text(CARD_X, y, fitted(" · ".join(line), 13, CARD_WIDTH), 13, class_="muted")
    return Row(markup, 82)


def _stages(plan: Plan) -> Row:
    """Draw one box for each stage, in the order in which they run; empty for a plan without stages."""
    stages, gap, height = plan.stages, 18, 74
    if stages is None:
        return Row("", 0)
    largest = [max(ranks) for ranks in stage_bytes(plan)]
    sent = [0] * stages.count
    for (source, _), num_bytes in crossing_bytes(plan).items():
        sent[source] += num_bytes
    drawn: list[int | None] = list(range(stages.count))
    if stages.count > MAX_STAGES:
        drawn[MAX_STAGES - 2 : -1] = [None]
    width = (CARD_WIDTH - gap * (len(drawn) - 1)) / len(drawn)
    markup = ""
    for place, stage in enumerate(drawn):
        lines = [f"… {stages.count - len(drawn) + 1} more …"]
        if stage is not None:
            lines = [f"stage {stage}", layers_text(stages, stage), f"{human_bytes(largest[stage])} per rank"]
            lines += [f"{human_bytes(sent[stage])} sent per token"] * (sent[stage] > 0)
        box = rect(0, 0, width, height, rx=8, class_="card")
        for number, line in enumerate(lines):
            bold = number == 0 and stage is not None and stage == stages.own
            style = {"font_weight": "700"} if bold else {"class_": "muted"} if number else {}
            box += text(10, 18 + 16 * number, fitted(line, 11.5, width - 20, bold=bold), 11.5, **style)
        x = CARD_X + place * (width + gap)
        markup += moved(x, 0, box)
        if place:
            arrow = element("line", x1=3, y1=0, x2=gap - 8, y2=0, stroke_width=2, class_="line")
            arrow += element("path", d=f"M{gap - 9} -5v10l7 -5z", class_="tip")
            markup += moved(x - gap, height / 2, arrow)
    return Row(markup, height + 14)


def _legend(plan: Plan, blocks: Sequence[Block], paint: Paint) -> Row:
    """Return the colors of the ranks and of everything else in the picture."""
    entries: list[tuple[str, str]] = []
    if plan.tp > 1:
        ranks = range(plan.tp) if plan.tp <= len(RANK_COLORS) else (0, 1, 2, plan.tp - 1)
        entries += [(rect(0, 0, 13, 13, rx=2, fill=paint.rank(rank)), f"rank {rank}") for rank in ranks]
    entries.append((rect(0, 0, 13, 13, rx=2, class_="replicated"), "replicated"))
    items = [item for block in blocks for item in block.items]
    if any(t.plan.partial for item in items if isinstance(item, Cell) for t in item.tensors):
        mark = rect(0, 0, 13, 13, rx=2, fill=RANK_COLORS[0]) + rect(0, 0, 13, 13, fill=paint.hatch())
        entries.append((mark, "partial: full on one rank, zero on the others"))
    ops = {item.op for item in items if isinstance(item, Bar)}
    bars = ((op, rect(3, -1, 7, 15, rx=3.5, fill=COLLECTIVE_COLORS[op])) for op in COMMUNICATING if op in ops)
    entries += [(mark, op) for op, mark in bars]
    labeled = [
        (mark + text(18, 10.5, label, 11.5, class_="muted"), 18 + text_width(label, 11.5))
        for mark, label in entries
    ]
    lines = _in_lines(labeled, CARD_X, CARD_WIDTH, line=20, gap=14)
    return Row(lines.markup, lines.height + 10)


def _arrow() -> Row:
    middle = WIDTH / 2
    line = element("line", x1=middle, y1=2, x2=middle, y2=13, stroke_width=2, class_="line")
    return Row(line + element("path", d=f"M{middle - 5:g} 12h10l-5 7z", class_="tip"), 22)


def _block(block: Block, plan: Plan, paint: Paint) -> Row:
    """Draw a card with the lanes of a block; several layers look like several cards."""
    cells = [item for item in block.items if isinstance(item, Cell)]
    longest = longest_dim([tensor.plan for cell in cells for tensor in cell.tensors])
    budget, rows = MAX_ITEMS, []
    for lane in block.lanes():
        if budget > 0:
            rows.append(_lane(lane, lane.items[:budget], block, plan, paint, longest))
        budget -= len(lane.items)
    if budget < 0:
        rows.append(Row(text(INNER_X, 12, f"… and {-budget} more", 11.5, class_="muted"), 14))
    if block.replicated:
        rows.append(_chips(block))
    head = _block_head(block)
    inside, height = _stacked(rows, gap=8)
    height += head.height + PAD - 8
    count = len(block.layers)
    depths = (8.0, 4.0, 0.0) if count > 1 else (0.0,)
    cards = "".join(rect(CARD_X + d, d, CARD_WIDTH, height, rx=10, class_="card") for d in depths)
    return Row(cards + head.markup + moved(0, head.height, inside), height + depths[0])


def _block_head(block: Block) -> Row:
    if not block.stack:
        return Row("", PAD)
    size, x, markup, count = human_bytes(block.rank_bytes) + " per rank", LANE_X, "", len(block.layers)
    if count > 1:
        label = f"{TIMES} {count}"
        width = text_width(label, 12.5) + 18
        markup += rect(x, 11, width, 20, rx=10, class_="pill")
        markup += text(x + width / 2, 25.5, label, 12.5, text_anchor="middle", font_weight="700")
        x += width + 8
    name = layer_names(block.layers)
    shown = fitted(name, 14.5, LANE_X + LANE_WIDTH - x - text_width(size, 12) - 12, bold=True)
    markup += element("g", title(name) + text(x, 25.5, shown, 14.5, font_weight="650"))
    markup += text(LANE_X + LANE_WIDTH, 25, size, 12, text_anchor="end", class_="muted")
    return Row(markup, 38)


def _chips(block: Block) -> Row:
    """Return the replicated tensors as text."""
    items, labels, count = [], [], len(block.layers)
    for name, layers in block.replicated.items():
        labels.append(name + (f", in {len(layers)} of {count}" if len(layers) < count else ""))
    more = [f"and {len(labels) - MAX_CHIPS} more"] * (len(labels) > MAX_CHIPS)
    for label in (*labels[:MAX_CHIPS], *more):
        shown = fitted(label, 10.5, LANE_WIDTH - 24)
        width = text_width(shown, 10.5) + 24
        swatch = rect(8, 6, 8, 8, rx=2, class_="replicated")
        chip = rect(0, 0, width, 20, rx=6, class_="lane") + swatch + text(21, 14, shown, 10.5, class_="muted")
        items.append((element("g", title(label) + chip), width))
    return _in_lines(items, LANE_X, LANE_WIDTH, line=24, gap=6)


CELL_WIDTH, MAX_CELL_WIDTH, BAR_WIDTH, GAP = 100.0, 148.0, 56.0, 8.0

_Item = tuple[Drawn, Row]
"""A drawing, as wide as its column in the row, and the labels under it."""


def _lane(
    lane: Lane, items: Sequence[Cell | Bar], block: Block, plan: Plan, paint: Paint, longest: int
) -> Row:
    y, markup = 10.0, ""
    heading = lane.part
    if lane.layers < block.layers:
        heading = f"{heading} of {layer_names(lane.layers)}".removeprefix(" of ")
    if heading:
        shown = fitted(heading, 12, INNER_WIDTH)
        markup, y = text(INNER_X, 18, shown, 12, font_weight="600", class_="muted"), 28.0
    units: list[list[_Item]] = []  # each cell with the collectives around it
    has_cell = False
    for item in items:
        if not units or (isinstance(item, Cell) and has_cell):
            units.append([])
            has_cell = False
        has_cell = has_cell or isinstance(item, Cell)
        units[-1].append(
            _cell(item, lane, block, plan, paint, longest)
            if isinstance(item, Cell)
            else _bar(item, lane, block)
        )
    for row in _rows(units):
        height = max(drawn.height for drawn, _ in row)
        x = INNER_X + (INNER_WIDTH - sum(drawn.width + GAP for drawn, _ in row) + GAP) / 2
        for drawn, labels in row:
            markup += moved(x, y + (height - drawn.height) / 2, drawn.markup)
            markup += moved(x, y + height + 4, labels.markup)
            x += drawn.width + GAP
        y += height + max(labels.height for _, labels in row) + 12
    return Row(rect(LANE_X, 0, LANE_WIDTH, y, rx=7, class_="lane") + markup, y)


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


def _cell(cell: Cell, lane: Lane, block: Block, plan: Plan, paint: Paint, longest: int) -> _Item:
    drawn = draw(cell.tensors, paint, longest)
    lines = list(_cell_lines(cell, lane, block, plan))
    longest_line = max(text_width(line, size, bold=is_name) for line, size, is_name in lines)
    width = max(CELL_WIDTH, drawn.width, min(longest_line + 4, MAX_CELL_WIDTH))
    name = ".".join(
        filter(None, (layer_names(cell.layers), cell.path, ", ".join(t.name for t in cell.tensors)))
    )
    markup = element("g", title(name) + moved((width - drawn.width) / 2, 0, drawn.markup))
    y, labels = 0.0, ""
    for line, points, is_name in lines:
        y += points + 2.8
        kind = {"font_weight": "650"} if is_name else {"class_": "muted"}
        shown = fitted(line, points, width, bold=is_name)
        labels += text(width / 2, y, shown, points, text_anchor="middle", **kind)
    return Drawn(markup, drawn.height, width), Row(labels, y + 2)


def _cell_lines(cell: Cell, lane: Lane, block: Block, plan: Plan) -> Iterator[tuple[str, float, bool]]:
    """Yield the labels under a cell: text, its size, and whether it is the name."""
    first = cell.tensors[0]
    is_small = len(first.plan.dims) < 2
    leaves = ", ".join(tensor.name for tensor in cell.tensors) if is_small else first.name
    path = cell.path.removeprefix(lane.part).lstrip(".") if lane.part else cell.path
    if not path or not leaves.startswith("weight"):
        path = f"{path}.{leaves}".lstrip(".")
    around, _, name = path.rpartition(".")
    if around:
        yield around, 9.5, False
    yield name, 11.5, True
    _, shapes, _ = tensor_cells(plan, first)
    before, _, after = shapes.replace(", ", f" {TIMES} ").replace("[", "").replace("]", "").partition(" → ")
    notes = [before or "scalar", f"→ {after}" if after else ""]
    if cell.tied_to:
        notes.append(f"is {cell.tied_to.removesuffix('.weight')}")
    if cell.copies > 1:
        notes.append(f"{cell.copies} in each layer")
    if cell.layers < lane.layers:
        notes.append(f"in {len(cell.layers)} of {len(lane.layers)} layers")
    axes = {axis for dim in first.plan.dims for axis in axes_of(dim)}
    num_shards = math.prod(plan.mesh[axis] for axis in axes)
    if first.plan.partial:
        notes.append("partial")
    elif 1 < num_shards < plan.tp:
        notes.append(f"each shard on {plan.tp // num_shards} ranks")
    if plan.tp > 1 and not is_small and all(is_common(tensor.plan) for tensor in cell.tensors):
        notes.append("replicated")
    if first.plan.packing is not None:
        notes.append(f"packed ({first.plan.packing.method}, {len(first.plan.packing.tensors)} tensors)")
    yield from ((note, 10, False) for note in notes if note)


def _bar(bar: Bar, lane: Lane, block: Block) -> _Item:
    """Draw a collective as a bar between weights."""
    length, middle = max(92.0, text_width(bar.op, 11.5) + 16), BAR_WIDTH / 2
    where = ".".join(filter(None, (layer_names(bar.layers), bar.path))) or "the model"
    label = text(0, 4, bar.op, 11.5, text_anchor="middle", font_weight="650", class_="bar")
    markup = title(f"{bar.op}: {where} {bar.port}")
    markup += rect(middle - 10, 0, 20, length, rx=10, fill=COLLECTIVE_COLORS[bar.op])
    markup += element("g", label, transform=f"translate({middle:g} {length / 2:g}) rotate(-90)")
    lines = [human_bytes(bar.token_bytes), "per token"]
    if bar.layers < lane.layers:
        lines.append(f"{len(bar.layers)} of {len(lane.layers)}")
    labels = ""
    for index, line in enumerate(lines):
        kind = {"class_": "muted"} if index else {"font_weight": "650"}
        labels += text(middle, 14 + 12.8 * index, line, 10, text_anchor="middle", **kind)
    return Drawn(element("g", markup), length, BAR_WIDTH), Row(labels, 14 + 12.8 * len(lines))
