"""The values that cross the borders of a stage in the pass of a microbatch.

Every stage finds their forms in a pass of placeholders, without a message: placeholders also replace its
own modules and return tensors of the shapes in the plan, while the code around them runs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RefusedCallError
from ..training.sequence import padded
from .stage_link import Crossing, Handover
from .stage_model import StageModel


@dataclass(frozen=True)
class ValueForm:
    """The shape, local, and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Make a meta tensor of this form, which requires a gradient if it can have one."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point
        )


@dataclass(frozen=True)
class StageBoundary:
    """The values that a stage receives from the one before, and leaves for the next one, in order."""

    received: Mapping[Crossing, ValueForm]
    left: Mapping[Crossing, ValueForm]

    @classmethod
    def of(cls, stage: StageModel, number: int, forms: Mapping[Crossing, ValueForm]) -> StageBoundary:
        """Return the borders of a stage; a value for a later stage crosses all borders on its way."""
        crossings = stage.crossings()
        ways = {crossing: crossings[crossing] for crossing in crossings if crossing in forms}
        return cls(
            {c: forms[c] for c, (source, last) in ways.items() if source < number <= last},
            {c: forms[c] for c, (source, last) in ways.items() if source <= number < last},
        )

    def handover(self, received: Sequence[Tensor]) -> Handover:
        """Make the handover for a pass that received these values."""
        return Handover(dict(zip(self.received, received, strict=True)))

    def leaving(self, handover: Handover) -> tuple[Tensor, ...]:
        """Return the values that the pass leaves for the next stage."""
        if missing := [crossing for crossing in self.left if crossing not in handover.values]:
            raise RefusedCallError(
                f"{missing[0][0]} was not called for this microbatch, and was for the first one; give all "
                "microbatches the same arguments"
            )
        return tuple(_for_backward(handover.values[crossing].contiguous()) for crossing in self.left)


def _for_backward(x: Tensor) -> Tensor:
    """Return a value with which a backward pass can begin, though no parameter that is trained made it."""
    is_constant = torch.is_grad_enabled() and x.is_floating_point() and not x.requires_grad
    return x.detach().requires_grad_() if is_constant else x


class _Measuring(Handover):
    """Records the values that passes would receive, and returns zeros."""

    only_measures = True

    def __init__(self, device: torch.device) -> None:
        super().__init__({})
        self._device = device
        self.forms: dict[Crossing, ValueForm] = {}

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return zeros of this form."""
        tensor = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        self.forms[crossing] = ValueForm(tuple(shape), tensor.dtype)
        self.send(crossing, tensor, ())
        return tensor


def measured_forms(
    model: nn.Module, stage: StageModel, inputs: Mapping[str, Any]
) -> dict[Crossing, ValueForm]:
    """Return the forms of all values that stages hand on in a call."""
    with padded(model, inputs) as padded_inputs:
        return forms_inside(model, stage, padded_inputs)


def forms_inside(model: nn.Module, stage: StageModel, given: Mapping[str, Any]) -> dict[Crossing, ValueForm]:
    """Return the same for the arguments of the model's code, behind its hooks."""
    measuring = _Measuring(stage.device)
    devices = [stage.device] if stage.device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        stage.without_units(model),
        stage.link.calling(),
        stage.link.through(measuring),
    ):
        model.forward(**given)
    return measuring.forms
