"""The modules that a plan names in their local form: with overrides, replaced, or with steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..errors import PlanError
from ..format.dims import size
from ..format.module_steps import (
    AllReduceStep,
    LocalRowsStep,
    ModuleStep,
    ReduceScatterStep,
    ZeroOutOfShardStep,
)
from ..format.plan import ModulePlan, ParameterPlan, Plan, local_shape
from ..format.slices import Mesh, ranges
from ..format.stored_layout import holds_values
from .attribute_overrides import apply_overrides, raise_flags
from .boundary import TensorStep, attach, forward_signature, in_use, step
from .layers import ColumnParallelLinear, RowParallelLinear, Steps, VocabParallelEmbedding
from .row_ids import RowIds
from .sharded_norms import sharded_class

if TYPE_CHECKING:
    from .packed_modules import PackedModules

# The part of a global tensor in memory that a rank holds.


def local_tensor(entry: ParameterPlan, tensor: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """Return the part of a global tensor in memory that a rank holds.

    Args:
        tensor: global.

    Returns:
        local, contiguous; of a Partial parameter, zeros where a coordinate on its axes is not 0.
    """
    return local_view(entry, tensor, mesh, rank).to(getattr(torch, entry.dtype)).contiguous()


def local_view(entry: ParameterPlan, tensor: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """Return the same part in the dtype of ``tensor``, without a copy if it holds one span of each dim."""
    for index, dim in enumerate(entry.dims):
        spans = ranges(dim, mesh, rank)
        if spans != ((0, tensor.shape[index]),):
            pieces = [tensor.narrow(index, start, stop - start) for start, stop in spans]
            empty = tensor.narrow(index, 0, 0)
            tensor = torch.cat(pieces, index) if len(pieces) > 1 else next(iter(pieces), empty)
    return tensor if holds_values(entry, mesh, rank) else torch.zeros_like(tensor)


def localize_modules(
    model: nn.Module,
    plan: Plan,
    modules: dict[str, ModulePlan],
    targets: dict[str, nn.Module],
    parameters: dict[str, ParameterPlan],
    comm: Communicator,
    training: bool,
    packed: PackedModules | None,
) -> None:
    """AttributeOverride, replace and wrap the modules that the plan names, in place."""
    for fqn, entry in modules.items():
        if entry.overrides or entry.flags:
            with _at(fqn):
                apply_overrides(targets[fqn], entry.overrides, comm.rank)
                raise_flags(targets[fqn], entry.flags)
    computing = {} if packed is None else packed.replace(model, modules, training=training)
    replaced = {id(old): new for old, new in computing.items()}
    for fqn, entry in modules.items():
        if targets[fqn] in computing:
            continue
        with _at(fqn):
            target = _Target(fqn, targets[fqn], entry, parameters, dict(plan.tied), comm, training)
            replaced[id(targets[fqn])] = _convert(target)
    # Put the new modules where the old ones are, under each of their names.
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = replaced.get(id(child), child)


@dataclass(frozen=True)
class _Target:
    """A module that the plan names."""

    fqn: str
    module: nn.Module
    entry: ModulePlan
    parameters: dict[str, ParameterPlan]
    tied: dict[str, str]
    comm: Communicator
    training: bool = False

    def parameter(self, name: str) -> ParameterPlan:
        """Return the plan of one of the module's parameters."""
        fqn = f"{self.fqn}.{name}" if self.fqn else name
        entry = self.parameters.get(self.tied.get(fqn, fqn))
        if entry is None:
            raise PlanError(f"the plan lacks the parameter {fqn!r}")
        return entry

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return local shape of one of the module's parameters."""
        return local_shape(self.parameter(name), self.comm.mesh, self.comm.rank)

    def steps(self, side: str, ignored: type[ModuleStep] | tuple[()] = ()) -> list[TensorStep]:
        """Return the steps on the only input, or on the output."""
        boundaries = self.entry.inputs if side == "input" else self.entry.outputs
        ports = ("input.input", "input.0") if side == "input" else ("output",)
        for boundary in boundaries:
            if boundary.port not in ports:
                raise PlanError(f"a {type(self.module).__name__} has no port {boundary.port!r}")
        steps = [b for b in in_use(boundaries, self.training) if not isinstance(b, ignored)]
        return [step(b, self.comm, self.training) for b in steps]


