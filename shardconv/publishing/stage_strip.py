"""The stages of a plan as a strip of a picture: what each holds, and what it sends to the next ones."""

from __future__ import annotations

from shardconv_runtime.format.plan import Plan

from ..reporting.human_numbers import human_bytes
from ..reporting.stage_lines import crossing_bytes, layers_text
from ..reporting.summary import stage_bytes
from .geometry import CARD_WIDTH, CARD_X
from .svg import Row, element, fitted, moved, rect, text

MAX_BOXES = 5
"""Most stages that are drawn; of more, the first ones and the last."""
GAP, HEIGHT = 18, 74


def stage_strip(plan: Plan) -> Row:
    """One box for each stage, in the order in which they run; empty for a plan without stages."""
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
            lines = [f"stage {stage}", layers_text(stages, stage), f"{human_bytes(held[stage])} a rank"]
            if sent[stage]:
                lines.append(f"{human_bytes(sent[stage])} sent a token")
        is_own = stage is not None and stage == stages.own
        parts.append(moved(CARD_X + place * (width + GAP), 0, _box(lines, width, is_own=is_own)))
        if place:
            parts.append(moved(CARD_X + place * (width + GAP) - GAP, HEIGHT / 2, _arrow()))
    return Row("".join(parts), HEIGHT + 14)


def _box(lines: list[str], width: float, *, is_own: bool) -> str:
    """A box with a line for each of its facts; the stage of this plan has a heavier first one."""
    markup = rect(0, 0, width, HEIGHT, rx=8, class_="card")
    for number, line in enumerate(lines):
        bold = number == 0 and is_own
        style = {"font_weight": "700"} if bold else {"class_": "muted"} if number else {}
        markup += text(10, 18 + 16 * number, fitted(line, 11.5, width - 20, bold=bold), 11.5, **style)
    return markup


def _arrow() -> str:
    """From one box to the next."""
    line = element("line", x1=3, y1=0, x2=GAP - 8, y2=0, stroke_width=2, class_="line")
    return line + element("path", d=f"M{GAP - 9} -5v10l7 -5z", class_="tip")
