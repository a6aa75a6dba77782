"""The norm of the gradients of a sharded model, and clipping by it.

Every element counts once. Positions that are replicated over a mesh axis count on the rank with coordinate 0
on it, segment by segment; elements that are replicated over data-parallel processes count on the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ..comm.waiting import hinting
from ..errors import OptionError, PlanError, RefusedCallError, missing
from ..format.plan import ParameterPlan, parameter_plans
from ..format.slices import Mesh, Range, coordinates
from ..format.stored_layout import by_axes
from ..loaded import loaded
from ..saving.local_windows import local_tensor, local_window
from ..saving.replicas import mesh_of
from ..saving.stored_model import named_tensors
from .fsdp import MODELS, models_of

OwnedCell = tuple[tuple[Range, ...], ...]
"""Positions of a local tensor, as ranges in each dim."""


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients so that their norm over the full model is at most ``max_norm``.

    Call it on every process of the model, after the last backward pass of a step. Like
    ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, it multiplies gradients by ``min(1, max_norm
    / (norm + 1e-6))``, even if this is nan.

    Args:
        model: see ``grad_norm``.
        max_norm: maximum of the norm after clipping.
        norm_type: see ``grad_norm``.
        error_if_nonfinite: raise an error on all processes if the norm is not finite. This waits for the
            device.
        foreach: scale many gradients in one operation; the default.

    Returns:
        The norm before clipping, a replicated scalar; see ``grad_norm``.

    Raises:
        PlanError: see ``grad_norm``.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.

    Example:
        >>> loss.backward()
        >>> norm = shardconv_runtime.clip_grad_norm(model, 1.0)
        >>> optimizer.step()
    """
    norm = grad_norm(model, norm_type=norm_type)
    if error_if_nonfinite:
        require_finite(norm, norm_type)
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    # torch reads only this attribute of parameters. Gradients of FSDP are DTensors, and are scaled in parts.
    local: list[Any] = [SimpleNamespace(grad=local_tensor(gradient.detach())) for gradient in gradients]
    torch.nn.utils.clip_grads_with_norm_(local, max_norm, norm, foreach)
    return norm


def require_finite(norm: Tensor, norm_type: float) -> None:
    """Raise ``RuntimeError`` unless the norm of gradients, a scalar, is finite; waits for the device."""
    if not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so that they cannot be "
            "clipped; skip the step, or pass error_if_nonfinite=False"
        )


