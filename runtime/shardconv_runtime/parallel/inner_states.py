"""Hidden states of a sharded model: returned where every rank has all of them, and refused elsewhere.

A plan keeps activations between modules as terms of a sum, or as shards, where that saves a collective. The
code that collects hidden states takes them as they are. So those that a call asks for are compared between
the ranks: only replicated ones are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..comm.collectives import Communicator
from ..errors import PlanError
from .boundary import forward_signature, renumber
from .refusals import is_asked_for

ARGUMENT = "output_hidden_states"
NUM_PROJECTIONS = 16
"""Directions along which hidden states are compared."""
TOLERANCE = 0.02
"""Difference of a projection, relative to the largest one, that may be rounding of kernels."""


def check_hidden_states(model: nn.Module, comm: Communicator) -> None:
    """Have a model compare the hidden states that it is asked for, and refuse parts of them."""
    hook = _Comparison(model, comm)
    renumber(model, model.register_forward_hook(hook, with_kwargs=True))


class _Comparison:
    """Forward hook of the model."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        names = list(forward_signature(model).parameters)
        self._position = names.index(ARGUMENT) if ARGUMENT in names else len(names)
        self._comm = comm

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = dict(enumerate(args)).get(self._position, kwargs.get(ARGUMENT))
        if not is_asked_for(module, ARGUMENT, given):
            return
        if torch.compiler.is_compiling():
            raise PlanError(f"{ARGUMENT} was given to a compiled model of several ranks; call it uncompiled")
        digests = [digest(states) for states in _hidden_states(output)]
        if not digests:
            return
        axes = self._comm.real(range(len(self._comm.mesh)))
        ranks = self._comm.concatenate(torch.stack(digests)[None], axes)
        if not are_alike(ranks):
            raise PlanError(
                f"{ARGUMENT} was given to a model whose plan keeps parts of the hidden states on the ranks, "
                "which each would return; use the outputs alone, or the unsharded model"
            )


def _hidden_states(output: Any) -> Iterator[Tensor]:
    """The hidden states of an output; of a tuple, which has no names, the tensors in its tuples."""
    if isinstance(output, Mapping):
        found = [value for name, value in output.items() if "hidden_states" in name]
    else:
        found = [value for value in output if isinstance(value, tuple)] if isinstance(output, tuple) else []
    for leaf in _pytree.tree_leaves(found):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and leaf.numel():
            yield leaf.detach()


def are_alike(digests: Tensor) -> bool:
    """Whether ranks have the same tensors, from their digests ``[ranks, tensors, NUM_PROJECTIONS]``."""
    differences = (digests - digests[0]).abs().amax((0, 2))
    return not bool((differences > TOLERANCE * digests.abs().amax((0, 2))).any())


def digest(states: Tensor) -> Tensor:
    """Projections of ``[..., H]``, summed over its rows: float64 ``[NUM_PROJECTIONS]``."""
    wide = states if states.dtype == torch.float64 else states.float()
    # Chirps are as good as random directions, and do not depend on what a caller makes of random numbers.
    places = torch.arange(1, states.shape[-1] + 1, dtype=torch.float64) ** 2
    rates = torch.arange(1, NUM_PROJECTIONS + 1, dtype=torch.float64).sqrt()
    directions = torch.sin(torch.outer(places, rates)).to(wide)
    return (wide @ directions).double().flatten(0, -2).sum(0)
