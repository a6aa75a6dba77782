"""Plans as JSON: deterministic bytes out, strict validation in.

``docs/plan-format.md`` is the specification. The same plan gives the same bytes, so that their
sha256 identifies it. The rules between the parts of a plan are checked whenever one is read or written;
checks that need only one value run when the value is made.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ..errors import PlanError
from .field_checks import (
    MAX_TENSOR_DIMS,
    MAX_TP,
    check_axes,
    check_dims,
    check_slot,
    fail,
    is_importable,
    is_step,
)
from .names import MAX_NAME_LENGTH, expand_all
from .pipeline_stages import StagedModule, StagesPlan
from .plan import (
    FORMAT,
    VERSION,
    DrawPlan,
    FusedPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    SequencePlan,
    by_name,
    module_plans,
    parameter_plans,
)
from .slices import Mesh, num_ranges
from .slot_steps import check_step
from .stage_names import (
    Stages,
    absent_modules,
    held_names,
    is_inside,
    own_parameters,
    staged_modules,
)
from .stored_layout import check_fused, check_packing, fused_groups
from .typed_json import MalformedError, dump_document, load_document, read_text, write_text

# The rules between the parts of a plan.


MAX_RANGES_IN_ALL = 2**22
"""Most ranges of all ranks' parts of all parameter entries: hashing a layout visits each."""


def check_plan(plan: Plan) -> None:
    """Check the rules of ``docs/plan-format.md`` that concern several parts of a plan."""
    path, _, name = plan.model.class_name.partition(":")  # of a class that can be imported
    if not is_importable(path) or not is_step(name) or not name.isidentifier():
        fail("model.class_name", f'expected "module:Class", got {plan.model.class_name!r}')
    for index, parameter in enumerate(plan.parameters):
        where = f"parameters[{index}]"
        if not parameter.names or "" in parameter.names:
            fail(f"{where}.names", "a parameter needs a name")
        if not 0 <= parameter.grad_levels <= min(name.count(".") for name in parameter.names):
            fail(f"{where}.grad_levels", "the parameter is inside of fewer modules")
        check_dims(f"{where}.dims", parameter.dims, plan.mesh)
        check_axes(f"{where}.partial", parameter.partial, plan.mesh)
        check_axes(f"{where}.grad_axes", parameter.grad_axes, plan.mesh)
    # The work for each rank's part of each entry is bounded.
    count = sum(1 + sum(map(num_ranges, entry.dims)) for entry in plan.parameters)
    if count * plan.tp > MAX_RANGES_IN_ALL:
        fail(
            "parameters",
            f"the parts of {plan.tp} ranks fall into more than {MAX_RANGES_IN_ALL} ranges: shard outer dims",
        )
    for index, module in enumerate(plan.modules):
        _check_module(f"modules[{index}]", module, plan)
    has_experts = any(entry.category == "experts" for entry in plan.modules)
    if plan.experts == "ep" and plan.tp > 1 and not has_experts:
        fail("experts", 'it is "ep", but no module has the category "experts"')
    parameters, modules = parameter_plans(plan), module_plans(plan)
    seen: set[str] = set()
    for number, (alias, target) in enumerate(plan.tied):
        if target not in parameters:
            fail(f"tied[{number}]", f"{alias!r} is tied to {target!r}, which is not a parameter of the plan")
        if alias in parameters or alias in seen:
            fail(f"tied[{number}]", f"{alias!r} is a parameter or an alias already")
        if not 1 <= len(alias) <= MAX_NAME_LENGTH:
            fail(f"tied[{number}]", f"an alias needs a name of at most {MAX_NAME_LENGTH} characters")
        seen.add(alias)
    if plan.logits is not None:
        head = modules.get(plan.logits.module)
        if head is None:
            fail("logits.module", f"the plan has no module entry for {plan.logits.module!r}")
        if not any(step.op == "all_gather" and step.slot == plan.logits.slot for step in head.outputs):
            fail("logits", f"{plan.logits.module!r} has no all_gather at {plan.logits.slot!r}")
    for entry in plan.parameters:
        if entry.packing is not None:
            check_packing(entry, plan.mesh)
    if plan.fused:
        check_fused(plan)
    if plan.training is not None:
        _check_draws("training.draws", plan.training.draws, plan.mesh)
        if plan.training.sequence is not None:
            _check_sequence("training.sequence", plan.training.sequence, plan, parameters)
    if plan.stages is not None:
        _check_stages(plan.stages, plan)


