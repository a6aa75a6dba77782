"""The optimizer's state of the full model, merged from the summaries of all processes.

Every process merges the same summaries, so that all raise the same errors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..errors import CheckpointError, PlanError, missing
from ..format.plan import ParameterPlan, global_shape
from .held_state import OptimizerSummary
from .optimizer_index import OptimizerIndex, ParameterGroup, ParameterState, StoredValue

Entries = Mapping[str, ParameterPlan]
"""All parameters of the model, in the order of the plan."""


def common_index(summaries: Sequence[OptimizerSummary], entries: Entries) -> OptimizerIndex:
    """The index of the state that the processes hold together.

    Args:
        summaries: of all processes, in the order of their numbers.
        entries: of the model.

    Raises:
        PlanError: processes keep different state of one parameter; raised on all of them.
    """
    groups = _groups(summaries, entries)
    states = [state for name in entries if (state := _common_state(name, summaries)) is not None]
    return OptimizerIndex(summaries[0].optimizer, groups, tuple(states))


def _common_state(name: str, summaries: Sequence[OptimizerSummary]) -> ParameterState | None:
    """The state of a parameter on all processes that hold values of it; None without any."""
    found = {number: s.states.get(name) for number, s in enumerate(summaries) if name in s.holding}
    if not found:
        return None
    first, state = next(iter(found.items()))
    for other, theirs in found.items():
        if theirs != state:
            raise PlanError(
                f"{name}: processes {first} and {other} keep different state ({_shown(state)}, and "
                f"{_shown(theirs)}); step the optimizer on all ranks alike"
            )
    return state


def _shown(state: ParameterState | None) -> str:
    if state is None:
        return "nothing"
    scalars = [f"{key} {value.text}" for key, value in state.scalars.items()]
    return ", ".join([*scalars, *state.tensors])


def _groups(summaries: Sequence[OptimizerSummary], entries: Entries) -> tuple[ParameterGroup, ...]:
    """The merged groups of all processes; a process may lack parameters of which it holds no values.

    Raises:
        PlanError: the number of groups, their hyperparameters or the optimizers' classes differ; raised on
            all processes.
    """
    first = summaries[0]
    merged = []
    for other, summary in enumerate(summaries):
        if (summary.optimizer, len(summary.groups)) != (first.optimizer, len(first.groups)):
            raise PlanError(
                f"process 0 has {first.optimizer} with {len(first.groups)} parameter groups, process {other} "
                f"has {summary.optimizer} with {len(summary.groups)}; make the optimizer alike on all ranks"
            )
        for number, (ours, theirs) in enumerate(zip(first.groups, summary.groups, strict=True)):
            if changed := _changed(ours.hyperparameters, theirs.hyperparameters):
                raise PlanError(
                    f"{changed} of parameter group {number} differs between processes 0 and {other}; set it "
                    "alike on all ranks"
                )
    for number in range(len(first.groups)):
        names = {name for summary in summaries for name in summary.groups[number].names}
        _require_all(number, names, summaries)
        ordered = tuple(name for name in entries if name in names)
        merged.append(ParameterGroup(ordered, first.groups[number].hyperparameters))
    return tuple(merged)


def _require_all(group: int, names: Collection[str], summaries: Sequence[OptimizerSummary]) -> None:
    """Refuse a process that holds values of a parameter and lacks it in its group."""
    for number, summary in enumerate(summaries):
        if lacking := (summary.holding & set(names)) - set(summary.groups[group].names):
            raise PlanError(
                f"process {number} holds a part of {min(lacking)}, and parameter group {group} of its "
                "optimizer lacks it; make the optimizer alike on all ranks"
            )


def _changed(ours: Mapping[str, StoredValue], theirs: Mapping[str, StoredValue]) -> str:
    return next((key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)), "")


@dataclass(frozen=True)
class Resumption:
    """What of a saved state goes where in an optimizer."""

    hyperparameters: tuple[Mapping[str, StoredValue] | None, ...]
    """For each of its groups; None: it has new parameters alone, and keeps its own."""
    new: tuple[str, ...]
    """The parameters that the saved optimizer did not have, in the order of the plan."""


def resumption(
    directory: Path, index: OptimizerIndex, summaries: Sequence[OptimizerSummary], entries: Entries
) -> Resumption:
    """Find out by the names of parameters which saved group is continued by which group of an optimizer.

    Args:
        directory: of the saved state, for messages.
        index: of the saved state.
        summaries: of all processes.
        entries: of the model.

    Raises:
        CheckpointError: the state is of another optimizer or model, or has a parameter that this optimizer
            lacks, or a group has parameters of saved groups that differ; raised on all processes.
        PlanError: the processes' optimizers differ; raised on all processes.
    """
    groups = _groups(summaries, entries)
    if index.optimizer != summaries[0].optimizer:
        raise CheckpointError(
            f"{directory} has the state of {index.optimizer}, and this optimizer is {summaries[0].optimizer}"
        )
    for state in index.parameters:
        shape = global_shape(entries[state.name]) if state.name in entries else None
        if shape is not None and shape != state.shape:
            raise CheckpointError(
                f"{directory}: {state.name} has shape {list(state.shape)} there, and {list(shape)} in this "
                "model"
            )
    saved = {name: number for number, group in enumerate(index.groups) for name in group.names}
    present = [name for group in groups for name in group.names]
    taken: list[Mapping[str, StoredValue] | None] = []
    differ = not saved.keys() <= set(present)
    for number, group in enumerate(groups):
        numbers = dict.fromkeys(saved[name] for name in group.names if name in saved)
        if not group.names and number < len(index.groups):
            numbers = {number: None}  # an empty one is known by its place alone
        theirs = [index.groups[each].hyperparameters for each in numbers]
        differ |= any(each != theirs[0] for each in theirs)
        taken.append(theirs[0] if theirs else None)
    if differ:
        _refuse_groups(directory, index.groups, groups)
    return Resumption(tuple(taken), tuple(name for name in present if name not in saved))


def _refuse_groups(
    directory: Path, saved: Sequence[ParameterGroup], groups: Sequence[ParameterGroup]
) -> NoReturn:
    """Raise ``CheckpointError`` with the first difference of groups, one by one."""
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{directory} has {len(saved)} parameter groups, and this optimizer has {len(groups)}, whose "
            "parameters are not those of saved groups that are alike; make the optimizer with the parameters "
            "and groups that it had"
        )
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        stored, present = set(theirs.names), set(ours.names)
        this, there = "this optimizer", "the saved state"
        for names, owner, holder in ((stored - present, there, this), (present - stored, this, there)):
            if names:
                lacking = missing(names, "parameter", owner, holder)
                raise CheckpointError(
                    f"{directory}: parameter group {number}: {lacking}; make the optimizer with the "
                    "parameters and groups that it had"
                )
    raise AssertionError("groups that differ have a difference")
