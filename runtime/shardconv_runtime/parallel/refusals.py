"""Calls and changes of a sharded model that would be wrong, and are refused.

The result of such a call would be one rank's part; after such a change, the plan would not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..comm.collectives import Communicator
from ..errors import RefusedCallError
from .boundary import forward_signature, renumber


def refuse(model: nn.Module, argument: str, why: str, unless_inference: bool = False) -> None:
    """Make a model refuse calls with an argument, given or set in its config."""
    names = list(forward_signature(model).parameters)
    position = names.index(argument) if argument in names else None

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if unless_inference and not torch.is_grad_enabled():
            return
        is_given = position is not None and position < len(args)
        value = args[position or 0] if is_given else kwargs.get(argument)
        if is_asked_for(module, argument, value):
            raise RefusedCallError(f"{argument} was given to a model {why}")

    model.register_forward_pre_hook(check, with_kwargs=True)


def refuse_implementations(model: nn.Module, attribute: str, names: Collection[str]) -> None:
    """Make a model and its base model refuse implementations that their config may choose at any time."""

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        chosen = getattr(getattr(module, "config", None), attribute, None)
        if str(chosen).removeprefix("paged|") in names:
            raise RefusedCallError(
                f"{attribute} of the config is {chosen!r}, with which ranks compute something else than the "
                "unsharded model (`shardconv plan` says why); choose the one that the model was converted "
                "with, by set_attn_implementation or set_experts_implementation"
            )

    for part in {model, getattr(model, "base_model", model)}:
        part.register_forward_pre_hook(check)


def refuse_head_masks(model: nn.Module) -> None:
    """Make a model and its base model refuse masks ``[B, H, Q, K]`` with several ``H``: one for each head."""
    for part in {model, getattr(model, "base_model", model)}:
        check = _head_mask_check(list(forward_signature(part).parameters))
        part.register_forward_pre_hook(check, with_kwargs=True)


def is_asked_for(model: nn.Module, argument: str, value: object) -> bool:
    """Return whether an argument is set: by ``value``, or otherwise by the model's config."""
    if value is None:
        value = getattr(getattr(model, "config", None), argument, None)
    return value is not None and value is not False


TOKEN_MASKS = ("attention_mask", "decoder_attention_mask")
"""Masks whose second of four dims counts heads. In masks of images and cross attention it counts others."""


def _head_mask_check(names: Sequence[str]) -> Callable[..., None]:
    """Return a forward pre-hook: masks of full attention are for all heads, or for each."""

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name not in TOKEN_MASKS:
                continue
            for mask in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1] != 1:
                    raise RefusedCallError(
                        f"{name} {tuple(mask.shape)} has a mask for each of {mask.shape[1]} heads, and a "
                        "rank has some of these; give one for all heads, [B, 1, Q, K]"
                    )

    return check


# Hidden states are returned if every rank has all of them, and refused otherwise.
#
# Between modules, a plan keeps activations as terms of a sum or as shards if that saves a collective. Code
# that collects hidden states takes them as they are. So the hidden states that a call asks for are compared
# between the ranks: only replicated ones are the same everywhere.

ARGUMENT = "output_hidden_states"
NUM_PROJECTIONS = 16
"""Directions along which hidden states are compared."""
TOLERANCE = 0.02
"""Difference of a projection, relative to the largest one, that may be rounding of kernels."""


def check_hidden_states(model: nn.Module, comm: Communicator) -> None:
    """Make a model compare the hidden states that it is asked for, and refuse parts of them."""
    hook = _Comparison(model, comm)
    renumber(model, model.register_forward_hook(hook, with_kwargs=True))


class _Comparison:
    """Forward hook of the model."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        names = list(forward_signature(model).parameters)
        self._position = names.index(ARGUMENT) if ARGUMENT in names else len(names)
        self._comm = comm

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        argument = dict(enumerate(args)).get(self._position, kwargs.get(ARGUMENT))
        if not is_asked_for(module, ARGUMENT, argument):
            return
        if torch.compiler.is_compiling():
            raise RefusedCallError(
                f"{ARGUMENT} was given to a compiled model of several ranks; call it uncompiled"
            )
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
