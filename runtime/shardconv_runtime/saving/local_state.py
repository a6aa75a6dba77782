"""The part of an optimizer's state that a process holds, and the state that all processes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import CheckpointError, InputsDifferError, RefusedCallError, missing
from ..format.header import dtype_name
from ..format.plan import ParameterPlan, global_shape, parameter_plans
from ..format.slices import Mesh, Range
from ..format.stage_names import held_names
from ..format.stored_layout import holds_values
from ..loaded import loaded
from ..parallel.refused_changes import MARK
from .dcp_boxes import Box, BoxedTensor, held_boxes, owned_boxes
from .local_windows import local_tensor, local_window
from .optimizer_index import (
    OptimizerIndex,
    ParameterGroup,
    ParameterState,
    StoredValue,
    from_value,
    tensor_name,
    to_value,
)
from .replicas import Replicas
from .stored_model import stored_model

OptimizerState = dict[str, dict[str, Any]]
"""The state of an optimizer, by the parameter's FQN and the optimizer's keys."""


@dataclass(frozen=True)
class OptimizerSummary:
    """The description of a process's state that it sends to the others."""

    optimizer: str
    """Name of its class."""
    groups: tuple[ParameterGroup, ...]
    states: dict[str, ParameterState]
    holding: frozenset[str]
    """Names of all tensors of the model of which the process holds values, in the optimizer or not."""


@dataclass(frozen=True)
class HeldState:
    """An optimizer's parameters on this process."""

    optimizer: Optimizer
    parameters: dict[str, Tensor]
    """Parameters of all groups by FQN, in their order; local, or DTensors over data-parallel processes."""
    windows: dict[str, tuple[Range, ...]]
    """The local positions of the rank's shard that this process holds, one range for each dim."""
    is_first: dict[str, bool]
    """Whether this process is the first of the data-parallel processes, and of the stages, that hold the same
    window."""
    holding: frozenset[str]
    """See ``OptimizerSummary``."""
    entries: Mapping[str, ParameterPlan]
    """The entries of all parameters of the model."""
    mesh: Mesh
    rank: int

    def summary(self) -> OptimizerSummary:
        """Return the summary to send to the other processes."""
        names, groups = {parameter: name for name, parameter in self.parameters.items()}, []
        for group in self.optimizer.param_groups:
            values: dict[str, StoredValue] = {}
            for key, thing in group.items():
                if key in ("params", "param_names", MARK):
                    continue
                value = to_value(thing)
                if value is None:
                    raise RefusedCallError(
                        f"the optimizer's {key} is a {type(thing).__name__}, which cannot be stored"
                    )
                values[key] = value
            groups.append(ParameterGroup(tuple(names[parameter] for parameter in group["params"]), values))
        states = {
            name: _parameter_state(name, parameter, self.optimizer.state[parameter], self.entries[name])
            for name, parameter in self.parameters.items()
            if self.optimizer.state.get(parameter)
        }
        return OptimizerSummary(type(self.optimizer).__qualname__, tuple(groups), states, self.holding)

    def written(self, index: OptimizerIndex) -> list[BoxedTensor]:
        """Return the tensors of the state that this process writes, with the boxes that it owns."""
        return [
            BoxedTensor(
                tensor_name(entry.name, key),
                entry.shape,
                local_tensor(self.optimizer.state[self.parameters[entry.name]][key].detach()),
                tuple(self._boxes(entry.name, owned=True)),
            )
            for entry in index.parameters
            if entry.name in self.parameters and self.is_first[entry.name] and entry.name in self.holding
            for key in entry.tensors
        ]

    def wanted(self, fresh: OptimizerState, index: OptimizerIndex) -> list[BoxedTensor]:
        """Return the tensors of ``fresh`` to fill, with all boxes that this process holds."""
        return [
            BoxedTensor(
                tensor_name(entry.name, key),
                entry.shape,
                local_tensor(fresh[entry.name][key]),
                tuple(self._boxes(entry.name, owned=False)),
            )
            for entry in index.parameters
            if entry.name in fresh
            for key in entry.tensors
        ]

    def _boxes(self, name: str, *, owned: bool) -> list[Box]:
        find = owned_boxes if owned else held_boxes
        return find(self.entries[name], self.mesh, self.rank, self.windows[name])


