"""The options of the caller of ``load``, the model that passed the checks, and its unsharded form on meta."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..adapters.adapter_set import AdapterSet
from ..checkpoint.lazy_tensor import LazyTensor
from ..checkpoint.quantized import without_quantization
from ..errors import OptionError, PlanError
from ..files.hub_downloads import Repository
from ..files.manifest import Manifest
from ..files.model_config import building_failed, read_config, read_generation_config
from ..files.object_stores import ObjectDirectory
from ..files.stored_copies import StoredCopy
from ..format import plan_json
from ..format.plan import Plan
from ..hub_options import Hub
from ..meta.meta_model import build_model, find_class
from ..option_values import Communication, Compiling, Planning, Training
from ..storage.reading import Span
from . import rank_files
from .data_sharding import DataSharding

AdapterDirectories = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""The directory of one adapter, or directories by the names that the adapters get."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The arguments of the caller."""

    path: str
    """A path, a Hub id, or the class of a model in memory."""
    plan: str | Plan | Planning | None
    in_memory: InMemory | None = None
    """The model, if the caller has it in memory."""
    hub: Hub = field(default_factory=Hub)
    trust_remote_code: bool = False
    dtype: torch.dtype | None = None
    training: Training | None
    sequence_parallel: bool
    gather_logits: bool | None
    verify: bool = False
    dequantize: bool = False
    fuse: bool | None
    adapter: AdapterDirectories | None = None
    data_parallel: DataSharding | None
    mesh: DeviceMesh | None
    """A device mesh, along a dim of which the ranks are."""
    compiling: Compiling | None
    communication: Communication

    def __post_init__(self) -> None:
        if self.regather is not None and not self.sequence_parallel:
            raise OptionError("regather= is about training with sequence_parallel=True; leave it out")

    @property
    def regather(self) -> bool | None:
        """Return which gathered activations are dropped and gathered again; None: the large ones."""
        return None if self.training is None else self.training.regather

    @property
    def stages_per_process(self) -> int:
        """Return the number of pipeline stages of each process."""
        return 1 if self.training is None else self.training.stages_per_process

    @property
    def all_reduce(self) -> str | None:
        """Return the name of the function, which is compared between the ranks."""
        function = self.communication.all_reduce
        return function if isinstance(function, str) else function and "a function"

    @property
    def unknown_to_stages(self) -> dict[str, bool]:
        """Return the arguments that a model with stages does not support, and whether they were given."""
        return {
            "all_reduce=": self.all_reduce is not None,
            "compile=True with training=True": self.compiling is not None and self.training is not None,
        }

    @property
    def computed_dtype(self) -> torch.dtype | None:
        """Return the dtype in which modules compute; None for the dtype of the parameters."""
        settings = None if self.data_parallel is None else self.data_parallel.settings
        return (settings and settings.param_dtype) or self.dtype

    @property
    def form(self) -> dict[str, bool]:
        """Return the options of the form of the plan; empty for plain inference."""
        options = {"training": self.training is not None, "sequence_parallel": self.sequence_parallel}
        return options if any(options.values()) else {}


@dataclass(frozen=True, eq=False)
class InMemory:
    """A model that the caller has in memory."""

    twin: nn.Module
    """The model on meta, with real values of the buffers that no file would hold."""
    tensors: Mapping[str, Tensor]
    """Its parameters and buffers by name, of global shapes; on meta if the caller's model is."""
    is_own: bool = False
    """Whether ``twin`` itself becomes the rank's model, which otherwise is made of a copy."""

    @property
    def is_meta(self) -> bool:
        """Return whether it has no values."""
        return any(tensor.is_meta for tensor in self.tensors.values())


