"""Simulates the ranks on numbers, before a byte is written.

All ranks run in one process, on random weights, in float64, and must return what the unsharded model
returns. Layers of a kind that is there already are bypassed, so that deep models fit.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from shardconv_runtime.build import owner_of, parallelize, stored_tensors
from shardconv_runtime.collectives import Communicator
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.plan import ParameterPlan, Plan, parameter_plans
from shardconv_runtime.slices import axes_of, size
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .exact import Float64
from .inputs import TraceInputs
from .shallow import Bypass, bypass
from .simulate import run_ranks
from .writer import local_tensor

TOLERANCE = 1e-9
"""Largest difference of the outputs, relative to the largest output, in float64."""
MAX_SIMULATED_BYTES = 16 * 2**30
"""Above this, or half of the free memory, a model is not simulated."""


def simulate(
    plan: Plan, model: nn.Module, inputs: TraceInputs, bypassed: Mapping[str, Bypass] | None = None
) -> float | None:
    """Run every rank in this process and compare with the unsharded model.

    Args:
        plan: the plan to prove.
        model: the global model, on meta; it is copied.
        inputs: what it is called with.
        bypassed: layers to leave out, on both sides.

    Returns:
        The largest difference of an output, relative to the largest value; None if the model is too
        large to be simulated here.

    Raises:
        SolveError: the ranks' outputs differ from the unsharded model's by more than ``TOLERANCE``.
    """
    skipped = bypassed or {}
    whole = bypass(copy.deepcopy(model).double(), skipped)
    entries = {name: entry for name, entry in parameter_plans(plan).items() if not _inside(name, skipped)}
    if _needed_bytes(entries, plan) > _budget():
        return None
    shapes = {name: t for name, t in stored_tensors(whole) if name in entries}
    weights = {name: _random(name, tensor) for name, tensor in shapes.items()}
    entries = {name: replace(entries[name], dtype=str(w.dtype)[6:]) for name, w in weights.items()}
    _fill(whole, weights)
    want = _outputs(whole, inputs)

    def rank_outputs(comm: Communicator) -> list[Tensor]:
        local = bypass(parallelize(copy.deepcopy(model).double(), plan, comm), skipped)
        _fill(local, {n: local_tensor(entries[n], w, plan.mesh, comm.rank) for n, w in weights.items()})
        return _outputs(local, inputs)

    try:
        results = run_ranks(plan.mesh, rank_outputs) if plan.tp > 1 else [want]
    except PlanError:
        raise
    except Exception as error:
        raise SolveError(f"the plan failed when its ranks were simulated: {error}") from error
    worst = max((_difference(got, want) for got in results), default=0.0)
    if not worst <= TOLERANCE:
        raise SolveError(
            f"the plan is wrong: simulated ranks differ from the unsharded model by {worst:.1e} of its "
            f"largest output (allowed: {TOLERANCE:.0e}). Nothing was written. This is a bug in shardconv; "
            "please report it."
        )
    return worst


def _inside(name: str, layers: Mapping[str, Bypass]) -> bool:
    """Whether a parameter belongs to one of the layers."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in layers for i in range(1, len(parts)))


def _needed_bytes(entries: Mapping[str, ParameterPlan], plan: Plan) -> int:
    """Float64 copies of the whole model and of all ranks."""
    total = 0
    for entry in entries.values():
        numel = math.prod(size(d) for d in entry.dims)
        split = math.prod(plan.mesh[a] for a in {a for d in entry.dims for a in axes_of(d)})
        total += 8 * numel * (1 + plan.tp // split)
    return total


def _budget() -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MAX_SIMULATED_BYTES, free // 2)


def _random(name: str, tensor: Tensor) -> Tensor:
    """Weights of a size that keeps activations in range; norms and biases are random as well."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + len(name))
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() < 2:
        return torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.5
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype).div_(math.sqrt(tensor.shape[-1]))


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers, and every other name of one that is tied."""
    aliases: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            aliases.setdefault(id(parameter), []).append((module, attribute))
    for name, tensor in tensors.items():
        owner, attribute = owner_of(model, name)
        if attribute in owner._parameters:
            real = nn.Parameter(tensor, requires_grad=False)
            for module, alias in aliases[id(owner._parameters[attribute])]:
                module._parameters[alias] = real
        else:
            owner._buffers[attribute] = tensor


def _outputs(model: nn.Module, inputs: TraceInputs) -> list[Tensor]:
    with torch.inference_mode(), Float64():
        result = model(**inputs.tensors, **inputs.options)
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def _difference(got: list[Tensor], want: list[Tensor]) -> float:
    if [t.shape for t in got] != [t.shape for t in want]:
        return math.inf
    return max((_relative(x.double(), y.double()) for x, y in zip(got, want, strict=True)), default=0.0)


def _relative(x: Tensor, y: Tensor) -> float:
    """Largest difference over the largest value; the same infinity or NaN is no difference."""
    finite = y.isfinite()
    if y.numel() == 0:
        return 0.0
    if not finite.any():
        return math.inf  # nothing to compare: nothing is proven
    same = (x == y) | (x.isnan() & y.isnan())
    error = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf)
    return float(error.max() / y[finite].abs().max().clamp_min(1e-30))
