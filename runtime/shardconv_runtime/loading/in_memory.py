"""A model that the caller has in memory, as the source of a rank's model."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Generator
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..comm.agreement import exchange
from ..comm.mesh import Launch
from ..errors import InputsDifferError, PlanError, SourceError, brief
from ..files.manifest import Manifest, Source
from ..files.small_files import entry_of, files_to_copy
from ..format import plan_json
from ..format.plan import Plan
from ..format.slices import Rows
from ..format.stored_layout import stored_plans
from ..meta.meta_model import class_name_of, meta_twin, refuse_other_models
from ..parallel.build import stored_tensors
from ..parallel.local_modules import local_view
from .checked_source import CheckedSource, InMemory

CONFIG_FILES = "shardconv-config-"
"""Prefix of temporary directories with the config of a model in memory, which ``save`` copies."""


def in_memory(model: nn.Module) -> InMemory:
    """Return a model of the caller as a source; the model itself stays as it is."""
    refuse_other_models(model)
    tensors = dict(stored_tensors(model))
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta and len(on_meta) < len(tensors):
        raise PlanError(
            f"{on_meta[0]} of {type(model).__name__} is on meta, and other tensors have values; give all a "
            "value, or none"
        )
    return InMemory(meta_twin(model), tensors)


def source_in_memory(model: InMemory, plan: Plan) -> CheckedSource:
    """Return the source of a model with its plan, and a directory with its config if it has one."""
    kind = type(model.twin)
    if plan.model.class_name != class_name_of(kind):
        raise PlanError(
            f"the plan is for a {plan.model.class_name}, and the model is a {class_name_of(kind)}; make a "
            "plan of that model"
        )
    directory = Path(tempfile.mkdtemp(prefix=CONFIG_FILES))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if isinstance(model.twin, PreTrainedModel):
        config = copy.deepcopy(model.twin.config)
        config.architectures = [kind.__name__]
        try:
            config.save_pretrained(directory)
        except Exception as error:  # transformers checks the values of a config when it is saved
            raise SourceError(
                f"the config of this {kind.__name__} cannot be saved with the model: {brief(error)}; give it "
                "values that its class accepts, and make the model again"
            ) from error
        generation_config = getattr(model.twin, "generation_config", None)
        if generation_config is not None:
            generation_config.save_pretrained(directory)
    entries = tuple(entry_of(directory, path) for path in files_to_copy(directory, code=False))
    digest = plan_json.sha256(plan_json.dumps(plan))
    manifest = Manifest(plan.tp, digest, Source(kind.__name__, None), {}, entries)
    return CheckedSource(directory, manifest, plan, in_memory=model)


def tensors_in_memory(
    plan: Plan, model: InMemory, rank: int, device: torch.device, rows: Rows
) -> Generator[tuple[str, Tensor]]:
    """Yield copies of the parts of a model's tensors that a rank holds, of local shapes, on the device."""
    for name, entry in stored_plans(plan).items():
        local = local_view(entry, model.tensors[name].detach(), plan.mesh, rank)
        if name in rows:
            begin, end = rows[name]
            local = local.narrow(0, begin, end - begin)
        # A copy, since a view would keep the whole tensor in memory and let training change the caller's.
        yield name, torch.empty_like(local, device=local.device if local.is_meta else device).copy_(local)


def require_same_values(model: InMemory, ranks: Launch) -> None:
    """Check that all ranks have a model with the same values, each of which keeps a part of its own."""
    if ranks.control is None:
        return
    sums = {name: _checksum(tensor) for name, tensor in model.tensors.items()}
    digest = sha256(repr(sums).encode()).hexdigest()
    if len(set(exchange(ranks, digest))) == 1:
        return
    first, *rest = exchange(ranks, sums)
    for rank, theirs in enumerate(rest, start=1):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise InputsDifferError(
                    f"{name} of the model in memory has other values on rank {rank} than on rank 0; set the "
                    "same seed on all ranks before the model is made, or read the same checkpoint"
                )


def _checksum(tensor: Tensor) -> tuple[tuple[int, ...], str, int]:
    """Return a tensor's shape, dtype, and the sum of its bits as whole numbers."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)
    if tensor.is_meta or not tensor.numel():
        return shape, dtype, 0
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous()
    bits = torch.view_as_real(bits).contiguous() if bits.is_complex() else bits
    bits = bits.view(whole[bits.element_size()])
    return shape, dtype, int(bits.sum(dtype=torch.int64))
