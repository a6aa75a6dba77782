"""The model of one stage of a pipeline: placeholders in the place of the modules of other stages.

A process of several stages has the modules of all of them in one model, which it runs once for each stage. In
such a pass the modules of the other stages give way: they return the results of placeholders.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import RefusedCallError, ShardconvError
from ..format.dims import size
from ..format.module_steps import LocalRowsStep
from ..format.plan import ModulePlan, Plan, module_plans
from ..format.stage_names import staged_modules
from ..parallel.boundary import forward_signature
from ..parallel.build import submodule
from .placeholders import Placeholder, swap_for_placeholder
from .stage_guards import attach_stage_guards
from .stage_link import Crossing, StageLink
from .stage_units import StagedUnit, StageRank, give_way, gives_way

ArgumentNames = Mapping[str, Sequence[str]]
"""FQN -> the names of a module's arguments, in order."""


def argument_names(model: nn.Module, plan: Plan) -> ArgumentNames:
    """Return the argument names of the modules that run on only some stages.

    A placeholder may name its arguments in another way.
    """
    return {fqn: list(forward_signature(submodule(model, fqn)).parameters) for fqn in staged_modules(plan)}


def keep_stage(
    model: nn.Module,
    plan: Plan,
    link: StageLink,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    names: ArgumentNames,
) -> StageModel:
    """Replace the modules of other stages, in place, and have the others send and receive.

    Args:
        dtype: the dtype of the model's parameters, when it is called.

    Returns:
        The stages and their units. The model has only parameters of this stage.
    """
    stage_rank = StageRank(link, plan.mesh, rank, device, dtype)
    units: dict[str, StagedUnit] = {}
    replaced: dict[Placeholder, nn.Module] = {}
    entries = module_plans(plan)
    for fqn, (entry, position) in staged_modules(plan).items():
        module = submodule(model, fqn)
        tables = _tables(module, entries.get(fqn), names[fqn])
        units[fqn] = unit = StagedUnit(stage_rank, fqn, entry, position, names[fqn], tables)
        passes = [stage in entry.stages for stage in link.stages]
        if not any(passes):
            replaced[swap_for_placeholder(model, fqn, unit)] = module
            continue
        if entry.sent:
            sender = _Sender(link, unit)
            module.register_forward_hook(sender, with_kwargs=True)
            if unit.has_parts:
                module.register_forward_pre_hook(sender.before, prepend=True, with_kwargs=True)
        if not all(passes):
            give_way(module, unit)
    _drop_parameters(model, replaced, device, dtype)
    attach_stage_guards(model, plan, link)
    # The values that each stage sends or receives in every call of the model.
    expected = {
        stage: frozenset(
            (fqn, value.item)
            for fqn, (entry, _) in staged_modules(plan).items()
            for value in entry.sent
            if value.each_call and (stage in value.to or stage in entry.stages)
        )
        for stage in link.stages
    }
    model.register_forward_hook(_Sharer(link, expected), with_kwargs=True)
    return StageModel(link, device, units)


@dataclass(frozen=True)
class StageModel:
    """The model of a stage of a pipeline, or of several: its link to the other stages, and all units."""

    link: StageLink
    device: torch.device
    _units: Mapping[str, StagedUnit]

    def crossings(self) -> dict[Crossing, tuple[int, int]]:
        """Return the values that stages hand on, in plan order: the sender, and the last receiver."""
        return {
            (fqn, value.item): (unit.entry.stages[0], max(value.to))
            for fqn, unit in self._units.items()
            for value in unit.entry.sent
        }

    def units_of(self, model: nn.Module, number: int) -> list[nn.Module]:
        """Return the modules of the stage of this number, on a rank that has it."""
        fqns = (fqn for fqn, unit in self._units.items() if number in unit.entry.stages)
        return [submodule(model, fqn) for fqn in fqns]

    @contextmanager
    def without_units(self, model: nn.Module) -> Iterator[None]:
        """Put placeholders in the place of this rank's modules too, while a measuring pass runs."""
        units: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for fqn, unit in self._units.items():
                path, _, attribute = fqn.rpartition(".")
                parent = submodule(model, path)
                module = submodule(parent, attribute)
                if isinstance(module, Placeholder) or gives_way(module) or not unit.entry.items:
                    continue  # it returns these results by itself, or there are none to return in its place
                units.append((parent, attribute, module))
                swap_for_placeholder(model, fqn, unit)
            yield
        finally:
            for parent, attribute, module in reversed(units):
                parent._modules[attribute] = module


