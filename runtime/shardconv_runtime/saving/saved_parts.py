"""``save_pretrained`` of a model inside of a loaded one, such as the base model under a head.

Rank 0 puts the parameters of the part together in the memory of its host, and writes them with the method of
transformers. A whole model is written without that, from the files of all ranks.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..comm import agreement
from ..default_modes import in_default_modes
from ..errors import RefusedCallError
from ..format.plan import parameter_plans
from ..loaded import loaded
from ..parallel.build import owner_of, retie, stored_tensors
from .gathering import gathered_on_rank_0, why_not_gathered

METHOD = "save_pretrained"


def attach_saving_of_parts(model: nn.Module) -> None:
    """Make the method of transformers right for the models inside of a model of which ranks have parts."""
    for path, part in model.named_modules():
        if path and isinstance(part, PreTrainedModel):
            part.save_pretrained = partial(_save_part, model, path)  # type: ignore[method-assign]


@in_default_modes
@agreement.named_call(METHOD)
@torch.no_grad()
def _save_part(model: Any, path: str, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """Write a part of a model as an ordinary checkpoint; every rank calls it, with transformers' options."""
    source = loaded(model)
    if why := why_not_gathered(model, source):
        raise RefusedCallError(
            f"{METHOD} of {path}: {why}; call it on the whole model on all ranks, and load what that wrote "
            "with `from_pretrained` of the part's class"
        )
    twin: Any = source.building.unsharded_model()
    first_names, plans = dict(source.plan.tied), parameter_plans(source.plan)
    tensors = {
        name: tensor
        for name, tensor in stored_tensors(model)
        if name.startswith(f"{path}.")
        or any(alias.startswith(f"{path}.") and first == name for alias, first in first_names.items())
    }
    for name, tensor in tensors.items():
        if name in first_names:
            continue
        full = gathered_on_rank_0(tensor.detach(), plans[name], source)
        if source.rank == 0:
            owner, attribute = owner_of(twin, name)
            if attribute in owner._parameters:
                owner._parameters[attribute] = nn.Parameter(full.cpu(), requires_grad=False)
            else:
                owner._buffers[attribute] = full.cpu()

    def write() -> None:
        if source.rank == 0:
            retie(twin, source.plan)
            whole, part = twin.get_submodule(path), model.get_submodule(path)
            whole.config = copy.deepcopy(part.config)
            if getattr(part, "generation_config", None) is not None:
                whole.generation_config = part.generation_config
            whole.save_pretrained(save_directory, **options)

    agreement.together(source.launch, write, agreement.READ_TIMEOUT_S)
