"""Whether a model's loss is that of the loss function that it shares with others of its kind."""

from __future__ import annotations

from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn

from .inputs import TraceInputs
from .trace import trace


def returns_its_loss_function(model: nn.Module, inputs: TraceInputs) -> bool:
    """Whether the model returns what its ``loss_function`` does, and calls it once.

    Some models have the function and compute a loss of their own. Nothing is known of a model that cannot be
    traced with labels.

    Args:
        model: on meta; to be thrown away afterwards.
        inputs: of a trace, without labels.
    """
    made: list[Tensor] = []
    returned: list[Any] = []

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        made.append(torch.zeros((), device="meta"))
        return made[-1]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        returned.append(getattr(output, "loss", None))

    model.loss_function = stand_in  # type: ignore[assignment]
    model.register_forward_hook(keep)
    try:
        trace(model, inputs.with_labels().tensors, (), inputs.options, few_chosen=inputs.few_chosen)
    except SolveError:
        return False
    return len(made) == 1 and len(returned) == 1 and returned[0] is made[0]