def _convert(target: _Target) -> nn.Module:
    """Return the module that replaces the target: itself with hooks if its class is unknown."""
    key = (target.entry.category, type(target.module))
    if key in _PARALLEL_CLASSES:
        layer = _PARALLEL_CLASSES[key](target)
        layer.local_part = _part(target)  # type: ignore[assignment]
        return layer.train(target.module.training)
    signature = forward_signature(target.module)
    module = target.module
    if target.entry.norm is not None:
        kind = sharded_class(type(module))  # type: ignore[arg-type]  # mypy takes a class to have no hash
        module = kind(target.entry.norm, module, target.comm, target.training)
    _check_rows(target)
    padding = getattr(module, "padding_idx", None)
    if isinstance(padding, int):
        # The padding id is a row id too, and must be one of the local table. Embeddings that are not torch's
        # give its function an attribute of this name, too.
        layouts = [step.layout for step in target.entry.inputs if isinstance(step, LocalRowsStep)]
        if layouts:
            module.padding_idx = RowIds(target.comm, layouts[0]).local(padding)  # type: ignore[assignment]
    attach(module, target.entry, target.comm, signature, target.training, name=target.fqn)
    return module


def _part(target: _Target) -> str:
    """Return the local shape of a layer's weight, and its place in the global one, to be printed."""
    entry, mesh, rank = target.parameter("weight"), target.comm.mesh, target.comm.rank
    places = []
    for index, dim in enumerate(entry.dims):
        spans = ranges(dim, mesh, rank)
        if spans != ((0, size(dim)),):
            shown = ", ".join(f"{begin}:{end}" for begin, end in spans[:3]) or "none"
            more = f" and {len(spans) - 3} more ranges" if len(spans) > 3 else ""
            places.append(f"{shown}{more} of dim {index}")
    where = f", {' and '.join(places)}" if places else ""
    return f"local weight={target.local_shape('weight')} on rank {rank} of {math.prod(mesh)}{where}"


def _column(target: _Target) -> nn.Module:
    out_features, in_features = target.local_shape("weight")
    module = ColumnParallelLinear(
        in_features,
        out_features,
        target.module.bias is not None,
        steps=Steps(target.steps("input"), target.steps("output")),
        training=target.training,
        device=torch.device("meta"),
    )
    return _as_planned(module, target)


def _row(target: _Target) -> nn.Module:
    out_features, in_features = target.local_shape("weight")
    has_bias = target.module.bias is not None
    bias_is_partial = has_bias and bool(target.parameter("bias").partial)
    is_summed = any(isinstance(each, AllReduceStep | ReduceScatterStep) for each in target.entry.outputs)
    if has_bias and not bias_is_partial and not is_summed:
        raise PlanError("each rank would add the bias to its partial output; make the bias partial")
    module = RowParallelLinear(
        in_features,
        out_features,
        has_bias,
        bias_is_partial=bias_is_partial,
        steps=Steps(target.steps("input"), target.steps("output")),
        device=torch.device("meta"),
    )
    return _as_planned(module, target)


def _as_planned(module: nn.Linear, target: _Target) -> nn.Linear:
    """Give a layer the sizes that the model's code reads: global ones, unless the plan has a local value.

    A loss asks the head for its ``out_features``, for example, and gets gathered logits. If code needs a
    local size, the trace has seen it, and the size is an override of the plan.
    """
    assert isinstance(target.module, nn.Linear)
    module.in_features, module.out_features = target.module.in_features, target.module.out_features
    return module


def _embedding(target: _Target) -> nn.Module:
    module = target.module
    assert isinstance(module, nn.Embedding)
    if module.max_norm is not None:
        raise PlanError("an embedding with max_norm changes its rows when used; it cannot be sharded")
    _check_rows(target)
    rows = RowIds(target.comm, target.parameter("weight").dims[0], table=target.fqn)
    return VocabParallelEmbedding(
        rows,
        target.local_shape("weight")[1],
        None if module.padding_idx is None else rows.local(module.padding_idx),
        num_embeddings=module.num_embeddings,
        steps=Steps(
            target.steps("input", ignored=LocalRowsStep), target.steps("output", ignored=ZeroOutOfShardStep)
        ),
        device=torch.device("meta"),
    )


_PARALLEL_CLASSES: dict[tuple[str, type[nn.Module]], Callable[[_Target], nn.Module]] = {
    ("column", nn.Linear): _column,
    ("vocab", nn.Linear): _column,
    ("row", nn.Linear): _row,
    ("vocab", nn.Embedding): _embedding,
}
"""Only these exact classes are replaced; a subclass may compute something else, so it is wrapped."""


def _check_rows(target: _Target) -> None:
    """Check that the layout with which ids become local equals the layout of a weight's rows."""
    tables = [n for n, p in target.module._parameters.items() if p is not None and p.dim() > 1]
    rows = {target.parameter(name).dims[0] for name in tables}
    for layout in (b.layout for b in target.entry.inputs if isinstance(b, LocalRowsStep)):
        if layout not in rows and size(layout) in map(size, rows):
            raise PlanError("local_rows has another layout than the rows of the weight")


class _at:
    """Puts the name of a module in front of a PlanError."""

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn or "the model itself"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, PlanError):
            raise PlanError(f"{self._fqn}: {error}") from error
