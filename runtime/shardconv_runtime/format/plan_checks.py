"""The rules of a plan beyond the types of its fields; checked whenever a plan is read or written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from ..errors import PlanError
from .dims import Dim, Leaf, axes_of, open_parts, to_text
from .header import STORED_NAME
from .names import MAX_NAME_LENGTH, expand_all
from .plan import (
    AllReduceStep,
    Boundary,
    DrawPlan,
    Edit,
    GradAllReduceStep,
    GradDivideStep,
    KeepOnFirstStep,
    LocalRowsOrEndStep,
    LocalRowsStep,
    LogitsInfo,
    ModulePlan,
    NormInfo,
    ParameterPlan,
    Plan,
    ReshardingStep,
    ZeroOutOfShardStep,
    by_name,
    module_plans,
    parameter_plans,
)
from .slices import Mesh, num_ranges, validate_tensor
from .typed_json import MalformedError

CATEGORY_FIELDS: Mapping[str, frozenset[str]] = {
    "column": frozenset({"gather_output"}),
    "row": frozenset({"input_is_parallel", "reduce_output"}),
    "vocab": frozenset({"gather_output", "reduce_output"}),
    "experts": frozenset({"reduce_output", "flags"}),
    "norm": frozenset({"norm"}),
    "boundary": frozenset(),
}
"""The fields, of those that not every module has, that may be set in a category."""

FLAG_STEPS: Mapping[str, tuple[str, ...]] = {
    "gather_output": ("all_gather",),
    "reduce_output": ("all_reduce", "reduce_scatter"),
}
"""The ops of which one is among the outputs if a flag is set."""

EXPERT_MODES = ("tp", "ep")

MAX_TENSOR_DIMS = 16

MAX_TP = 4096
"""Most ranks."""

MAX_MESH_AXES = 16

MAX_SOURCES = 4096
"""Most modules that the fingerprint covers."""

MAX_PATH_STEPS = 16
"""Most components of a slot, or of the path of an attribute."""

MAX_STEP_LENGTH = 100
"""Most characters of such a component."""

MAX_TEXT_LENGTH = 10_000
"""Most characters of a note, a reason, a version."""

MAX_RANGES_IN_ALL = 2**22
"""Most ranges of all ranks' parts of all parameter entries: hashing a layout visits each."""

