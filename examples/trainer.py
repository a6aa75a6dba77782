#!/usr/bin/env python3
"""Trains a converted language model with the ``Trainer`` of transformers: tensor parallelism x FSDP2.

    shardconv convert --random-init examples/small --tp 2 --sequence-parallel out/
    torchrun --nproc-per-node 4 examples/trainer.py --model out --output trained README.md docs/*.md

``ShardedTrainer`` is what a program of one's own needs; copy it. The Trainer needs accelerate.
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
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from shardconv_runtime.format import manifest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments


class ShardedTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed for mypy
    """A ``Trainer`` of a model that ``shardconv_runtime.load(..., mesh=mesh, training=True)`` returned.

    ``per_device_train_batch_size`` is that of a data-parallel copy. Checkpoints hold a converted directory
    (``model``) and the optimizer's state (``optimizer``), for any number of processes. To resume, load the
    model from ``CHECKPOINT/model`` and call ``train(resume_from_checkpoint=CHECKPOINT)``.

    Args:
        model: after ``shardconv_runtime.data_parallel``, if there are several copies.
        args: mixed precision and recomputation are left to ``data_parallel`` and ``checkpoint_activations``.
        mesh: of all processes; "tp" is its last dim.
        options: as for any Trainer.
    """

    def __init__(self, model: Any, args: TrainingArguments, *, mesh: DeviceMesh, **options: Any) -> None:
        if args.bf16 or args.fp16 or args.fsdp or args.deepspeed or args.gradient_checkpointing:
            raise ValueError(
                "bf16, fp16, fsdp, deepspeed and gradient_checkpointing would wrap the model a second time; "
                "call shardconv_runtime.data_parallel(..., param_dtype=...) and checkpoint_activations"
            )
        if args.load_best_model_at_end or args.auto_find_batch_size:
            raise ValueError("load_best_model_at_end and auto_find_batch_size would load the model again")
        if (mesh.mesh_dim_names or ())[-1:] != ("tp",) or mesh.size() != args.world_size:
            raise ValueError(
                f"{mesh}: its last dim should be 'tp', and it should have all {args.world_size} processes"
            )
        self.mesh = mesh
        super().__init__(model, args, **options)

    def get_tp_size(self) -> int:
        """Processes that have the same data: the tokens of a batch, and its size, are counted with it."""
        return self.mesh["tp"].size()

    def create_accelerator_and_postprocess(self) -> None:
        """Leave the model as it is, share out the data over copies, and count each sample once."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        prepare_other, tp = accelerator.prepare, self.get_tp_size()

        def prepare(*given: Any, **how: Any) -> Any:
            found = tuple(prepare_one(each, **how) for each in given)
            return found if len(found) > 1 else found[0]

        def prepare_one(given: Any, **how: Any) -> Any:
            if isinstance(given, nn.Module):
                return given  # the plan and data_parallel are all that it needs
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
        accelerator.clip_grad_norm_ = clip_grad_norm  # the norm of the whole model, of which this is a part
        accelerator.gather_for_metrics = self.gather_function = gather_for_metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a converted directory, ``model`` in ``output_dir``; every process calls it."""
        place = Path(output_dir or self.args.output_dir)
        shardconv_runtime.save(self.model, place / "model", overwrite=True)
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(place)

    # Trainer has no public place for what follows. These three are methods of it since 5.17, at least.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        place = Path(output_dir)
        optimizer = self.optimizer.optimizer  # without accelerate's wrapper
        shardconv_runtime.save_optimizer(self.model, optimizer, place / "optimizer", overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), place / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            optimizer = self.optimizer.optimizer
            shardconv_runtime.load_optimizer(self.model, optimizer, Path(checkpoint) / "optimizer")
            self.lr_scheduler.load_state_dict(
                torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the model was loaded from there."""


class Windows(Dataset[dict[str, Tensor]]):
    """Stretches of a text, one after another; tokens are bytes."""

    def __init__(self, files: tuple[Path, ...], length: int) -> None:
        text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
        self._rows = text[: len(text) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index].long()
        return {"input_ids": row, "labels": row}


def load(model: Path, mesh: DeviceMesh, dtype: str, sequence_parallel: bool) -> Any:
    """This process's part of the model, split over data-parallel processes."""
    # ``import Trainer`` changes where Python looks for modules of transformers, so that the check of the
    # model's code finds only those that are imported: import them.
    getattr(transformers, transformers.AutoConfig.from_pretrained(model).architectures[0])
    loaded = shardconv_runtime.load(model, mesh=mesh, training=True, sequence_parallel=sequence_parallel)
    param_dtype = getattr(torch, dtype) if dtype != "stored" else None
    return shardconv_runtime.data_parallel(loaded, mesh, param_dtype=param_dtype)


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
@click.option("--dtype", default="stored", help="That layers compute in; bfloat16 is mixed precision.")
@click.option("--sequence-parallel", is_flag=True, help="Split activations between blocks over the sequence.")
@click.option("--log-every", default=1, help="Steps.")
@click.option("--save-every", default=0, help="Steps; 0 saves at the end only.")
@click.option("--eval-file", type=click.Path(exists=True, path_type=Path), help="Evaluate on it at the end.")
@click.option(
    "--resume", type=click.Path(exists=True, path_type=Path), help="Checkpoint; --model is its model."
)
def main(
    files: tuple[Path, ...],
    model: Path,
    output: Path,
    unsharded: bool,
    steps: int,
    batch: int,
    length: int,
    accumulate: int,
    lr: float,
    dtype: str,
    sequence_parallel: bool,
    log_every: int,
    save_every: int,
    eval_file: Path | None,
    resume: Path | None,
) -> None:
    """Train MODEL on the bytes of FILES."""
    tp = 1 if unsharded else manifest.read(model).tp
    dp = int(os.environ.get("WORLD_SIZE", "1")) // tp
    args = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=batch // dp,
        per_device_eval_batch_size=batch // dp,
        gradient_accumulation_steps=accumulate,
        max_steps=steps,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, steps // 10),
        max_grad_norm=1.0,
        logging_steps=log_every,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or steps,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    evaluated = Windows((eval_file,), length) if eval_file else None
    options: dict[str, Any] = {"train_dataset": Windows(files, length), "eval_dataset": evaluated}
    trainer: Trainer
    if unsharded:
        whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        trainer = Trainer(whole, args, **options)
    else:
        # args.device starts the process group
        mesh = init_device_mesh(args.device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
        trainer = ShardedTrainer(load(model, mesh, dtype, sequence_parallel), args, mesh=mesh, **options)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if evaluated is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
