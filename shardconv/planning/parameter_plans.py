"""Plan parameters (how each is sharded, over which ranks its gradient is summed) and random numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from shardconv_runtime.format.dims import Dim, Leaf, axes_of
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.format.names import compress, expand_all
from shardconv_runtime.format.plan import GradientPlan, ParameterPlan
from shardconv_runtime.format.stored_layout import is_sharded_between
from shardconv_runtime.meta.meta_model import tied_names
from shardconv_runtime.parallel.build import stored_tensors
from torch import Tensor, nn

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import IncompatibleDims, Node, find, leaves, split
from ..tracing.fold import Folded
from ..tracing.tape import Mark, Op, prefixes, starred
from .conflict import Conflict
from .solution import Solution, stand_in

# A solution must not cut packed parameters inside of their grains.
#
# If the tree of a dim allows it, the positions of a step become an inner factor that is not sharded, and the
# solver distributes full grains, also unevenly. If there is no such factor (heads of one and a half grains),
# the solution is checked.

Grains = Mapping[str, tuple[int, ...]]
"""FQN of each packed parameter -> the positions of a dim that stay together, for each dim."""


def split_at_grains(analysis: Analysis, folded: Folded, grains: Grains) -> list[Node]:
    """Make grains a factor of the dims of packed parameters.

    Returns:
        The leaves inside of grains, which must stay replicated.
    """
    forbidden: list[Node] = []
    by_name = {info.name: tid for tid, info in enumerate(analysis.tape.tensors) if info.name}
    stand_ins = folded.representatives()
    kinds = {(by_name.get(stand_in(name, stand_ins)), sizes) for name, sizes in grains.items()}
    for tid, sizes in sorted((tid, sizes) for tid, sizes in kinds if tid is not None):
        if tid not in analysis.dims:
            continue
        for dim, step in zip(analysis.dims[tid], sizes, strict=True):
            with suppress(IncompatibleDims):
                if step > 1:
                    forbidden += leaves(split(dim, step)[1])
    return forbidden


def find_divided_grain(
    solution: Solution, parameters: Iterable[ParameterPlan], grains: Grains
) -> Conflict | None:
    """Return the first dim of a packed parameter in which a rank's shard begins or ends inside of a step."""
    if not grains:
        return None
    analysis = solution.analysis
    by_name = {info.name: tid for tid, info in enumerate(analysis.tape.tensors) if info.name}
    stand_ins = solution.folded.representatives()
    for entry in parameters:
        checked: set[tuple[int, ...]] = set()
        for name in expand_all(entry.names):
            sizes = grains.get(name, ())
            if sizes in checked:
                continue
            checked.add(sizes)
            for index, (dim, step) in enumerate(zip(entry.dims, sizes, strict=False)):
                if not is_sharded_between(dim, step, solution.layouts.mesh):
                    tid = by_name[stand_in(name, stand_ins)]
                    return Conflict((analysis.dims[tid][index],), f"{name} is packed in grains of {step}")
    return None


def parameter_plans(solution: Solution, model: nn.Module) -> tuple[ParameterPlan, ...]:
    """Return the layout of every parameter and persistent buffer; equal ones share an entry.

    Args:
        model: the global model, on meta.
    """
    by_name = {i.name: t for t, i in enumerate(solution.analysis.tape.tensors) if i.name}
    entries: dict[tuple[str, ParameterPlan], list[str]] = {}
    stand_ins = solution.folded.representatives()
    plans: dict[str, ParameterPlan] = {}
    aliases = tied_names(model)
    for name, tensor in stored_tensors(model):
        if name in aliases:
            continue
        shown = stand_in(name, stand_ins)
        entry = plans.get(shown)
        if entry is None:
            entry = _layout(solution, by_name.get(shown), tensor)
            entry = _row_bias(solution, model, shown, entry, by_name)
            if entry.grad_axes or entry.partial:
                owners = {n.rpartition(".")[0] for n in (shown, *(a for a in aliases if aliases[a] == shown))}
                entry = replace(entry, grad_levels=_levels(solution, model, by_name[shown], owners))
            plans[shown] = entry
        entries.setdefault((starred(name), entry), []).append(name)
    return tuple(replace(entry, names=tuple(compress(names))) for (_, entry), names in entries.items())


def gradient_plans(parameters: Iterable[ParameterPlan]) -> tuple[GradientPlan, ...]:
    """Return the gradients that are summed over ranks, from the plans of parameters; equal ones share an
    entry."""
    grouped: dict[tuple[str, tuple[int, ...], int], list[str]] = {}
    for entry in parameters:
        if entry.grad_axes:
            for name in expand_all(entry.names):
                grouped.setdefault((starred(name), entry.grad_axes, entry.grad_levels), []).append(name)
    return tuple(
        GradientPlan(tuple(compress(names)), grad_axes, levels)
        for (_, grad_axes, levels), names in grouped.items()
    )


