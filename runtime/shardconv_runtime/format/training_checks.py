"""The rules of the training part of a plan; checked with ``plan_checks`` where a plan has one."""

from __future__ import annotations

from .names import expand_all
from .norm_checks import check_norms
from .plan import DrawPlan, Plan, by_name, parameter_plans
from .plan_checks import check_axes, check_module, fail
from .slices import Mesh


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
