"""A type checker knows what a user's script gets from the runtime: without ``Any`` and without an ignore."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "typing" / "users_script.py"
ROOT = Path(__file__).parent.parent

WRONG = {
    "load(1)": "incompatible type",
    'load("out", trainig=True)': 'did you mean "training"',
    'load("out", training="yes")': "incompatible type",
    'load("out").generate(1)': "No overload variant",
    'Hub(revison="main")': 'did you mean "revision"',
}


def checked(code: Path, cache: Path) -> str:
    """What mypy says. torch does not annotate ``backward``, so that calls of such functions are allowed."""
    command = [sys.executable, "-m", "mypy", "--strict", "--allow-untyped-calls", "--config-file="]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "runtime")}
    done = subprocess.run(
        [*command, "--cache-dir", str(cache), str(code)], env=environment, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_users_script_is_typed(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    assert "Any" not in text
    assert "ignore" not in text
    assert "Success" in checked(SCRIPT, tmp_path / "cache")
    shown = tmp_path / "shown.py"
    calls = "\n".join(f"s.{call}" for call in WRONG)
    shown.write_text(f'import shardconv_runtime as s\nreveal_type(s.load("out"))\n{calls}\n')
    lines = checked(shown, tmp_path / "cache").splitlines()
    assert 'Revealed type is "shardconv_runtime.loaded.LoadedModel"' in lines[0]
    for number, message in enumerate(WRONG.values(), start=3):
        about = [line for line in lines if line.startswith(f"{shown}:{number}:")]
        assert any(message in line for line in about), (number, lines)
