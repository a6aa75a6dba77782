#!/usr/bin/env python3
"""Trains a converted language model on text files: tensor parallelism x FSDP2, a plain loop.

    shardconv convert --random-init examples/small --tp 2 --sequence-parallel out/
    torchrun --nproc-per-node 4 examples/train.py --model out --losses l.jsonl --save new README.md docs/*.md

Four processes and shards for two ranks make two replicas of the model. The same training of the unsharded
model in one process:

    shardconv export out/ plain/ --format hf
    python examples/train.py --model plain --unsharded --losses unsharded.jsonl README.md docs/*.md

Tokens are bytes, so that no tokenizer is needed. A step's data depends on the seed and the step alone: it is
the same for any number of processes, and a resumed run continues with unseen data.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from shardconv_runtime.files import manifest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Options:
    """The command line; see ``--help``."""

    files: tuple[Path, ...]
    model: Path
    unsharded: bool
    steps: int
    batch: int
    length: int
    accumulate: int
    lr: float
    warmup: int
    clip: float
    dtype: str
    sequence_parallel: bool
    checkpoint_activations: bool
    seed: int
    losses: Path | None
    save: Path | None
    resume: Path | None


def learning_rate(step: int, options: Options) -> float:
    """Linear warmup, then half a cosine to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def micro_batches(text: Tensor, step: int, options: Options) -> Tensor:
    """A step's token ids, global ``[accumulate, batch, length]``: the same on every process."""
    generator = torch.Generator().manual_seed(options.seed + 1_000_003 * step)
    shape = (options.accumulate, options.batch, 1)
    starts = torch.randint(len(text) - options.length + 1, shape, generator=generator)
    return text[starts + torch.arange(options.length)].long()


@dataclass
class Run:
    """The model on this process. ``mesh`` is None for the unsharded model."""

    model: Any
    mesh: DeviceMesh | None = None

    def own(self, batch: Tensor) -> Tensor:
        """This process's rows ``[B / dp, S]`` of a batch, global ``[B, S]``: replicated over "tp"."""
        if self.mesh is None:
            return batch
        return batch.chunk(self.mesh["dp"].size())[self.mesh["dp"].get_local_rank()].to(self.model.device)

    def mean(self, loss: Tensor) -> float:
        """The mean of a scalar loss over "dp"."""
        if self.mesh is not None:
            dist.all_reduce(loss, group=self.mesh.get_group("dp"))
            loss /= self.mesh["dp"].size()
        return loss.item()

    def clip(self, max_norm: float) -> float:
        """Scale the gradients; return their norm before."""
        if self.mesh is None:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()
        return shardconv_runtime.clip_grad_norm(self.model, max_norm).item()


def load(options: Options) -> Run:
    """The unsharded model, or this process's part of it."""
    if options.unsharded:
        return Run(transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").train())
    tp = manifest.read(options.model).tp
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]) // tp, tp), mesh_dim_names=("dp", "tp"))
    if options.batch % mesh["dp"].size():
        raise click.UsageError(f"--batch {options.batch} is not divisible by {mesh['dp'].size()} copies")
    # Master weights keep their stored dtype; layers compute in --dtype, gradients are averaged in float32.
    param_dtype = getattr(torch, options.dtype) if options.dtype != "stored" else None
    model = shardconv_runtime.load(
        options.model,
        mesh=mesh,
        training=True,
        sequence_parallel=options.sequence_parallel,
        data_parallel=shardconv_runtime.DataParallel(param_dtype=param_dtype),
    )
    if options.checkpoint_activations:
        shardconv_runtime.checkpoint_activations(model)
    return Run(model.train(), mesh)


def train(options: Options) -> None:
    """Run the remaining steps, then save."""
    run = load(options)
    is_first = run.mesh is None or dist.get_rank() == 0
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    start = 0
    if options.resume:
        shardconv_runtime.load_optimizer(run.model, optimizer, options.resume / "optimizer")
        start = json.loads((options.resume / "training.json").read_text())["steps"]
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in options.files)), dtype=torch.uint8)
    for step in range(start, options.steps):
        total = torch.zeros((), dtype=torch.float64, device=run.model.device)
        for batch in micro_batches(text, step, options):
            rows = run.own(batch)
            loss = run.model(rows, labels=rows).loss / options.accumulate
            loss.backward()
            total += loss.detach()
        norm = run.clip(options.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.step()
        optimizer.zero_grad()
        report(step, run.mean(total), norm, options.losses if is_first else None, new=step == 0)
    if options.save:
        shardconv_runtime.save(run.model, options.save / "model", overwrite=True)
        shardconv_runtime.save_optimizer(run.model, optimizer, options.save / "optimizer", overwrite=True)
        if is_first:
            (options.save / "training.json").write_text(json.dumps({"steps": options.steps}))


def report(step: int, loss: float, norm: float, losses: Path | None, *, new: bool) -> None:
    """A line of JSON for each step, in a file and on the terminal."""
    if losses is None:
        return
    line = json.dumps({"step": step, "loss": loss, "grad_norm": norm})
    click.echo(line)
    with losses.open("w" if new else "a") as file:
        file.write(line + "\n")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--model", required=True, type=click.Path(exists=True, path_type=Path), help="Converted directory."
)
@click.option("--unsharded", is_flag=True, help="MODEL is an ordinary checkpoint; use one process.")
@click.option("--steps", default=300, help="Total number of updates, including those before --resume.")
@click.option("--batch", default=8, help="Sequences per forward pass, summed over replicas.")
@click.option("--length", default=128, help="Bytes per sequence.")
@click.option("--accumulate", default=1, help="Forward and backward passes per update.")
@click.option("--lr", default=3e-3, help="Maximum learning rate.")
@click.option("--warmup", default=20, help="Updates until the maximum learning rate.")
@click.option("--clip", default=1.0, help="Maximum norm of the gradients.")
@click.option("--dtype", default="stored", help="Dtype of the computation; bfloat16 is mixed precision.")
@click.option("--sequence-parallel", is_flag=True, help="Shard activations between blocks over the sequence.")
@click.option("--checkpoint-activations", is_flag=True, help="Recompute activations, to save memory.")
@click.option("--seed", default=0, help="Seed of the data.")
@click.option("--losses", type=click.Path(path_type=Path), help="File that gets one line of JSON per step.")
@click.option("--save", type=click.Path(path_type=Path), help="Directory for the final model and optimizer.")
@click.option(
    "--resume", type=click.Path(exists=True, path_type=Path), help="Directory of an earlier --save."
)
def main(**given: Any) -> None:
    """Train MODEL on the bytes of FILES."""
    options = Options(**given)
    if options.unsharded and (options.save or options.resume or options.dtype != "stored"):
        raise click.UsageError("--unsharded is for comparing losses: no --save, --resume or --dtype")
    train(options)
    if dist.is_initialized():
        dist.barrier()  # a process that is ahead would close connections on which others still wait
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
