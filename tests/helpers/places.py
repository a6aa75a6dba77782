"""Where things are in this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN_PLAN = Path(__file__).with_name("golden_plan.json")
"""A plan with every field of the format."""