def _layout(solution: Solution, tid: int | None, tensor: Tensor) -> ParameterPlan:
    """Return the layout of a parameter: a tensor of the tape, or one that the forward pass does not use."""
    dtype = dtype_name(tensor.dtype)
    analysis = solution.analysis
    if tid is None or tid not in analysis.dims:
        dims: tuple[Dim, ...] = tuple(Leaf(n) for n in tensor.shape)
        return ParameterPlan((), dims, dtype, reason="the traced forward pass does not use it")
    dims = solution.layouts.dims(tid)
    partial = solution.layouts.assignment.partial_axes(analysis.partial[tid])
    sharded = any(axes_of(d) for d in dims)
    reason = "" if sharded or partial or not solution.layouts.mesh else _reason(solution, tid)
    return ParameterPlan((), dims, dtype, partial, reason, grad_axes=solution.gradients.axes(tid))


def _levels(solution: Solution, model: nn.Module, tid: int, owners: Collection[str]) -> int:
    """Return how many levels above a parameter's module is the innermost module that runs whenever it is
    read.

    Args:
        model: the global model, on meta.
    """
    tape = solution.analysis.tape
    called = {call.fqn for call in tape.calls}
    owner = tape.tensors[tid].name.rpartition(".")[0]
    # A module that layers share has a name in each of them, and code of a layer reads it under that name.
    names = [name for name in owners if model.get_submodule(name) is model.get_submodule(owner)]
    levels = 0
    for event in tape.events:
        if isinstance(event, Op) and tid in event.inputs:
            running = tape.calls[tape.training_call(event.call)].fqn
            if not any(prefix in owners for prefix in prefixes(running)):
                levels = max(levels, min(_levels_above(name, running, called) for name in names))
    return levels


def _levels_above(owner: str, running: str, called: Collection[str]) -> int:
    """Return how many levels above a module is the innermost module that is called and runs when another one
    does."""
    path = owner.split(".")
    same = [a == b for a, b in zip(path, running.split("."), strict=False)]
    num_equal = (*same, False).index(False)
    while num_equal and ".".join(path[:num_equal]) not in called:  # a list of layers is not called
        num_equal -= 1
    return len(path) - num_equal


def _row_bias(
    solution: Solution, model: nn.Module, name: str, entry: ParameterPlan, by_name: Mapping[str, int]
) -> ParameterPlan:
    """Replicate the bias of a row-parallel linear layer, which is added after the reduction.

    This holds only for a layer with a sharded weight that reduces its output: a replicated layer may get
        terms of a
    sum, and its bias is added before the reduction.
    """
    if not entry.partial:
        return entry
    fqn, _, attribute = name.rpartition(".")
    if attribute != "bias" or type(model.get_submodule(fqn)) is not nn.Linear:
        return entry
    weight = by_name.get(f"{fqn}.weight")
    if weight is None or not axes_of(solution.layouts.dims(weight)[-1]):
        return entry
    for event in solution.analysis.tape.events:
        if isinstance(event, Mark) and event.is_output and solution.fqn(event) == fqn:
            last = solution.layouts.dims(event.target)[-1]
            if solution.reduced_axes(event) == entry.partial and not axes_of(last):
                # Over these axes, the gradient of the bias is partial: those over which the output is
                # scattered, or its gradient is partial.
                target = event.target
                summed = {a for d in solution.layouts.dims(target) for a in axes_of(d)}
                summed |= set(solution.gradients.axes(target))
                grad_axes = {*entry.grad_axes, *(summed & set(solution.reduced_axes(event)))}
                reason = "added once, after the reduction"
                return replace(entry, partial=(), reason=reason, grad_axes=tuple(sorted(grad_axes)))
            break
    return entry


def _reason(solution: Solution, tid: int) -> str:
    """Say why a parameter is replicated."""
    parts = [x for dim in solution.analysis.dims[tid] for x in leaves(dim)]
    for leaf in (x for y in parts for x in (y, *y.links)):
        where = solution.ruled_out.get(find(leaf))
        if where is not None:
            return f"it could not be localized: {where}"
    free = [x for x in parts if not x.blocked]
    if not free:
        return next((x.why for x in parts if x.why), "") or "none of its dims can be sharded"
    if all(x.size < max(solution.layouts.mesh) for x in free):
        return "it has fewer positions than there are ranks"
    return "sharding it would cost more communication than it saves"
