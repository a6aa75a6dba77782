"""Ports for the processes that benchmarks start: those of the tests."""

from __future__ import annotations

import runpy
from pathlib import Path

_OF_TESTS = Path(__file__).resolve().parents[1] / "tests" / "helpers" / "ports.py"

free_port = runpy.run_path(str(_OF_TESTS))["free_port"]
