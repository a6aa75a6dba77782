"""Draws a plan as one picture: how each kind of layer is sharded over the ranks, and where the collectives
are.

The SVG is self-contained (no scripts, fonts or images) and has colors for light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardconv_runtime.format.plan import Plan, global_shape

from ..reporting.plan_lines import crossing_bytes, layers_text
from ..reporting.summary import (
    COMMUNICATING,
    Summary,
    human_bytes,
    human_count,
    stage_bytes,
    summarize,
    weights_text,
)
from .lane_picture import Paint, lane_picture, longest_dim
from .lanes import Bar, Block, Cell, outline
from .svg import (
    CARD_WIDTH,
    CARD_X,
    COLLECTIVE_COLORS,
    CSS,
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
    marked,
    moved,
    printable,
    rect,
    text,
    text_width,
    title,
)

MAX_BOXES = 5
"""Most stages that are drawn; of more, the first ones and the last."""
GAP, HEIGHT = 18, 74


def stage_strip(plan: Plan) -> Row:
    """Draw one box for each stage, in the order in which they run; empty for a plan without stages."""
    stages = plan.stages
    if stages is None:
        return Row("", 0)
    held = [max(ranks) for ranks in stage_bytes(plan)]
    sent = [0] * stages.count
    for (source, _), num_bytes in crossing_bytes(plan).items():
        sent[source] += num_bytes
    drawn: list[int | None] = list(range(stages.count))
    if stages.count > MAX_BOXES:
        drawn[MAX_BOXES - 2 : -1] = [None]
    width = (CARD_WIDTH - GAP * (len(drawn) - 1)) / len(drawn)
    parts = []
    for place, stage in enumerate(drawn):
        lines = [f"… {stages.count - len(drawn) + 1} more …"]
        if stage is not None:
            lines = [f"stage {stage}", layers_text(stages, stage), f"{human_bytes(held[stage])} per rank"]
            if sent[stage]:
                lines.append(f"{human_bytes(sent[stage])} sent per token")
        # The stage of this plan has a heavier first line.
        is_own = stage is not None and stage == stages.own
        box = rect(0, 0, width, HEIGHT, rx=8, class_="card")
        for number, line in enumerate(lines):
            bold = number == 0 and is_own
            style = {"font_weight": "700"} if bold else {"class_": "muted"} if number else {}
            box += text(10, 18 + 16 * number, fitted(line, 11.5, width - 20, bold=bold), 11.5, **style)
        parts.append(moved(CARD_X + place * (width + GAP), 0, box))
        if place:
            arrow = element("line", x1=3, y1=0, x2=GAP - 8, y2=0, stroke_width=2, class_="line")
            arrow += element("path", d=f"M{GAP - 9} -5v10l7 -5z", class_="tip")
            parts.append(moved(CARD_X + place * (width + GAP) - GAP, HEIGHT / 2, arrow))
    return Row("".join(parts), HEIGHT + 14)


MAX_BLOCKS, MAX_ITEMS, MAX_CHIPS = 24, 40, 14
"""Most of each that are drawn; the rest is counted."""


def picture(plan: Plan) -> str:
    """Draw a plan.

    Args:
        plan: any plan; nothing else is read.

    Returns:
        A self-contained SVG document, 800 wide; deterministic.
    """
    summary = summarize(plan)
    blocks = outline(plan)
    paint = Paint(plan)
    parts = [_header(plan, summary), stage_strip(plan), _legend(plan, blocks, paint)]
    shown = blocks if len(blocks) <= MAX_BLOCKS else (*blocks[: MAX_BLOCKS - 2], blocks[-1])
    for index, block in enumerate(shown):
        if len(shown) < len(blocks) and index == len(shown) - 1:
            label = f"… {len(blocks) - len(shown)} more kinds of layers …"
            left_out = text(WIDTH / 2, 16, label, 12, text_anchor="middle", class_="muted")
            parts += [_arrow(), Row(left_out, 22)]
        if index:
            parts.append(_arrow())
        parts.append(_block(block, plan, paint))
    body, y = [], MARGIN
    for part in parts:
        body.append(moved(0, y, part.markup))
        y += part.height
    height = y + MARGIN
    # The picture as text, for screen readers.
    largest = human_bytes(max(summary.rank_bytes))
    sentences = [
        f"How the weights of {_name(plan)} are sharded over {plan.tp} ranks, in the order of the layers.",
        f"Each rank holds {largest} of {human_bytes(summary.total_bytes)}.",
    ]
    for op in COMMUNICATING:
        found = [c for c in summary.collectives if c.op == op]
        if found:
            num_bytes = human_bytes(sum(c.token_bytes for c in found))
            sentences.append(f"{sum(c.count for c in found)} {op} of {num_bytes} per token.")
    for kind in summary.kinds:
        if kind.category and kind.tensors:
            sentences.append(f"{', '.join(kind.names[:2]) or 'the model'}: {kind.category}.")
    content = marked(
        "",
        title(f"{_name(plan)} sharded over {plan.tp} ranks"),
        element("desc", escape(printable(" ".join(sentences[:40])))),
        element("style", CSS),
        element("defs", "".join(paint.patterns.values())) if paint.patterns else "",
        rect(0.5, 0.5, WIDTH - 1, height - 1, rx=12, class_="page"),
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


def _name(plan: Plan) -> str:
    return plan.model.class_name.partition(":")[2]


def _header(plan: Plan, summary: Summary) -> Row:
    mesh = f" {TIMES} ".join(map(str, plan.mesh))
    ranks = "1 rank" if plan.tp == 1 else f"{plan.tp} ranks"
    ranks = f"{plan.stages.count} stages of {ranks}" if plan.stages else ranks
    facts = [
        f"{human_count(plan.model.num_parameters)} parameters",
        weights_text(plan),
        ranks + (f" (mesh {mesh})" if len(plan.mesh) > 1 else ""),
    ]
    costs = [f"{human_bytes(max(summary.rank_bytes))} of {human_bytes(summary.total_bytes)} on each rank"]
    count = sum(c.count for c in summary.collectives)
    if count:
        sent = human_bytes(sum(c.token_bytes for c in summary.collectives))
        costs.append(f"{count} collectives of {sent} per token")
    markup = text(CARD_X, 24, fitted(_name(plan), 23, CARD_WIDTH, bold=True), 23, font_weight="700")
    for y, line in ((46, facts), (65, costs)):
        markup += text(CARD_X, y, fitted(" · ".join(line), 13, CARD_WIDTH), 13, class_="muted")
    return Row(markup, 82)


def _legend(plan: Plan, blocks: Sequence[Block], paint: Paint) -> Row:
    """Return the colors of the ranks and of everything else in the picture."""
    entries: list[tuple[str, str]] = []
    if plan.tp > 1:
        ranks = range(plan.tp) if plan.tp <= len(RANK_COLORS) else (0, 1, 2, plan.tp - 1)
        entries += [(rect(0, 0, 13, 13, rx=2, fill=paint.rank(rank)), f"rank {rank}") for rank in ranks]
    entries.append((rect(0, 0, 13, 13, rx=2, class_="replicated"), "replicated"))
    tensors = [t.plan for b in blocks for item in _items(b) if isinstance(item, Cell) for t in item.tensors]
    if any(entry.partial for entry in tensors):
        ground = rect(0, 0, 13, 13, rx=2, fill=RANK_COLORS[0])
        entries.append(
            (ground + rect(0, 0, 13, 13, fill=paint.hatch()), "partial: full on one rank, zero on the others")
        )
    ops = {item.op for b in blocks for item in _items(b) if isinstance(item, Bar)}
    entries += [
        (rect(3, -1, 7, 15, rx=3.5, fill=COLLECTIVE_COLORS[op]), op) for op in COMMUNICATING if op in ops
    ]
    items = [
        (mark + text(18, 10.5, label, 11.5, class_="muted"), 18 + text_width(label, 11.5))
        for mark, label in entries
    ]
    lines = _in_lines(items, CARD_X, CARD_WIDTH, line=20, gap=14)
    return Row(lines.markup, lines.height + 10)


def _in_lines(items: Iterable[tuple[str, float]], left: float, width: float, line: float, gap: float) -> Row:
    """Put elements of given widths one after another, in as many lines as they need."""
    x, y, parts = left, 0.0, []
    for markup, own_width in items:
        if x + own_width > left + width and x > left:
            x, y = left, y + line
        parts.append(moved(x, y, markup))
        x += own_width + gap
    return Row("".join(parts), y + line)


def _items(block: Block) -> Iterator[Cell | Bar]:
    for lane in block.lanes:
        yield from lane.items


def _arrow() -> Row:
    middle = WIDTH / 2
    line = element("line", x1=middle, y1=2, x2=middle, y2=13, stroke_width=2, class_="line")
    tip = element("path", d=f"M{middle - 5:g} 12h10l-5 7z", class_="tip")
    return Row(line + tip, 22)


def _block(block: Block, plan: Plan, paint: Paint) -> Row:
    head = _block_head(block)
    y, inside = head.height, [head.markup]
    cells = [item for item in _items(block) if isinstance(item, Cell)]
    longest = longest_dim(cells)
    budget = MAX_ITEMS
    for lane in block.lanes:
        if budget <= 0:
            continue
        drawn = lane_picture(lane, block, plan, paint, longest, budget)
        budget -= len(lane.items)
        inside.append(moved(0, y, drawn.markup))
        y += drawn.height + 8
    left = sum(len(lane.items) for lane in block.lanes) - MAX_ITEMS
    if left > 0:
        inside.append(text(INNER_X, y + 12, f"… and {left} more", 11.5, class_="muted"))
        y += 22
    if block.replicated:
        chips = _chips(block)
        inside.append(moved(0, y, chips.markup))
        y += chips.height
    height = y + PAD - 8
    cards = [rect(CARD_X, 0, CARD_WIDTH, height, rx=10, class_="card")]
    if block.count > 1:
        cards = [rect(CARD_X + d, d, CARD_WIDTH, height, rx=10, class_="card") for d in (8.0, 4.0)] + cards
    return Row("".join([*cards, *inside]), height + (8 if block.count > 1 else 0))


def _block_head(block: Block) -> Row:
    if not block.title:
        return Row("", PAD)
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
    return Row(markup, 38)


def _chips(block: Block) -> Row:
    """Return the replicated vectors as text."""
    labels = []
    for cell in block.replicated[:MAX_CHIPS]:
        leaves = [tensor.name for tensor in cell.tensors]
        named = cell.path if leaves == ["weight"] else f"{cell.path} {', '.join(leaves)}".strip()
        shape = ", ".join(map(str, global_shape(cell.tensors[0].plan)))
        many = f" {TIMES} {cell.count}" if cell.count > 1 else ""
        some = f", in {cell.in_layers} of {block.count}" if cell.in_layers < block.count else ""
        labels.append(f"{named} [{shape}]{many}{some}")
    if len(block.replicated) > MAX_CHIPS:
        labels.append(f"and {len(block.replicated) - MAX_CHIPS} more")
    items = []
    for label in labels:
        shown = fitted(label, 10.5, LANE_WIDTH - 24)
        width = text_width(shown, 10.5) + 24
        swatch = rect(8, 6, 8, 8, rx=2, class_="replicated")
        chip = rect(0, 0, width, 20, rx=6, class_="lane") + swatch + text(21, 14, shown, 10.5, class_="muted")
        items.append((element("g", title(label) + chip), width))
    lines = _in_lines(items, LANE_X, LANE_WIDTH, line=24, gap=6)
    return Row(lines.markup, lines.height + 4)
