"""The kernels of float8 in plain torch, for the CPU: transformers downloads those for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shardconv_runtime.packed import quantizers
from shardconv_runtime.packed.formats import FORMATS
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace the kernels, and what asks for a GPU, in this process.

    Args:
        put: sets an attribute; that of a ``MonkeyPatch`` undoes it.
    """
    for each in FORMATS:
        put(type(each), "on_gpus_only", False)
    put(quantizers, "_is_installed", lambda package: True)
    put(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **options: None)
    put(finegrained_fp8, "fp8_linear", product)
    put(CompressedTensorsHfQuantizer, "validate_environment", _choose_kernel)


def _choose_kernel(self: Any, **options: Any) -> None:
    """torch multiplies float8 on a CPU too, unlike what transformers supposes."""
    self.use_fp8_kernel = self.quantization_config.use_optimized_inference


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: Any,
    bias: Any = None,
    *others: Any,
    **options: Any,
) -> torch.Tensor:
    """A linear layer of activations in float8, with a factor for each token and block of inputs.

    Args:
        x: ``[..., in]``.
        weight: float8 ``[out, in]``.
        scale: of blocks, ``[ceil(out / block[0]), ceil(in / block[1])]``, or of all.
        block: sizes of a block, or None.
        bias: ``[out]``, or None.
        others: ignored, as are ``options``.
    """
    columns = weight.shape[1]
    size = block[1] if block else columns
    cells = torch.nn.functional.pad(x.float(), (0, -columns % size)).unflatten(-1, (-1, size))
    factors = cells.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    rounded = ((cells / factors).to(torch.float8_e4m3fn).float() * factors).flatten(-2)[..., :columns]
    values = weight.float() * scale.float() if not block else weight.float() * _spread(scale, weight, block)
    return torch.nn.functional.linear(rounded, values, bias).to(x.dtype)


def _spread(scale: torch.Tensor, weight: torch.Tensor, block: Any) -> torch.Tensor:
    rows = scale.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : weight.shape[1]]


def use_those_of_cpus() -> None:
    """In this process: those above, and of libraries those that compute in the dtype of the activations."""
    install()
    torch.compiler.set_stance("force_eager")  # libraries would compile parts of their modules
    try:
        from bitsandbytes.nn import modules
    except ImportError:
        return
    modules.has_avx512bf16 = lambda: False  # its kernel computes in bfloat16
