"""Attention weights of all heads, for calls that ask for them.

A rank computes the weights of some heads. Nothing but a caller reads them, so they are gathered only in a
call with ``output_attentions``, at the outputs of the modules that compute them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..comm.steps import GradReduce
from ..errors import RefusedCallError
from ..format.module_steps import GradDivideStep, ModuleStep
from .boundary import OutputHook, TensorStep, in_use, output_hook, renumber, step
from .refusals import Argument, models_in, refuse

ASK = "output_attentions"
WHY_NOT = (
    "whose heads are sharded by a plan that was not proven with it: each rank would return the weights of "
    "its own heads. `shardconv reshard --in-place`, or `plan --check`, proves it where the model returns "
    "them with eager attention; a sequence-parallel model does not return them"
)


def refuse_attentions(model: nn.Module) -> None:
    """Make a model and the models in it refuse to return attention weights."""
    for part in models_in(model):
        refuse(part, ASK, WHY_NOT)


def gather_attentions(
    model: nn.Module, gathers: Mapping[str, Sequence[ModuleStep]], comm: Communicator, training: bool
) -> None:
    """Make a model return the attention weights of all heads in calls that ask for them, in place."""
    asked = _Asked()
    for part in models_in(model):
        call = _Call(part, asked)
        renumber(part, part.register_forward_pre_hook(call.begin, prepend=True, with_kwargs=True))
        renumber(part, part.register_forward_hook(call.end, always_call=True))
    for fqn, steps in gathers.items():
        for each in in_use(steps, training):
            module = model.get_submodule(fqn)
            gather: Any = step(each, comm, training)
            if isinstance(each, GradDivideStep):
                returned = ReturnedPart(gather, GradReduce(comm, each.axes).backward)
            else:
                returned = ReturnedPart(gather, gather.forward)
            hook = _IfAsked(output_hook(each.port, returned), asked)
            renumber(module, module.register_forward_hook(hook, prepend=True))


class _Asked:
    """Whether the calls that are running have asked for attention weights."""

    def __init__(self) -> None:
        self.running: list[bool] = []
        self.latest = False
        """The answer of the latest call, which also holds for layers that backward runs again."""


class _Call:
    """The hooks around the calls of one model."""

    def __init__(self, model: nn.Module, asked: _Asked) -> None:
        self._argument = Argument.of(model, ASK)
        self._asked = asked

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a call asks, or one around it does."""
        is_asked = self._argument.is_set(module, args, kwargs)
        if torch.compiler.is_compiling():
            if is_asked:
                raise RefusedCallError(
                    f"{ASK} was given to a compiled model of several ranks; call it uncompiled"
                )
            return
        asked = self._asked
        asked.latest = is_asked or (bool(asked.running) and asked.running[-1])
        asked.running.append(asked.latest)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note that the call is over."""
        if not torch.compiler.is_compiling():
            running = self._asked.running
            if running:  # a call may have failed before it began
                running.pop()
            self._asked.latest = running[-1] if running else self._asked.latest


class _IfAsked:
    """A forward hook that runs in calls that ask for attention weights; others may lack its port."""

    def __init__(self, hook: OutputHook, asked: _Asked) -> None:
        self._hook = hook
        self._asked = asked

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._hook(module, args, output) if self._asked.latest else None


class ReturnedPart:
    """A step whose result can retain its gradient.

    The model goes on with its local weights, and only the caller reads the result. So autograd knows no
    gradient of the result by a loss of the logits; it is gathered from the gradients of the local weights.
    """

    def __init__(self, gather: TensorStep, of_gradient: TensorStep) -> None:
        self._gather = gather
        self._of_gradient = of_gradient
        """Makes the gradient of the local weights one of the result."""

    def __call__(self, local: Tensor) -> Tensor:
        full = self._gather(local)
        if full.requires_grad:
            retain = partial(self._retain, local, ref(full))  # a cycle would keep both until it is collected
            full.retain_grad = retain  # type: ignore[method-assign]
        return full

    def _retain(self, local: Tensor, result: ReferenceType[Tensor]) -> None:
        """Have a backward pass add to the ``grad`` of the result; every rank calls it."""
        full = result()
        assert full is not None, "this is a method of it"
        Tensor.retain_grad(full)
        of_caller: list[Tensor] = []
        full.register_hook(of_caller.append)  # type: ignore[no-untyped-call]

        def add(gradient: Tensor) -> None:
            total = self._of_gradient(gradient)
            full = result()
            if full is not None:
                # Torch has added what comes from the caller, which is a part of the total.
                rest = total - of_caller.pop() if of_caller else total
                full.grad = rest if full.grad is None else full.grad + rest

        local.register_hook(add)  # type: ignore[no-untyped-call]
