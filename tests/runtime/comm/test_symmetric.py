"""Sums in symmetric memory: here the kernel is a stand-in over gloo, in the order of the ranks as torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from converted import llama_plan, random_llama, write_directory
from distributed import run_errors, run_processes
from shardconv_runtime import Communication
from shardconv_runtime.comm import symmetric
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.errors import LaunchError, PlanError
from torch import Tensor
from warm_compiler import warm_up

IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_llama(torch.float32)
    plan = llama_plan(model.config, (2,), "float32")
    return write_directory(tmp_path_factory.mktemp("symmetric") / "out", model, plan)


def load(path: Path, kinds: list[Any]) -> None:
    shardconv_runtime.load(path, communication=Communication(all_reduce=kinds[dist.get_rank()]))


def test_without_nccl_it_is_refused_on_all_ranks(path: Path) -> None:
    for error in run_errors(2, load, path, ["symmetric"] * 2, start_group=True):
        assert isinstance(error, LaunchError)
        assert 'all_reduce="symmetric" needs GPUs and nccl, and the model is on cpu' in str(error)


def test_all_ranks_take_the_same_one(path: Path) -> None:
    for error in run_errors(2, load, path, ["symmetric", None], start_group=True):
        assert isinstance(error, LaunchError)
        assert "the ranks must load the same form" in str(error)


def test_another_name_is_refused(path: Path) -> None:
    first, second = run_errors(2, load, path, ["symetric"] * 2, start_group=True)
    assert isinstance(first, PlanError)
    assert isinstance(second, PlanError)
    assert "all_reduce='symetric' should be 'symmetric'" in str(first)


def stand_in() -> list[int]:
    """In place of the kernel and its memory; the sizes of the tensors that it has summed."""
    seen: list[int] = []

    def in_rank_order(mine: Tensor, op: str, group_name: str) -> Tensor:
        _, buffer = symmetric._shared[group_name]
        assert mine.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        seen.append(mine.numel())
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce", in_rank_order, "CPU")
    symmetric.can_capture = lambda start: True
    symmetric._shared_buffer = lambda device, group: torch.empty(symmetric.MAX_BYTES, dtype=torch.uint8)
    symmetric.keep_library = library  # type: ignore[attr-defined]  # as long as the process
    return seen


def logits_of_rank(path: Path, compiled: bool) -> tuple[Tensor, Tensor, int]:
    seen = stand_in()
    model = shardconv_runtime.load(path, communication=Communication(all_reduce="symmetric"))
    with torch.no_grad():
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        logits = call(IDS, use_cache=False).logits
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return logits, tokens, len(seen)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_sums_in_it(path: Path, compiled: bool) -> None:
    warm_up()
    model = random_llama(torch.float32)
    (first, tokens, number), (second, others, _) = run_processes(2, logits_of_rank, path, compiled)
    assert torch.equal(first, second)
    assert torch.equal(tokens, others)
    with torch.no_grad():
        torch.testing.assert_close(first, model(IDS).logits, rtol=1e-4, atol=1e-3)
    assert number > 0


def sums_of_rank() -> tuple[list[Tensor], list[int]]:
    seen = stand_in()
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    symmetric.prepare_symmetric(Launch(rank, 2, torch.device("cpu"), group), [group])
    kinds = [
        ((4, 8), torch.bfloat16),
        ((3,), torch.float32),  # no multiple of 16 bytes
        ((symmetric.MAX_BYTES // 4,), torch.float32),
        ((symmetric.MAX_BYTES // 4 + 4,), torch.float32),
        ((8,), torch.float64),
        ((0, 8), torch.float32),
    ]
    inputs = [torch.full(shape, rank + 1.0, dtype=dtype) for shape, dtype in kinds]
    sums = [symmetric.symmetric_sum(x, group.group_name) for x in inputs]
    assert all(bool((x == rank + 1).all()) for x in inputs), "the inputs stay"
    return sums, seen


def test_which_tensors_are_summed_in_one_step() -> None:
    for sums, seen in run_processes(2, sums_of_rank, start_group=True):
        assert all(bool((x == 3).all()) for x in sums)
        assert seen == [32, symmetric.MAX_BYTES // 4, 0]