def held_state(model: nn.Module, optimizer: Optimizer, replicas: Replicas) -> HeldState:
    """Find the state that this process holds. No collective runs."""
    source = loaded(model)
    plan = source.plan
    stored = stored_model(model).tensors
    firsts = {name_in_model: first for first, name_in_model in held_names(plan, source.stages).items()}
    tensors = {firsts[name]: tensor for name, tensor in stored.items()}
    entries = parameter_plans(plan)
    # The optimizer's parameters by FQN, in the order of its groups.
    names = {tensor: name for name, tensor in tensors.items()}  # tensors are hashed by identity
    parameters: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise RefusedCallError(
                    f"parameter {position} of group {number} of the optimizer does not belong to the model; "
                    "make the optimizer from the model as it is now (e.g. after fully_shard)"
                )
            parameters[names[parameter]] = parameter
    parameters_in_groups = set(parameters.values())
    if any(parameter not in parameters_in_groups for parameter in optimizer.state):
        raise RefusedCallError(
            "the optimizer has state without a parameter in its groups; it cannot be stored"
        )
    windows = {name: local_window(name, parameter) for name, parameter in parameters.items()}
    return HeldState(
        optimizer,
        parameters,
        {name: window for name, (window, _) in windows.items()},
        {
            name: first
            and (replicas.is_first or isinstance(parameters[name], DTensor))
            and name not in source.held_before
            for name, (_, first) in windows.items()
        },
        frozenset(
            name
            for name, tensor in tensors.items()
            if local_tensor(tensor).numel() and holds_values(entries[name], plan.mesh, replicas.rank)
        ),
        entries,
        plan.mesh,
        replicas.rank,
    )


def fresh_state(held: HeldState, index: OptimizerIndex) -> OptimizerState:
    """Return the state of this process's parameters, with tensors of zeros to be filled."""
    fresh: OptimizerState = {}
    for entry in index.parameters:
        parameter = held.parameters.get(entry.name)
        if parameter is None:
            continue
        fresh[entry.name] = {key: from_value(value) for key, value in entry.scalars.items()}
        for key, name in entry.tensors.items():
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(
                    f"{entry.name}: {key} has the dtype {name[:80]!r}, which torch does not know"
                )
            fresh[entry.name][key] = torch.zeros_like(parameter.detach(), dtype=dtype)
    return fresh


