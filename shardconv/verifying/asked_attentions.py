"""Attention weights that a call asks for: proven on the smaller model, and planned for the full one."""

from __future__ import annotations

from dataclasses import replace

from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format.dims import leaves
from shardconv_runtime.format.module_steps import AllGatherStep, GradDivideStep
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import AttentionPlan, Plan
from shardconv_runtime.parallel.attention_weights import ASK
from torch import nn

from ..inputs.trace_inputs import TraceInputs
from ..planning.attention_plans import Gathers, asking, attention_gathers, returning_attentions
from ..simulation.rank_simulation import Logits
from ..tracing.fold import Folded
from ..tracing.tape import starred
from .proof_case import Case, simulate


def asked_case(case: Case, gathers: Gathers) -> Case:
    """Return the case of a model that returns attention weights, with a plan that gathers them."""
    model = returning_attentions(case.model)
    assert model is not None, "there are gathers"
    return case.with_model(model, with_attentions(case.plan, gathers))


def are_right(case: Case, gathers: Gathers, *, gradients: bool) -> bool:
    """Return whether ranks return the attention weights of the unsharded model, and their gradients."""
    asked, inputs = asked_case(case, gathers), asking(case.inputs)
    try:
        simulate(asked, inputs, logits=Logits.GATHERED)
        return not (gradients and asked.simulation.wrong_gradient(inputs))
    except ShardconvError:
        return False


def planned_attentions(
    plan: Plan, proven: Gathers, model: nn.Module, inputs: TraceInputs, folded: Folded
) -> Plan:
    """Return the plan of the full model with its gathers, if they are those that were proven.

    Args:
        model: without the layers that others represent, by ``folded``.
    """
    gathers = attention_gathers(model, inputs, plan)
    if gathers is None or not _forms(gathers) <= _forms(proven):
        return plan
    return with_attentions(plan, {n: steps for fqn, steps in gathers.items() for n in folded.names(fqn)})


def with_attentions(plan: Plan, gathers: Gathers) -> Plan:
    """Return a plan that grants calls that ask for attention weights."""
    grouped: dict[tuple[str, tuple[AllGatherStep | GradDivideStep, ...]], list[str]] = {}
    for fqn, steps in gathers.items():
        grouped.setdefault((starred(fqn), steps), []).append(fqn)
    attentions = tuple(AttentionPlan(tuple(compress(names)), steps) for (_, steps), names in grouped.items())
    return replace(plan, attentions=attentions, proven_arguments=(*plan.proven_arguments, ASK))


def _forms(gathers: Gathers) -> set[tuple[object, ...]]:
    """Return what gathers do, whatever the sizes, at which modules, whatever their numbers."""
    return {
        (starred(fqn), s.port, s.dim, tuple(x.axes for x in leaves(s.layout) if x.axes))
        if isinstance(s, AllGatherStep)
        else (starred(fqn), s.port, s.axes)
        for fqn, steps in gathers.items()
        for s in steps
    }
