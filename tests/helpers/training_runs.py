"""The same training, by one process on the unsharded model and by many on parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from checkpoints import CONFIGS, save
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from zoo.models import build

import shardconv
from shardconv.simulation.model_runs import Float64

BATCH, LENGTH, MICRO_BATCHES, VOCAB = 4, 13, 2, 131
"""Global batch of a micro batch; a length that two ranks do not divide."""
MAX_NORM, LEARNING_RATE = 0.5, 1e-2

CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 1, "pad_token_id": 0},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
"""Norms of queries and keys beside a single head of keys that both ranks hold; a fused matrix of which ranks
hold one segment alike; tied parameters and biases that are zero on one rank. No dropout."""


def save_model(model_type: str, path: Path) -> Path:
    """Save a random model of a type, in float64."""
    if model_type not in CHANGES:
        config = build("causal", model_type).config
    else:
        config = transformers.CONFIG_MAPPING[model_type](
            **{**CONFIGS[model_type], **CHANGES[model_type], "vocab_size": VOCAB}
        )
    return save(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64), path)


def converted_for_two(root: Path, model_type: str) -> Path:
    """A model of a type, converted for two ranks unless it was before; its checkpoint lies beside it."""
    path = root / model_type / "out"
    if not path.exists():
        save_model(model_type, root / model_type / "model")
        shardconv.convert(root / model_type / "model", path, 2, sequence_parallel=True)
    return path


def load_unsharded(path: Path) -> Any:
    """The unsharded model, in training mode."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()


def batches(first: int, num_steps: int) -> Iterator[list[Tensor]]:
    """The micro batches ``[B, S]`` of each step from ``first`` on."""
    for step in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(step)
        yield [torch.randint(VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(MICRO_BATCHES)]


def unsharded_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of the unsharded model, in float64 throughout; transformers' own is in float32."""
    with Float64():
        logits = model(ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Curve:
    """A run: for each step the mean loss, and the norm of the gradients before they were clipped."""

    losses: list[float]
    norms: list[float]


def part_loss(model: Any, ids: Tensor) -> Tensor:
    """The same of this process's part of a model."""
    with Float64() if model.dtype == torch.float64 else nullcontext():
        loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train_unsharded(model: Any, optimizer: torch.optim.Optimizer, first: int, num_steps: int) -> Curve:
    """Train the unsharded model."""
    return _train(
        optimizer,
        batches(first, num_steps),
        lambda ids: unsharded_loss(model, ids),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    )


def train_parts(
    model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, first: int, num_steps: int
) -> Curve:
    """Train this process's part; the losses are means over the data-parallel processes."""
    part, parts = data_rank(mesh)
    rows = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    found = _train(
        optimizer,
        batches(first, num_steps),
        lambda ids: part_loss(model, ids[rows]),
        lambda: shardconv_runtime.clip_grad_norm(model, MAX_NORM),
    )
    losses = torch.tensor(found.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return Curve((losses / dist.get_world_size()).tolist(), found.norms)


def _train(
    optimizer: torch.optim.Optimizer,
    steps: Iterator[list[Tensor]],
    loss_of: Callable[[Tensor], Tensor],
    clip: Callable[[], Tensor],
) -> Curve:
    losses, norms = [], []
    for micro_batches in steps:
        total = 0.0
        for ids in micro_batches:
            loss = loss_of(ids) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        norms.append(clip().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Curve(losses, norms)


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """This process's number among those that get other data, and how many there are."""
    coordinates, shape = mesh.get_coordinate(), tuple(mesh.shape)
    assert coordinates is not None
    part = 0
    for coordinate, size in zip(coordinates[:-1], shape[:-1], strict=True):
        part = part * size + coordinate
    return part, math.prod(shape[:-1])


def cpu_mesh(*shape: int) -> DeviceMesh:
    """Of data-parallel dims and, last, tensor parallelism."""
    names = {2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}[len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of all runs."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
