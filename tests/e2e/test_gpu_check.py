"""``scripts/gpu_check``: what it says without a GPU, that its sections run, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_forked, run_script
from places import ROOT

COMMAND = ROOT / "scripts" / "gpu_check"
TIMEOUT_S = 1500
NAMES = ("rank", "nccl", "tp1", "load", "training", "ranks", "packed", "gpus")

NO_METADATA = """
import importlib.metadata as metadata
find = metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.startswith("shardconv"):
        raise metadata.PackageNotFoundError(name)
    return find(cls, name)
metadata.Distribution.from_name = classmethod(from_name)
"""
"""Of ``sitecustomize``: the packages are on the path, and nothing tells that they were ever installed."""


def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    """With the interpreter of the tests, from a directory that is not the repository's."""
    variables = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [COMMAND, *arguments], stdout=pipe, stderr=pipe, text=True, env=variables, cwd="/"
    )


def run(*arguments: str, **env: str) -> tuple[int, list[str], str]:
    """The exit code, the lines of the output, and the errors."""
    child = start(*arguments, **env)
    out, errors = child.communicate(timeout=TIMEOUT_S)
    return child.returncode, out.splitlines(), errors


def run_forked_here(*arguments: str) -> tuple[int, list[str], str]:
    """The same in a fork of this process, which need not import torch again; no section can run in time."""
    script = COMMAND.with_suffix(".py")
    done = run_forked(run_script, script, argv=[str(script), *arguments], timeout=TIMEOUT_S)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_was_not_checked(tmp_path: Path) -> None:
    code, output, errors = run_forked_here("--json", str(tmp_path / "found.json"))
    assert code == 0, errors
    *lines, verdict, count = output
    assert [line.split()[:3] for line in lines] == [["not", "checked", name] for name in NAMES]
    assert verdict == "nothing was checked on a GPU"
    assert count == f"0 ok, 0 FAILED, {len(NAMES)} not checked"
    written = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert {line["status"] for line in written} == {"not checked"}
    assert all(line["why"] for line in written)


def on_the_cpu(tmp_path: Path, *arguments: str) -> list[str]:
    return [
        "--device",
        "cpu",
        "--small",
        "--directory",
        str(tmp_path),
        "--json",
        str(tmp_path / "a.json"),
        *arguments,
    ]


def lines_of(tmp_path: Path) -> list[Any]:
    return json.loads((tmp_path / "a.json").read_text())["lines"]


def test_sections_run_from_a_clone_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_METADATA)
    names = ("rank",)
    code, output, errors = run(*on_the_cpu(tmp_path, "--sections", *names), PYTHONPATH=str(tmp_path))
    assert code == 0, "\n".join(output) + errors
    assert "nothing was checked on a GPU" in output
    found = {(line["section"], line["what"]): line for line in lines_of(tmp_path)}
    for key in (
        ("rank", "roofline of a token"),
        ("rank", "token of generate, eager"),
        ("rank", "token of generate, CUDA graphs"),
        ("rank", "token of generate, compiled, no graphs"),
    ):
        assert found[key]["status"] == "ok"
    assert found["rank", "recordings of steps, CUDA graphs"]["number"] == 1
    for name in names:
        assert (tmp_path / "a.logs" / f"{name}.log").read_text()


