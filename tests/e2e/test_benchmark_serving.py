"""``benchmarks/serving.py`` with tiny sizes: all requests are answered, in every way with the same tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "serving.py"
TIMEOUT_S = 600


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    if not find_spec("accelerate"):
        pytest.skip("transformers' own tensor parallelism needs accelerate")
    file = tmp_path / "table.md"
    command = [sys.executable, str(SCRIPT), "--small", "--markdown", str(file)]
    subprocess.run(command, check=True, env=os.environ, timeout=TIMEOUT_S, capture_output=True)
    rows = [line for line in file.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 4
    assert all(row.endswith("| 8 of 8 |") for row in rows)
