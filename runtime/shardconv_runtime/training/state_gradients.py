"""Hidden states in training: returned if a loss of them has the gradients of the unsharded model.

The gradient of a tensor inside of a model may be a term of a sum over ranks; a loss of such a tensor would
add the full gradient on each rank. The plan says at the ports of modules where gradients are full. So the
hidden states that a call returns must be tensors that passed such ports in that call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import RefusedCallError
from ..format.plan import HookPlan, Plan, by_name
from ..parallel.boundary import forward_signature, positional_names, renumber
from ..parallel.refusals import ARGUMENT, hidden_states, is_asked_for, other_results
from ..parallel.user_hooks import map_tensors

WHY_NO_STATES = (
    "whose inner activations, or their gradients, may be sharded: a loss of them would train the model "
    "wrongly; use its outputs alone"
)


def check_state_gradients(model: nn.Module, plan: Plan) -> None:
    """Make a model refuse to return hidden states whose gradients are not full on every rank."""
    check = _Check(model, by_name("hooks", plan.hooks))
    renumber(model, model.register_forward_pre_hook(check.begin, with_kwargs=True))
    renumber(model, model.register_forward_hook(check.end, always_call=True))


class _Check:
    """Hooks around the calls of one model."""

    def __init__(self, model: nn.Module, entries: Mapping[str, HookPlan]) -> None:
        names = list(forward_signature(model).parameters)
        self._position = names.index(ARGUMENT) if ARGUMENT in names else len(names)
        self._entries = entries
        self._handles: list[RemovableHandle] = []
        self._full: set[Tensor] = set()
        """Tensors of the running call, by identity, whose gradients are full."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Check:
        """Return a check of a copy of the model, outside of calls."""
        other: _Check = object.__new__(type(self))
        vars(other).update(vars(self), _handles=[], _full=set())
        return other

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the tensors with full gradients of a call that asks for hidden states."""
        value = args[self._position] if self._position < len(args) else kwargs.get(ARGUMENT)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return  # a compiled model refuses to return them
        if not is_asked_for(model, ARGUMENT, value):
            return
        self._forget()
        for name, module in model.named_modules():
            entry = self._entries.get(name, HookPlan(()))
            inputs, outputs = (
                {port.port for port in side if not port.grad_axes and not port.sequence_axes}
                for side in (entry.inputs, entry.outputs)
            )
            # The methods of the class: those of the module refuse hooks on ports whose tensors are parts.
            if inputs:
                hook = partial(self._enter, inputs, positional_names(module))
                options: dict[str, Any] = {"prepend": True, "with_kwargs": True}
                self._handles.append(nn.Module.register_forward_pre_hook(module, hook, **options))
            if outputs:
                leave = partial(self._leave, outputs)
                self._handles.append(nn.Module.register_forward_hook(module, leave))

    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Check the hidden states that a call returns."""
        if not self._handles:
            return
        # Whatever else the model returns has full gradients; the last hidden state may be among that.
        full = {*self._full, *other_results(output)}
        self._forget()
        if any(states.requires_grad and states not in full for states in hidden_states(output)):
            raise RefusedCallError(f"{ARGUMENT} was given to a model {WHY_NO_STATES}")

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._full = [], set()

    def _enter(
        self,
        ports: set[str],
        names: list[str],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            map_tensors(value, partial(self._note, ports), f"input.{name}")

    def _leave(self, ports: set[str], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        map_tensors(output, partial(self._note, ports), "output")

    def _note(self, ports: set[str], x: Tensor, port: str) -> Tensor:
        if port in ports:
            self._full.add(x)
        return x
