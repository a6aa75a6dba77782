"""``benchmarks/pipeline.py`` with tiny sizes: all ways give the same tokens, and bytes are as planned."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "pipeline.py"
TIMEOUT_S = 600


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("ip") or not Path("/dev/net/tun").exists():
        pytest.skip("network namespaces need root, and ip")
    file = tmp_path / "table.md"
    command = [sys.executable, str(SCRIPT), "--small", "--tp", "1", "--delays", "2", "--markdown", str(file)]
    subprocess.run(command, check=True, env=os.environ, timeout=TIMEOUT_S, capture_output=True)
    rows = [line.split(" | ") for line in file.read_text().splitlines() if line.startswith("| ")]
    speeds, sizes = rows[1:5], rows[6:]
    assert [row[-1] for row in speeds] == ["yes |"] * 4
    for _, whole, whole_held, _, part, part_held, _, sent, sent_measured in sizes:
        assert (whole, part, f"{sent} |") == (whole_held, part_held, sent_measured)
    assert [row[-2] for row in sizes] == ["256", "0"]
