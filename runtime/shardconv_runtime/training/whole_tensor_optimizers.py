"""Optimizers whose step needs more than an element's own gradient: refused for parts of tensors.

Most optimizers treat each element alone, and so are right on a part. Those that take norms, factors or
products of whole tensors would take them of this rank's part, without a word.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import PlanError
from .models_in_parts import MODELS

WHOLE_TENSORS = ("Adafactor", "LAMB", "Lamb", "LARS", "LBFGS", "Muon", "SOAP", "Shampoo")
"""Names of their classes, in torch, transformers and elsewhere."""


@cache
def refuse_whole_tensor_optimizers() -> None:
    """Refuse the steps of such optimizers of parameters of ``MODELS``."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if not names & set(WHOLE_TENSORS):
        return
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if any(parameter in given for model in MODELS for parameter in model.parameters()):
        raise PlanError(
            f"{type(optimizer).__name__} computes its step from whole tensors, and each rank holds parts of "
            "them; use an optimizer that treats each element alone, such as AdamW, Adam, SGD or Adagrad"
        )
