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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.collectives import Communicator
from ..comm.steps import unchanged
from ..errors import RefusedCallError
from ..format.plan import HookPort, Plan, by_name
from .boundary import Outermost, positional_names, renumber
from .refusals import models_in
from .user_hooks import PLACED, Part, map_arguments, map_tensors, to_full, to_part

Conversions = Mapping[str, Part]
"""Port -> conversion of its tensor."""

IN_NO_BACKWARD = -1
"""The number of the running backward pass if none runs."""

_AS_PLANNED: ContextVar[bool] = ContextVar("as_planned", default=False)
"""Whether code of this package calls modules, with the tensors of the plan."""

EMBEDDINGS = ("inputs_embeds", "decoder_inputs_embeds")
"""Arguments that are given in place of ids; ``embeddings.py`` knows their gradients."""


def complete_outside_calls(
    model: nn.Module, plan: Plan, comm: Communicator, training: bool, is_running: Callable[[], bool]
) -> None:
    """Make modules convert their inputs and outputs in calls from outside, in place.

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
    checks_gradients = training and plan.stages is None
    models = models_in(model) if checks_gradients else []
    for name, module in model.named_modules():
        # An input embedding completes its rows itself.
        if PLACED in module.__dict__ or not (name in watched or module in models):
            continue
        # The methods of the class: those of the module are for hooks that are given full tensors.
        register = partial(nn.Module.register_forward_pre_hook, module, prepend=True, with_kwargs=True)
        arguments = dict(enumerate(positional_names(module)))
        if module is not model:
            inputs, outputs = entries.get(name, ([], []))
            before = _Before(watch, {port.port: to_part(port, comm, training) for port in inputs}, arguments)
            renumber(module, register(before))
            full = {port.port: to_full(port, comm, training) for port in outputs}
            after = _After(watch, full, {port.port: to_part(port, comm, training) for port in outputs})
            renumber(module, nn.Module.register_forward_hook(module, after, always_call=True))
        if checks_gradients:
            listed = {port.port: port.has_gradient for port in hooks[name].inputs} if name in hooks else {}
            renumber(module, register(_GivenWithGradient(watch, arguments, listed, module in models)))


@contextmanager
def as_planned() -> Iterator[None]:
    """Let modules that are called by themselves take and return this rank's tensors."""
    token = _AS_PLANNED.set(True)
    try:
        yield
    finally:
        _AS_PLANNED.reset(token)


class _Watch:
    """Knows the module that was called from outside and has not returned."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._called: nn.Module | None = None
        self.results = WeakTensorKeyDictionary()
        """Results of modules that were called from outside -> the conversion to this rank's tensor."""

    def is_outside(self) -> bool:
        """Return whether a call is one from outside."""
        if torch.compiler.is_compiling() or self._called is not None or self._is_running():
            return False
        return not _AS_PLANNED.get() and bool(torch._C._current_graph_task_id() == IN_NO_BACKWARD)

    def begins(self, module: nn.Module) -> bool:
        """Return whether a call of a module is one from outside, and note it."""
        if not self.is_outside():
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
        convert = partial(_converted, self.ports)
        return map_arguments(convert, self.names, args, kwargs)


@dataclass(eq=False)
class _After(Outermost):
    """Forward hook: makes this rank's outputs full."""

    watch: _Watch
    ports: Conversions
    inverse: Conversions
    """The inverse of each conversion."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.watch.ends(module):
            return None

        def note(x: Tensor, port: str) -> Tensor:
            if x.requires_grad:
                self.watch.results[x] = self.inverse.get(port, unchanged)
            return x

        return map_tensors(map_tensors(output, partial(_converted, self.ports), "output"), note, "output")


@dataclass(eq=False)
class _GivenWithGradient(Outermost):
    """Forward pre-hook: inputs that require gradients get all of them, or are refused.

    A plan knows the gradients of tensors that its trace made. So a model may be given the results of a
    module in it, such as an encoder.
    """

    watch: _Watch
    names: Mapping[int, str]
    listed: Mapping[str, bool]
    """Port of an input that the plan lists, and that ``_Before`` converts -> whether it has a gradient."""
    is_model: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or not self.watch.is_outside():
            return None

        def own(x: Tensor, port: str) -> Tensor:
            name = port.removeprefix("input.")
            if not x.requires_grad or self.listed.get(port, not self.is_model) or name in EMBEDDINGS:
                return x
            if port in self.listed or x not in self.watch.results:
                raise RefusedCallError(
                    f"{name} was given to {type(module).__name__} and requires gradients, of which each rank "
                    "may have a part; pass .detach() of it where only this model is trained, or convert one "
                    "model that contains both"
                )
            part: Part = self.watch.results[x]
            return part(x)

        return map_arguments(own, self.names, args, kwargs)


def _converted(ports: Conversions, x: Tensor, port: str) -> Tensor:
    return ports[port](x) if port in ports else x
