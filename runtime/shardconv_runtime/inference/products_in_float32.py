"""Products of many rows in 16 bits on CPUs that have no instructions for them, computed in float32.

There torch (2.13) takes as long for each row as for the first one: on an EPYC with AVX2, the products of
a model of 135M parameters take 40 times as long for 64 rows as for one, 5 times as long as in float32. A part
of a weight at a time is converted, which is exact, and multiplied while it is in the processor's cache. As in
torch's own products, numbers are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LEAST_ROWS = 8
"""Fewest rows that gain: with 8 of them a product takes 0.6 of the time, with 4 as long as before."""

PART = 2**18
"""Numbers of a weight that are converted at a time: 1 MB in float32, which a processor's cache holds. With
2**16 products took 1.2 times as long, and a whole matrix at a time 1.3 to 1.7 times."""


def has_no_instructions() -> bool:
    """Return whether this CPU multiplies 16-bit numbers row by row; others were not measured."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def in_float32(num_tokens: int, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a call of a model computes its products, without gradients.

    A mode costs some microseconds for each function of torch, so that only calls of enough tokens have it.

    Args:
        dtype: the dtype of the activations.
    """
    is_slow = device.type == "cpu" and _has_16_bits(dtype) and num_tokens >= LEAST_ROWS
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not (is_slow and has_no_instructions()):
        return nullcontext()
    return _InFloat32()


class _InFloat32(TorchFunctionMode):
    """Computes linear layers of many rows by ``product``; for inference."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and _gains(*args[:2]):
            return product(*args)
        return func(*args, **(kwargs or {}))


def _has_16_bits(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 2


def _gains(x: Tensor, weight: Tensor) -> bool:
    """Return whether these are plain numbers of 16 bits, and many rows; packed weights have other types."""
    return (
        _has_16_bits(weight.dtype)
        and x.dtype == weight.dtype
        and type(weight) in (Tensor, nn.Parameter)
        and weight.dim() == 2
        and x.numel() >= LEAST_ROWS * x.shape[-1]
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[..., O]``, rounded to the dtype of ``x``; it has no backward.

    Args:
        x: ``[..., I]``
        weight: ``[O, I]``
        bias: ``[O]``
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    y = x.new_empty(len(rows), len(weight))
    size = max(1, PART // weight.shape[1])
    for start in range(0, len(weight), size):
        part = slice(start, start + size)
        y[:, part] = F.linear(rows, weight[part].float(), None if bias is None else bias[part].float())
    return y.view(*x.shape[:-1], len(weight))