def grad_norm(model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the gradients of the full model; call it on every process of the model.

    It needs one all_reduce over all processes, or one over each dim of their mesh. It is not
    differentiable.

    Args:
        model: returned by ``load(..., training=True)``, also after ``data_parallel`` or ``fully_shard``, or
            in ``DistributedDataParallel``. Parameters without gradients count as zero.
        norm_type: order of the norm, above 0; ``inf`` for the largest absolute value.

    Returns:
        A scalar, replicated over all processes: float64 if a gradient is float64, otherwise float32. It is
        NaN if an element on any process is.

    Raises:
        PlanError: ``load`` did not return the model, the plan has no entry for one of its parameters, or
            ``norm_type`` is not above 0.
    """
    return norm_of_gradients(model, [p.grad for p in model.parameters() if p.grad is not None], norm_type)


def norm_of_gradients(model: nn.Module, gradients: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the norm of some gradients of the full model; otherwise as ``grad_norm``.

    Args:
        gradients: the gradients of its parameters, local; the same parameters' on all processes.
    """
    order = float(norm_type)
    if not order > 0:
        raise OptionError(f"norm_type={norm_type} should be above 0, or inf")
    source, counted = loaded(model), set(gradients)  # tensors are hashed by identity
    shares = list(_shares(model, counted))
    norms = [norm for share in shares for norm in share.norms(order)]
    local = torch.stack([norm.double() for norm in norms]) if norms else None
    total = torch.zeros(2, dtype=torch.float64, device=source.launch.device)
    if local is not None:
        total[0] = torch.linalg.vector_norm(local.to(total.device), order)
    is_wide = any(share.gradient.dtype == torch.float64 for share in shares)
    with hinting(source.launch.rank, "clip_grad_norm or grad_norm"):
        norm = _combined(total, order, groups_of(model))
    return norm.to(torch.float64 if is_wide else torch.float32)


@dataclass(frozen=True)
class _Share:
    """A local gradient on this process, and its cells that count here."""

    gradient: Tensor
    cells: tuple[OwnedCell, ...]

    def norms(self, order: float) -> Iterator[Tensor]:
        """Yield the norm of each cell, a scalar; low precision is summed in float32."""
        dtype = torch.float64 if self.gradient.dtype == torch.float64 else torch.float32
        for cell in self.cells:
            taken = _take(self.gradient, cell)
            if taken.numel():
                yield torch.linalg.vector_norm(taken, order, dtype=dtype)


def _shares(model: nn.Module, counted: Collection[Tensor]) -> Iterator[_Share]:
    source = loaded(model)
    plan = source.held_plan
    entries, aliases = parameter_plans(plan), dict(plan.tied)
    mesh = mesh_of(model)
    first = mesh is None or not any(mesh.get_coordinate() or ())
    elsewhere = set(source.held_before.values())
    for name, parameter in named_tensors(model).items():
        if not isinstance(parameter, nn.Parameter) or name in aliases:
            continue
        if name not in entries:
            raise PlanError(
                f"{missing({name}, 'parameter', 'the model', 'the plan')}, so the norm of the gradients of "
                "all ranks is undefined; use the model as it was loaded"
            )
        window, is_first = local_window(name, parameter)
        if parameter.grad is not None and parameter.grad in counted:
            counts = is_first if isinstance(parameter, DTensor) else first
            counts = counts and name not in elsewhere
            cells = owned_cells(entries[name], plan.mesh, source.rank, window) if counts else ()
            yield _Share(local_tensor(parameter.grad.detach()), cells)


@lru_cache(maxsize=4096)
def owned_cells(
    entry: ParameterPlan, mesh: Mesh, rank: int, window: tuple[Range, ...]
) -> tuple[OwnedCell, ...]:
    """Return the positions of a window of a rank's tensor that count on this rank, in disjoint cells.

    Args:
        window: local positions that this process holds, one range for each dim.
    """
    nonzero = {axis for axis, coordinate in enumerate(coordinates(mesh, rank)) if coordinate}
    dims = [
        [(axes, _clipped(spans, *part)) for axes, spans in by_axes(dim, mesh, rank).items()]
        for dim, part in zip(entry.dims, window, strict=True)
    ]
    return tuple(
        tuple(spans for _, spans in cell)
        for cell in product(*dims)
        if nonzero.issubset(axis for axes, _ in cell for axis in axes)
    )


def _clipped(spans: tuple[Range, ...], first: int, last: int) -> tuple[Range, ...]:
    """Return the parts of ranges in ``[first, last)``, relative to ``first``."""
    clipped = ((max(start, first) - first, min(stop, last) - first) for start, stop in spans)
    return tuple((start, stop) for start, stop in clipped if start < stop)


def _take(x: Tensor, cell: OwnedCell) -> Tensor:
    """Return the elements of a cell of a local tensor; a view if each dim has one range."""
    for dim, spans in enumerate(cell):
        parts = [x.narrow(dim, start, stop - start) for start, stop in spans]
        if len(parts) == 1:
            x = parts[0]
        else:
            x = torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
    return x


def _combined(total: Tensor, order: float, groups: list[dist.ProcessGroup]) -> Tensor:
    """Return the norm over all processes, a scalar; one all_reduce over each group.

    Args:
        total: ``[2]``, float64: this process's norm, and 0.
    """
    if math.isinf(order):  # whether a maximum keeps NaNs depends on the backend
        is_nan = total[0].isnan()
        total = torch.stack((total[0].nan_to_num(0.0, posinf=math.inf), is_nan.double()))
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX, group)
        return torch.where(total[1] > 0, math.nan, total[0])
    powers = total[:1].pow(order)
    for group in groups:
        dist.all_reduce(powers, group=group)
    return powers[0].pow(1 / order)


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return groups such that reductions over one after the other cover all processes of the model."""
    tp, mesh = loaded(model).launch.group, mesh_of(model)
    groups = [] if tp is None else [tp]
    if mesh is not None:
        groups += [mesh.get_group(dim) for dim in range(mesh.ndim)]
    world = dist.group.WORLD if groups else None
    if world is not None and math.prod(group.size() for group in groups) == world.size():
        return [world]
    return groups


@cache
def take_norms_over_ranks() -> None:
    """Let torch's functions take norms over all ranks of ``MODELS``.

    They are given only gradients, which say nothing of the ranks: each rank would compute the norm of its
    part, and scale by another factor. torch has no hook for that, so the function with which both compute the
    norm is replaced by one that recognizes these gradients. ``clip_grad_norm_`` looks it up by its private
    name in ``torch.nn.utils.clip_grad``.
    """
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
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model = _model_of(gradients)
        if model is None:
            return local_norm(gradients, norm_type, error_if_nonfinite, foreach)
        norm = norm_of_gradients(model, gradients, norm_type)
        if error_if_nonfinite:
            require_finite(norm, norm_type)
        return norm

    return total_norm


def _model_of(tensors: Iterable[Tensor]) -> nn.Module | None:
    """Return the loaded model whose gradients these are; None if they are of others."""
    gradients = set(tensors)  # by identity
    for model in MODELS:
        model_gradients = {p.grad for p in model.parameters() if p.grad is not None} & gradients
        if model_gradients and model_gradients != gradients:
            raise RefusedCallError(
                f"{len(gradients) - len(model_gradients)} of {len(gradients)} gradients are not of the "
                f"parameters of the {type(model).__name__} that is sharded over ranks; clip these apart "
                "from its own"
            )
        if model_gradients:
            return model
    return None


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
        infinities = own(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        models = models_of(p for group in optimizer.param_groups for p in group["params"])
        if not models:
            return infinities
        if not infinities:  # this process has no gradients; the others do, and wait for it
            infinities[found_inf.device] = found_inf.clone()
        total = found_inf.new_zeros((), device=loaded(models[0]).launch.device)
        for value in infinities.values():
            total = torch.maximum(total, value.to(total.device).reshape(()))
        groups = {group.group_name: group for model in models for group in groups_of(model)}
        for name in sorted(groups):  # in the same order on all processes
            dist.all_reduce(total, dist.ReduceOp.MAX, groups[name])
        for value in infinities.values():
            value.copy_(total.expand_as(value))
        return infinities

    return unscaled
