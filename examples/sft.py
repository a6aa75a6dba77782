#!/usr/bin/env python3
"""Trains an adapter of a converted language model with the ``SFTTrainer`` of TRL: tensor parallelism x FSDP2.

    shardconv convert --random-init examples/small --tp 2 out/
    shardconv adapt out/ out-lora/ --new lora.json --seed 1
    torchrun --nproc-per-node 4 examples/sft.py --model out --adapter out-lora --output trained README.md

Needs TRL: ``pip install trl``. The trained adapter is in ``trained/model``; peft and
``load(adapter=)`` take it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset  # type: ignore[import-not-found]
from shardconv_runtime.files import manifest
from shardconv_runtime.integrations import ShardedSFTTrainer
from torch.distributed.device_mesh import init_device_mesh
from transformers import ByT5Tokenizer
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]


def training_arguments(output: Path, batch_size: int, steps: int, save_every: int, lr: float) -> SFTConfig:
    """The trainer's arguments; ``batch_size`` is that of one replica."""
    return SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=lr,
        max_length=64,
        logging_steps=1,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or steps,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        # the next two are on by default
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to="none",
    )


def unsharded(model: Path, adapter: Path) -> Any:
    """The model with its adapter, in one process."""
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--adapter", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory for checkpoints.")
@click.option("--unsharded", "alone", is_flag=True, help="MODEL is an ordinary checkpoint; plain SFTTrainer.")
@click.option("--steps", default=100, help="Number of updates.")
@click.option("--batch", default=4, help="Sequences per forward pass, summed over replicas.")
@click.option("--lr", default=1e-3, help="Maximum learning rate.")
@click.option("--save-every", default=0, help="Steps between checkpoints; 0 saves only at the end.")
@click.option(
    "--resume",
    type=click.Path(exists=True, path_type=Path),
    help="Checkpoint to resume; --adapter is its model.",
)
def main(
    files: tuple[Path, ...],
    model: Path,
    adapter: Path,
    output: Path,
    alone: bool,
    steps: int,
    batch: int,
    lr: float,
    save_every: int,
    resume: Path | None,
) -> None:
    """Train ADAPTER on the lines of FILES; tokens are bytes."""
    lines = [line for path in files for line in path.read_text().splitlines() if line.strip()]
    tp = 1 if alone else manifest.read(model).tp
    dp = int(os.environ.get("WORLD_SIZE", "1")) // tp
    common: dict[str, Any] = {
        "args": training_arguments(output, batch // dp, steps, save_every, lr),
        "train_dataset": Dataset.from_dict({"text": lines}),
        "processing_class": ByT5Tokenizer(extra_ids=0),
    }
    if alone:
        trainer = SFTTrainer(unsharded(model, adapter), **common)
    else:
        # args.device starts the process group
        mesh = init_device_mesh(common["args"].device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
        # import the model's class before it is loaded, see trainer.py
        getattr(transformers, transformers.AutoConfig.from_pretrained(model).architectures[0])
        part = shardconv_runtime.load(model, adapter=adapter, mesh=mesh, training=True, data_parallel=True)
        trainer = ShardedSFTTrainer(part, mesh=mesh, **common)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.save_model()
    trainer.save_state()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
