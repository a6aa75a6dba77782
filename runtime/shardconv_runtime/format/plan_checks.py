"""The rules between the parts of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .field_checks import (
    MAX_TENSOR_DIMS,
    MAX_TP,
    check_axes,
    check_dims,
    check_port,
    fail,
    is_importable,
    is_step,
)
from .fused_groups import check_fused
from .module_steps import check_step
from .names import MAX_NAME_LENGTH, expand_all
from .pipeline_stages import StagedModule, StagesPlan
from .plan import (
    DrawPlan,
    HookPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    SequencePlan,
    by_name,
    module_plans,
    parameter_plans,
)
from .slices import Mesh, num_ranges
from .stage_names import staged_modules
from .stored_layout import check_packing

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
        if not any(step.op == "all_gather" and step.port == plan.logits.port for step in head.outputs):
            fail("logits", f"{plan.logits.module!r} has no all_gather at {plan.logits.port!r}")
    for entry in plan.parameters:
        if entry.packing is not None:
            check_packing(entry, plan.mesh)
    if plan.fused:
        check_fused(plan)
    _check_hooks("hooks", plan.hooks, plan.mesh)
    _check_attentions(plan)
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
    for index, override in enumerate(entry.overrides):
        if len(override.local) not in (1, plan.tp):
            fail(
                f"{where}.overrides[{index}].local",
                f"expected 1 value or {plan.tp} (one for each rank), got {len(override.local)}",
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


def _check_hooks(where: str, hooks: tuple[HookPlan, ...], mesh: Mesh) -> None:
    for index, entry in enumerate(hooks):
        if not entry.names:
            fail(f"{where}[{index}].names", "needs the name of a module")
        for side, ports in (("input", entry.inputs), ("output", entry.outputs)):
            for number, port in enumerate(ports):
                place = f"{where}[{index}].{side}s[{number}]"
                check_port(f"{place}.port", port.port, side)
                check_axes(f"{place}.grad_axes", port.grad_axes, mesh)
                check_axes(f"{place}.sequence_axes", port.sequence_axes, mesh)
                check_axes(f"{place}.partial_axes", port.partial_axes, mesh)
    by_name(where, hooks)


def _check_attentions(plan: Plan) -> None:
    for index, entry in enumerate(plan.attentions):
        if not entry.names:
            fail(f"attentions[{index}].names", "needs the name of a module")
        for number, step in enumerate(entry.outputs):
            check_step(f"attentions[{index}].outputs[{number}]", step, "output", plan.mesh)
    by_name("attentions", plan.attentions)


def _check_sequence(
    where: str, sequence: SequencePlan, plan: Plan, parameters: Mapping[str, ParameterPlan]
) -> None:
    _check_draws(f"{where}.draws", sequence.draws, plan.mesh)
    _check_hooks(f"{where}.hooks", sequence.hooks, plan.mesh)
    for index, module in enumerate(sequence.modules):
        _check_module(f"{where}.modules[{index}]", module, plan)
    by_name(f"{where}.modules", sequence.modules)
    for index, entry in enumerate(sequence.gradients):
        check_axes(f"{where}.gradients[{index}].axes", entry.axes, plan.mesh)
        if unknown := [name for name in expand_all(entry.names) if name not in parameters]:
            fail(f"{where}.gradients[{index}].names", f"{unknown[0]!r} is not a parameter of the plan")
    by_name(f"{where}.gradients", sequence.gradients)


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
    entries = staged_modules(plan)
    return {fqn: (entry.stages, [(s.item, s.to) for s in entry.sent]) for fqn, (entry, _) in entries.items()}


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
                    check_port(where, each.port, "input")
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
