"""``benchmarks/decoding.py``: what is counted, in tiny sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decoding.py"
TIMEOUT_S = 900
LAYERS = 2


def rows_of(table: list[str]) -> list[dict[str, str]]:
    """By the names of the columns."""
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_counts_of_a_token_and_of_many_calls(tmp_path: Path) -> None:
    if not find_spec("accelerate"):
        pytest.skip("transformers' own tensor parallelism needs accelerate")
    file = tmp_path / "table.md"
    command = [sys.executable, str(SCRIPT), "--small", "--models", "narrow", "--tables", "host", "calls"]
    command += ["--markdown", str(file)]
    subprocess.run(command, check=True, env=os.environ, timeout=TIMEOUT_S, capture_output=True)
    parts = [part.strip() for part in file.read_text().split("\n\n")]
    tables = [part.splitlines() for part in parts if part.startswith("|")]
    host, calls = map(rows_of, tables)
    for tp in ("1", "2"):
        found = {row["what"]: row for row in host if row["tp"] == tp}
        products = {side: int(found[f"{side}, eager"]["products"]) for side in ("shardconv", "transformers")}
        assert products == {"shardconv": 4 * LAYERS + 1, "transformers": 7 * LAYERS + 1}
        assert found["shardconv, eager"]["waits"] == "1"
        times = [row["what"] for row in found.values() if row["ms a token"]]
        assert [what for what in times if "kernels" in what] == [
            "shardconv, compiled, with its kernels",
            "transformers, compiled, with its kernels",
        ]
    assert [int(row["calls of generate"]) for row in calls] == [0, 6, 12, 18, 24, 30]
    for count in ("recordings", "graphs", "buffers, MB"):
        assert len({row[count] for row in calls}) == 1, "flat after the warm-up"
