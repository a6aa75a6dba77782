"""Guards of torch's clipping, scaler and optimizers, for gradients of which each rank has a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import PlanError
from ..loaded import loaded
from ..parallel.refusals import MARK, require_own_part
from .clipping import groups_of, norm_of_gradients, require_finite
from .fsdp import MODELS, models_of
from .optimizer_trial import TrialError, needs_full_tensors

# ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` of the gradients of loaded models.
#
# They are given only gradients, which say nothing of the ranks: each rank would compute the norm of its
# part, and scale by another factor. torch has no hook for that, so the function with which both compute the
# norm is replaced by one that recognizes these gradients. ``clip_grad_norm_`` looks it up by its private
# name in ``torch.nn.utils.clip_grad``.


@cache
def take_norms_over_ranks() -> None:
    """Let torch's functions take norms over all ranks of ``MODELS``."""
    replaced = _norm_over_ranks(clip_grad._get_total_norm)
    clip_grad._get_total_norm = replaced
    torch.nn.utils.get_total_norm = replaced


def _norm_over_ranks(local_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(local_norm)
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model = _model_of(given)
        if model is None:
            return local_norm(given, norm_type, error_if_nonfinite, foreach)
        norm = norm_of_gradients(model, given, norm_type)
        if error_if_nonfinite:
            require_finite(norm, norm_type)
        return norm

    return total_norm


def _model_of(tensors: Iterable[Tensor]) -> nn.Module | None:
    """Return the loaded model whose gradients these are; None if they are of others."""
    given = set(tensors)  # by identity
    for model in MODELS:
        own = {p.grad for p in model.parameters() if p.grad is not None} & given
        if own and own != given:
            raise PlanError(
                f"{len(given) - len(own)} of {len(given)} gradients are not of the parameters of the "
                f"{type(model).__name__} that is sharded over ranks; clip these apart from its own"
            )
        if own:
            return model
    return None


# Optimizers whose step needs more than an element's own gradient are refused for parts of tensors. They are
# recognized by a trial (``optimizer_trial.py``) before their first step.


@cache
def guard_optimizers() -> None:
    """Refuse such optimizers of parameters of ``MODELS``, and those that loaded another rank's state."""
    register_optimizer_step_pre_hook(_check)


OPTIONS = {"percentile_clipping": 100, "max_unorm": 0.0}
"""Options of optimizers of bitsandbytes whose steps depend on norms of tensors, and the values without. They
may have no effect in a trial, since they compare a gradient with a hundred earlier ones."""

TRIED: WeakSet[Optimizer] = WeakSet()
"""Optimizers that treat each element by itself."""

_REMEDY = "use an optimizer that treats each element separately, such as AdamW, Adam, SGD or Adagrad"


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _check_state(optimizer)
    if optimizer in TRIED or not _models(optimizer):
        return
    name, given = type(optimizer).__name__, getattr(optimizer, "args", None)
    option = next((n for n, without in OPTIONS.items() if getattr(given, n, without) != without), None)
    name += f" with {option}" if option else ""
    try:
        if option or needs_full_tensors(optimizer):
            raise PlanError(
                f"{name} computes its step from full tensors, and each rank holds parts of them; {_REMEDY}"
            )
    except TrialError as error:
        raise PlanError(
            f"{name} could not be tried on small parameters ({error}), so it may compute its step from full "
            f"tensors, of which each rank holds parts; {_REMEDY}"
        ) from error
    TRIED.add(optimizer)


def _models(optimizer: Optimizer) -> list[nn.Module]:
    return models_of(p for group in optimizer.param_groups for p in group["params"])


# States that a program saves itself, with ``optimizer.state_dict()``. The states of two ranks often have the
# same shapes, so that all could load the state that rank 0 saved. At its first step an optimizer is known to
# be one of a loaded model. From then on its states have a mark, in their groups. A mark that was loaded
# before is compared there.

_MARKING: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose states get a mark."""


def _check_state(optimizer: Optimizer) -> None:
    marks = [group.pop(MARK, None) for group in optimizer.param_groups]
    if optimizer in _MARKING and not any(marks):
        return
    models = _models(optimizer)
    if not models:
        return
    launch = loaded(models[0]).launch
    place = (launch.rank, launch.world_size)
    for found in filter(None, marks):
        require_own_part("optimizer.load_state_dict", found, place)
    if optimizer not in _MARKING:
        _MARKING.add(optimizer)
        optimizer.register_state_dict_post_hook(partial(_mark_state, place))


def _mark_state(place: tuple[int, int], optimizer: Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group[MARK] = place


# ``torch.amp.GradScaler`` of the gradients of loaded models: all ranks skip a step, or none does.
#
# A scaler looks for infinities in the gradients that it is given. Each rank would look at its own part, so
# that after an overflow in one rank's shard that rank skips the step, the others take it, and they go on with
# other scales. All ways in which a scaler looks (``unscale_``, ``step``, also for fused optimizers) pass
# through a private method of its class. In its place, one takes the largest answer of all processes of the
# model.

_FOUND = "_unscale_grads_"
"""The private method: it scales gradients, and returns for each device whether one of them was not finite."""


@cache
def look_for_infinities_over_ranks() -> None:
    """Let scalers of torch decide for all ranks of ``MODELS``."""
    for kind in (GradScaler, ShardedGradScaler):
        if _FOUND in vars(kind):
            setattr(kind, _FOUND, _over_ranks(vars(kind)[_FOUND]))


def _over_ranks(own: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    @wraps(own)
    def unscaled(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        found = own(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        models = _models(optimizer)
        if not models:
            return found
        if not found:  # this process has no gradients; the others do, and wait for it
            found[found_inf.device] = found_inf.clone()
        total = found_inf.new_zeros((), device=loaded(models[0]).launch.device)
        for value in found.values():
            total = torch.maximum(total, value.to(total.device).reshape(()))
        groups = {group.group_name: group for model in models for group in groups_of(model)}
        for name in sorted(groups):  # in the same order on all processes
            dist.all_reduce(total, dist.ReduceOp.MAX, groups[name])
        for value in found.values():
            value.copy_(total.expand_as(value))
        return found

    return unscaled
