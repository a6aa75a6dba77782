"""What all processes hold together of an optimizer's state, from what each says of its own.

Every process works it out from the same summaries, so that what is wrong all raise alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError, PlanError
from ..format.plan import ParameterPlan, global_shape
from .held_state import OptimizerSummary
from .optimizer_index import Group, OptimizerIndex, ParameterState, StoredValue

Entries = Mapping[str, ParameterPlan]
"""Of all parameters of the model, in the order of the plan."""


def common_index(summaries: Sequence[OptimizerSummary], entries: Entries) -> OptimizerIndex:
    """What the processes hold together.

    Raises:
        PlanError: they do not keep the same of a parameter; on all of them alike.
    """
    groups = _groups(summaries, entries)
    states = [state for name in entries if (state := _common_state(name, summaries)) is not None]
    return OptimizerIndex(summaries[0].optimizer, groups, tuple(states))


def _common_state(name: str, summaries: Sequence[OptimizerSummary]) -> ParameterState | None:
    """The state that all keep who hold something of a parameter."""
    found = {number: s.states.get(name) for number, s in enumerate(summaries) if name in s.holding}
    if not found:
        return None
    first, state = next(iter(found.items()))
    for other, its in found.items():
        if its != state:
            raise PlanError(
                f"{name}: processes {first} and {other} keep other state of it ({_shown(state)}, and "
                f"{_shown(its)}); step the optimizer on all ranks alike"
            )
    return state


def _shown(state: ParameterState | None) -> str:
    if state is None:
        return "nothing"
    scalars = [f"{key} {value.text}" for key, value in state.scalars.items()]
    return ", ".join([*scalars, *state.tensors])


def _groups(summaries: Sequence[OptimizerSummary], entries: Entries) -> tuple[Group, ...]:
    """The groups of all processes together: one may lack a parameter of which it holds nothing.

    Raises:
        PlanError: their numbers, hyperparameters or classes differ; on all processes alike.
    """
    first = summaries[0]
    merged = []
    for other, summary in enumerate(summaries):
        if (summary.optimizer, len(summary.groups)) != (first.optimizer, len(first.groups)):
            raise PlanError(
                f"process 0 has {first.optimizer} with {len(first.groups)} parameter groups, process {other} "
                f"{summary.optimizer} with {len(summary.groups)}; make the optimizer alike on all ranks"
            )
        for number, (ours, theirs) in enumerate(zip(first.groups, summary.groups, strict=True)):
            if changed := _changed(ours.hyperparameters, theirs.hyperparameters):
                raise PlanError(
                    f"{changed} of parameter group {number} is not the same on processes 0 and {other}"
                )
    for number in range(len(first.groups)):
        names = {name for summary in summaries for name in summary.groups[number].names}
        _require_all(number, names, summaries)
        ordered = tuple(name for name in entries if name in names)
        merged.append(Group(ordered, first.groups[number].hyperparameters))
    return tuple(merged)


def _require_all(group: int, names: Collection[str], summaries: Sequence[OptimizerSummary]) -> None:
    """Who holds something of a parameter has it in the same group."""
    for number, summary in enumerate(summaries):
        if lacking := (summary.holding & set(names)) - set(summary.groups[group].names):
            raise PlanError(
                f"process {number} holds a part of {min(lacking)}, and parameter group {group} of its "
                "optimizer lacks it; make the optimizer alike on all ranks"
            )


def _changed(ours: Mapping[str, StoredValue], theirs: Mapping[str, StoredValue]) -> str:
    return next((key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)), "")


def require_same(
    place: Path, index: OptimizerIndex, summaries: Sequence[OptimizerSummary], entries: Entries
) -> None:
    """Check that what was saved is the state of such an optimizer, of such a model.

    Raises:
        CheckpointError: it is another's; on all processes alike.
        PlanError: the processes' optimizers differ; on all alike.
    """
    groups = _groups(summaries, entries)
    if index.optimizer != summaries[0].optimizer:
        raise CheckpointError(
            f"{place} has the state of {index.optimizer}, and this optimizer is {summaries[0].optimizer}"
        )
    for state in index.parameters:
        shape = global_shape(entries[state.name]) if state.name in entries else None
        if shape is not None and shape != state.shape:
            raise CheckpointError(
                f"{place}: {state.name} has shape {list(state.shape)} there, and {list(shape)} in this model"
            )
    if len(index.groups) != len(groups):
        raise CheckpointError(
            f"{place} has {len(index.groups)} parameter groups, and this optimizer {len(groups)}"
        )
    for number, (theirs, ours) in enumerate(zip(index.groups, groups, strict=True)):
        stored, present = set(theirs.names), set(ours.names)
        for names, where in (
            (stored - present, "is only there"),
            (present - stored, "is only in this optimizer"),
        ):
            if names:
                raise CheckpointError(
                    f"{place}: parameter group {number}: {min(names)} {where} ({len(names)} such); make the "
                    "optimizer with the parameters and groups that it had"
                )
