"""A model in parts of replicas is evaluated, and its optimizer is made after that.

FSDP2 keeps the outermost module's parameters gathered for a backward pass, which does not come: the optimizer
took them, and stepped tensors that the next forward pass threw away. Report: pytorch#131965.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime import DataParallel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])


def evaluated_and_trained(model: Any) -> Tensor:
    with torch.no_grad():
        model(IDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


def on_rank(out: Path) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    settings = (DataParallel(), DataParallel(reshard_after_forward=False))
    return [
        evaluated_and_trained(shardconv_runtime.load(out, mesh=mesh, training=True, data_parallel=each))
        for each in settings
    ]


def test_the_parameters_of_the_model_are_trained(saved_llama: Path, tmp_path: Path) -> None:
    """As in one process."""
    shardconv.convert(saved_llama, tmp_path / "out", tp=2, check=False)
    wanted = evaluated_and_trained(transformers.LlamaForCausalLM.from_pretrained(saved_llama))
    for found in run_processes(2, on_rank, tmp_path / "out", start_group=True):
        for logits in found:
            assert torch.allclose(logits, wanted, atol=1e-4)
