"""The SVG elements of pictures, their colors, and text that fits a width."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

# Left edges and widths on the page of a picture, in pixels: the page has cards, a card has lanes.

WIDTH = 800
MARGIN, PAD = 22.0, 14.0
CARD_X, CARD_WIDTH = MARGIN, WIDTH - 2 * MARGIN
LANE_X, LANE_WIDTH = CARD_X + PAD, CARD_WIDTH - 2 * PAD
INNER_X, INNER_WIDTH = LANE_X + 12.0, LANE_WIDTH - 24.0
"""The content of a lane."""


RANK_COLORS = ("#5b8ff9", "#61d9a5", "#f6bd16", "#f0785a", "#6fcbe8", "#a284d8", "#ff9f4a", "#f194bd")
"""Distinct from their neighbors, and light enough for dark text on light and dark backgrounds."""

COLLECTIVE_COLORS = {"all_reduce": "#c2255c", "all_gather": "#0b7285", "reduce_scatter": "#5f3dc4"}
"""Dark enough for white text."""

CSS = """
.sc { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.sc text { fill: #1b2430; }
.sc .page { fill: #ffffff; stroke: #d5dde7; }
.sc .card { fill: #f5f7fa; stroke: #d5dde7; }
.sc .lane { fill: #ffffff; stroke: #e3e9f0; }
.sc .muted { fill: #56657a; }
.sc .line { stroke: #9aa8b9; fill: none; }
.sc .tip { fill: #9aa8b9; }
.sc .replicated { fill: #c6ced8; }
.sc .gap { fill: #e6ebf1; }
.sc .edge { stroke: #1b2430; stroke-opacity: .55; fill: none; }
.sc .shard { stroke: #ffffff; stroke-width: 1; }
.sc .pill { fill: #dfe6ef; }
.sc .on { fill: #10151f; }
.sc .bar { fill: #ffffff; }
.sc .hatch { stroke: #10151f; stroke-opacity: .55; stroke-width: 1.6; }
@media screen and (prefers-color-scheme: dark) {
.sc text { fill: #e8edf4; }
.sc .page { fill: #10151c; stroke: #2d3745; }
.sc .card { fill: #19212b; stroke: #2d3745; }
.sc .lane { fill: #10161e; stroke: #2a3340; }
.sc .muted { fill: #9dabbd; }
.sc .line { stroke: #66758a; }
.sc .tip { fill: #66758a; }
.sc .replicated { fill: #556172; }
.sc .gap { fill: #2a3440; }
.sc .edge { stroke: #e8edf4; stroke-opacity: .45; }
.sc .shard { stroke: #10161e; }
.sc .pill { fill: #2d3847; }
.sc .on { fill: #10151f; }
.sc .bar { fill: #ffffff; }
}
"""
"""The style of every picture; classes apply inside ``.sc`` only, so that a page may embed pictures."""

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Row:
    """Markup that begins at y = 0, and its height."""

    markup: str
    height: float


_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_NARROW, _WIDE = frozenset("iljtfr.,:;'|![](){}/ -"), frozenset("mwMW@%")


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return an upper estimate of the width of text in a system font."""
    size = 1.1 * size if bold else size
    units = sum(0.38 if c in _NARROW else 0.95 if c in _WIDE or ord(c) > 0x2E80 else 0.63 for c in text)
    return units * size


def fitted(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """Return text without its middle, if it is wider than ``width``; two characters stay."""
    if len(text) < 3 or text_width(text, size, bold=bold) <= width:
        return text
    num_shown = len(text)
    while num_shown > 2 and text_width(_shortened(text, num_shown), size, bold=bold) > width:
        num_shown -= 1 if num_shown < 64 else num_shown // 8
    return _shortened(text, num_shown)


def _shortened(text: str, num_shown: int) -> str:
    head = num_shown // 2
    return text[:head] + "…" + text[len(text) - (num_shown - head) :]


def number(value: float) -> str:
    """Return a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(name: str, content: str = "", /, **attributes: float | str) -> str:
    """Return an element; ``_`` in names of attributes becomes ``-``, and a trailing one is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def moved(x: float, y: float, markup: str) -> str:
    """Return markup whose origin is at (x, y)."""
    return element("g", markup, transform=f"translate({x:g} {round(y, 2):g})")


def rect(x: float, y: float, width: float, height: float, **attributes: float | str) -> str:
    """Return a rectangle."""
    return element("rect", x=x, y=y, width=max(width, 0), height=max(height, 0), **attributes)


def text(x: float, y: float, content: str, size: float, **attributes: float | str) -> str:
    """Return a line of text; ``content`` is escaped here."""
    return element("text", escape(printable(content)), **{"x": x, "y": y, "font_size": size, **attributes})


def title(content: str) -> str:
    """Return a tooltip, which screen readers read too."""
    return element("title", escape(printable(content)))


def printable(text: str) -> str:
    """Return text with a replacement for each character that XML does not allow."""
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
