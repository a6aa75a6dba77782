#!/usr/bin/env python3
"""Trains a converted language model with the ``Trainer`` of transformers: tensor parallelism x FSDP2.

    shardconv convert --random-init examples/small --tp 2 --sequence-parallel out/
    torchrun --nproc-per-node 4 examples/trainer.py --model out --output trained README.md docs/*.md

Needs accelerate: ``pip install accelerate``.
"""

from __future__ import annotations

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
from shardconv_runtime.integrations import ShardedTrainer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive stretches of a text; tokens are bytes."""

    def __init__(self, files: tuple[Path, ...], length: int) -> None:
        text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
        self._rows = text[: len(text) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index].long()
        return {"input_ids": row, "labels": row}


@dataclass(frozen=True)
class Options:
    """The command line; see ``--help``."""

    files: tuple[Path, ...]
    model: Path
    output: Path
    unsharded: bool
    steps: int
    batch: int
    length: int
    accumulate: int
    lr: float
    dtype: str
    sequence_parallel: bool
    log_every: int
    save_every: int
    eval_file: Path | None
    resume: Path | None


def make_trainer(options: Options) -> Trainer:
    """The Trainer of the unsharded model, or of this process's part of it."""
    tp = 1 if options.unsharded else manifest.read(options.model).tp
    dp = int(os.environ.get("WORLD_SIZE", "1")) // tp
    args = training_arguments(options, options.batch // dp)
    data: dict[str, Any] = {"train_dataset": Windows(options.files, options.length)}
    if options.eval_file is not None:
        data["eval_dataset"] = Windows((options.eval_file,), options.length)
    if options.unsharded:
        unsharded = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        return Trainer(unsharded, args, **data)
    # args.device starts the process group
    mesh = init_device_mesh(args.device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    model = load(options.model, mesh, options.dtype, options.sequence_parallel)
    return ShardedTrainer(model, args, mesh=mesh, **data)


def training_arguments(options: Options, batch_size: int) -> TrainingArguments:
    """The Trainer's arguments; ``batch_size`` is that of one replica."""
    return TrainingArguments(
        output_dir=str(options.output),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=options.accumulate,
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, options.steps // 10),
        max_grad_norm=1.0,
        logging_steps=options.log_every,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or options.steps,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )


def load(model: Path, mesh: DeviceMesh, dtype: str, sequence_parallel: bool) -> Any:
    """This process's part of the model, sharded over data-parallel processes."""
    # Importing ``Trainer`` changes where Python looks for modules of transformers. The check of the model's
    # code then finds only imported ones, so import the model's.
    getattr(transformers, transformers.AutoConfig.from_pretrained(model).architectures[0])
    param_dtype = getattr(torch, dtype) if dtype != "stored" else None
    return shardconv_runtime.load(
        model,
        mesh=mesh,
        training=True,
        sequence_parallel=sequence_parallel,
        data_parallel=shardconv_runtime.DataParallel(param_dtype=param_dtype),
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--model", required=True, type=click.Path(exists=True, path_type=Path), help="Converted directory."
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory for checkpoints.")
@click.option("--unsharded", is_flag=True, help="MODEL is an ordinary checkpoint; the plain Trainer.")
@click.option("--steps", default=300, help="Number of updates.")
@click.option("--batch", default=8, help="Sequences per forward pass, summed over replicas.")
@click.option("--length", default=128, help="Bytes per sequence.")
@click.option("--accumulate", default=1, help="Forward and backward passes per update.")
@click.option("--lr", default=3e-3, help="Maximum learning rate.")
@click.option("--dtype", default="stored", help="Dtype of the computation; bfloat16 is mixed precision.")
@click.option("--sequence-parallel", is_flag=True, help="Shard activations between blocks over the sequence.")
@click.option("--log-every", default=1, help="Steps between logs.")
@click.option("--save-every", default=0, help="Steps between checkpoints; 0 saves only at the end.")
@click.option(
    "--eval-file", type=click.Path(exists=True, path_type=Path), help="File for the final evaluation."
)
@click.option(
    "--resume",
    type=click.Path(exists=True, path_type=Path),
    help="Checkpoint to resume, which contains --model.",
)
def main(**given: Any) -> None:
    """Train MODEL on the bytes of FILES."""
    options = Options(**given)
    trainer = make_trainer(options)
    trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
    if options.eval_file is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
