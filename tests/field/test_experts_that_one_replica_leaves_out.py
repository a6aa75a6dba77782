"""Experts that are modules, of which the tokens of each replica choose other ones, beside FSDP.

Each replica reduced the gradients that it had: other tensors on each, which ended the processes or hung them.
https://github.com/pytorch/pytorch/issues/158719, https://github.com/THUDM/slime/pull/1010
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
from distributed import run_errors, run_processes
from shardconv_runtime import Communication, PlanError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from zoo.saved import save_random

import shardconv


def gradients(path: Path, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of the batch of this process's replica; all replicas get the mean."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"mesh": mesh, "training": True, "data_parallel": True, "dtype": torch.float32}
    model = shardconv_runtime.load(path, **options, communication=Communication(timeout_s=30))
    model(**batches[mesh["dp"].get_local_rank()]).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def test_experts_that_the_tokens_of_one_replica_do_not_choose(tmp_path: Path) -> None:
    """They are modules of their own in a layer; each replica has gradients of others of them."""
    model = save_random("seq2seq", "switch_transformers", tmp_path / "model").float().eval()
    shardconv.convert(tmp_path / "model", tmp_path / "out", tp=1, check=False)
    rng = torch.Generator().manual_seed(1)
    one = {name: torch.full((1, 4), 7) for name in ("input_ids", "decoder_input_ids", "labels")}
    many = {name: torch.randint(3, 100, (4, 16), generator=rng) for name in one}
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # of newer versions of torch
        for error in run_errors(2, gradients, tmp_path / "out", [one, many], start_group=True):
            assert isinstance(error, PlanError)
        return
    unused = []
    for batch in (one, many):
        before = {n for n, p in model.named_parameters() if p.grad is not None}
        (model(**batch).loss / 2).backward()
        unused.append({n for n, p in model.named_parameters() if p.grad is None} - before)
    assert len(unused[0]) > len(unused[1]), "one replica uses fewer experts"
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for found in run_processes(2, gradients, tmp_path / "out", [one, many], start_group=True):
        assert want.keys() <= found.keys()
        for name, gradient in found.items():
            expected = want.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)
