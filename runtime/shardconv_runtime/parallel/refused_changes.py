"""Changes of a loaded model that its plan does not hold for: refused when they are made.

The plan is for the modules that were converted. A module that takes the place of one of them has the
global sizes, or lacks the steps that were attached to the old one; either way the results would be wrong
on every rank. Wrappers that keep the module and its parameters (``torch.compile``, for example) are
allowed, and also replacements by a model or an adapter in its forward pass, which was verified.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ..errors import PlanError, RefusedCallError

_BEFORE = "change the unsharded model, save it, and convert it again"


_ADAPTERS = (
    "call shardconv_runtime.add_adapter(model, config) for a new one; for a trained one run "
    "`shardconv adapt` and load(..., adapter=DIR)"
)


REFUSED_METHODS = {
    "push_to_hub": (
        "each rank has a part of the parameters; call save_pretrained(DIR) or "
        "shardconv_runtime.save(model, OUT) on all ranks, then `hf upload` or "
        "`shardconv push OUT`"
    ),
    "add_adapter": f"an adapter would get the sizes of a part of each layer; {_ADAPTERS}",
    "load_adapter": f"an adapter would get the sizes of a part of each layer; {_ADAPTERS}",
}
"""Methods of transformers' models that would take this rank's part for the model -> the remedy."""

_METHODS_OF_PARTS = REFUSED_METHODS | {
    "resize_token_embeddings": "call it on the model that was loaded",
}
"""The same of models inside of the model."""


@dataclass(frozen=True)
class _Part:
    """Information about a module of a loaded model."""

    ranks: frozenset[int]
    """The ranks of the default group, those that hold parts of the model together."""
    is_planned: bool
    """Whether the plan has overrides or steps for the module itself."""


MARK = "shardconv_rank"
"""Key of states that programs save themselves: which rank's part it is. Parts often have equal shapes."""


_ATTRIBUTE = "_shardconv_part"
"""Attribute of the modules of loaded models, and so of their copies."""


def _part(module: object) -> _Part | None:
    return module.__dict__.get(_ATTRIBUTE) if isinstance(module, nn.Module) else None


@cache
def _watch_registrations() -> None:
    register_module_module_registration_hook(_check_registration)
    register_module_parameter_registration_hook(_check_parameter)


def refuse_changes(
    model: nn.Module, planned: Collection[str], ranks: Collection[int], place: tuple[int, int]
) -> None:
    """Refuse methods of a model, and replacements of its modules, that would be wrong on every rank."""
    model.register_state_dict_post_hook(partial(_mark_state, place))  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(partial(_check_state, place))  # type: ignore[no-untyped-call]
    _watch_registrations()
    for path, module in model.named_modules():
        setattr(module, _ATTRIBUTE, _Part(frozenset(ranks), path in planned))
        for name, remedy in (_METHODS_OF_PARTS if path else REFUSED_METHODS).items():
            if hasattr(module, name):
                setattr(module, name, partial(refuse_method, name, remedy))


