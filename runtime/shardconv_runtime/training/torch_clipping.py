"""``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` of the gradients of loaded models.

They are given gradients alone, which say nothing of the ranks: each rank would take the norm of its own part,
and scale by another factor. torch has no hook for that, so the function with which both compute the norm is
replaced by one that recognizes these gradients. ``clip_grad_norm_`` looks it up by its private name in
``torch.nn.utils.clip_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ..errors import PlanError
from .clipping import norm_of_gradients, require_finite
from .models_in_parts import MODELS


@cache
def take_norms_over_ranks() -> None:
    """Let torch's functions take norms over all ranks of ``MODELS``."""
    replaced = _over_ranks(clip_grad._get_total_norm)
    clip_grad._get_total_norm = replaced
    torch.nn.utils.get_total_norm = replaced


def _over_ranks(local_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(local_norm)
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model = _model_of(given)
        if model is None:
            return local_norm(given, norm_type, error_if_nonfinite, foreach)
        norm = norm_of_gradients(model, given, norm_type)
        if error_if_nonfinite:
            require_finite(norm, norm_type)
        return norm

    return total_norm


def _model_of(tensors: Iterable[Tensor]) -> nn.Module | None:
    """The loaded model whose gradients these are; None if they are of others.

    Raises:
        PlanError: some of them are, and some are not, so that one norm cannot be taken of them.
    """
    given = set(tensors)  # by identity
    for model in MODELS:
        own = {p.grad for p in model.parameters() if p.grad is not None} & given
        if own and own != given:
            raise PlanError(
                f"{len(given) - len(own)} of {len(given)} gradients are not of the parameters of the "
                f"{type(model).__name__} that is sharded over ranks; clip these apart from its own"
            )
        if own:
            return model
    return None
