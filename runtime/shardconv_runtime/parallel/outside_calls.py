"""Modules that are called from outside of the model's own calls: they take and return full tensors.

Between its modules a rank may hold a term of a sum, which has the shape of the full tensor, and so may
gradients. A user who calls a layer, or a method that calls several modules, means full tensors. So while no
model runs, each module makes a full input this rank's term, and sums the terms that it returns. The code
between such calls then gets full tensors everywhere, and is right. Inputs and outputs that are sharded stay
local: their shapes say so.

A layer that is computed again in the backward pass (activation checkpointing) is called by itself as well,
with the tensors of the model's call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Communicator
from ..format.plan import HookPort, Plan, by_name
from .boundary import Outermost, positional_names, renumber
from .user_hooks import PLACED, Part, map_tensors, to_full, to_part

Conversions = Mapping[str, Part]
"""Port -> conversion of its tensor."""

IN_NO_BACKWARD = -1
"""The number of the running backward pass if none runs."""


def complete_outside_calls(
    model: nn.Module, plan: Plan, comm: Communicator, training: bool, is_running: Callable[[], bool]
) -> None:
    """Make modules convert what they take and return in calls from outside, in place.

    Args:
        is_running: whether the model, or a model in it, is being called.
    """
    watch = _Watch(is_running)

    def converted(ports: tuple[HookPort, ...]) -> list[HookPort]:
        return [p for p in ports if not p.sequence_axes and (p.partial_axes or (p.grad_axes and training))]

    hooks = by_name("hooks", plan.hooks)
    entries = {name: (converted(entry.inputs), converted(entry.outputs)) for name, entry in hooks.items()}
    names = [name for name, (inputs, outputs) in entries.items() if inputs or outputs]
    # A module around them calls them as the plan says.
    watched = {name.rsplit(".", up)[0] for name in names for up in range(name.count(".") + 1)}
    for name, module in model.named_modules():
        if name not in watched or PLACED in module.__dict__:  # an input embedding completes its rows itself
            continue
        inputs, outputs = entries.get(name, ([], []))
        # The methods of the class: those of the module are for hooks that are given full tensors.
        register = partial(nn.Module.register_forward_pre_hook, module)
        parts = {port.port: to_part(port, comm, training) for port in inputs}
        before = _Before(watch, parts, dict(enumerate(positional_names(module))))
        renumber(module, register(before, prepend=True, with_kwargs=True))
        after = _After(watch, {port.port: to_full(port, comm, training) for port in outputs})
        renumber(module, nn.Module.register_forward_hook(module, after, always_call=True))


class _Watch:
    """Knows the module that was called from outside and has not returned."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._called: nn.Module | None = None

    def begins(self, module: nn.Module) -> bool:
        """Return whether a call of a module is one from outside, and note it."""
        if torch.compiler.is_compiling() or self._called is not None or self._is_running():
            return False
        if torch._C._current_graph_task_id() != IN_NO_BACKWARD:
            return False
        self._called = module
        return True

    def ends(self, module: nn.Module) -> bool:
        """Return whether the call that returns is the noted one, and forget it."""
        if torch.compiler.is_compiling() or self._called is not module:
            return False
        self._called = None
        return True


@dataclass(eq=False)
class _Before(Outermost):
    """Forward pre-hook: makes full inputs this rank's."""

    watch: _Watch
    ports: Conversions
    names: Mapping[int, str]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.watch.begins(module):
            return None
        named = [(self.names.get(i, i), value) for i, value in enumerate(args)]
        return (
            tuple(_converted(self.ports, value, f"input.{name}") for name, value in named),
            {name: _converted(self.ports, value, f"input.{name}") for name, value in kwargs.items()},
        )


@dataclass(eq=False)
class _After(Outermost):
    """Forward hook: makes this rank's outputs full."""

    watch: _Watch
    ports: Conversions

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _converted(self.ports, output, "output") if self.watch.ends(module) else None


def _converted(ports: Conversions, value: Any, port: str) -> Any:
    return map_tensors(value, lambda x, port: ports[port](x) if port in ports else x, port)
