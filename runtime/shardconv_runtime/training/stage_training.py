"""What the model of a stage of a pipeline needs to be trained: its loss, and refusals of calls without a
schedule, whose gradients would end where the stage begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.stage_link import StageLink
from ..errors import ShardconvError


class StageLoss:
    """Replaces the loss function of a model with stages.

    The last stage divides the sum over the tokens of a microbatch by the mean number of tokens of all
    microbatches, so that the mean of their losses is that of all tokens. The others, which have no logits,
    return zero.

    Args:
        own: the model's loss function.
        link: to the other stages.
    """

    def __init__(self, own: Any, link: StageLink) -> None:
        self._own = own
        self._link = link
        self.num_items: float | None = None
        """By which the sum over the tokens of a microbatch is divided; None: by their number."""
        self.num_parts = 1
        """Over how many microbatches the losses are averaged; a caller who gives ``num_items_in_batch`` wants
        their sum."""
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, a scalar; arguments as of the model's loss function."""
        self.was_called = True
        if self._link.is_last and not self._link.is_measuring:
            is_sum = kwargs.get("num_items_in_batch") is not None
            if self.num_items is not None and not is_sum:
                kwargs["num_items_in_batch"] = self.num_items
            loss: Tensor = self._own(*args, **kwargs)
            return loss * self.num_parts if is_sum else loss
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wide = any(value.dtype == torch.float64 for value in given)
        device = given[0].device if given else None
        return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


def prepare_stage(model: nn.Module, link: StageLink) -> None:
    """Make the model of a stage ready to be trained, in place."""
    if hasattr(model, "loss_function"):
        model.loss_function = StageLoss(model.loss_function, link)  # type: ignore[assignment]

    def refuse(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if link.handover is None and (torch.is_grad_enabled() or model.training):
            raise ShardconvError(
                "this stage alone cannot give gradients: train with shardconv_runtime.Pipeline(model, ...)"
                ".step(batch); to evaluate, call the model after eval(), in torch.no_grad()"
            )

    model.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True)
