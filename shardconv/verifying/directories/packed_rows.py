"""Packed parameters in files as weights that are dequantized when they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from shardconv_runtime.checkpoint.quantized import rows_of
from shardconv_runtime.format.plan import Packing
from shardconv_runtime.format.slices import Range
from shardconv_runtime.packed.dequantize import check_values, dequantize
from shardconv_runtime.packed.held import WeightSlice
from shardconv_runtime.tensors.copying import read_tensor
from shardconv_runtime.tensors.lazy_tensor import LazyTensor
from torch import Tensor

from ..simulation.streamed_weights import computed, computed_rows


def dequantized_rows(
    name: str, packing: Packing, stored: Mapping[str, LazyTensor], held: WeightSlice, dtype: str
) -> LazyTensor:
    """A weight that is dequantized when it is read, a stack of matrices matrix by matrix.

    Args:
        name: of the parameter, for messages.
        packing: how it is stored.
        stored: its stored tensors, local ones if ``held`` is a part.
        held: which part of the weight it is.
        dtype: of the weight.
    """

    def compute(span: Range) -> Tensor:
        part = held.rows(*span)
        read = {t.name: read_tensor(rows_of(stored[t.name], t, span)) for t in packing.tensors}
        check_values(packing, read, part, name)
        return dequantize(packing, read, part, getattr(torch, dtype))

    shape = held.local_shape
    if any(dim.of == 0 and dim.step != 1 for tensor in packing.tensors for dim in tensor.dims):
        return computed(name, dtype, shape, lambda: compute((0, shape[0])))
    return computed_rows(name, dtype, shape, compute)
