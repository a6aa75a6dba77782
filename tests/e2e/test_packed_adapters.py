"""Adapters over packed weights, in real processes: trained as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import library_checkpoints
import plain_kernels
import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from adapters import low_rank, scramble
from distributed import run_processes
from library_checkpoints import save_bnb
from packed_ranks import in_float32
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from shardconv_runtime.adapters.adapter_set import local_parts
from shardconv_runtime.errors import PlanError
from shardconv_runtime.loaded import loaded
from torch import Tensor

import shardconv

pytestmark = pytest.mark.formats

TOLERANCE = 1e-5
"""Of gradients, relative to the largest of a matrix: kernels compute in float32."""


def loss_of(model: Any) -> Tensor:
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def train(base: Path, saved: Path, out: Path, adapted: Path, result: Path) -> tuple[float, float, list[str]]:
    """How far the loss and the gradients are from those of one process, and what was refused."""
    plain_kernels.use_those_of_cpus()
    model = shardconv_runtime.load(out, adapter=adapted, dtype="float32", training=True)
    loss = loss_of(model.train())
    loss.backward()  # type: ignore[no-untyped-call]
    whole = PeftModel.from_pretrained(in_float32(base), saved, is_trainable=True)
    want = loss_of(whole.train())
    want.backward()  # type: ignore[no-untyped-call]
    inner = dict(model.get_base_model().named_parameters())
    gradients = {n: p.grad for n, p in whole.get_base_model().named_parameters() if p.grad is not None}
    assert {n for n, p in inner.items() if p.grad is not None} == gradients.keys()
    worst = 0.0
    for name, part in local_parts(gradients.items(), loaded(model).plan, dist.get_rank()):
        gradient = inner[name].grad
        assert gradient is not None
        worst = max(worst, ((gradient - part).abs().max() / gradients[name].abs().max()).item())
    model.save_pretrained(result)
    refused = []
    for call in (model.merge_adapter, lambda: shardconv_runtime.load(out, dtype="float32", training=True)):
        try:
            call()
        except PlanError as error:
            refused.append(str(error))
    return (loss - want).abs().item(), worst, refused


def save_trained(base: Path, path: Path) -> None:
    """Runs in a process of its own: libraries of formats start threads."""
    save_bnb(base, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = get_peft_model(in_float32(base), low_rank())
    torch.manual_seed(1)
    scramble(model)
    model.save_pretrained(path)


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    base = tmp_path / "base"
    run_processes(1, save_trained, base, tmp_path / "lora")
    shardconv.convert(base, tmp_path / "out", 2, check=False)
    shardconv.adapt(tmp_path / "out", tmp_path / "lora", tmp_path / "adapted")
    paths = base, tmp_path / "lora", tmp_path / "out", tmp_path / "adapted", tmp_path / "saved"
    for loss, gradient, refused in run_processes(2, train, *paths):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
        assert len(refused) == 2
    saved = load_adapter_tensors(tmp_path / "saved")
    assert saved.keys() == load_adapter_tensors(tmp_path / "lora").keys()


def load_adapter_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path / "adapter_model.safetensors")


def train_on_stages(base: Path, saved: Path, out: Path, adapted: Path) -> tuple[float, float, int]:
    """How far the loss and the gradients of a stage are from those of one process, and how many it has."""
    plain_kernels.use_those_of_cpus()
    model = shardconv_runtime.load(out, adapter=adapted, dtype="float32", training=True).train()
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = shardconv_runtime.Pipeline(model, microbatches=2).step({"input_ids": ids, "labels": ids})
    whole = PeftModel.from_pretrained(in_float32(base), saved, is_trainable=True)
    want = loss_of(whole.train())
    want.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in whole.get_base_model().named_parameters() if p.grad is not None}
    inner = {n: p.grad for n, p in model.get_base_model().named_parameters() if p.grad is not None}
    source = loaded(model)
    parts = dict(local_parts(gradients.items(), source.plan, source.rank))
    worst = max(((inner[n] - parts[n]).abs().max() / gradients[n].abs().max()).item() for n in inner)
    return (loss - want).abs().item(), worst, len(inner)


def save_two_layers(base: Path, path: Path) -> None:
    """A model that can be cut."""
    library_checkpoints.NUM_LAYERS = 2
    save_trained(base, path)


@pytest.mark.slow
def test_gradients_of_stages_are_those_of_one_process(tmp_path: Path) -> None:
    base = tmp_path / "base"
    run_processes(1, save_two_layers, base, tmp_path / "lora")
    shardconv.convert(base, tmp_path / "out", 2, pp=2, check=False)
    shardconv.adapt(tmp_path / "out", tmp_path / "lora", tmp_path / "adapted")
    paths = base, tmp_path / "lora", tmp_path / "out", tmp_path / "adapted"
    for loss, gradient, number in run_processes(4, train_on_stages, *paths):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
        assert number == 14
