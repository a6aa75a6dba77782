"""Leaves out layers that others stand for, so that a deep model can be run on numbers.

A layer that takes the previous layer's output as one of its inputs and returns one tensor can be
bypassed by returning that input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardconv_runtime.boundary import forward_signature
from torch import Tensor, nn

from .tape import Mark, Tape


@dataclass(frozen=True, slots=True)
class Bypass:
    """How to leave out a layer: it returns this one of its inputs."""

    argument: str
    """Name in the signature of its forward."""


def find_bypasses(tape: Tape, layers: Iterable[str]) -> dict[str, Bypass]:
    """How each of these layers is bypassed; empty unless all of them can be.

    Args:
        tape: of the whole model, not folded.
        layers: FQNs of layers of a stack; each one follows another layer of that stack.
    """
    wanted = set(layers)
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
    for fqn in wanted:
        stack = fqn.rpartition(".")[0]
        passed = [m for m in entries.get(fqn, ()) if returned.get(m.source, "").rpartition(".")[0] == stack]
        results = exits.get(fqn, [])
        plain = len(passed) == 1 and passed[0].slots[0].count(".") == 1
        if not plain or [m.slots for m in results] != [("output",)]:
            return {}
        out[fqn] = Bypass(passed[0].slots[0].partition(".")[2])
    return out


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