_IMPORTABLE = re.compile(r"[\w-]+(\.[\w-]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_plan(plan: Plan) -> None:
    """Check the rules of ``docs/plan-format.md`` that the types do not express, but for those of training.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
        PlanError: the name patterns of two entries overlap, or are malformed.
    """
    _check_head(plan)
    _check_texts(plan)
    for index, parameter in enumerate(plan.parameters):
        _check_parameter(f"parameters[{index}]", parameter, plan.mesh)
    # The work for each rank's part of each entry is bounded.
    count = sum(1 + sum(map(num_ranges, entry.dims)) for entry in plan.parameters)
    if count * plan.tp > MAX_RANGES_IN_ALL:
        fail(
            "parameters",
            f"the parts of {plan.tp} ranks fall into more than {MAX_RANGES_IN_ALL} ranges: shard outer dims",
        )
    for index, module in enumerate(plan.modules):
        check_module(f"modules[{index}]", module, plan)
    _check_experts(plan)
    if plan.training is not None and plan.inference_only:
        fail("inference_only", "must be empty, since the plan has a training part")
    _check_tied(plan.tied, parameter_plans(plan))
    modules = module_plans(plan)
    if plan.logits is not None:
        _check_logits(plan.logits, modules)


def is_sha256(text: str) -> bool:
    """Whether the text is a sha256 in lower-case hex."""
    return _SHA256.fullmatch(text) is not None


def _check_head(plan: Plan) -> None:
    check_tp(plan.tp)
    if len(plan.mesh) > MAX_MESH_AXES:
        fail("mesh", f"more than {MAX_MESH_AXES} axes")
    if any(extent < 1 for extent in plan.mesh) or math.prod(plan.mesh) != plan.tp:
        fail("mesh", f"the product of {list(plan.mesh)} must be tp = {plan.tp}")
    module, _, name = plan.model.class_name.partition(":")
    if not _is_importable(module) or not is_step(name) or not name.isidentifier():
        fail("model.class_name", f'expected "module:Class", got {plan.model.class_name!r}')
    check_dtype("model.dtype", plan.model.dtype)
    if plan.model.num_parameters < 0:
        fail("model.num_parameters", "must not be negative")
    if len(plan.code.sources) > MAX_SOURCES:
        fail("code.sources", f"more than {MAX_SOURCES} modules")
    for index, source in enumerate(plan.code.sources):
        if not _is_importable(source):
            fail(f"code.sources[{index}]", f"{source!r} is not the name of a module")
    if list(plan.code.sources) != sorted(set(plan.code.sources)):
        fail("code.sources", "must be sorted, each name once")
    if not is_sha256(plan.code.fingerprint):
        fail("code.fingerprint", "expected 64 hex digits in lower case")


def check_tp(tp: int) -> None:
    """Check a number of ranks.

    Raises:
        MalformedError: it is outside of the range that a plan or a manifest may have.
    """
    if not 1 <= tp <= MAX_TP:
        fail("tp", f"must be 1 or more, and at most {MAX_TP}, got {tp}")


def _check_texts(plan: Plan) -> None:
    texts = {"code.torch": plan.code.torch, "code.transformers": plan.code.transformers}
    texts["inference_only"] = plan.inference_only
    texts |= {f"notes[{index}]": note for index, note in enumerate(plan.notes)}
    texts |= {f"parameters[{index}].reason": entry.reason for index, entry in enumerate(plan.parameters)}
    for where, text in texts.items():
        if len(text) > MAX_TEXT_LENGTH:
            fail(where, f"more than {MAX_TEXT_LENGTH} characters")


def _check_parameter(where: str, entry: ParameterPlan, mesh: Mesh) -> None:
    if not entry.names or "" in entry.names:
        fail(f"{where}.names", "a parameter needs a name")
    check_dtype(f"{where}.dtype", entry.dtype)
    if len(entry.dims) > MAX_TENSOR_DIMS:
        fail(f"{where}.dims", f"more than {MAX_TENSOR_DIMS} dims")
    check_dims(f"{where}.dims", entry.dims, mesh)
    check_axes(f"{where}.partial", entry.partial, mesh)
    check_axes(f"{where}.grad_axes", entry.grad_axes, mesh)
    if not 0 <= entry.grad_levels < min(name.count(".") for name in entry.names) + 1:
        fail(f"{where}.grad_levels", "the parameter is inside of fewer modules")
    if both := sorted(set(entry.partial).intersection(_all_axes(entry.dims))):
        problem = (
            f"mesh axis {both[0]} also shards a dim; a tensor is Partial or Shard over an axis, not both"
        )
        fail(f"{where}.partial", problem)


def check_module(where: str, entry: ModulePlan, plan: Plan) -> None:
    """Check an entry of ``modules``.

    Raises:
        MalformedError: a rule is broken; the message begins with ``where``.
    """
    if not entry.names:
        fail(f"{where}.names", "a module entry needs a name")
    if entry.category not in CATEGORY_FIELDS:
        fail(f"{where}.category", one_of(entry.category, CATEGORY_FIELDS))
    for field in ("gather_output", "input_is_parallel", "reduce_output", "norm", "flags"):
        if getattr(entry, field) and field not in CATEGORY_FIELDS[entry.category]:
            fail(f"{where}.{field}", f'a module of the category "{entry.category}" cannot have it')
    for side, steps in (("input", entry.inputs), ("output", entry.outputs)):
        for index, step in enumerate(steps):
            _check_boundary(f"{where}.{side}s[{index}]", step, side, plan.mesh)
    for field, ops in FLAG_STEPS.items():
        if getattr(entry, field) and not any(_has_op(entry.outputs, op) for op in ops):
            fail(f"{where}.{field}", f"needs a step {' or '.join(ops)} among the outputs")
    _check_out_of_shard(where, entry)
    if flags := [flag for flag in entry.flags if not flag.isidentifier() or flag.startswith("__")]:
        fail(f"{where}.flags", f"not the name of an attribute: {flags[0]!r}")
    if len(set(entry.flags)) < len(entry.flags):
        fail(f"{where}.flags", "an attribute is named twice")
    _check_edits(f"{where}.edits", entry.edits, plan.tp)
    if entry.category == "norm" and entry.norm is None:
        fail(where, 'the key "norm" is missing')


def _check_out_of_shard(where: str, entry: ModulePlan) -> None:
    """A step that zeroes positions needs the ids that an earlier step found to be out-of-shard."""
    remembers = False
    for index, step in enumerate(entry.inputs):
        if isinstance(step, ZeroOutOfShardStep) and not remembers:
            fail(f"{where}.inputs[{index}]", f"{step.op} needs a local_rows before it")
        remembers |= isinstance(step, LocalRowsStep | LocalRowsOrEndStep)
    if _has_op(entry.outputs, "zero_foreign") and not _has_op(entry.inputs, "local_rows"):
        fail(f"{where}.outputs", "zero_foreign needs a local_rows among the inputs")


def _check_experts(plan: Plan) -> None:
    if plan.experts not in EXPERT_MODES:
        fail("experts", one_of(plan.experts, EXPERT_MODES))
    has_experts = any(entry.category == "experts" for entry in plan.modules)
    if plan.experts == "ep" and plan.tp > 1 and not has_experts:
        fail("experts", 'it is "ep", but no module has the category "experts"')


def _check_boundary(where: str, step: Boundary, side: str, mesh: Mesh) -> None:
    check_slot(f"{where}.slot", step.slot, side)
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


def _check_grad_axes(where: str, step: Boundary, moved: frozenset[int], mesh: Mesh) -> None:
    """Gradients are partial over no other mesh axes than the step's own."""
    for field in ("grad_axes", "local_grad_axes"):
        axes = getattr(step, field, ())
        check_axes(f"{where}.{field}", axes, mesh)
        if outside := sorted(set(axes) - moved):
            fail(f"{where}.{field}", f"{step.op} does not run over mesh axis {outside[0]}")


def check_slot(where: str, slot: str, side: str) -> None:
    """Check that a slot is one of an input or of an output, as ``side`` says.

    Raises:
        MalformedError: it is not; the message begins with ``where``.
    """
    first, *path = slot.split(".")
    if first != side or not _is_path(path) or (side == "input" and not path):
        example = "input.hidden_states" if side == "input" else "output.0"
        fail(where, f'not a slot of an {side}: {slot!r}; one reads like "{example}"')


def _check_edits(where: str, edits: Sequence[Edit], tp: int) -> None:
    seen: set[str] = set()
    for index, edit in enumerate(edits):
        at = f"{where}[{index}]"
        first, *path = edit.attribute.split(".")
        if not (first.isidentifier() and _is_public_path([first, *path])):
            fail(f"{at}.attribute", f"not the path of an attribute: {edit.attribute!r}")
        if edit.attribute in seen:
            fail(f"{at}.attribute", f"{edit.attribute!r} is edited twice")
        seen.add(edit.attribute)
        if edit.value < 1 or any(value < 1 for value in edit.local):
            fail(at, "the values must be 1 or more")
        if max(edit.local, default=0) > edit.value:
            fail(at, "a local value is larger than the global one")
        if len(edit.local) not in (1, tp):
            fail(f"{at}.local", f"expected 1 value or {tp} (one for each rank), got {len(edit.local)}")


def _check_tied(tied: Sequence[tuple[str, str]], parameters: Mapping[str, ParameterPlan]) -> None:
    seen: set[str] = set()
    for index, (alias, name) in enumerate(tied):
        if name not in parameters:
            fail(f"tied[{index}]", f"{alias!r} is tied to {name!r}, which is not a parameter of the plan")
        if alias in parameters or alias in seen:
            fail(f"tied[{index}]", f"{alias!r} is a parameter or an alias already")
        if not 1 <= len(alias) <= MAX_NAME_LENGTH:
            fail(f"tied[{index}]", f"an alias needs a name of at most {MAX_NAME_LENGTH} characters")
        seen.add(alias)


def _check_logits(logits: LogitsInfo, modules: Mapping[str, ModulePlan]) -> None:
    check_slot("logits.slot", logits.slot, "output")
    entry = modules.get(logits.module)
    if entry is None:
        fail("logits.module", f"the plan has no module entry for {logits.module!r}")
    if not any(step.op == "all_gather" and step.slot == logits.slot for step in entry.outputs):
        fail("logits", f"{logits.module!r} has no all_gather at {logits.slot!r}")


def check_dims(where: str, dims: Sequence[Dim], mesh: Mesh) -> None:
    """Check the dims of a tensor.

    Raises:
        MalformedError: a rule is broken; the message begins with ``where``.
    """
    try:
        validate_tensor(dims, mesh)
    except PlanError as error:
        raise MalformedError(where, str(error)) from error


def _check_layout(where: str, step: ReshardingStep | LocalRowsStep | LocalRowsOrEndStep, mesh: Mesh) -> None:
    """The layout of a step may have an open factor, where the step does not need its size."""
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


def check_axes(where: str, axes: Sequence[int], mesh: Mesh) -> None:
    """Check that mesh axes are of the mesh, each named once.

    Raises:
        MalformedError: a rule is broken; the message begins with ``where``.
    """
    if outside := [a for a in axes if not 0 <= a < len(mesh)]:
        fail(where, f"mesh axis {outside[0]} is outside of the mesh {list(mesh)}")
    if len(set(axes)) < len(axes):
        fail(where, "a mesh axis is named twice")


def check_dtype(where: str, dtype: str) -> None:
    """Check that a dtype is one that a shard can hold."""
    if dtype not in STORED_NAME:
        fail(where, one_of(dtype, STORED_NAME))


def _all_axes(dims: Iterable[Dim]) -> frozenset[int]:
    return frozenset[int]().union(*(axes_of(dim) for dim in dims))


def _has_op(steps: Iterable[Boundary], op: str) -> bool:
    return any(step.op == op for step in steps)


def is_step(text: str) -> bool:
    """One component of a path to an attribute or a slot: an identifier, no dunder, or an index."""
    is_index = text.isascii() and text.isdigit() and len(text) <= 9
    is_name = text.isidentifier() and not text.startswith("__") and len(text) <= MAX_STEP_LENGTH
    return is_index or is_name


def _is_path(steps: Sequence[str]) -> bool:
    return len(steps) <= MAX_PATH_STEPS and all(map(is_step, steps))


def _is_public_path(steps: Sequence[str]) -> bool:
    return _is_path(steps) and not any(step.startswith("_") for step in steps)


def _is_importable(text: str) -> bool:
    return len(text) <= MAX_NAME_LENGTH and _IMPORTABLE.fullmatch(text) is not None


def one_of(got: str, known: Iterable[str]) -> str:
    """The message for a text that is not among the known ones."""
    return f"expected one of {', '.join(known)}; got {got[:60]!r}"


def fail(where: str, problem: str) -> NoReturn:
    """Refuse the plan for a problem with the field at the path ``where``."""
    raise MalformedError(where, problem)


# The rules for the norms of a plan.

GATE_ACTIVATIONS = ("silu", "sigmoid", "gelu", "relu", "identity")
"""Activations of the gate of a gated norm: functions of ``torch.nn.functional``, or none."""


def check_norms(where: str, modules: tuple[ModulePlan, ...], mesh: Mesh) -> None:
    """Check the norms among module entries.

    Raises:
        MalformedError: a rule is broken; the message begins with ``where``.
    """
    for index, entry in enumerate(modules):
        if entry.norm is not None:
            _check_norm(f"{where}[{index}].norm", entry.norm, mesh)


def _check_norm(where: str, norm: NormInfo, mesh: Mesh) -> None:
    if norm.kind not in ("rms", "layer"):
        fail(f"{where}.kind", one_of(norm.kind, ("rms", "layer")))
    if norm.eps < 0:
        fail(f"{where}.eps", "must not be negative")
    if norm.size < 1:
        fail(f"{where}.size", "must be 1 or more")
    check_axes(f"{where}.axes", norm.axes, mesh)
    if len(norm.groups) not in (1, math.prod(mesh)) or any(n < 1 for n in norm.groups):
        fail(f"{where}.groups", "needs a number of 1 or more for all ranks, or one for each")
    if norm.gate and (norm.gate_activation not in GATE_ACTIVATIONS or not norm.input):
        fail(f"{where}.gate", "needs an input and a known gate_activation")
    for field, name in (("weight", norm.weight), ("bias", norm.bias)):
        if name and not is_step(name):
            fail(f"{where}.{field}", f"not the name of a parameter: {name!r}")
    if norm.compute_dtype != "input":
        check_dtype(f"{where}.compute_dtype", norm.compute_dtype)


# The rules of the training part of a plan; checked with ``plan_checks`` where a plan has one.


def check_training(plan: Plan) -> None:
    """Check the rules of ``docs/plan-format.md`` for ``training``.

    Raises:
        MalformedError: a rule is broken; the message begins with the path of the field.
    """
    if plan.training is None:
        return
    _check_draws("training.draws", plan.training.draws, plan.mesh)
    sequence = plan.training.sequence
    if sequence is None:
        return
    _check_draws("training.sequence.draws", sequence.draws, plan.mesh)
    for index, module in enumerate(sequence.modules):
        check_module(f"training.sequence.modules[{index}]", module, plan)
    check_norms("training.sequence.modules", sequence.modules, plan.mesh)
    by_name("training.sequence.modules", sequence.modules)
    known = parameter_plans(plan)
    for index, entry in enumerate(sequence.gradients):
        where = f"training.sequence.gradients[{index}]"
        check_axes(f"{where}.axes", entry.axes, plan.mesh)
        if unknown := [name for name in expand_all(entry.names) if name not in known]:
            fail(f"{where}.names", f"{unknown[0]!r} is not a parameter of the plan")
    by_name("training.sequence.gradients", sequence.gradients)


def _check_draws(where: str, draws: tuple[DrawPlan, ...], mesh: Mesh) -> None:
    for index, entry in enumerate(draws):
        if not entry.names:
            fail(f"{where}[{index}].names", "needs the name of a module")
        check_axes(f"{where}[{index}].axes", entry.axes, mesh)
        check_axes(f"{where}[{index}].afterwards", entry.afterwards or (), mesh)
        if entry.mixed and entry.axes:
            fail(f"{where}[{index}].mixed", "a mixed module cannot have axes")
    by_name(where, draws)
