"""What crosses the borders of a stage in the pass of a microbatch: found by a pass of placeholders.

Every stage finds it by itself, without a message: in the place of its own modules too, placeholders return
tensors of the shapes that the plan says, and the code around them runs as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.stage_link import Crossing, Handover
from ..errors import PlanError, ShardconvError
from ..parallel.stage_model import StageModel
from .loss_parallel import predicts_next
from .sequence import padded

# A batch in parts that run one after another.

IGNORED = -100
"""The label of tokens without a loss, in transformers, unless a call says another one."""


def divide(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Divide the tensors of a batch along their first dim.

    Args:
        batch: arguments of a model by name; what is no tensor goes into each part.
        count: of the parts, which are equally long.

    Raises:
        PlanError: the sizes of their first dims differ, or cannot be divided.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    sizes = {name: value.shape[0] for name, value in tensors.items()}
    if not sizes:
        raise PlanError("the batch has no tensors to divide into microbatches")
    if len(set(sizes.values())) > 1 or next(iter(sizes.values())) % count:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise PlanError(
            f"a batch with first dims of {found} cannot be divided into {count} microbatches; give a list of "
            "microbatches"
        )
    chunks = {name: value.chunk(count) for name, value in tensors.items()}
    return [
        {name: chunks[name][i] if name in chunks else value for name, value in batch.items()}
        for i in range(count)
    ]


def require_alike(parts: Sequence[Mapping[str, Any]]) -> object:
    """The names, shapes and dtypes that all parts have.

    Raises:
        PlanError: they differ.
    """
    forms = []
    for part in parts:
        form: list[tuple[Any, ...]] = []
        for name, v in sorted(part.items()):
            form.append((name, str(v.dtype), tuple(v.shape)) if isinstance(v, Tensor) else (name, repr(v)))
        forms.append(form)
    for number, form in enumerate(forms):
        if form != forms[0]:
            raise PlanError(
                f"microbatch {number} has other arguments or shapes ({form}) than the first ({forms[0]}): "
                "stages receive equal shapes; pad them"
            )
    return forms[0]


def count_labels(model: nn.Module, parts: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many labels of each part have a loss."""
    first = 1 if predicts_next(getattr(model, "loss_type", None)) else 0
    return [int((p["labels"][..., first:] != p.get("ignore_index", IGNORED)).sum()) for p in parts]


@dataclass(frozen=True)
class ValueForm:
    """The shape, local, and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """On meta; it requires a gradient if it can have one."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point
        )


@dataclass(frozen=True)
class StageBoundary:
    """What a stage receives from the one before, and leaves for the next one, in order."""

    received: Mapping[Crossing, ValueForm]
    left: Mapping[Crossing, ValueForm]

    @classmethod
    def of(cls, stage: StageModel, number: int, forms: Mapping[Crossing, ValueForm]) -> StageBoundary:
        """The borders of the stage of a number; a value for a later one crosses all borders on its way."""
        crossings = stage.crossings()
        ways = {crossing: crossings[crossing] for crossing in crossings if crossing in forms}
        return cls(
            {c: forms[c] for c, (source, last) in ways.items() if source < number <= last},
            {c: forms[c] for c, (source, last) in ways.items() if source <= number < last},
        )

    def handover(self, received: Sequence[Tensor]) -> Handover:
        """For a pass that received these."""
        return Handover(dict(zip(self.received, received, strict=True)))

    def leaving(self, handover: Handover) -> tuple[Tensor, ...]:
        """What the pass leaves for the next stage.

        Raises:
            ShardconvError: it did not compute it.
        """
        if missing := [crossing for crossing in self.left if crossing not in handover.values]:
            raise ShardconvError(
                f"{missing[0][0]} was not called for this microbatch, and was for the first one; give all "
                "microbatches the same arguments"
            )
        return tuple(_for_backward(handover.values[crossing].contiguous()) for crossing in self.left)


def _for_backward(x: Tensor) -> Tensor:
    """A value with which a backward pass can begin, though no parameter that is trained made it."""
    is_constant = torch.is_grad_enabled() and x.is_floating_point() and not x.requires_grad
    return x.detach().requires_grad_() if is_constant else x


class _Measuring(Handover):
    """Records what passes would take, and gives zeros."""

    only_measures = True

    def __init__(self, device: torch.device) -> None:
        super().__init__({})
        self._device = device
        self.forms: dict[Crossing, ValueForm] = {}

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return zeros of this form."""
        found = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        self.forms[crossing] = ValueForm(tuple(shape), found.dtype)
        self.send(crossing, found, ())
        return found


def measured_forms(
    model: nn.Module, stage: StageModel, inputs: Mapping[str, Any]
) -> dict[Crossing, ValueForm]:
    """The forms of all values that stages hand on in a call.

    Args:
        model: of this stage. Its own hooks do not run.
        stage: its link and the forms of its modules.
        inputs: of the model, by name.
    """
    with padded(model, inputs) as given:
        return forms_inside(model, stage, given)


def forms_inside(model: nn.Module, stage: StageModel, given: Mapping[str, Any]) -> dict[Crossing, ValueForm]:
    """The same, of what the model's code is given, behind its hooks."""
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
