"""Draw the pictures of the README and of docs/start.md: docs/overview.svg and docs/layer.svg.

Each picture has its own background, and follows the color scheme of the reader's system.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from shardconv.reporting.svg import COLLECTIVE_COLORS, CSS, RANK_COLORS, element, rect, text  # noqa: E402

MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
ALL_REDUCE = COLLECTIVE_COLORS["all_reduce"]


def main() -> None:
    """Write both pictures."""
    for name, (parts, width, height, label) in {"overview": overview(), "layer": layer()}.items():
        page = rect(0.5, 0.5, width - 1, height - 1, rx=10, class_="page")
        style = element("style", CSS)
        tip = element("marker", element("path", d="M0 0L8 4L0 8Z", class_="tip"), **TIP)
        svg = element(
            "svg",
            style + element("defs", tip) + page + "\n" + "\n".join(parts) + "\n",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            width=width,
            height=height,
            role="img",
            aria_label=label,
            class_="sc",
        )
        (ROOT / "docs" / f"{name}.svg").write_text(svg + "\n")


TIP: dict[str, float | str] = {
    "id": "tip",
    "viewBox": "0 0 8 8",
    "refX": 6,
    "refY": 4,
    "markerWidth": 8,
    "markerHeight": 8,
    "orient": "auto",
}


def card(x: float, y: float, width: float, height: float, title: str) -> str:
    """A box with a title."""
    box = rect(x, y, width, height, rx=8, class_="card")
    return box + text(x + 12, y + 22, title, 13, font_weight="600")


def code(x: float, y: float, content: str, size: float = 11.5, **attributes: float | str) -> str:
    """A line in the font of code."""
    return text(x, y, content, size, font_family=MONO, **attributes)


def note(x: float, y: float, content: str, **attributes: float | str) -> str:
    """A line in small gray letters."""
    return text(x, y, content, 11, class_="muted", **attributes)


def arrow(path: str) -> str:
    """A line with a tip at its end."""
    return element("path", d=path, class_="line", stroke_width=1.6, marker_end="url(#tip)")


def shards(x: float, y: float, width: float, height: float, ranks: tuple[int, ...], *, rows: bool) -> str:
    """A matrix whose parts have the colors of their ranks; a part of another rank is only an outline."""
    found = ""
    for part in range(2):
        x0, y0 = (x, y + part * height / 2) if rows else (x + part * width / 2, y)
        w, h = (width, height / 2) if rows else (width / 2, height)
        if part in ranks:
            found += rect(x0, y0, w, h, fill=RANK_COLORS[part], class_="shard")
        else:
            found += rect(x0, y0, w, h, fill="none", class_="line", stroke_dasharray="3 3")
    return found


def overview() -> tuple[list[str], int, int, str]:
    """From a checkpoint to ranks."""
    parts = [
        card(20, 50, 180, 150, "Checkpoint"),
        code(32, 96, "config.json"),
        code(32, 114, "model.safetensors"),
        shards(32, 128, 156, 56, (0, 1), rows=False),
        arrow("M200 125H296"),
        code(248, 100, "shardconv", text_anchor="middle", font_weight="600"),
        code(248, 115, "convert", text_anchor="middle", font_weight="600"),
        note(248, 143, "once,", text_anchor="middle"),
        note(248, 157, "on a CPU", text_anchor="middle"),
        card(302, 50, 200, 150, "Converted directory"),
        code(314, 96, "plan.json"),
        note(384, 96, "verified first"),
        code(314, 116, "rank-00000-of-00002/"),
        rect(470, 107, 20, 10, fill=RANK_COLORS[0], class_="shard"),
        code(314, 136, "rank-00001-of-00002/"),
        rect(470, 127, 20, 10, fill=RANK_COLORS[1], class_="shard"),
        code(314, 156, "common/"),
        note(366, 156, "replicated tensors"),
        code(314, 176, "tokenizer, configs"),
        arrow("M502 125H598"),
        code(550, 100, "torchrun", text_anchor="middle", font_weight="600"),
        code(550, 115, "load(...)", text_anchor="middle", font_weight="600"),
        note(550, 143, "each rank reads", text_anchor="middle"),
        note(550, 157, "its own bytes", text_anchor="middle"),
        card(604, 20, 176, 92, "Rank 0"),
        shards(622, 56, 140, 40, (0,), rows=False),
        card(604, 142, 176, 92, "Rank 1"),
        shards(622, 178, 140, 40, (1,), rows=False),
        arrow("M650 116V138"),
        arrow("M734 138V116"),
        text(692, 131, "collectives", 11, text_anchor="middle", fill=ALL_REDUCE, class_="muted"),
        note(20, 232, "Every rank has the same transformers class; model.generate(...) works as usual."),
    ]  # fmt: skip
    label = (
        "shardconv convert turns a checkpoint into a plan and one set of files per rank; torchrun loads them"
    )
    return parts, 800, 254, label


def layer() -> tuple[list[str], int, int, str]:
    """A feed-forward block on two ranks."""
    parts = [text(20, 28, "A feed-forward block on two ranks", 14, font_weight="600")]
    for rank in range(2):
        y = 48 + 104 * rank
        parts += [
            rect(20, y, 760, 92, rx=8, class_="card"),
            text(34, y + 22, f"Rank {rank}", 13, font_weight="600"),
            code(34, y + 56, "x"),
            note(48, y + 56, "full"),
            arrow(f"M80 {y + 52}H126"),
            shards(134, y + 22, 110, 60, (rank,), rows=False),
            code(254, y + 40, "up_proj"),
            note(254, y + 56, "column-parallel:"),
            note(254, y + 71, "half of the outputs"),
            arrow(f"M356 {y + 52}H392"),
            shards(400, y + 22, 60, 60, (rank,), rows=True),
            code(470, y + 40, "down_proj"),
            note(470, y + 56, "row-parallel:"),
            note(470, y + 71, "half of the inputs"),
            arrow(f"M574 {y + 52}H614"),
        ]
    parts += [
        rect(620, 60, 74, 172, rx=8, fill=ALL_REDUCE),
        text(657, 142, "all_reduce", 12, text_anchor="middle", style="fill:#fff"),
        text(657, 158, "sums both", 11, text_anchor="middle", style="fill:#fff"),
    ]
    for rank in range(2):
        y = 48 + 104 * rank
        parts += [arrow(f"M694 {y + 52}H726"), code(734, y + 56, "y"), note(748, y + 56, "full")]
    parts.append(
        note(20, 278, "The activation in the middle is sharded, so one collective per block is enough.")
    )
    label = "A column-parallel and a row-parallel matrix on two ranks, followed by one all_reduce"
    return parts, 800, 296, label


if __name__ == "__main__":
    main()
