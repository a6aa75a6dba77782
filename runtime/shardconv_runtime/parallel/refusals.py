"""Calls and changes of a sharded model that would be wrong, and are refused.

The result of such a call would be one rank's part; after such a change, the plan would not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import RefusedCallError
from .boundary import forward_signature


def refuse(model: nn.Module, argument: str, why: str, unless_inference: bool = False) -> None:
    """Make a model refuse calls with an argument, given or set in its config."""
    asked = Argument.of(model, argument)

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if unless_inference and not torch.is_grad_enabled():
            return
        if asked.is_set(module, args, kwargs):
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


@dataclass(frozen=True)
class Argument:
    """An argument of a model, which is given by name or position, or set in the model's config."""

    name: str
    position: int | None

    @classmethod
    def of(cls, model: nn.Module, name: str) -> Argument:
        """Return the argument of this name."""
        names = list(forward_signature(model).parameters)
        return cls(name, names.index(name) if name in names else None)

    def is_set(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call has it."""
        is_given = self.position is not None and self.position < len(args)
        return is_asked_for(model, self.name, args[self.position or 0] if is_given else kwargs.get(self.name))


def models_in(model: nn.Module) -> list[nn.Module]:
    """Return the model and the models of transformers in it, which users may call by themselves."""
    return [part for part in model.modules() if part is model or isinstance(part, PreTrainedModel)]


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
