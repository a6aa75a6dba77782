"""Hidden states that a call asks for: every rank returns all of them, and a loss of them has right gradients.

Between modules, a plan keeps activations as terms of a sum or as shards if that saves a collective, and a
gradient as a term. The plan says at the ports of modules how they are held. So a call that asks notes the
tensors that pass ports, and completes those that it returns. Others are compared between the ranks, since
only replicated ones are the same everywhere; in training they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from ..comm.collectives import Communicator
from ..comm.steps import GradReduce, unchanged
from ..errors import RefusedCallError
from ..format.plan import HookPlan, HookPort, Plan, by_name
from .attention_weights import ReturnedPart
from .boundary import positional_names, renumber
from .refusals import Argument, models_in
from .user_hooks import map_tensors, to_full

ARGUMENT = "output_hidden_states"
NUM_PROJECTIONS = 16
"""Directions along which hidden states are compared."""
TOLERANCE = 0.02
"""Difference of a projection, relative to the largest one, that may be rounding of kernels."""
WHY_NO_STATES = (
    "whose inner activations, or their gradients, may be sharded: a loss of them would train the model "
    "wrongly; use its outputs alone"
)


PORTS = "_shardconv_ports"
"""Attribute of a module: the tensors at its boundary that the plan describes."""


def attach_hidden_states(
    model: nn.Module, plan: Plan, comm: Communicator, training: bool
) -> Callable[[], bool]:
    """Make a model, and the models in it, complete, compare or refuse the hidden states that they return.

    Returns:
        Whether one of these models is being called, uncompiled.
    """
    entries = by_name("hooks", plan.hooks)
    for name, module in model.named_modules():
        if name in entries:
            module.__dict__[PORTS] = entries[name]
    outputs = plan.training.extra_outputs if plan.training is not None else ()
    running = _Running(comm, training, ARGUMENT in outputs)
    for part in models_in(model):
        begin = partial(running.begin, Argument.of(part, ARGUMENT), part is model)
        renumber(part, part.register_forward_pre_hook(begin, with_kwargs=True))
        renumber(part, part.register_forward_hook(running.end, always_call=True))
    return running.is_running


class _Running:
    """The calls of one model and of models in it that are running; the outermost one is looked at."""

    def __init__(self, comm: Communicator, training: bool, is_planned: bool) -> None:
        self._comm = comm
        self._training = training
        self._is_planned = is_planned
        """The plan was solved for a call that returns hidden states."""
        self._calls: list[nn.Module] = []
        self._asks = False
        self._handles: list[RemovableHandle] = []
        self._ports: dict[Tensor, HookPort] = {}
        """How the tensors of the running call are held, by identity."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Running:
        """Return the record of a copy of the model, outside of calls."""
        return _Running(self._comm, self._training, self._is_planned)

    def is_running(self) -> bool:
        """Return whether a call has begun and not ended."""
        return bool(self._calls)

    def begin(
        self,
        argument: Argument,
        is_whole: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Watch the tensors of a call that asks for hidden states."""
        asks = argument.is_set(module, args, kwargs)
        if torch.compiler.is_compiling():
            if asks and is_whole:
                raise RefusedCallError(
                    f"{ARGUMENT} was given to a compiled model of several ranks; call it uncompiled"
                )
            return
        self._calls.append(module)
        if len(self._calls) > 1:
            return
        self._forget()
        self._asks = asks
        if asks:
            self._watch(module)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Complete and check the hidden states that a call returns."""
        if torch.compiler.is_compiling() or module not in self._calls:
            return None
        del self._calls[self._calls.index(module) :]
        if self._calls or not self._asks:
            return None
        ports = dict(self._ports)
        self._forget()
        states = list(hidden_states(output))
        if self._checks_gradients:
            # Whatever else the model returns has full gradients; the last hidden state may be among that.
            trainable = {*ports, *other_results(output)}
            if any(each.requires_grad and each not in trainable for each in states):
                raise RefusedCallError(f"{ARGUMENT} was given to a model {WHY_NO_STATES}")
        whole = {each: self._completed(each, ports[each]) for each in states if each in ports}
        result = map_tensors(output, lambda x, port: whole.get(x, x), "output")
        self._compare(result)
        return result

    @property
    def _checks_gradients(self) -> bool:
        return self._training and torch.is_grad_enabled() and not self._is_planned

    def _watch(self, model: nn.Module) -> None:
        for module in model.modules():
            entry = module.__dict__.get(PORTS, HookPlan(()))
            inputs, outputs = (
                {
                    p.port: p
                    for p in side
                    if not (p.sequence_axes or p.is_written) and (p.partial_axes or self._checks_gradients)
                }
                for side in (entry.inputs, entry.outputs)
            )
            # The methods of the class: those of the module are for hooks that are given full tensors.
            if inputs:
                hook = partial(self._enter, inputs, positional_names(module))
                options: dict[str, Any] = {"prepend": True, "with_kwargs": True}
                self._handles.append(nn.Module.register_forward_pre_hook(module, hook, **options))
            if outputs:
                leave = partial(self._leave, outputs)
                self._handles.append(nn.Module.register_forward_hook(module, leave))

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._ports, self._asks = [], {}, False

    def _enter(
        self,
        ports: Mapping[str, HookPort],
        names: list[str],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            map_tensors(value, partial(self._note, ports), f"input.{name}")

    def _leave(
        self, ports: Mapping[str, HookPort], module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        map_tensors(output, partial(self._note, ports), "output")

    def _note(self, ports: Mapping[str, HookPort], x: Tensor, port: str) -> Tensor:
        if port in ports:
            self._ports.setdefault(x, ports[port])
        return x

    def _completed(self, states: Tensor, port: HookPort) -> Tensor:
        """Return all of hidden states; the gradient of the result becomes one of the states as they are."""
        if not self._checks_gradients:
            port = replace(port, grad_axes=())
        if not (port.partial_axes or port.grad_axes):
            return states
        of_gradient = GradReduce(self._comm, port.grad_axes).backward if port.grad_axes else unchanged
        return ReturnedPart(to_full(port, self._comm, self._training), of_gradient)(states)

    def _compare(self, output: Any) -> None:
        """Check that all ranks return the same hidden states."""
        digests = [digest(states.detach()) for states in hidden_states(output)]
        if not digests:
            return
        axes = self._comm.real(range(len(self._comm.mesh)))
        ranks = self._comm.concatenate(torch.stack(digests)[None], axes)
        if not are_alike(ranks):
            raise RefusedCallError(
                f"{ARGUMENT} was given to a model whose plan keeps parts of the hidden states on the ranks, "
                "which each would return; use only the outputs, or the unsharded model"
            )


def hidden_states(output: Any) -> Iterator[Tensor]:
    """Yield the hidden states of an output and of the outputs in it.

    A tuple has no names: they are the tensors in its tuples.
    """
    if isinstance(output, Mapping):
        for name, value in output.items():
            if "hidden_states" in name:
                yield from _floating(value)
            elif isinstance(value, Mapping):
                yield from hidden_states(value)
    elif isinstance(output, tuple):
        yield from _floating([value for value in output if isinstance(value, tuple)])


def other_results(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output that are not hidden states."""
    if isinstance(output, Mapping):
        for name, value in output.items():
            if "hidden_states" not in name:
                yield from other_results(value) if isinstance(value, Mapping) else _floating(value)
    else:
        values = output if isinstance(output, tuple) else (output,)
        yield from _floating([value for value in values if not isinstance(value, tuple)])


def _floating(values: Any) -> Iterator[Tensor]:
    for leaf in _pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and leaf.numel():
            yield leaf


def are_alike(digests: Tensor) -> bool:
    """Return whether ranks have the same tensors by digests ``[ranks, tensors, NUM_PROJECTIONS]``."""
    differences = (digests - digests[0]).abs().amax((0, 2))
    return not bool((differences > TOLERANCE * digests.abs().amax((0, 2))).any())


def digest(states: Tensor) -> Tensor:
    """Return projections of ``[..., H]``, summed over its rows: float64 ``[NUM_PROJECTIONS]``."""
    wide = states if states.dtype == torch.float64 else states.float()
    # Chirps are as good as random directions, and do not depend on a caller's random numbers.
    places = torch.arange(1, states.shape[-1] + 1, dtype=torch.float64) ** 2
    rates = torch.arange(1, NUM_PROJECTIONS + 1, dtype=torch.float64).sqrt()
    directions = torch.sin(torch.outer(places, rates)).to(wide)
    return (wide @ directions).double().flatten(0, -2).sum(0)
