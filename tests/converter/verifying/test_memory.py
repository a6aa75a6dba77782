"""What memory is left, as the kernel's files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import SolveError
from torch import nn

from shardconv.arguments import SolveOptions
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import solve_plan
from shardconv.simulation import available_memory, rank_simulation
from shardconv.simulation.available_memory import (
    GARBAGE_BYTES,
    available_bytes,
    collect_garbage,
    require_memory,
)
from shardconv.simulation.model_runs import PRECISIONS, usable_gradients

GB = 10**9


def machine(root: Path, groups: str, available: int = 64 * GB) -> None:
    """The files of a machine whose process is in these control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)


def group(directory: Path, limit: str, used: int, cached: int, version: int = 2) -> None:
    """The files of one control group."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


def test_of_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_without_groups(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    assert available_bytes(tmp_path) == 64 * GB


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job/step\n")
    top = tmp_path / "sys/fs/cgroup"
    group(top / "job/step", "max", 2 * GB, GB)
    group(top / "job", str(8 * GB), 3 * GB, GB)
    assert available_bytes(tmp_path) == 6 * GB
    group(top, str(4 * GB), 3 * GB, GB)
    assert available_bytes(tmp_path) == 2 * GB
    group(top / "job/step", str(GB), 2 * GB, 0)
    assert available_bytes(tmp_path) == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    machine(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    group(tmp_path / "sys/fs/cgroup/memory/a", str(8 * GB), 3 * GB, GB, version=1)
    group(tmp_path / "sys/fs/cgroup/cpu,cpuacct/a", str(GB), 0, 0, version=1)
    assert available_bytes(tmp_path) == 6 * GB


@pytest.mark.parametrize("groups", ["", "0::/elsewhere\n"])
def test_groups_that_cannot_be_seen(tmp_path: Path, groups: str) -> None:
    machine(tmp_path, groups)
    group(tmp_path / "sys/fs/cgroup", "garbage", 1, 1)
    assert available_bytes(tmp_path) == 64 * GB


def test_a_system_without_these_files(tmp_path: Path) -> None:
    assert 0 < available_bytes(tmp_path) < 1 << 50


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("std::bad_alloc"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_memory_that_runs_out_is_no_fault_of_a_model(error: Exception) -> None:
    with pytest.raises(MemoryError) as raised:
        require_memory(error)
    assert raised.value.__cause__ is error


def test_other_errors_are_left_to_the_caller() -> None:
    require_memory(RuntimeError("a dim that cannot be allocated"))


class WithoutMemory(nn.Module):
    """Memory runs out when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_no_reason_for_a_plan_is_that_memory_ran_out() -> None:
    inputs = TraceInputs({"x": torch.ones(2, 3)}, {})
    with pytest.raises(MemoryError):
        usable_gradients(WithoutMemory, inputs, PRECISIONS[0])


@pytest.mark.parametrize("calls", [0, 1])
def test_a_plan_says_that_memory_ran_out(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run of outputs as in that of gradients, where other errors leave a plan for inference only."""
    run_ranks, done = rank_simulation.run_ranks, []

    def without_memory(*given: Any, **more: Any) -> Any:
        if len(done) == calls:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes")
        done.append(given)
        return run_ranks(*given, **more)

    monkeypatch.setattr(rank_simulation, "run_ranks", without_memory)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=120
    )
    spec = ModelSpec("small", config, transformers.LlamaForCausalLM, "float32")
    with pytest.raises(SolveError, match=r"small: memory ran out .*--no-check"):
        solve_plan(spec, SolveOptions(2))


def test_garbage_is_searched_for_when_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    peak = 2**30
    monkeypatch.setattr(available_memory, "most_bytes", lambda: peak)
    monkeypatch.setattr(available_memory.gc, "collect", lambda: searches.append(peak))
    monkeypatch.setattr(available_memory._Searched, "at_bytes", 0)
    for growth in (0, 0, GARBAGE_BYTES - 1, 1, 0, GARBAGE_BYTES):
        peak += growth
        collect_garbage()
    assert searches == [2**30, 2**30 + GARBAGE_BYTES, 2**30 + 2 * GARBAGE_BYTES]
