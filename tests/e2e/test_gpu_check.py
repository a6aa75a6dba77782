"""``scripts/gpu_check``: what it says where there is no GPU, and that its sections run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked, run_script

COMMAND = Path(__file__).parents[2] / "scripts" / "gpu_check"
TIMEOUT_S = 1500
NAMES = ("nccl", "ranks", "gpus", "memory", "load", "rank")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """With the interpreter of the tests, from a directory that is not the repository's."""
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, env=env, cwd="/")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_was_not_checked(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    *lines, verdict, count = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [["not", "checked", name] for name in NAMES]
    assert verdict == "nothing was checked on a GPU"
    assert count == "0 ok, 0 FAILED, 6 not checked"
    written = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert {line["status"] for line in written} == {"not checked"}
    assert all(line["why"] for line in written)


def run_on_the_cpu(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """The process, and the lines that it wrote."""
    files = ["--directory", str(tmp_path), "--json", str(tmp_path / "found.json")]
    argv = [str(COMMAND), "--device", "cpu", "--small", *files, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_forked(run_script, COMMAND.with_suffix(".py"), argv=argv, env=env, timeout=TIMEOUT_S)
    assert "nothing was checked on a GPU" in done.stdout.splitlines()
    return done, json.loads((tmp_path / "found.json").read_text())["lines"]


@pytest.mark.slow
def test_loading_runs_on_the_cpu(tmp_path: Path) -> None:
    done, lines = run_on_the_cpu(tmp_path, "--sections", "load")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["status"] for line in lines} == {"ok"}
    rates = {line["what"]: line["number"] for line in lines if line["unit"] == "GB/s"}
    for what in ("read into memory", "safetensors load_file", "load"):
        assert rates[f"{what}, cold"] > 0
        assert rates[f"{what}, warm"] > 0


def test_a_section_that_takes_too_long_fails_and_the_next_one_is_run(tmp_path: Path) -> None:
    done, lines = run_on_the_cpu(tmp_path, "--sections", "ranks", "load", "--section-limit", "0.5")
    assert done.returncode == 1
    assert [(line["section"], line["status"], line["why"]) for line in lines] == [
        ("ranks", "FAILED", "ran past 0.5 s"),
        ("load", "FAILED", "ran past 0.5 s"),
    ]


@pytest.mark.slow
def test_all_sections_run_on_the_cpu(tmp_path: Path) -> None:
    done, lines = run_on_the_cpu(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line["what"]: line["status"] for line in lines}
    for what in (
        "all_reduce and all_gather",
        "decode, compiled",
        "logits, float32, tp 4, 2 kv heads",
        "16 greedy tokens, tp 2, 4 kv heads",
        "generate_batch has the tokens of generate",
        "whole experts, 2 ranks: 16 tokens, beams",
        "dense, 2 ranks: compiled tokens, a padded batch",
        "dense, 2 ranks: tokens sampled inside of a graph, on all ranks",
        "dense, 2 ranks: each step is recorded once",
        "experts, bfloat16, 2 ranks: logits of the median token, eager",
        "whole experts, bfloat16, 2 ranks: logits and 16 tokens on all ranks, compiled",
        "loss, 2 ranks: loss from sharded logits, without waits",
        "many requests, 2 ranks: generate_batch has the tokens of generate",
        "repeated calls, 2 ranks: memory that repeated calls of generate add, eager",
        'speed, 2 ranks: transformers, tp_plan="auto"',
        "repeated calls, 2 ranks: memory that repeated calls of generate add, compiled",
        "a rank fails, 2 ranks: the steps are recorded",
        "a rank fails, 2 ranks: they raise",
        "a rank fails, eager, 2 ranks: they raise",
    ):
        assert found[what] == "ok"
    for what in ("decode, CUDA graphs", "peak device memory of a load"):
        assert found[what] == "not checked"
