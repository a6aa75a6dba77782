"""Which GPU a rank takes, on hosts whose GPUs are told to torch's functions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from converted import llama_plan, random_llama, write_directory
from distributed import run_errors, run_processes
from shardconv_runtime.comm import agreement, mesh, process_groups
from shardconv_runtime.comm.agreement import shared_gpu_error
from shardconv_runtime.comm.mesh import Launch, find_device
from shardconv_runtime.errors import LaunchError


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host of four GPUs, where no process is bound to one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_gpu_for_each_local_rank(host: pytest.MonkeyPatch) -> None:
    assert find_device(None, 0) == torch.device("cuda", 0)
    host.setenv("LOCAL_RANK", "3")
    assert find_device(None, 4) == find_device("cuda", 4) == torch.device("cuda", 3)
    assert find_device("cuda:1", 8) == torch.device("cuda", 1)
    assert find_device("cpu", 8) == torch.device("cpu")


def test_the_gpu_to_which_the_process_is_bound(host: pytest.MonkeyPatch) -> None:
    host.setenv("LOCAL_RANK", "3")
    host.setattr(torch.cuda, "current_device", lambda: 2)
    assert find_device(None, 4) == torch.device("cuda", 2)
    assert find_device("cuda:1", 4) == torch.device("cuda", 1)


def test_more_processes_than_gpus_are_refused(host: pytest.MonkeyPatch) -> None:
    for local, num_local, told in (("4", 0, 5), ("0", 8, 8), ("7", 8, 8)):
        host.setenv("LOCAL_RANK", local)
        with pytest.raises(
            LaunchError, match=f"started {told} processes on this host, where 4 GPUs are visible"
        ):
            find_device(None, num_local)


def test_a_launcher_that_shows_each_process_its_own_gpu(host: pytest.MonkeyPatch) -> None:
    host.setattr(torch.cuda, "device_count", lambda: 1)
    host.setenv("LOCAL_RANK", "5")
    assert find_device(None, 8) == torch.device("cuda", 0)


def test_a_launcher_that_gives_no_local_rank(host: pytest.MonkeyPatch) -> None:
    host.setenv("RANK", "6")
    assert find_device(None, 0) == torch.device("cuda", 2)


def test_ranks_with_one_gpu_are_found() -> None:
    gpus = [("a", "gpu-0"), ("a", "gpu-1"), ("b", "gpu-0")]
    assert shared_gpu_error(gpus) is None
    error = shared_gpu_error([*gpus, ("a", "gpu-1")])
    assert str(error).startswith("ranks 1 and 3 use the same GPU (gpu-1 on a)")


def compare_gpus(identities: list[str]) -> None:
    rank = dist.get_rank()
    agreement.can_capture = lambda start: True
    agreement.describe_gpu = lambda device: ("host", identities[rank])
    group = dist.group.WORLD
    agreement.require_own_gpus(Launch(rank, len(identities), torch.device("cpu"), group, group))


def test_all_ranks_raise_if_two_have_the_same_gpu() -> None:
    assert run_errors(2, compare_gpus, ["one", "two"], start_group=True) == [None, None]
    errors = run_errors(2, compare_gpus, ["one", "one"], start_group=True)
    assert [type(error) for error in errors] == [LaunchError, LaunchError]


def load_with_a_broken_link(path: Path) -> None:
    if dist.get_rank() == 1:
        reduce = dist.all_reduce

        def fail(*args: Any, **kwargs: Any) -> None:
            reduce(*args, **kwargs)
            raise dist.DistBackendError("NCCL error: unhandled system error")

        dist.all_reduce = fail
    shardconv_runtime.load(path)


def test_a_link_that_does_not_work_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,)))
    first, second = run_errors(2, load_with_a_broken_link, path, start_group=True)
    assert isinstance(first, LaunchError)
    assert isinstance(second, LaunchError)
    assert str(second) == "rank 1 cannot communicate with other ranks: NCCL error: unhandled system error"
    assert str(first) == f"rank 1: {second}"


def groups_warmed(path: Path, others_come: bool) -> Any:
    """How many ranks were in the groups that had a collective when the model was loaded."""
    sizes = []
    warm_up = process_groups.warm_up

    def watched(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
        groups = list(groups)
        sizes.extend(group.size() for group in groups)
        if others_come or dist.get_rank() == 0:
            process_groups.JOIN_TIMEOUT_S = 1
            warm_up(groups, device)

    mesh.warm_up = watched
    shardconv_runtime.load(path)
    return sizes


def test_every_group_is_connected_by_load(tmp_path: Path) -> None:
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,)))
    assert run_processes(2, groups_warmed, path, True, start_group=True) == [[2]] * 2
    first, second = run_errors(2, groups_warmed, path, False, start_group=True)
    assert "rank 0 cannot communicate with other ranks" in str(first)
    assert str(second) == f"rank 0: {first}"
