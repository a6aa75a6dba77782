"""Stored tensors of quantized weights, which the format's library computes when they are written.

A process that writes some ranks computes the rows and columns of a weight that these hold. Along a dim that
is possible if each stored tensor that depends on the values runs along it, as the factors of blocks do: a
part that begins and ends between blocks is then quantized as in the whole weight. Along other dims, such as
the inputs of a row that shares a factor, the part is all of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor, assemble, from_leaf, take
from shardconv_runtime.checkpoint.quantized import PackedWeight
from shardconv_runtime.errors import SourceError, brief
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.format.plan import PackedDim
from shardconv_runtime.format.slices import Range
from shardconv_runtime.format.stored_layout import tensor_name
from shardconv_runtime.packed.formats import relative_error
from shardconv_runtime.packed.packed_format import PackedFormat
from shardconv_runtime.packed.stored_weights import WeightSlice, stored_shape
from torch import Tensor

Spans = tuple[Range, ...]
"""Positions of a dim, as ascending ranges."""


class Library:
    """Computes the stored tensors of a weight, and keeps them: they are written one after another.

    Attributes:
        weights: those that are packed, by FQN.
        errors: relative errors of the computed ones, by FQN; of parts, the largest.
    """

    def __init__(self, packed_format: PackedFormat, quantizer: Any) -> None:
        self.weights: dict[str, PackedWeight] = {}
        self.errors: dict[str, float] = {}
        self._format = packed_format
        self._quantizer = quantizer
        self._plain: dict[str, LazyTensor] = {}
        self._constants: dict[str, dict[str, Tensor]] = {}
        self._lock = threading.Lock()
        self._last: tuple[LazyTensor | None, dict[str, Tensor]] = None, {}

    def stored_tensors(self, name: str, weight: LazyTensor) -> dict[str, LazyTensor]:
        """Return the stored tensors of a weight, not computed, by their names in a checkpoint."""
        form = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype), device="meta")
        try:
            parts = self._format.packed(form, self._quantizer)
        except Exception as error:  # each library has its own errors
            raise SourceError(
                f"{name}, {weight.dtype} {list(weight.shape)}, cannot be quantized: {brief(error)}; choose "
                "another --quantize, or another --dtype"
            ) from error
        self._plain[name] = weight
        self._constants[name] = {part: tensor for part, tensor in parts.items() if not tensor.is_meta}
        stored = {}
        for part, tensor in parts.items():
            if tensor.is_meta:
                leaf = self._leaf(name, weight, part, dtype_name(tensor.dtype), tensor.shape)
            else:
                constant = partial(_itself, tensor)
                leaf = ComputedLeaf(f"{name}: {part}", constant, dtype_name(tensor.dtype), tensor.numel())
            stored[tensor_name(name, part)] = from_leaf(leaf, tensor.shape)
        return stored

    def in_parts(self, name: str, spans: Sequence[Spans]) -> dict[str, LazyTensor]:
        """Return global stored tensors of a packed weight, of which one part is computed without the rest.

        Args:
            name: its FQN.
            spans: the positions of the part in each dim of the weight, between the steps of the format.

        Returns:
            Those that depend on the values, by their names in the packing; their other positions would be
            computed from the whole weight. Nothing if the part is all of the weight.
        """
        weight, packed = self._plain[name], self.weights[name]
        computed = [t for t in packed.packing.tensors if t.name not in self._constants[name]]
        whole = WeightSlice.whole(weight.shape)
        held = WeightSlice(
            weight.shape,
            tuple(
                positions if all(dim in (d.of for d in tensor.dims) for tensor in computed) else everything
                for dim, (positions, everything) in enumerate(zip(spans, whole.ranges, strict=True))
            ),
        )
        if held == whole or 0 in held.local_shape:
            return {}
        part = weight
        for dim, positions in enumerate(held.ranges):
            part = take(part, dim, positions)
        made = {}
        for tensor in computed:
            shape = stored_shape(tensor, held)
            leaf = self._leaf(name, part, tensor.name, tensor.dtype, shape)
            places = [_stored_spans(dim, held) for dim in tensor.dims]
            made[tensor.name] = _with_part(packed.tensors[tensor.name], from_leaf(leaf, shape), places)
        return made

    def _leaf(
        self, name: str, weight: LazyTensor, part: str, dtype: str, shape: Sequence[int]
    ) -> ComputedLeaf:
        """Return a stored tensor of a weight, or of a part of it."""
        compute = partial(self._part, name, weight, part)
        return ComputedLeaf(f"{name}, quantized: {part}", compute, dtype, math.prod(shape))

    def _part(self, name: str, weight: LazyTensor, part: str) -> Tensor:
        with self._lock:
            if weight is not self._last[0]:
                self._last = None, {}
                plain = read_tensor(weight)
                parts = self._format.packed(plain, self._quantizer)
                self.errors[name] = max(self._error(name, plain, parts), self.errors.get(name, 0.0))
                self._last = weight, parts
            return self._last[1][part]

    def _error(self, name: str, weight: Tensor, parts: Mapping[str, Tensor]) -> float:
        """Return the error of a weight; ``SourceError`` if it is not a number."""
        packing, whole = self.weights[name].packing, WeightSlice.whole(tuple(weight.shape))
        tensors = {**parts, **self._constants[name]}  # the library makes some of them for the shape of a part
        shaped = {t.name: tensors[t.name].reshape(stored_shape(t, whole)) for t in packing.tensors}
        error = relative_error(packing, shaped, weight)
        if math.isfinite(error):
            return error
        raise SourceError(
            f"{name}, {weight.dtype} {list(weight.shape)}, has values that are not finite, or that are not "
            f"when they are quantized ({self._format.method}); leave it as it is (--keep), or choose another "
            "--quantize"
        )


def union(spans: Iterable[Range]) -> Spans:
    """Return the positions of ranges that may overlap, ascending."""
    joined: list[Range] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _stored_spans(dim: PackedDim, held: WeightSlice) -> Spans:
    """Return the positions of a part in a dim of a stored tensor."""
    if dim.of is None:
        return ((0, dim.step),)
    return union((start // dim.step, -(-stop // dim.step)) for start, stop in held.ranges[dim.of])


def _with_part(tensor: LazyTensor, part: LazyTensor, places: Sequence[Spans]) -> LazyTensor:
    """Return a tensor of which the positions ``places`` of each dim are another tensor."""
    parts = [(part, list(places))]
    for dim, spans in enumerate(places):
        size = tensor.shape[dim]
        edges = [0, *(edge for span in spans for edge in span), size]
        gaps = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
        if gaps:
            box = [*places[:dim], tuple(gaps), *(((0, extent),) for extent in tensor.shape[dim + 1 :])]
            rest = tensor
            for index, positions in enumerate(box):
                rest = take(rest, index, positions)
            parts.append((rest, box))
    return assemble(tensor.dtype, tensor.shape, parts)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
