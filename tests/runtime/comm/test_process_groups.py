"""Process groups of ranks whose processes have different histories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from converted import llama_plan, random_llama, write_directory
from distributed import run_processes
from shardconv_runtime.comm import process_groups
from shardconv_runtime.comm.mesh import launch
from torch.torch_version import TorchVersion


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "JOIN_TIMEOUT_S", 20)


def groups_after_others() -> list[float]:
    """Rank 0 has made three groups that the others know nothing of."""
    number = dist.get_rank()
    for _ in range(0 if number else 3):
        dist.new_group([0], use_local_synchronization=True)
    start = launch(device="cpu")
    assert start.group is not None
    groups = (
        [start.control, process_groups.axes_group(start.group, (0, 1))] if number < 2 else [start.control]
    )
    sums = [torch.tensor(number + 1.0) for _ in groups]
    for x, group in zip(sums, groups, strict=True):
        dist.all_reduce(x, group=group)
    return [x.item() for x in sums]


def test_processes_that_made_other_groups_before_find_each_other() -> None:
    assert run_processes(3, groups_after_others, start_group=True) == [[6, 3], [6, 3], [6]]


def load_with_a_draft(path: Path, draft: Path) -> list[int]:
    """Rank 0 alone loads a second model, before the one that all load."""
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        shardconv_runtime.load(draft, process_group=alone)
    model = shardconv_runtime.load(path)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    tokens: list[int] = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
    return tokens


def test_a_model_that_rank_0_alone_loaded_before(tmp_path: Path) -> None:
    model = random_llama()
    draft, path = (
        write_directory(tmp_path / str(tp), model, llama_plan(model.config, (tp,))) for tp in (1, 2)
    )
    first, second = run_processes(2, load_with_a_draft, path, draft, start_group=True)
    assert first == second
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert first == model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()


def bound_while_made() -> list[object]:
    world = dist.group.WORLD
    assert world is not None
    bound = torch.device("cuda", dist.get_rank())
    world.bound_device_id = bound
    seen: list[object] = []
    make = process_groups._c10d._new_process_group_helper

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(world.bound_device_id)
        return make(*args, **kwargs)

    process_groups._c10d._new_process_group_helper = watched
    dist.barrier(process_groups.control_group(world))  # the first one to end takes the store with it
    seen.append(world.bound_device_id == bound)
    world.bound_device_id = None
    return seen


def test_a_bound_default_group_is_not_split() -> None:
    """Splitting takes all of its processes; only the members of the new group are here."""
    assert run_processes(2, bound_while_made, start_group=True) == [[None, True]] * 2


def policies_of_loops(path: Path) -> tuple[set[int], set[int], set[int]]:
    """Of gloo's loops after loading, of them if one was given another policy, and of all other threads."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    shardconv_runtime.load(path)
    loops, others = policies()
    os.sched_setscheduler(min(loops), os.SCHED_IDLE, os.sched_param(0))
    process_groups.calm_gloo()
    return set(loops.values()), set(policies()[0].values()), set(others.values())


def policies() -> tuple[dict[int, int], dict[int, int]]:
    loops, others = {}, {}
    for task in Path("/proc/self/task").glob("*"):
        is_loop = (task / "comm").read_text().strip() == process_groups.GLOO_LOOP
        (loops if is_loop else others)[int(task.name)] = os.sched_getscheduler(int(task.name))
    return loops, others


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies of Linux")
@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13), reason="earlier ones do not name the loops")
def test_loops_of_gloo_preempt_nobody(tmp_path: Path) -> None:
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,)))
    for loaded, other, rest in run_processes(2, policies_of_loops, path):
        assert loaded == {os.SCHED_BATCH}
        assert other == {os.SCHED_BATCH, os.SCHED_IDLE}
        assert rest == {os.SCHED_OTHER}