def refuse_method(name: str, remedy: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise ``PlanError``; put in place of a method that assumes that it holds the full model."""
    raise RefusedCallError(f"{name} was called on a model whose parameters are sharded over ranks: {remedy}")


def _mark_state(
    place: tuple[int, int], model: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Note the rank in the metadata of ``state_dict``, which ``torch.save`` keeps."""
    metadata[MARK] = place


def _check_state(
    place: tuple[int, int],
    model: nn.Module,
    state: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *rest: Any,
) -> None:
    """Refuse another rank's part in ``load_state_dict``, which would take it if sizes are the same."""
    require_own_part("load_state_dict", metadata.get(MARK), place)
    local_state = model.state_dict()
    for name, value in state.items():
        shapes = [tuple(getattr(x, "shape", ())) for x in (value, local_state.get(name, value))]
        if shapes[0] != shapes[1]:
            raise RefusedCallError(
                f"load_state_dict: {name} has shape {shapes[0]}, and this rank's part of it {shapes[1]}; "
                "convert the checkpoint and load that, or give each rank its part, as state_dict() returns it"
            )


def require_own_part(what: str, found: Sequence[int] | None, place: tuple[int, int]) -> None:
    """Check that a state is of the same rank. A state that only rank 0 saved is not the others' state."""
    if found is not None and tuple(found) != place:
        raise RefusedCallError(
            f"{what}: this is the state of rank {found[0]} of {found[1]}, and this process is rank "
            f"{place[0]} of {place[1]}; each has its own part. Save with shardconv_runtime.save and "
            "save_optimizer on all ranks, or a file for each rank"
        )


def _check_registration(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    """Refuse a module that replaces one of the plan; torch calls this for each registration."""
    if new is None:
        return
    if isinstance(parent, DistributedDataParallel):
        for part in filter(None, map(_part, new.modules())):  # the model may be inside of another wrapper
            # The wrapper makes parameters and gradients of its processes equal, so these must be replicas.
            processes = set(dist.get_process_group_ranks(parent.process_group))
            if processes & part.ranks - {dist.get_rank()}:
                raise RefusedCallError(
                    "DistributedDataParallel would make the parts of ranks "
                    f"{', '.join(map(str, sorted(part.ranks)))} equal; pass process_group=, the processes "
                    "that hold the same part, or use shardconv_runtime.data_parallel (accelerate and a plain "
                    "Trainer wrap the model so; docs/training.md has a Trainer that does not)"
                )
    if _part(new) is not None and name == "base_model" and _origin(parent) == "peft":
        # Adapters of layers put another module around the model first.
        raise RefusedCallError(
            f"a {type(parent).__name__} was made of a loaded model, with an adapter that adds tokens to its "
            "inputs: peft would use a rank's sizes as the model's; use an adapter of layers, as LoRA, with "
            "shardconv_runtime.add_adapter(model, config), or train the unsharded model"
        )
    around = _part(parent)
    if around is None:
        return
    if name == "parametrizations":
        if _is_in_forward_pass():  # for this call: peft adds its factors to the weights of experts so
            return
        raise _of_part(parent)
    old = parent._modules.get(name)
    if old is None or old is new:
        return
    keeps_parameters = set(new.parameters()) == set(old.parameters())
    if keeps_parameters and old in new.modules():
        return  # a wrapper without its own parameters changes nothing
    old_part = _part(old)
    if keeps_parameters and old_part is not None and not old_part.is_planned and _is_in_forward_pass():
        # The model's own forward pass replaces the module, as it did when the plan was verified. Modules with
        # overrides or steps are not allowed to, since these would be lost.
        setattr(new, _ATTRIBUTE, replace(around, is_planned=False))
        return
    remedy = _ADAPTERS if type(new).__module__.startswith("peft.") else _BEFORE
    raise PlanError(
        f"{name} of a {type(parent).__name__} was to be replaced by a {type(new).__name__}, in a model whose "
        f"parameters are sharded over ranks: the plan is for the modules that were converted; {remedy}"
    )


def _origin(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _check_parameter(module: nn.Module, name: str, new: nn.Parameter | None) -> None:
    """Refuse parameters with which pruning or a weight norm replaces ``weight``."""
    if _part(module) is not None and any(name.startswith(f"{old}_") for old in module._parameters):
        raise _of_part(module)


def _of_part(module: nn.Module) -> PlanError:
    return PlanError(
        f"the weights of a {type(module).__name__} were to be made of other tensors (a norm, a mask), in a "
        f"model whose parameters are sharded over ranks: each rank would take those of its part; {_BEFORE}"
    )


def _is_in_forward_pass() -> bool:
    """Return whether the caller was called by the forward pass of a module of a loaded model."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "forward" and _part(frame.f_locals.get("self")) is not None:
            return True
    return False
