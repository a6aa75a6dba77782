"""Left edges and widths on the page of a picture, in pixels: the page has cards, a card has lanes."""

from __future__ import annotations

WIDTH = 800
MARGIN, PAD = 22.0, 14.0
CARD_X, CARD_WIDTH = MARGIN, WIDTH - 2 * MARGIN
LANE_X, LANE_WIDTH = CARD_X + PAD, CARD_WIDTH - 2 * PAD
INNER_X, INNER_WIDTH = LANE_X + 12.0, LANE_WIDTH - 24.0
"""The content of a lane."""
