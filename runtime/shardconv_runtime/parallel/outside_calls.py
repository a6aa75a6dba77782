"""Modules that are called from outside of the model's own calls: they take and return full tensors.

Between its modules a rank may hold a term of a sum, which has the shape of the full tensor. A user who calls
a layer, or a method that calls several modules, means full tensors. So while no model runs, each module
makes a full input this rank's term, and sums the terms that it returns. The code between such calls then gets
full tensors everywhere, and is right. Inputs and outputs that are sharded stay local: their shapes say so.

With gradients, layers are also called by themselves to be computed again in the backward pass (activation
checkpointing), with terms. So a model that was loaded for training takes and returns terms in such calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..comm.steps import KeepOnFirst, Reduce
from ..format.plan import HookPlan, Plan, by_name
from .boundary import Outermost, positional_names, renumber
from .user_hooks import PLACED, map_tensors

Conversions = Mapping[str, Callable[[Tensor], Tensor]]
"""Port -> conversion of its tensor."""


def complete_outside_calls(
    model: nn.Module, plan: Plan, comm: Communicator, training: bool, is_running: Callable[[], bool]
) -> None:
    """Make modules that take or return terms convert them in calls from outside, in place.

    Args:
        is_running: whether the model, or a model in it, is being called.
    """
    watch = _Watch(is_running, training)
    entries = {
        name: entry
        for name, entry in by_name("hooks", plan.hooks).items()
        if any(port.partial_axes for port in (*entry.inputs, *entry.outputs))
    }
    # A module around them calls them with terms.
    watched = {name.rsplit(".", up)[0] for name in entries for up in range(name.count(".") + 1)}
    for name, module in model.named_modules():
        if name not in watched or PLACED in module.__dict__:  # an input embedding completes its rows itself
            continue
        entry = entries.get(name, HookPlan(()))
        inputs = {
            port.port: KeepOnFirst(comm, port.partial_axes) for port in entry.inputs if port.partial_axes
        }
        outputs = {port.port: Reduce(comm, port.partial_axes) for port in entry.outputs if port.partial_axes}
        # The methods of the class: those of the module are for hooks that are given full tensors.
        register = partial(nn.Module.register_forward_pre_hook, module)
        before = _Before(watch, inputs, dict(enumerate(positional_names(module))))
        renumber(module, register(before, prepend=True, with_kwargs=True))
        after = _After(watch, outputs)
        renumber(module, nn.Module.register_forward_hook(module, after, always_call=True))


class _Watch:
    """Knows the module that was called from outside and has not returned."""

    def __init__(self, is_running: Callable[[], bool], training: bool) -> None:
        self._is_running = is_running
        self._training = training
        self._called: nn.Module | None = None

    def begins(self, module: nn.Module) -> bool:
        """Return whether a call of a module is one from outside, and note it."""
        if torch.compiler.is_compiling() or self._called is not None or self._is_running():
            return False
        if self._training and torch.is_grad_enabled():
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
    """Forward pre-hook: keeps full inputs on the first of the ranks that hold terms."""

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
    """Forward hook: sums the terms of the ranks."""

    watch: _Watch
    ports: Conversions

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _converted(self.ports, output, "output") if self.watch.ends(module) else None


def _converted(ports: Conversions, value: Any, port: str) -> Any:
    return map_tensors(value, lambda x, port: ports[port](x) if port in ports else x, port)