@pytest.mark.slow
def test_all_sections_run_on_the_cpu(tmp_path: Path) -> None:
    """Also from a clone that is not installed."""
    (tmp_path / "sitecustomize.py").write_text(NO_METADATA)
    code, output, errors = run(*on_the_cpu(tmp_path), PYTHONPATH=str(tmp_path))
    assert code == 0, "\n".join(output) + errors
    lines = lines_of(tmp_path)
    assert {line["section"] for line in lines} == set(NAMES)
    found = {line["what"]: line["status"] for line in lines}
    for what in (
        "16 greedy tokens, CUDA graphs",
        "token of generate, 8B, shardconv, CUDA graphs",
        "generate_batch has the tokens of generate",
        "load, cold",
        "load, warm",
        "logits, float32, tp 4, 2 kv heads",
        "16 greedy tokens, tp 2, 4 kv heads",
        "logits, FP8 in blocks, dequantized",
        "all_reduce and all_gather",
        "loss, float32",
        "gradients, float32, the worst parameter",
        "step of 1B, bfloat16, recomputed",
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
    for what in (
        "sums in symmetric memory",
        "peak device memory of a load",
        "all_reduce and all_gather in a CUDA graph",
    ):
        assert found[what] == "not checked"


def test_a_section_that_takes_too_long_fails_and_the_next_one_is_run(tmp_path: Path) -> None:
    code, _, _ = run(*on_the_cpu(tmp_path, "--sections", "ranks", "load", "--section-limit", "0.5"))
    assert code == 1
    lines = lines_of(tmp_path)
    assert [(line["section"], line["status"]) for line in lines] == [("ranks", "FAILED"), ("load", "FAILED")]
    assert all(line["why"].startswith("ran past 0.5 s") for line in lines)


def test_sections_for_which_there_is_no_time_are_named_at_the_end(tmp_path: Path) -> None:
    code, output, _ = run_forked_here(*on_the_cpu(tmp_path, "--seconds", "5", "--sections", "rank", "load"))
    assert code == 0
    assert output[-3:] == [
        "nothing was checked on a GPU",
        "not reached: rank, load",
        "0 ok, 0 FAILED, 2 not checked",
    ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_the_rows_it_has(tmp_path: Path, how: signal.Signals) -> None:
    """Also from a clone that is not installed."""
    (tmp_path / "sitecustomize.py").write_text(NO_METADATA)
    child = start(*on_the_cpu(tmp_path, "--sections", "rank", "load"), PYTHONPATH=str(tmp_path))
    deadline = time.monotonic() + 120
    while not (tmp_path / "a.json").exists() or len(lines_of(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(how)
    out, _ = child.communicate(timeout=60)
    lines = lines_of(tmp_path)
    assert len(lines) >= 2
    assert {line["status"] for line in lines} == {"ok"}
    if how == signal.SIGTERM:
        assert child.returncode == 143
        assert "not reached: load" in out


class TestRecordings:
    """Steps that were not recorded, or again and again, are a failed check."""

    @pytest.mark.parametrize(("counted", "status"), [(1, "ok"), (0, "FAILED"), (2, "FAILED")])
    def test_their_number(
        self,
        counted: int,
        status: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        for name in ("scripts", "benchmarks"):
            monkeypatch.syspath_prepend(ROOT / name)
        import gpu_sections

        replays = [SimpleNamespace(_graph=None)] * min(counted, 1)
        model = torch.nn.Module()
        vars(model)[gpu_sections.DECODER] = SimpleNamespace(
            num_recordings=counted, _recorded={"bucket": (None, replays)} if replays else {}
        )
        section = gpu_sections.Section("rank", "cpu", True, tmp_path)
        gpu_sections._tell_recordings(section, model, "here")
        line = json.loads(capsys.readouterr().out)
        assert (line["status"], line["number"]) == (status, counted)


def test_the_table_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fills the page between its marks, and can be written again."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_check

    page = tmp_path / "gpu.md"
    page.write_text("before\n<!-- results -->\nnot yet\n<!-- end of results -->\nafter\n")
    monkeypatch.setattr(gpu_check, "TABLE_FILE", page)
    line = {
        "section": "rank",
        "what": "token",
        "status": "ok",
        "number": 2.0,
        "unit": "ms",
        "ratio": 3.5,
        "of": "it",
    }
    run_of = {"machine": {"gpu": "H100"}, "lines": [line]}
    (tmp_path / "run.json").write_text(json.dumps(run_of))
    for _ in range(2):
        gpu_check.write_table(tmp_path / "run.json")
    text = page.read_text()
    assert "not yet" not in text
    assert text.count("| rank | token | 2 ms, 3.5 x it | ok |") == 1
    assert text.startswith("before\n<!-- results -->\nRun with gpu H100.")
    assert text.endswith("<!-- end of results -->\nafter\n")
