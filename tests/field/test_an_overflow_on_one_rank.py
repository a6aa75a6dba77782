"""An overflow in one rank's gradients: all ranks skip the step and lower the scale, as one process does.

With ``torch.amp.GradScaler`` each rank looked at its own shard, so that one skipped and the others stepped:
replicated norms drift apart, and so do the scales.
https://github.com/facebookresearch/fairseq2/pull/1374, https://github.com/facebookresearch/fairscale/pull/179,
https://github.com/NVIDIA-NeMo/Speech/pull/3088
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from checkpoints import save_causal
from distributed import run_processes
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from training_runs import cpu_mesh

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 93, 2]])
STEPS = 8

Prepare = Callable[[Any, Any, Any], object]
"""What is done with a scaler, an optimizer and a model between the backward pass and the step."""


def scale_of(model: Any) -> float:
    """A scale with which the largest gradients alone overflow; the same on all ranks."""
    scale: float = model.config.scale_of_this_test
    return scale


def train(
    model: Any,
    kind: Any = torch.optim.SGD,
    prepare: Prepare | None = None,
    scaler: Any = None,
    **options: Any,
) -> Tensor:
    """The scales of each step, and the weights of a norm, which all ranks have."""
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    scaler = scaler or GradScaler("cpu", init_scale=scale_of(model), growth_interval=2)
    scales = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(IDS, labels=IDS).loss).backward()
        if prepare is not None:
            prepare(scaler, optimizer, model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return with_norm(model, scales)


def with_norm(model: Any, numbers: list[float]) -> Tensor:
    weight = dict(model.named_parameters())["model.norm.weight"]
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return torch.cat((torch.tensor(numbers).log2(), weight.detach()))


def plain(model: Any) -> Tensor:
    return train(model)


def foreach(model: Any) -> Tensor:
    return train(model, torch.optim.AdamW, foreach=True)


def fused(model: Any) -> Tensor:
    return train(model, torch.optim.AdamW, fused=True)


def clipped(model: Any) -> Tensor:
    def prepare(scaler: Any, optimizer: Any, model: Any) -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return train(model, prepare=prepare)


def clipped_by_value(model: Any) -> Tensor:
    def prepare(scaler: Any, optimizer: Any, model: Any) -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    return train(model, prepare=prepare)


def some_parameters(model: Any) -> Tensor:
    """Only those of the last layer and the norm; the others have gradients, too."""
    chosen = [p for n, p in model.named_parameters() if "layers.1." in n or n == "model.norm.weight"]
    return train(model, lambda parameters, lr: torch.optim.SGD(chosen, lr=lr))


def accelerated(model: Any) -> Tensor:
    Accelerator(cpu=True)
    scaler = GradScaler("cpu", init_scale=scale_of(model), growth_interval=2)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), scaler=scaler)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(IDS, labels=IDS).loss).backward()
        optimizer.step()
        found += [scaler.get_scale(), 1.0 + optimizer.step_was_skipped]
    return with_norm(model, found)


USES = (plain, foreach, fused, clipped, clipped_by_value, some_parameters, accelerated)


def own_scaler(model: Any) -> Tensor:
    """The one for FSDP, for a group of this process alone."""
    group = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    scale = scale_of(model)
    return train(model, scaler=ShardedGradScaler("cpu", scale, growth_interval=2, process_group=group))


class Estimating(torch.optim.SGD):
    """Its rate is estimated from all gradients, as those of D-Adaptation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=float(group["lr"] / norm))


class Clipping(torch.optim.SGD):
    """As those of bitsandbytes."""

    class args:
        percentile_clipping = 5


def estimated(model: Any) -> Tensor:
    return train(model, Estimating, scaler=GradScaler("cpu", 1.0))


def by_percentiles(model: Any) -> Tensor:
    return train(model, Clipping, scaler=GradScaler("cpu", 1.0))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama, converted for two ranks into "out"."""
    root = tmp_path_factory.mktemp("llama")
    plain = save_causal("llama", root / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).train()
    model(IDS, labels=IDS).loss.backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    config = transformers.AutoConfig.from_pretrained(plain)
    config.scale_of_this_test = torch.finfo(torch.float32).max / largest * 1.5
    config.save_pretrained(plain)
    shardconv.convert(plain, root / "out", tp=2, check=False)
    return root


def test_scales_and_steps_are_those_of_one_process(llama: Path) -> None:
    one = of_one(llama / "model", USES, training=True, dtype=torch.float32)
    ranks = of_ranks(llama / "out", (*USES, own_scaler), training=True, dtype=torch.float32)
    require_same((*USES, own_scaler), [*one, one[0]], ranks, tolerance=1e-4)


def test_decisions_by_norms_of_parts_are_refused(llama: Path) -> None:
    uses = (estimated, by_percentiles)
    ranks = of_ranks(llama / "out", uses, training=True, dtype=torch.float32)
    require_refused(uses, ranks, "computes its step from full tensors")


def sharded(path: Path) -> list[Tensor]:
    found = []
    for use in (plain, fused):
        mesh = cpu_mesh(2, 2)
        options = {"mesh": mesh, "training": True, "data_parallel": True, "dtype": torch.float32}
        found.append(use(shardconv_runtime.load(path, **options).train()))
    return found


def test_beside_fsdp(llama: Path) -> None:
    """Each process has a part of a part."""
    one = of_one(llama / "model", (plain, fused), training=True, dtype=torch.float32)
    for found in run_processes(4, sharded, llama / "out", start_group=True):
        for got, want in zip(found, one, strict=True):
            torch.testing.assert_close(got, want.value, rtol=1e-4, atol=1e-4)
