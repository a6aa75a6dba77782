"""The ``Trainer`` of transformers for a model that is sharded over tensor-parallel and data-parallel ranks.

    from shardconv_runtime.integrations import ShardedTrainer

Needs accelerate, as the Trainer itself: ``pip install accelerate``.
"""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ..adapters.adapter_names import WEIGHTS_NAME
from ..comm.call_agreement import require_same_call
from ..comm.mesh import mesh_processes
from ..errors import OptionError, RefusedCallError
from ..files import manifest
from ..files.manifest import MANIFEST_NAME
from ..loaded import loaded
from ..saving.optimizer_state import load_optimizer, save_optimizer
from ..saving.save import save
from ..training.clipping import clip_grad_norm


class ShardedTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed for mypy
    """A ``Trainer`` of a model that ``shardconv_runtime.load(..., mesh=mesh, training=True)`` returned.

    For a subclass of the Trainer, put it in front: ``class ShardedSFTTrainer(ShardedTrainer, SFTTrainer)``.
    ``per_device_train_batch_size`` is the batch size of a data-parallel copy. Checkpoints hold a converted
    directory, or an adapter (``model``), and the optimizer's state (``optimizer``), for any number of
    processes. To resume, load the model, or the adapter, from ``CHECKPOINT/model`` and call
    ``train(resume_from_checkpoint=CHECKPOINT)``.

    Args:
        model: the model, loaded with ``data_parallel=`` if there are several copies.
        args: mixed precision and recomputation are left to ``DataParallel`` and ``checkpoint_activations``.
        mesh: the mesh of all processes; "tp" is its last dim.
        options: the options of the Trainer.
    """

    def __init__(self, model: Any, args: TrainingArguments, *, mesh: DeviceMesh, **options: Any) -> None:
        _require_supported(args)
        if (mesh.mesh_dim_names or ())[-1:] != ("tp",) or mesh.size() != args.world_size:
            on_cpus = mesh.device_type == "cpu" and not args.use_cpu
            raise OptionError(
                f"{mesh}: its last dim should be 'tp', and it should have all {args.world_size} processes"
                + ("; on CPUs, the Trainer sees the others with use_cpu=True only" if on_cpus else "")
            )
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        if mesh.size() > mesh["tp"].size() and not is_sharded:
            raise RefusedCallError(
                f"{mesh}: nothing averages gradients over copies; load with data_parallel="
            )
        self.mesh = mesh
        self._counts_own_tokens = False
        # Let modules of FSDP2 return the names of the classes that FSDP2 derived theirs from.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                model_class = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
                vars(module)["_get_name"] = partial(
                    str, model_class.__name__
                )  # in place of a method of nn.Module
        super().__init__(model=model, args=args, **options)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as the Trainer does. All processes resume from one checkpoint, from whose ``model`` the model
        is.

        Raises:
            LaunchError: they do not: some would wait for the others.
            PlanError: the model was loaded from elsewhere.
        """
        chosen = resume_from_checkpoint or None
        if chosen is True:
            chosen = get_last_checkpoint(self.args.output_dir)
        everyone = mesh_processes(self.mesh, self.args.device)
        require_same_call(everyone, "train", {"resume_from_checkpoint": str(chosen)})
        return super().train(resume_from_checkpoint, *args, **options)

    def get_tp_size(self) -> int:
        """Return the number of processes with the same data, by which the Trainer counts tokens."""
        return 1 if self._counts_own_tokens else self.mesh["tp"].size()

    @property
    def gather_function(self) -> Any:
        """The function that collects predictions; it returns each sample once."""
        return self._gather_function

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        # Trainers of sequence-to-sequence models set the one of accelerate, which gives each sample tp times.
        is_of_all = function == self.accelerator.gather
        self._gather_function = self.accelerator.gather_for_metrics if is_of_all else function

    def create_accelerator_and_postprocess(self) -> None:
        """Leave the model unchanged, distribute the data over replicas, and count each sample once."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        prepare_other, tp = accelerator.prepare, self.get_tp_size()

        def prepare(*given: Any, **how: Any) -> Any:
            prepared = tuple(prepare_one(each, **how) for each in given)
            return prepared if len(prepared) > 1 else prepared[0]

        def prepare_one(given: Any, **how: Any) -> Any:
            if isinstance(given, nn.Module):
                return given  # load has prepared it
            if not isinstance(given, DataLoader):
                return prepare_other(given, **how)
            replica = self.args.process_index // tp
            seeding = given.worker_init_fn
            if isinstance(seeding, partial) and "rank" in seeding.keywords:
                # The workers of all processes of a replica draw the same numbers for one sample.
                given.worker_init_fn = partial(seeding, rank=replica)
            return prepare_data_loader(
                given,
                accelerator.device,
                num_processes=self.mesh.size() // tp,
                process_index=replica,
                split_batches=accelerator.split_batches,
                put_on_device=True,
                rng_types=["generator"],
                dispatch_batches=False,
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=self.args.data_seed,
                non_blocking=accelerator.non_blocking,
            )

        def clipped(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
            return clip_grad_norm(self.model, max_norm, norm_type=norm_type)

        def gather_for_metrics(data: Any, use_gather_object: bool = False) -> Any:
            state = accelerator.gradient_state
            last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

            def once(x: Tensor) -> Tensor:
                return torch.cat(accelerator.gather(x).chunk(self.mesh.size())[::tp])[:last]

            return recursively_apply(once, data, error_on_other_type=True)

        accelerator.prepare = prepare
        accelerator.clip_grad_norm_ = clipped  # by the norm over all ranks
        accelerator.gather_for_metrics = self.gather_function = gather_for_metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a converted directory, ``model`` in ``output_dir``; every process calls it."""
        directory = Path(output_dir or self.args.output_dir)
        save(self.model, directory / "model", overwrite=True)
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(directory)

    # The Trainer lacks public hooks for the next five, which are checked for below.

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # The Trainer divides by the number of processes with the same data, whether it has added their counts
        # up or not.
        self._counts_own_tokens = not self.args.average_tokens_across_devices
        try:
            return super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self._counts_own_tokens = False

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # counts the tokens of all processes
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self.get_tp_size()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        directory = Path(output_dir)
        optimizer = self.optimizer.optimizer  # without accelerate's wrapper
        save_optimizer(self.model, optimizer, directory / "optimizer", overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), directory / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            optimizer = self.optimizer.optimizer
            load_optimizer(self.model, optimizer, Path(checkpoint) / "optimizer")
            self.lr_scheduler.load_state_dict(
                torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: the caller has loaded the model from the checkpoint."""
        _require_weights_of(self.model, Path(resume_from_checkpoint) / "model")


_WRAPS = "it would wrap the model a second time; "
_DATA_PARALLEL = "load with data_parallel=DataParallel(param_dtype=...)"
_BEST = (
    "it would load the model again; trainer.state.best_model_checkpoint names the best checkpoint, whose "
    "model/ load takes"
)
_CASTS = "it would cast the weights that are trained; load with dtype=, and evaluate that model"
_RECOMPUTES = f"{_WRAPS}call checkpoint_activations of shardconv_runtime"
_COMPILES = "the model is not compiled by it; call model.compile() after load"
REFUSED: Mapping[str, str] = {
    "bf16": _WRAPS + _DATA_PARALLEL,
    "fp16": _WRAPS + _DATA_PARALLEL,
    "fsdp": _WRAPS + _DATA_PARALLEL,
    "deepspeed": _WRAPS + _DATA_PARALLEL,
    "parallelism_config": "the mesh says how the processes share the model and the data; leave it out",
    "activation_checkpointing": _RECOMPUTES,
    "gradient_checkpointing": _RECOMPUTES,
    "bf16_full_eval": _CASTS,
    "fp16_full_eval": _CASTS,
    "torch_compile": _COMPILES,
    "torch_compile_backend": _COMPILES,
    "torch_compile_mode": _COMPILES,
    "use_liger_kernel": "its kernels read the full weights of the head; leave it out",
    "load_best_model_at_end": _BEST,
    "auto_find_batch_size": f"{_BEST}, and each process would find another size",
    "eval_use_gather_object": "objects would be collected from each process of a replica; leave it out",
    "enable_jit_checkpoint": "each process would save when it is told to, and wait for the others; use steps",
    "push_to_hub": "it uploads while processes write; call shardconv push with CHECKPOINT/model",
}
"""Options of ``TrainingArguments`` that are refused if they are set -> the reason and the remedy."""


def _require_supported(args: TrainingArguments) -> None:
    """Check that no option is set of which the result would be another one than that of one process."""
    chosen = [name for name in REFUSED if getattr(args, name, None)]
    if chosen:
        raise RefusedCallError("; ".join(f"{name}: {REFUSED[name]}" for name in chosen))
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise RefusedCallError('train_sampling_strategy="batch_rebalance" shares data out over all processes')
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise OptionError(
            "accelerator_config dispatch_batches: rank 0 would give each process other samples; leave it out"
        )


def _require_weights_of(model: Any, saved: Path) -> None:
    """Check that a model was loaded from a checkpoint of the Trainer, or from a copy of it."""
    source = loaded(model)
    options = source.building.options
    if not hasattr(model, "peft_config"):
        file = saved / MANIFEST_NAME
        there = manifest.read(saved) if file.is_file() else None  # stages have a directory each
        is_saved = there is None or there.tp != source.plan.tp or there.files == source.manifest.files
        remedy = f'load("{saved}")'
    else:
        directories = (
            options.adapter if isinstance(options.adapter, Mapping) else {"default": options.adapter}
        )
        folders = {name: saved if (saved / WEIGHTS_NAME).is_file() else saved / name for name in directories}
        is_saved = all(
            directories.get(name) is not None
            and _same_bytes(Path(directories[name]) / WEIGHTS_NAME, folders[name])
            for name in model.active_adapters
        )
        remedy = f'load(..., adapter="{saved}")'
    if not is_saved:
        raise RefusedCallError(
            f"resume_from_checkpoint: the model was not loaded from {saved}, and would be trained on from "
            f"other weights than those of the optimizer's state; call {remedy}, then make the trainer"
        )


def _same_bytes(file: Path, folder: Path) -> bool:
    other = folder / WEIGHTS_NAME
    return file.is_file() and other.is_file() and filecmp.cmp(file, other, shallow=False)


OVERRIDDEN = (
    "create_accelerator_and_postprocess",
    "get_tp_size",
    "save_model",
    "_get_num_items_in_batch",
    "_track_num_input_tokens",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
)
"""Methods of the Trainer that the class above replaces. One that is gone would silently not be called."""


if _missing := [name for name in OVERRIDDEN if not callable(getattr(Trainer, name, None))]:
    raise ImportError(
        f"the Trainer of transformers {transformers.__version__} has no {', '.join(_missing)}, which a "
        "sharded model needs; use a version of transformers that shardconv-runtime was tried with"
    )