def fresh_groups(
    held: HeldState, hyperparameters: Sequence[Mapping[str, StoredValue] | None]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the saved hyperparameters, as in its ``state_dict``."""
    numbers = iter(range(len(held.parameters)))
    return [
        {
            **group,
            **{key: from_value(value) for key, value in (stored or {}).items()},
            "params": [next(numbers) for _ in group["params"]],
        }
        for group, stored in zip(held.optimizer.param_groups, hyperparameters, strict=True)
    ]


def install(
    held: HeldState, index: OptimizerIndex, fresh: OptimizerState, groups: list[dict[str, Any]]
) -> None:
    """Load state and groups into the optimizer through its ``load_state_dict``.

    Tensors that had their parameter's dtype get the one that it has now: optimizers need them alike. Others
    keep the values that the optimizer chose for them.
    """
    numbers = {name: number for number, name in enumerate(held.parameters)}
    states = {numbers[name]: dict(state) for name, state in fresh.items()}
    held.optimizer.load_state_dict({"state": states, "param_groups": groups})
    entries = {entry.name: entry for entry in index.parameters}
    for name, state in fresh.items():  # load_state_dict has cast tensors to the parameter's dtype
        loaded_state = held.optimizer.state[held.parameters[name]]
        followed = () if entries[name].has_own_dtypes else entries[name].tensors
        for key, thing in state.items():
            if key in followed:
                continue
            if key != "step" and isinstance(thing, Tensor) and loaded_state[key].dtype != thing.dtype:
                loaded_state[key] = thing.to(loaded_state[key].device)


def _parameter_state(
    name: str, parameter: Tensor, state: dict[str, Any], entry: ParameterPlan
) -> ParameterState:
    tensors, scalars = {}, {}
    for key, thing in state.items():
        value = None if isinstance(thing, str) else to_value(thing)
        if (
            isinstance(thing, Tensor)
            and thing.dim()
            and local_tensor(thing).shape == local_tensor(parameter).shape
        ):
            tensors[key] = dtype_name(thing.dtype)
        elif value is not None:
            scalars[key] = value
        else:
            shape = f" of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else ""
            raise RefusedCallError(
                f"{name}: the optimizer keeps {key}, a {type(thing).__name__}{shape}; only tensors of the "
                f"parameter's shape {tuple(parameter.shape)} and numbers can be stored for other ranks"
            )
    has_own_dtypes = any(state[key].dtype != parameter.dtype for key in tensors)
    return ParameterState(name, global_shape(entry), tensors, scalars, has_own_dtypes)


# The optimizer's state of the full model, merged from the summaries of all processes.
#
# Every process merges the same summaries, so that all raise the same errors.

Entries = Mapping[str, ParameterPlan]
"""All parameters of the model, in the order of the plan."""


def common_index(summaries: Sequence[OptimizerSummary], entries: Entries) -> OptimizerIndex:
    """Return the index of the state that the processes hold together."""
    groups = _groups(summaries, entries)
    states = [state for name in entries if (state := _common_state(name, summaries)) is not None]
    return OptimizerIndex(summaries[0].optimizer, groups, tuple(states))


def _common_state(name: str, summaries: Sequence[OptimizerSummary]) -> ParameterState | None:
    """Return the state of a parameter on all processes that hold values of it; None without any."""
    states = {number: s.states.get(name) for number, s in enumerate(summaries) if name in s.holding}
    if not states:
        return None
    first, state = next(iter(states.items()))
    for other, theirs in states.items():
        if theirs != state:
            raise InputsDifferError(
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
    """Return the merged groups of all processes, which may lack parameters that they hold no values of."""
    first = summaries[0]
    merged = []
    for other, summary in enumerate(summaries):
        if (summary.optimizer, len(summary.groups)) != (first.optimizer, len(first.groups)):
            raise InputsDifferError(
                f"process 0 has {first.optimizer} with {len(first.groups)} parameter groups, process {other} "
                f"has {summary.optimizer} with {len(summary.groups)}; make the optimizer alike on all ranks"
            )
        for number, (ours, theirs) in enumerate(zip(first.groups, summary.groups, strict=True)):
            our_values, other_values = ours.hyperparameters, theirs.hyperparameters
            differing = (
                key for key in {**our_values, **other_values} if our_values.get(key) != other_values.get(key)
            )
            if changed := next(differing, ""):
                raise InputsDifferError(
                    f"{changed} of parameter group {number} differs between processes 0 and {other}; set it "
                    "alike on all ranks"
                )
    for number in range(len(first.groups)):
        names = {name for summary in summaries for name in summary.groups[number].names}
        for process, summary in enumerate(summaries):
            if lacking := (summary.holding & names) - set(summary.groups[number].names):
                raise InputsDifferError(
                    f"process {process} holds a part of {min(lacking)}, and parameter group {number} of its "
                    "optimizer lacks it; make the optimizer alike on all ranks"
                )
        ordered = tuple(name for name in entries if name in names)
        merged.append(ParameterGroup(ordered, first.groups[number].hyperparameters))
    return tuple(merged)


@dataclass(frozen=True)
class Resumption:
    """The places in an optimizer to which parts of a saved state go."""

    hyperparameters: tuple[Mapping[str, StoredValue] | None, ...]
    """The saved ones for each group of the optimizer; None if a group has only new parameters, and keeps its
    own."""
    new: tuple[str, ...]
    """The parameters that the saved optimizer did not have, in the order of the plan."""


def resumption(
    directory: Path, index: OptimizerIndex, summaries: Sequence[OptimizerSummary], entries: Entries
) -> Resumption:
    """Find out by the names of parameters which saved group is continued by which group of an optimizer."""
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
            numbers = {number: None}  # an empty one is known only by its place
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
            "parameters do not match the saved groups; make the optimizer with the same parameters and "
            "groups as before"
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
