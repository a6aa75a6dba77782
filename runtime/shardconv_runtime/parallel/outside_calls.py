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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.collectives import Communicator
from ..comm.steps import unchanged
from ..errors import RefusedCallError
from ..format.plan import HookPlan, HookPort, Plan
from .boundary import Outermost, positional_names, renumber
from .hidden_states import PORTS
from .refusals import models_in
from .user_hooks import PLACED, Part, map_arguments, map_tensors, to_full, to_part

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

    modules = dict(model.named_modules())
    entries = {name: module.__dict__.get(PORTS, HookPlan(())) for name, module in modules.items()}
    names = [name for name, entry in entries.items() if converted(entry.inputs) or converted(entry.outputs)]
    # A module around them calls them as the plan says.
    watched = {name.rsplit(".", up)[0] for name in names for up in range(name.count(".") + 1)}
    checks_gradients = training and plan.stages is None
    models = models_in(model) if checks_gradients else []
    for name, module in modules.items():
        # An input embedding completes its rows itself.
        if PLACED in module.__dict__ or not (name in watched or module in models):
            continue
        entry = entries[name]
        before = _Before(
            watch,
            {port.port: to_part(port, comm, training) for port in converted(entry.inputs)},
            dict(enumerate(positional_names(module))),
            _Gradients(entry, is_model=module in models) if checks_gradients else None,
            is_whole=module is model,
        )
        # The methods of the class: those of the module are for hooks that are given full tensors.
        register = nn.Module.register_forward_pre_hook
        renumber(module, register(module, before, prepend=True, with_kwargs=True))
        if module is not model:
            conversions = {
                port.port: (to_full(port, comm, training), to_part(port, comm, training))
                for port in converted(entry.outputs)
            }
            after = _After(watch, conversions)
            renumber(module, nn.Module.register_forward_hook(module, after, always_call=True))


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
        self.called: nn.Module | None = None
        self.results = WeakTensorKeyDictionary()
        """Results of modules that were called from outside -> the conversion to this rank's tensor."""

    def is_outside(self) -> bool:
        """Return whether a call that begins is one from outside."""
        if torch.compiler.is_compiling() or self.called is not None or self._is_running():
            return False
        return not _AS_PLANNED.get() and bool(torch._C._current_graph_task_id() == IN_NO_BACKWARD)


@dataclass(frozen=True)
class _Gradients:
    """The inputs of a module whose gradients the plan knows: the tensors that its trace made."""

    entry: HookPlan
    is_model: bool
    """A model may also be given the results of a module in it, such as an encoder."""

    def checked(self, x: Tensor, port: str, module: nn.Module, watch: _Watch) -> Tensor:
        """Return an input that requires gradients and gets all of them; raise if it might not."""
        name = port.removeprefix("input.")
        listed = next((each for each in self.entry.inputs if each.port == port), None)
        is_known = not self.is_model if listed is None else listed.has_gradient
        if not x.requires_grad or is_known or name in EMBEDDINGS:
            return x
        if listed is not None or x not in watch.results:
            raise RefusedCallError(
                f"{name} was given to {type(module).__name__} and requires gradients, of which each rank "
                "may have a part; pass .detach() of it where only this model is trained, or convert one "
                "model that contains both"
            )
        part: Part = watch.results[x]
        return part(x)


@dataclass(eq=False)
class _Before(Outermost):
    """Forward pre-hook: makes full inputs this rank's."""

    watch: _Watch
    parts: Mapping[str, Part]
    """Port -> conversion of its full tensor."""
    names: Mapping[int, str]
    gradients: _Gradients | None
    """None: they are not checked."""
    is_whole: bool
    """It is the model itself, which knows its calls."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.watch.is_outside():
            return None
        gradients = self.gradients if torch.is_grad_enabled() else None

        def part(x: Tensor, port: str) -> Tensor:
            if gradients is not None:
                x = gradients.checked(x, port, module, self.watch)
            return self.parts[port](x) if port in self.parts else x

        arguments = map_arguments(part, self.names, args, kwargs)
        if not self.is_whole:
            self.watch.called = module
        return arguments


@dataclass(eq=False)
class _After(Outermost):
    """Forward hook: makes this rank's outputs full."""

    watch: _Watch
    conversions: Mapping[str, tuple[Part, Part]]
    """Port -> conversion of its tensor to the full one, and back."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if torch.compiler.is_compiling() or self.watch.called is not module:
            return None
        self.watch.called = None

        def full(x: Tensor, port: str) -> Tensor:
            convert, back = self.conversions.get(port, (unchanged, unchanged))
            whole = convert(x)
            if whole.requires_grad:
                self.watch.results[whole] = back
            return whole

        return map_tensors(output, full, "output")
