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
from .models_in_parts import models_of

WHOLE_TENSORS = frozenset(
    (
        # norms, factors or products of each tensor
        *(
            "Adafactor",
            "AdaLomo",
            "CAME",
            "FusedLAMB",
            "FusedNovoGrad",
            "LAMB",
            "LAMB8bit",
            "LARS",
            "LARS8bit",
        ),
        *("LBFGS", "Lamb", "Muon", "NovoGrad", "SM3", "SOAP", "Shampoo", "StableAdamW"),
        # projections of each gradient
        *("APOLLOAdamW", "GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"),
        # a step size that is estimated from all gradients
        *("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy"),
    )
)
"""Names of their classes, in torch, transformers and elsewhere."""

OPTIONS = {"percentile_clipping": 100, "max_unorm": 0.0}
"""Options of optimizers of bitsandbytes whose steps depend on norms of tensors, and the values without."""


@cache
def refuse_whole_tensor_optimizers() -> None:
    """Refuse the steps of such optimizers of parameters of ``MODELS``."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    given = getattr(optimizer, "args", None)
    option = next((n for n, without in OPTIONS.items() if getattr(given, n, without) != without), None)
    if not names & WHOLE_TENSORS and option is None:
        return
    if models_of(parameter for group in optimizer.param_groups for parameter in group["params"]):
        what = f"{type(optimizer).__name__} with {option}" if option else type(optimizer).__name__
        raise PlanError(
            f"{what} computes its step from whole tensors, and each rank holds parts of them; use an "
            "optimizer that treats each element alone, such as AdamW, Adam, SGD or Adagrad"
        )
