"""The steps that a plan puts at the inputs and outputs of modules: collectives, slices, local ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import PlanError
from .dims import Dim, Leaf, axes_of, open_parts, to_text
from .field_checks import MAX_TENSOR_DIMS, check_axes, check_dims, check_port, fail
from .slices import Mesh
from .typed_json import MalformedError


@dataclass(frozen=True, slots=True)
class AllReduceStep:
    """Partial over ``axes`` to Replicate."""

    port: str
    """The port at which the step runs, for example ``input.hidden_states``, ``input.position_embeddings.0``,
    ``output``, ``output.logits`` or ``output.0``; all steps have this field."""
    op: Literal["all_reduce"] = field(default="all_reduce", init=False)
    axes: tuple[int, ...]
    per_token: int = 0
    """Elements of the (global) tensor for each token of the input; for reports. All steps have it."""
    grad_axes: tuple[int, ...] = ()
    """Mesh axes of the step over which the gradient of its replicated side is a Partial. This side is the
    output of ``all_reduce`` and ``all_gather``, and the input of ``slice``."""


@dataclass(frozen=True, slots=True)
class AllGatherStep:
    """Dim ``dim``, laid out as ``layout``, becomes replicated."""

    port: str
    op: Literal["all_gather"] = field(default="all_gather", init=False)
    dim: int
    layout: Dim
    per_token: int = 0
    grad_axes: tuple[int, ...] = ()
    local_grad_axes: tuple[int, ...] = ()
    """Mesh axes over which the gradient of the sharded side is a Partial, if the layout has segments that are
    not sharded."""


@dataclass(frozen=True, slots=True)
class SliceStep:
    """Dim ``dim``, replicated, becomes this rank's part of ``layout``."""

    port: str
    op: Literal["slice"] = field(default="slice", init=False)
    dim: int
    layout: Dim
    per_token: int = 0
    grad_axes: tuple[int, ...] = ()
    local_grad_axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReduceScatterStep:
    """Partial over the axes of ``layout`` to this rank's part of dim ``dim``."""

    port: str
    op: Literal["reduce_scatter"] = field(default="reduce_scatter", init=False)
    dim: int
    layout: Dim
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class KeepOnFirstStep:
    """Replicate to Partial over ``axes``: the first rank along them keeps the value, others have zeros."""

    port: str
    op: Literal["keep_on_first"] = field(default="keep_on_first", init=False)
    axes: tuple[int, ...]
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class GradAllReduceStep:
    """The value passes; its gradient, Partial over ``axes``, is summed."""

    port: str
    op: Literal["grad_all_reduce"] = field(default="grad_all_reduce", init=False)
    axes: tuple[int, ...]
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class GradDivideStep:
    """The value passes; its gradient, replicated over ``axes``, becomes a Partial."""

    port: str
    op: Literal["grad_divide"] = field(default="grad_divide", init=False)
    axes: tuple[int, ...]
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class LocalRowsStep:
    """Global row ids (of a table whose dim 0 is laid out as ``layout``) become local row ids.

    Out-of-shard ids become 0 and are remembered. Only on inputs.
    """

    port: str
    op: Literal["local_rows"] = field(default="local_rows", init=False)
    layout: Dim
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class LocalRowsOrEndStep:
    """Like ``LocalRowsStep``, but out-of-shard ids become the number of local rows, which experts skip."""

    port: str
    op: Literal["local_rows_or_end"] = field(default="local_rows_or_end", init=False)
    layout: Dim
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class ZeroOutOfShardStep:
    """Zero the positions whose ids were out of the shard.

    The tensor has the shape of the ids plus trailing dims: it is an output, or another input (the weights of
    experts).
    """

    port: str
    op: Literal["zero_out_of_shard"] = field(default="zero_out_of_shard", init=False)
    per_token: int = 0


ReshardingStep = AllGatherStep | SliceStep | ReduceScatterStep
"""Steps that change how one dim is sharded."""

ModuleStep = (
    AllReduceStep
    | ReshardingStep
    | KeepOnFirstStep
    | GradAllReduceStep
    | GradDivideStep
    | LocalRowsStep
    | LocalRowsOrEndStep
    | ZeroOutOfShardStep
)
"""One step at a port of a module: applied, in order, before (inputs) or after (outputs) its forward."""


def layout_of(step: ModuleStep) -> Dim | None:
    """Return the layout of the dim that a step concerns; None for a step that concerns all dims alike."""
    return step.layout if isinstance(step, ReshardingStep | LocalRowsStep | LocalRowsOrEndStep) else None


def check_step(where: str, step: ModuleStep, side: str, mesh: Mesh) -> None:
    """Check a step among the inputs or the outputs of a module, as ``side`` says."""
    check_port(f"{where}.port", step.port, side)
    if step.per_token < 0:
        fail(f"{where}.per_token", "must not be negative")
    if isinstance(step, AllReduceStep | KeepOnFirstStep | GradAllReduceStep | GradDivideStep):
        if not step.axes:
            fail(f"{where}.axes", f"{step.op} needs a mesh axis")
        check_axes(f"{where}.axes", step.axes, mesh)
        _check_grad_axes(where, step, frozenset(step.axes), mesh)
    elif isinstance(step, LocalRowsStep | LocalRowsOrEndStep):
        if side != "input":
            fail(f"{where}.op", f"{step.op} is for an input only")
        _check_layout(f"{where}.layout", step, mesh)
    elif not isinstance(step, ZeroOutOfShardStep):
        if not -MAX_TENSOR_DIMS <= step.dim < MAX_TENSOR_DIMS:
            fail(f"{where}.dim", f"{step.dim} is not a tensor dim")
        _check_layout(f"{where}.layout", step, mesh)
        _check_grad_axes(where, step, axes_of(step.layout), mesh)


def _check_grad_axes(where: str, step: ModuleStep, moved: frozenset[int], mesh: Mesh) -> None:
    """Check that gradients are partial only over the step's own mesh axes."""
    for name in ("grad_axes", "local_grad_axes"):
        axes = getattr(step, name, ())
        check_axes(f"{where}.{name}", axes, mesh)
        if outside := sorted(set(axes) - moved):
            fail(f"{where}.{name}", f"{step.op} does not run over mesh axis {outside[0]}")


def _check_layout(where: str, step: ReshardingStep | LocalRowsStep | LocalRowsOrEndStep, mesh: Mesh) -> None:
    """Check that only steps that do not need the size have a layout with an open factor."""
    layout, is_lookup = step.layout, isinstance(step, LocalRowsStep | LocalRowsOrEndStep)
    try:
        parts = open_parts(layout)
    except PlanError as error:
        raise MalformedError(where, str(error)) from error
    if isinstance(layout, Leaf) and not layout.size:
        if is_lookup:
            fail(where, f"{to_text(layout)}: an open dim is not allowed here")
        check_axes(where, layout.axes, mesh)
    else:
        if parts is not None and (is_lookup or all(map(axes_of, parts))):
            fail(where, f"{to_text(layout)}: an open factor is not allowed here")
        check_dims(where, parts or (layout,), mesh)
    if not axes_of(layout):
        fail(where, f"must be sharded over a mesh axis; else {step.op} has no effect")