@dataclass(frozen=True)
class CheckedSource:
    """A model that passed the checks so far."""

    directory: Path
    manifest: Manifest
    """The manifest; for an ordinary model, a manifest of its small files."""
    plan: Plan
    repository: Repository | StoredCopy | None = None
    """The repository, or the directory in an object store with a copy on this host, from which this rank's
    files are still to be downloaded."""
    objects: ObjectDirectory | None = None
    """The object store that holds the shards; ``directory`` has only the small files."""
    files: rank_files.RankFiles | None = None
    """This rank's files, checked."""
    checkpoint: Mapping[str, LazyTensor] | None = None
    """Instead of files: the global weights of an ordinary model, not read."""
    in_wanted_dtypes: bool = False
    """Whether the weights of ``checkpoint`` have the dtypes in which the model is loaded, not the plan's."""
    in_memory: InMemory | None = None
    """Instead of files: a model that the caller has in memory."""
    adapters: AdapterSet | None = None
    more: tuple[CheckedSource, ...] = ()
    """The directories of this process's other stages."""

    @property
    def has_shards(self) -> bool:
        """Return whether it was converted, so that each rank has its own files."""
        return self.checkpoint is None and self.in_memory is None

    @property
    def full_plan(self) -> Plan:
        """Return the plan of the model with its adapters."""
        return self.plan if self.adapters is None else self.adapters.plan

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all stages."""
        return self.plan.tp * (1 if self.plan.stages is None else self.plan.stages.count)

    @property
    def common_manifest(self) -> Manifest:
        """Return the manifest without the fields that differ between the directories of stages."""
        if self.plan.stages is None:
            return self.manifest
        plan = replace(self.plan, stages=replace(self.plan.stages, own=None))
        digest = plan_json.sha256(plan_json.dumps(plan))
        return replace(self.manifest, plan_sha256=digest, files=())

    @property
    def model(self) -> tuple[Path, Any, Plan, Repository | StoredCopy | None]:
        """Return the directory, manifest, plan and repository, which are known before the model is built."""
        return self.directory, self.manifest, self.plan, self.repository

    def spans(self, sharding: DataSharding | None) -> Sequence[Span]:
        """Return the byte ranges of files that this process will read, as far as they are known."""
        if self.files is None:
            return ()
        spans_of_files = self.files.spans if sharding is None else sharding.spans(self.files.local)
        return [*spans_of_files, *(span for other in self.more for span in other.spans(sharding))]


def unsharded(checked: CheckedSource, wanted: LoadOptions) -> tuple[Any, nn.Module]:
    """Build the unquantized model with global shapes on the meta device.

    Returns:
        The config as it was stored, and the model.
    """
    plan, directory = checked.plan, checked.directory
    if checked.in_memory is not None:
        source = checked.in_memory
        twin = source.twin if source.is_own else copy.deepcopy(source.twin)
        return getattr(twin, "config", None), twin
    stored = config = read_config(directory, checked.manifest, plan)
    if any(entry.packing is not None for entry in plan.parameters):
        config = without_quantization(config)
    dtype = wanted.dtype or getattr(torch, plan.model.dtype)
    try:
        find = partial(remote_class, directory) if plan.model.trust_remote_code else find_class
        return stored, build_model(find(plan.model.class_name), config, dtype, dict(plan.tied))
    except Exception as error:
        raise building_failed(directory, error) from error


def generation_config_of(checked: CheckedSource) -> Any | None:
    """Return the generation config that the model was stored with; None if it had none."""
    if checked.in_memory is not None:
        return getattr(checked.in_memory.twin, "generation_config", None)
    return read_generation_config(checked.directory, checked.manifest)


def remote_class(directory: Path, class_name: str) -> type[nn.Module]:
    """Import a class from Python code in a directory."""
    reference = class_name.replace(":", ".")
    if "--" in reference:
        raise PlanError(f"{directory}: the model class {reference!r} is code of another repository")
    model_class: type[nn.Module] = get_class_from_dynamic_module(
        reference, str(directory), local_files_only=True
    )
    return model_class


def stays_packed(plan: Plan, wanted: LoadOptions) -> bool:
    """Return whether modules compute with packed parameters as they are stored."""
    return not wanted.dequantize and any(entry.packing is not None for entry in plan.parameters)
