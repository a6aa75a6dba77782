"""Leaves out layers that others stand for, so that a deep model can be run on numbers.

A layer that takes the previous layer's output as one of its inputs and returns one tensor can be
bypassed by returning that input. It is bypassed if it is planned as the layer that stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardconv_runtime.format.plan import Plan, module_plans, parameter_plans
from shardconv_runtime.parallel.boundary import forward_signature
from torch import Tensor, nn

from ...tracing.tape import Mark, Tape, prefixes


@dataclass(frozen=True, slots=True)
class Bypass:
    """How to leave out a layer: it returns this one of its inputs."""

    argument: str
    """Name in the signature of its forward."""
    like: str
    """FQN of the layer that stands for it, and is run."""


def find_bypasses(tape: Tape, layers: Mapping[str, str]) -> dict[str, Bypass]:
    """How each of these layers is bypassed; empty unless all of them can be.

    Args:
        tape: of all layers, not folded.
        layers: FQNs of layers of a stack, each with the layer that stands for it; each one follows
            another layer of that stack.
    """
    returned: dict[int, str] = {}
    entries: dict[str, list[Mark]] = {}
    exits: dict[str, list[Mark]] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            fqn = tape.calls[event.call].fqn
            (exits if event.is_output else entries).setdefault(fqn, []).append(event)
            if event.is_output:
                returned[event.target] = fqn
    out: dict[str, Bypass] = {}
    for fqn, like in layers.items():
        stack = fqn.rpartition(".")[0]
        passed = [m for m in entries.get(fqn, ()) if returned.get(m.source, "").rpartition(".")[0] == stack]
        results = exits.get(fqn, [])
        plain = len(passed) == 1 and passed[0].slots[0].count(".") == 1
        if not plain or [m.slots for m in results] != [("output",)]:
            return {}
        out[fqn] = Bypass(passed[0].slots[0].partition(".")[2], like)
    return out


def planned_alike(plan: Plan, layers: Mapping[str, Bypass]) -> dict[str, Bypass]:
    """Those of the layers for which the plan is that of the layer that stands for them."""
    modules, parameters = module_plans(plan), parameter_plans(plan)
    said: dict[str, object] = {name: replace(entry, names=()) for name, entry in modules.items()}
    said |= {f"{name}=": replace(entry, names=()) for name, entry in parameters.items()}
    said |= {f"{alias}=": name for alias, name in plan.tied}
    inside: dict[str, dict[str, object]] = {}
    wanted = {fqn for layer, how in layers.items() for fqn in (layer, how.like)}
    for name, entry in said.items():
        for layer in wanted.intersection(prefixes(name)):
            inside.setdefault(layer, {})[name[len(layer) :]] = entry
    return {fqn: how for fqn, how in layers.items() if inside.get(fqn) == inside.get(how.like)}


def bypass(model: nn.Module, layers: Mapping[str, Bypass]) -> nn.Module:
    """Replace these layers of ``model``, in place."""
    for fqn, how in layers.items():
        parent, _, name = fqn.rpartition(".")
        owner = model.get_submodule(parent)
        owner._modules[name] = _Bypassed(model.get_submodule(fqn), how)
    return model


class _Bypassed(nn.Module):
    """Stands in for a layer: its attributes, none of its parameters, one of its inputs as output."""

    def __init__(self, layer: nn.Module, how: Bypass) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer
        names = list(forward_signature(layer).parameters)
        self._argument = how.argument
        self._position = int(how.argument) if how.argument.isdigit() else names.index(how.argument)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The input that the layer would have changed."""
        value: Tensor = kwargs[self._argument] if self._argument in kwargs else args[self._position]
        return value
