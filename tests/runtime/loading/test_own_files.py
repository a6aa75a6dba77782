"""A rank needs its own files and those in common/, and touches nothing else of the directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import shardconv_runtime
import torch
from converted import llama_plan, random_llama, write_directory
from distributed import run_processes
from shardconv_runtime.files.manifest import rank_directory

IDS = [[1, 5, 100, 7]]


def load_own(path: Path) -> torch.Tensor:
    model = shardconv_runtime.load(path / os.environ["RANK"])
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor(IDS)).logits
    return logits


def mapped_files(below: Path) -> set[Path]:
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return {Path(p).relative_to(below) for p in paths if p.startswith(f"{below}/")}


def load_and_look(path: Path) -> set[str]:
    model = shardconv_runtime.load(path)
    assert all(not p.is_meta for p in model.parameters())
    return {file.parts[0] for file in mapped_files(path)}


def test_each_host_may_have_the_files_of_its_ranks_alone(tmp_path: Path) -> None:
    model = random_llama()
    converted = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,)), shards=2)
    for rank in (0, 1):
        shutil.copytree(converted, tmp_path / str(rank))
        shutil.rmtree(tmp_path / str(rank) / rank_directory(1 - rank, 2))
    with torch.no_grad():
        expected = model(torch.tensor(IDS)).logits
    for logits in run_processes(2, load_own, tmp_path):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
def test_what_is_mapped(tmp_path: Path) -> None:
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,)), shards=2)
    found = run_processes(2, load_and_look, path)
    assert found == [{"common", rank_directory(rank, 2)} for rank in (0, 1)]
