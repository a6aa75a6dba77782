"""Make labels for models that compute a loss, in the forms that their code may take.

The forms follow from the tensors that the model returns: a class for each row of logits, a number in place of
it, or a number for each logit. Forms that the model's code does not take are for the caller to leave out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from shardconv_runtime.parallel.boundary import forward_signature
from torch import Tensor, nn

from .trace_inputs import TraceInputs

_OF_A_LOSS = re.compile(r"label|loss|(start|end)_positions$|(target|future)_values$")
"""The names that transformers' models give to arguments for which they compute a loss."""

PROBLEM_TYPES = ("single_label_classification", "regression", "multi_label_classification")
"""Values of ``problem_type`` in configs of transformers, which choose the loss of a classifier."""

IGNORED = -100
"""A label that no loss counts."""


def loss_arguments(module: nn.Module) -> list[str]:
    """Return the arguments of a module's forward method for which it computes a loss."""
    return [name for name in forward_signature(module).parameters if _OF_A_LOSS.search(name)]


@dataclass(frozen=True)
class LabelForm:
    """One form of labels."""

    name: str
    """A description, for messages."""
    inputs: TraceInputs
    """The inputs of a call, with labels."""
    is_for_each_logit: bool
    """Whether they are numbers in the shape of logits, as regression takes them."""


def label_forms(model: nn.Module, inputs: TraceInputs, returned: Mapping[str, Tensor]) -> Iterator[LabelForm]:
    """Yield calls with labels, the likeliest first. The model's code may take none of them.

    Args:
        returned: the outputs of the unsharded model in that call, by name: global ``[B, ...]``.
    """
    names = [name for name in loss_arguments(model) if name not in inputs.tensors]
    makers = {name: list(_values(name, inputs, returned)) for name in names}
    most = max((len(values) for values in makers.values()), default=0)
    for index in range(most):  # the arguments together: some code needs all for its loss
        labels = {name: values[min(index, len(values) - 1)] for name, values in makers.items() if values}
        if labels:
            yield _form(inputs, labels)
    if len(names) > 1:
        for name, values in makers.items():
            for value in values:
                yield _form(inputs, {name: value})


LossOf = Callable[[str | None, TraceInputs], tuple[Tensor | None, str | None]]
"""Calls a model of a ``problem_type`` (None: its config's), and returns its loss, if it has one, and the type
that its config has after the call."""


def forms_with_a_loss(
    model: nn.Module, inputs: TraceInputs, returned: Mapping[str, Tensor], loss_of: LossOf
) -> Iterator[tuple[str | None, LabelForm]]:
    """Yield one form of labels for each loss of a model's code, with the problem type that chooses the loss.

    The config of a classifier of transformers chooses among losses. If it does not, the first labels do, and
    the code writes the choice to the config.
    """
    chosen: str | None = None
    for kind in (None, *PROBLEM_TYPES):
        if kind is not None and (chosen is None or kind == chosen):
            continue
        for form in label_forms(model, inputs, returned):
            if kind in PROBLEM_TYPES[1:] and not form.is_for_each_logit:
                continue  # they would be broadcast to the logits
            loss, used = loss_of(kind, form.inputs)
            if loss is not None and loss.isfinite().all():
                if kind is None and problem_type(model) is None:
                    chosen = used
                yield kind, form
                break


def problem_type(model: nn.Module) -> str | None:
    """Return the ``problem_type`` of a model's config."""
    return getattr(getattr(model, "config", None), "problem_type", None)


_EACH_LOGIT = "a number for each logit"
_Value = tuple[str, Any]
"""A description of a value, and the value."""


def _form(inputs: TraceInputs, given: Mapping[str, _Value]) -> LabelForm:
    text = ", ".join(f"{name}: {what}" for name, (what, _) in given.items())
    tensors = {name: value for name, (_, value) in given.items() if isinstance(value, Tensor)}
    options = {name: value for name, (_, value) in given.items() if not isinstance(value, Tensor)}
    labelled = replace(inputs, tensors={**inputs.tensors, **tensors}, options={**inputs.options, **options})
    return LabelForm(text, labelled, any(what == _EACH_LOGIT for what, _ in given.values()))


def _values(name: str, inputs: TraceInputs, returned: Mapping[str, Tensor]) -> Iterator[_Value]:
    """Yield values for one argument."""
    random = torch.Generator().manual_seed(0)
    batch, length = _batch_and_length(inputs, returned)
    if "loss" in name:
        yield "true", True
        return
    if name.endswith("_positions"):
        yield "positions", torch.randint(0, length, (batch,), generator=random)
        return
    if name.endswith("label"):  # of a pair of sentences
        yield "one of two classes", torch.randint(0, 2, (batch,), generator=random)
        return
    logits = {
        tuple(x.shape): x for x in returned.values() if x.is_floating_point() and x.dim() > 1 and x.numel()
    }
    for shape in logits:
        yield from _of_logits(shape, random)
    for each in ("decoder_input_ids", "input_ids"):
        if each in inputs.tensors:
            yield "tokens", inputs.tensors[each].clone()
    for shape in logits:
        if len(shape) == 3:
            yield "objects with boxes", _objects(shape, random)


def _of_logits(shape: tuple[int, ...], random: torch.Generator) -> Iterator[_Value]:
    """Yield labels for logits ``[B, ..., C]``, or ``[B, C, H, W]`` of an image."""
    *rows, classes = shape
    if classes > 1:
        yield "classes", _classes(rows, classes, random)
    else:
        yield "numbers", torch.rand(rows, generator=random)
    if len(shape) == 4:
        batch, channels, height, width = shape
        if channels > 1:
            yield "classes of pixels", torch.randint(0, channels, (batch, height, width), generator=random)
        yield "numbers of pixels", torch.rand((batch, height, width), generator=random)
    yield _EACH_LOGIT, torch.randint(0, 2, shape, generator=random).float()


def _classes(rows: list[int], classes: int, random: torch.Generator) -> Tensor:
    labels = torch.randint(0, classes, rows, generator=random)
    if len(rows) > 1:
        labels[:, ::5] = IGNORED
    return labels


def _objects(shape: tuple[int, ...], random: torch.Generator) -> list[dict[str, Tensor]]:
    """Return two objects in each image, for logits ``[B, objects, classes]``.

    Boxes are center and size, in fractions of the image.
    """
    batch, _, classes = shape
    return [
        {
            "class_labels": torch.randint(0, max(1, classes - 1), (2,), generator=random),
            "boxes": 0.25 + torch.rand((2, 4), generator=random) / 4,
        }
        for _ in range(batch)
    ]


def _batch_and_length(inputs: TraceInputs, returned: Mapping[str, Tensor]) -> tuple[int, int]:
    for name in ("input_ids", *inputs.tensors):
        tensor = inputs.tensors.get(name)
        if tensor is not None and tensor.dim() > 1:
            return int(tensor.shape[0]), int(tensor.shape[1])
    first = next(iter(returned.values()))
    return int(first.shape[0]), int(first.shape[1])