def _tables(module: nn.Module, entry: ModulePlan | None, names: Sequence[str]) -> dict[str, int]:
    """Return the arguments of a module that are ids of a table -> the rows of the table, global."""
    steps = () if entry is None else entry.inputs
    num_rows = {
        step.port.split(".")[1]: size(step.layout) for step in steps if isinstance(step, LocalRowsStep)
    }
    if not num_rows and isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        num_rows = {"0": module.num_embeddings}
    return {names[int(name)] if name.isdigit() else name: rows for name, rows in num_rows.items()}


def _drop_parameters(
    model: nn.Module, replaced: Mapping[Placeholder, nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """Drop the parameters of modules that have been replaced, in place.

    Code asks weights for their device and dtype. So the weights of such modules become one number in their
    shape, and parts of the model that have no parameters left show one number.
    """
    remaining = set(model.modules())
    one = nn.Parameter(torch.zeros((), dtype=dtype, device=device), requires_grad=False)
    for module in remaining - {model}:
        if module in replaced or next(module.parameters(), None) is not None:
            continue
        if any(inner in replaced for inner in module.modules()):
            module.parameters = functools.partial(_shown, one)  # type: ignore[method-assign]
    for module in replaced.values():
        for owner in set(module.modules()) - remaining:
            for name, tensor in owner._parameters.items():
                if tensor is not None:
                    target = dtype if tensor.is_floating_point() else tensor.dtype
                    shown = torch.zeros((), dtype=target, device=device).expand(tensor.shape)
                    owner._parameters[name] = nn.Parameter(shown, requires_grad=False)


def _shown(parameter: nn.Parameter, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Return one number in place of ``parameters``; it has no name, so it is not trained or saved."""
    return iter((parameter,))


class _Sender:
    """A hook that sends results of a module to the stages that need them.

    Placeholders expect them in the form that was traced. A call in which the module returns another form is
    an error here, where the form is known.
    """

    def __init__(self, link: StageLink, unit: StagedUnit) -> None:
        self._link = link
        self._unit = unit
        self._given: dict[str, Any] | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Keep the caller's arguments, before the steps of the plan shard them."""
        self._given = self._unit.bound(args, kwargs)

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Send, in the order of the plan."""
        unit = self._unit
        items = [output] if isinstance(output, Tensor) else output
        arguments = unit.bound(args, kwargs) if self._given is None else self._given
        self._given = None
        planned = [item.tensor is not None for item in unit.entry.items]
        if [isinstance(item, Tensor) for item in items] != planned:
            raise _other_form(unit.fqn, "other results")
        for value in unit.entry.sent:
            item, tensor = items[value.item], unit.entry.items[value.item].tensor
            shape, dtype = unit.shape(value.item, arguments), unit.dtype(tensor)
            if tuple(item.shape) != shape or item.dtype != dtype:
                received = f"{item.dtype} {list(item.shape)}, where {dtype} {list(shape)} was expected"
                raise _other_form(unit.fqn, received)
            self._link.send((unit.fqn, value.item), item, value.to)


def _other_form(fqn: str, what: str) -> ShardconvError:
    return ShardconvError(
        f"in this call {fqn} returns {what}: another stage cannot receive it; call the model "
        "as it was traced, or convert without --pp"
    )


class _Sharer:
    """A hook that gives every stage the results of the model on the last one, except caches."""

    def __init__(self, link: StageLink, expected: Mapping[int, frozenset[Crossing]]) -> None:
        self.link = link
        self._expected = expected

    def __call__(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Fill the results of the model."""
        if missing := self.link.missing(self._expected[self.link.stage]):
            raise RefusedCallError(
                f"{min(missing)[0]} was not called, but another stage needs its results: this call leaves it "
                "out; convert with other --stages"
            )
        self.link.share_results(returned_tensors(model, output))


def returned_tensors(model: nn.Module, output: Any) -> list[Tensor]:
    """Return the tensors that a model returns, except those that are handed back to it, such as caches."""
    if isinstance(output, Mapping):
        arguments = forward_signature(model).parameters
        output = [value for name, value in output.items() if name not in arguments]
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