def _check_module(where: str, entry: ModulePlan, plan: Plan) -> None:
    if not entry.names:
        fail(f"{where}.names", "a module entry needs a name")
    for side, steps in (("input", entry.inputs), ("output", entry.outputs)):
        for index, step in enumerate(steps):
            check_step(f"{where}.{side}s[{index}]", step, side, plan.mesh)
    for index, edit in enumerate(entry.edits):
        if len(edit.local) not in (1, plan.tp):
            fail(
                f"{where}.edits[{index}].local",
                f"expected 1 value or {plan.tp} (one for each rank), got {len(edit.local)}",
            )
    if entry.norm is not None:
        check_axes(f"{where}.norm.axes", entry.norm.axes, plan.mesh)
        if len(entry.norm.groups) not in (1, plan.tp):
            fail(f"{where}.norm.groups", "needs a number of 1 or more for all ranks, or one for each")


def _check_draws(where: str, draws: tuple[DrawPlan, ...], mesh: Mesh) -> None:
    for index, entry in enumerate(draws):
        if not entry.names:
            fail(f"{where}[{index}].names", "needs the name of a module")
        check_axes(f"{where}[{index}].axes", entry.axes, mesh)
        check_axes(f"{where}[{index}].afterwards", entry.afterwards or (), mesh)
    by_name(where, draws)


def _check_sequence(
    where: str, sequence: SequencePlan, plan: Plan, parameters: Mapping[str, ParameterPlan]
) -> None:
    _check_draws(f"{where}.draws", sequence.draws, plan.mesh)
    for index, module in enumerate(sequence.modules):
        _check_module(f"{where}.modules[{index}]", module, plan)
    by_name(f"{where}.modules", sequence.modules)
    for index, entry in enumerate(sequence.gradients):
        check_axes(f"{where}.gradients[{index}].axes", entry.axes, plan.mesh)
        if unknown := [name for name in expand_all(entry.names) if name not in parameters]:
            fail(f"{where}.gradients[{index}].names", f"{unknown[0]!r} is not a parameter of the plan")
    by_name(f"{where}.gradients", sequence.gradients)


# Pipeline stages.


def _check_stages(stages: StagesPlan, plan: Plan) -> None:
    if stages.count * plan.tp > MAX_TP:
        fail("stages.count", f"must be 2 or more, and at most {MAX_TP} ranks in all, got {stages.count}")
    for index, entry in enumerate(stages.modules):
        _check_staged_module(f"stages.modules[{index}]", entry, stages, plan)
    staged_modules(plan)
    sequence = plan.training.sequence if plan.training is not None else None
    if sequence is not None:
        for index, entry in enumerate(sequence.stages):
            _check_staged_module(f"training.sequence.stages[{index}]", entry, stages, plan)
        of_form = replace(plan, stages=replace(stages, modules=sequence.stages))
        if _ways(of_form) != _ways(plan):
            fail("training.sequence.stages", "other modules, or other results that are sent, than in stages")


def _ways(plan: Plan) -> dict[str, tuple[object, ...]]:
    """Return by module where it runs, and which of its results are sent where."""
    found = staged_modules(plan)
    return {fqn: (entry.stages, [(s.item, s.to) for s in entry.sent]) for fqn, (entry, _) in found.items()}


def _check_staged_module(where: str, entry: StagedModule, stages: StagesPlan, plan: Plan) -> None:
    if not entry.names or "" in entry.names:
        fail(f"{where}.names", "a module of a stage needs a name")
    _check_ascending(f"{where}.stages", entry.stages, stages.count)
    tensors = [item.tensor for item in entry.items]
    tensors += [argument.tensor for call in entry.cache for argument in call.arguments]
    for tensor in tensors:
        if tensor is not None:
            for dim in tensor.dims:
                if len(dim.of) > MAX_TENSOR_DIMS:
                    fail(where, f"more than {MAX_TENSOR_DIMS} dims make one")
                for each in dim.of:
                    check_slot(where, each.slot, "input")
                if max(dim.times, dim.over) > plan.tp:
                    fail(where, f"a part of a dim should be one of at most {plan.tp} ranks")
                if dim.size is not None:
                    check_dims(where, (dim.size,), plan.mesh)
    for sent in entry.sent:
        _check_ascending(f"{where}.sent", sent.to, stages.count)
        if len(entry.stages) != 1 or sent.to[0] <= entry.stages[0]:
            fail(f"{where}.sent", "what is sent is made on one stage, and received on later ones")


