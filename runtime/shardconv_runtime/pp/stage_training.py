"""Training of the model of a pipeline stage: forms of values that cross its borders, loss, tied parameters.

Calls without a schedule are refused, since their gradients would end where the stage begins.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RefusedCallError
from ..parallel.boundary import forward_signature, given_cache
from ..training.checkpointing import without_cache
from .border_values import StageBoundary, forms_inside
from .stage_link import StageLink
from .stage_model import StageModel


def evaluate_in_passes(model: nn.Module, stage: StageModel) -> None:
    """Have a call of a model run all stages of this process, in place.

    Values that cross the border of two neighboring stages go from process to process as in a schedule, in
    which this is one microbatch.
    """
    inner = getattr(model.forward, "__func__", type(model).forward)
    names = list(forward_signature(model).parameters)

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if stage.link.is_scheduled():
            return inner(self, *args, **kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if (name := given_cache(arguments)) is not None:
            raise RefusedCallError(
                f"{name} was given to a model with several stages in each process, which keeps none; pass "
                "full sequences, or load it without stages_per_process"
            )
        arguments = without_cache(self, names, arguments)  # each pass would make one for its stage
        link, processes = stage.link, stage.link.transport
        output: Any = None
        forms = forms_inside(self, stage, arguments)
        for number in link.stages:
            border = StageBoundary.of(stage, number, forms)
            received = [
                processes.receive(crossing, form.shape, form.dtype, number - 1)
                for crossing, form in border.received.items()
            ]
            handover = border.handover(received)
            with link.through(handover, number):
                output = self.forward(**arguments)
            if number < link.count - 1:
                for crossing, x in zip(border.left, border.leaving(handover), strict=True):
                    processes.send(crossing, x, (number + 1,))
        # Values that are handed back to the model, such as caches, belong to one pass: they are left out.
        for name in names if isinstance(output, MutableMapping) else ():
            if output.get(name) is not None:
                output[name] = None
        return output

    model.__dict__["forward"] = MethodType(forward, model)


class StageLoss:
    """Replaces the loss function of a model with stages.

    The last stage divides the sum over the tokens of a microbatch by the mean number of tokens of all
    microbatches, so that the mean over microbatches is the mean over all tokens. The other stages, which have
    no logits, return zero.
    """

    def __init__(self, own: Any, link: StageLink) -> None:
        self.own = own
        self._link = link
        self.num_items: float | None = None
        """The divisor of the sum over the tokens of a microbatch; None: the number of these tokens."""
        self.num_parts = 1
        """The number of microbatches over which the losses are averaged; a caller who gives
        ``num_items_in_batch`` wants their sum."""
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss, a scalar; see the model's loss function for the arguments."""
        self.was_called = True
        if self._link.is_last and not self._link.is_measuring:
            is_sum = kwargs.get("num_items_in_batch") is not None
            if self.num_items is not None and not is_sum:
                kwargs["num_items_in_batch"] = self.num_items
            loss: Tensor = self.own(*args, **kwargs)
            return loss * self.num_parts if is_sum else loss
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wide = any(value.dtype == torch.float64 for value in tensors)
        device = tensors[0].device if tensors else None
        return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


def prepare_stage(model: nn.Module, link: StageLink) -> None:
    """Make the model of a stage ready to be trained, in place."""
    if hasattr(model, "loss_function"):
        model.loss_function = StageLoss(model.loss_function, link)  # type: ignore[assignment]

    def refuse(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not link.is_scheduled() and (torch.is_grad_enabled() or model.training):
            raise RefusedCallError(
                "a single stage cannot give gradients: train with shardconv_runtime.Pipeline(model, ...)"
                ".step(batch); to evaluate, call the model after eval(), in torch.no_grad()"
            )

    model.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True)
