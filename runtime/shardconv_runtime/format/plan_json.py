"""Plans as JSON: deterministic bytes out, strict validation in.

``docs/plan-format.md`` is the specification. The same plan gives the same bytes, so that their
sha256 identifies it. The rules between the parts of a plan are checked whenever one is read or written;
checks that need only one value run when the value is made.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ..errors import PlanError
from .fused_groups import fused_groups
from .names import expand_all
from .plan import (
    FORMAT,
    VERSION,
    FusedPlan,
    Plan,
    parameter_plans,
)
from .plan_checks import check_plan
from .stage_names import (
    Stages,
    absent_modules,
    held_names,
    is_inside,
    own_parameters,
)
from .typed_json import MalformedError, dump_document, load_document, read_text, write_text


def require_training(plan: Plan) -> None:
    """Check that a plan has the collectives of a backward pass."""
    if plan.training is None:
        raise PlanError(
            "the model cannot be trained: its plan was solved for inference only"
            + (f" ({plan.inference_only})" if plan.inference_only else "; convert it again, or replan it")
        )


def of_sequence(plan: Plan) -> Plan:
    """Return the plan with the modules, gradients, draws and hooks of its sequence-parallel form."""
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
        hooks=sequence.hooks,
        attentions=(),
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
    names_in_model = held_names(plan, stages)
    tied = [
        (alias, names_in_model[name])
        for alias, name in plan.tied
        if name in names_in_model and alias != names_in_model[name] and not is_inside(alias, absent)
    ]
    groups = [group for group in fused_groups(plan) if not any(is_inside(fqn, absent) for fqn in group)]
    fused = tuple(FusedPlan(tuple((fqn,) for fqn in group)) for group in groups)
    return replace(plan, parameters=own_parameters(plan, stages), tied=tuple(tied), fused=fused)
