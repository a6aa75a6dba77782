"""A batch in parts that run one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import OptionError, RefusedCallError
from ..training.loss_parallel import predicts_next

IGNORED = -100
"""The label of tokens without a loss, in transformers, unless a call says another one."""


def divide(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Divide the tensors of a batch along their first dim."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    sizes = {name: value.shape[0] for name, value in tensors.items()}
    if not sizes:
        raise OptionError("the batch has no tensors to divide into microbatches")
    if len(set(sizes.values())) > 1 or next(iter(sizes.values())) % count:
        sizes_text = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise OptionError(
            f"a batch with first dims of {sizes_text} cannot be divided into {count} microbatches; give a "
            "list of microbatches"
        )
    chunks = {name: value.chunk(count) for name, value in tensors.items()}
    return [
        {name: chunks[name][i] if name in chunks else value for name, value in batch.items()}
        for i in range(count)
    ]


def require_alike(parts: Sequence[Mapping[str, Any]]) -> object:
    """Return the names, shapes and dtypes that all parts have."""
    forms = []
    for part in parts:
        form: list[tuple[Any, ...]] = []
        for name, v in sorted(part.items()):
            form.append((name, str(v.dtype), tuple(v.shape)) if isinstance(v, Tensor) else (name, repr(v)))
        forms.append(form)
    for number, form in enumerate(forms):
        if form != forms[0]:
            raise RefusedCallError(
                f"microbatch {number} has other arguments or shapes ({form}) than the first ({forms[0]}): "
                "stages receive equal shapes; pad them"
            )
    return forms[0]


def count_labels(model: nn.Module, parts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how many labels of each part have a loss."""
    first = 1 if predicts_next(getattr(model, "loss_type", None)) else 0
    return [int((p["labels"][..., first:] != p.get("ignore_index", IGNORED)).sum()) for p in parts]