def _check_ascending(where: str, stages: tuple[int, ...], count: int) -> None:
    if not stages or list(stages) != sorted(set(stages)) or not 0 <= stages[0] <= stages[-1] < count:
        fail(where, f"expected stages below {count}, ascending, each once; got {list(stages)}")


# The forms of a plan other than inference: for training, and sequence-parallel.


def require_training(plan: Plan) -> None:
    """Check that a plan has the collectives of a backward pass."""
    if plan.training is None:
        raise PlanError(
            "the model cannot be trained: its plan was solved for inference only"
            + (f" ({plan.inference_only})" if plan.inference_only else "; convert it again, or replan it")
        )


def of_sequence(plan: Plan) -> Plan:
    """Return the plan with the modules, gradients and draws of its sequence-parallel form."""
    sequence = plan.training.sequence if plan.training else None
    if sequence is None:
        raise PlanError(
            "sequence_parallel=True: the plan has no sequence-parallel form; convert with --sequence-parallel"
        )
    gradients = {name: each for each in sequence.gradients for name in expand_all(each.names)}
    parameters = tuple(
        replace(
            entry,
            names=(name,),
            grad_axes=gradients[name].axes if name in gradients else (),
            grad_levels=gradients[name].levels if name in gradients else entry.grad_levels,
        )
        for name, entry in parameter_plans(plan).items()
    )
    assert plan.training is not None
    training = replace(plan.training, draws=sequence.draws)
    return replace(
        plan,
        modules=sequence.modules,
        stages=plan.stages and replace(plan.stages, modules=sequence.stages),
        parameters=parameters,
        training=training,
        proven_arguments=(),
        fused=(),
    )


MAX_BYTES = 16 * 2**20
"""Largest plan or manifest that is read."""

MAX_SIGNS = 2**18
"""Most ``*`` and ``+`` in a plan, which join the leaves of its dims: each leaf takes time to read."""

_OTHER_VERSION = "convert the model again"


def dumps(plan: Plan) -> str:
    """Return the plan as JSON."""
    try:
        text = dump_document(plan, FORMAT)
    except (TypeError, ValueError) as error:
        raise PlanError(f"the plan has a value that JSON cannot hold: {error}") from error
    loads(text)
    return text


@lru_cache(maxsize=4)  # a load asks for its plan two or three times; plans are frozen
def loads(text: str) -> Plan:
    """Read a plan from JSON.

    Example:
        >>> loads(dumps(plan)) == plan
        True
    """
    try:
        if text.count("*") + text.count("+") > MAX_SIGNS:
            raise MalformedError("", f"the dims of the plan have more than {MAX_SIGNS} '*' and '+' in all")
        plan = load_document(Plan, text, FORMAT, VERSION, MAX_BYTES, _OTHER_VERSION)
        check_plan(plan)
    except MalformedError as error:
        raise PlanError(str(error)) from error
    return plan


def read(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file."""
    try:
        return loads(read_text(Path(path), MAX_BYTES))
    except (MalformedError, PlanError) as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from error


def write(plan: Plan, path: str | os.PathLike[str]) -> str:
    """Write a plan to a file atomically, and return its sha256 in hex."""
    text = dumps(plan)
    write_text(Path(path), text)
    return sha256(text)


def sha256(text: str) -> str:
    """Return the sha256 (hex) of a document as it is on disk; of a plan, its identity."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def of_stage(plan: Plan, stages: Stages) -> Plan:
    """Return the plan of one stage, or of one process, by the names in its model, with its fused groups.

    Its modules are the modules of all stages.
    """
    if plan.stages is None:
        return plan
    absent = absent_modules(plan, stages)
    held = held_names(plan, stages)
    tied = [
        (alias, held[name])
        for alias, name in plan.tied
        if name in held and alias != held[name] and not is_inside(alias, absent)
    ]
    groups = [group for group in fused_groups(plan) if not any(is_inside(fqn, absent) for fqn in group)]
    fused = tuple(FusedPlan(tuple((fqn,) for fqn in group)) for group in groups)
    return replace(plan, parameters=own_parameters(plan, stages), tied=tuple(tied), fused=fused)
