#!/usr/bin/env python3
"""Trains a converted language model with the ``Trainer`` of transformers: tensor parallelism x FSDP2.

    shardconv convert --random-init examples/small --tp 2 --sequence-parallel out/
    torchrun --nproc-per-node 4 examples/trainer.py --model out --output trained README.md docs/*.md

To use it in another program, copy ``ShardedTrainer``. The Trainer needs accelerate.
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
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from shardconv_runtime.format import manifest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments


class ShardedTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed for mypy
    """A ``Trainer`` of a model that ``shardconv_runtime.load(..., mesh=mesh, training=True)`` returned.

    For a subclass of the Trainer, put it in front: ``class ShardedSFTTrainer(ShardedTrainer, SFTTrainer)``.
    ``per_device_train_batch_size`` is that of a data-parallel copy. Checkpoints hold a converted directory,
    or an adapter (``model``), and the optimizer's state (``optimizer``), for any number of processes. To
    resume, load the model, or the adapter, from ``CHECKPOINT/model`` and call
    ``train(resume_from_checkpoint=CHECKPOINT)``.

    Args:
        model: with ``data_parallel=``, if there are several copies.
        args: mixed precision and recomputation are left to ``DataParallel`` and ``checkpoint_activations``.
        mesh: of all processes; "tp" is its last dim.
        options: as for the Trainer.
    """

    def __init__(self, model: Any, args: TrainingArguments, *, mesh: DeviceMesh, **options: Any) -> None:
        if args.bf16 or args.fp16 or args.fsdp or args.deepspeed or args.gradient_checkpointing:
            raise ValueError(
                "bf16, fp16, fsdp, deepspeed and gradient_checkpointing would wrap the model a second time; "
                "load with data_parallel=DataParallel(param_dtype=...), call checkpoint_activations"
            )
        if args.load_best_model_at_end or args.auto_find_batch_size:
            raise ValueError("load_best_model_at_end and auto_find_batch_size would load the model again")
        if (mesh.mesh_dim_names or ())[-1:] != ("tp",) or mesh.size() != args.world_size:
            raise ValueError(
                f"{mesh}: its last dim should be 'tp', and it should have all {args.world_size} processes"
            )
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        if mesh.size() > mesh["tp"].size() and not is_sharded:
            raise ValueError(f"{mesh}: nothing averages gradients over copies; load with data_parallel=")
        self.mesh = mesh
        super().__init__(model=model, args=args, **options)

    def get_tp_size(self) -> int:
        """Processes with the same data; the Trainer uses it to count the tokens and the size of a batch."""
        return self.mesh["tp"].size()

    def create_accelerator_and_postprocess(self) -> None:
        """Leave the model unchanged, distribute the data over replicas, and count each sample once."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        prepare_other, tp = accelerator.prepare, self.get_tp_size()

        def prepare(*given: Any, **how: Any) -> Any:
            found = tuple(prepare_one(each, **how) for each in given)
            return found if len(found) > 1 else found[0]

        def prepare_one(given: Any, **how: Any) -> Any:
            if isinstance(given, nn.Module):
                return given  # load has prepared it
            if not isinstance(given, DataLoader):
                return prepare_other(given, **how)
            return prepare_data_loader(
                given,
                accelerator.device,
                num_processes=self.mesh.size() // tp,
                process_index=self.args.process_index // tp,
                put_on_device=True,
                rng_types=["generator"],
                dispatch_batches=False,
                even_batches=accelerator.even_batches,
                use_seedable_sampler=True,
                data_seed=self.args.data_seed,
            )

        def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
            return shardconv_runtime.clip_grad_norm(self.model, max_norm, norm_type=norm_type)

        def gather_for_metrics(data: Any, use_gather_object: bool = False) -> Any:
            state = accelerator.gradient_state
            last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

            def once(x: Tensor) -> Tensor:
                return torch.cat(accelerator.gather(x).chunk(self.mesh.size())[::tp])[:last]

            return recursively_apply(once, data, error_on_other_type=True)

        accelerator.prepare = prepare
        accelerator.clip_grad_norm_ = clip_grad_norm  # by the norm over all ranks
        accelerator.gather_for_metrics = self.gather_function = gather_for_metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a converted directory, ``model`` in ``output_dir``; every process calls it."""
        directory = Path(output_dir or self.args.output_dir)
        shardconv_runtime.save(self.model, directory / "model", overwrite=True)
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(directory)

    # The Trainer lacks public hooks for the next three. It has had these methods at least since 5.17.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        directory = Path(output_dir)
        optimizer = self.optimizer.optimizer  # without accelerate's wrapper
        shardconv_runtime.save_optimizer(self.model, optimizer, directory / "optimizer", overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), directory / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            optimizer = self.optimizer.optimizer
            shardconv_runtime.load_optimizer(self.model, optimizer, Path(checkpoint) / "optimizer")
            self.lr_scheduler.load_state_dict(
                torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The caller has loaded the model from the checkpoint."""


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
@click.option("--steps", default=300, help="Updates of the weights.")
@click.option("--batch", default=8, help="Sequences in a forward pass of all copies together.")
@click.option("--length", default=128, help="Bytes in a sequence.")
@click.option("--accumulate", default=1, help="Forward and backward passes for each update.")
@click.option("--lr", default=3e-3, help="The largest learning rate.")
@click.option("--dtype", default="stored", help="Dtype of the computation; bfloat16 is mixed precision.")
@click.option("--sequence-parallel", is_flag=True, help="Shard activations between blocks over the sequence.")
@click.option("--log-every", default=1, help="Steps.")
@click.option("--save-every", default=0, help="Steps; 0 saves at the end only.")
@click.option("--eval-file", type=click.Path(exists=True, path_type=Path), help="Evaluate on it at the end.")
@click.option(
    "--resume", type=click.Path(exists=True, path_type=Path), help="Checkpoint; --model is its model."
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
