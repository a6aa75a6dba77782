"""The forms in which a plan can be used beside inference: for training, and sequence-parallel."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from .names import expand_all
from .plan import Plan, parameter_plans


def require_training(plan: Plan) -> None:
    """Check that a plan has the collectives of a backward pass.

    Raises:
        PlanError: it has none; with the reason, if the plan gives one.
    """
    if plan.training is None:
        raise PlanError(
            "the model cannot be trained: its plan was solved for inference only"
            + (f" ({plan.inference_only})" if plan.inference_only else "; convert it again, or replan it")
        )


def of_sequence(plan: Plan) -> Plan:
    """The plan with the modules, gradients and draws of its sequence-parallel form.

    Raises:
        PlanError: it has none.
    """
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
