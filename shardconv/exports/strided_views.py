"""Finds the content of a view of a storage after writes to other views of it.

A view is an offset, a shape and strides, all in elements. Two views of one storage are compared in mixed
radix: their strides, if each divides the next larger one, are the weights of a number system in which every
view is a box. So the parts of a view that a write covers are boxes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from shardconv_runtime.checkpoint import lazy_tensor as lazy
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor, Shape
from shardconv_runtime.checkpoint.recording_tensors import RecordedTensor
from shardconv_runtime.format.slices import Range

Box = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A strided window of a storage, in elements."""

    offset: int
    shape: Shape
    strides: Shape

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Return the window of its storage that a tensor occupies."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class Write:
    """Elements of a view were replaced."""

    view: View
    content: LazyTensor | str
    """A tensor of the view's shape, or the reason why it is not known."""


class UnknownContentError(ValueError):
    """The content of a view is not known; the message says why."""


def content_of(view: View, dtype: str, writes: Sequence[Write]) -> LazyTensor:
    """Return the content of a view.

    Args:
        dtype: the dtype of all elements.
    """
    if math.prod(view.shape) == 0:
        return LazyTensor(dtype, view.shape, ())
    order = sorted(range(len(view.shape)), key=lambda dim: -view.strides[dim])
    writes = [write for write in writes if math.prod(write.view.shape)]
    view_box, boxes, sizes = _boxes_of(view, [write.view for write in writes])
    free = [view_box]
    parts: list[tuple[LazyTensor, list[list[Range]]]] = []
    for write, box in zip(reversed(writes), reversed(boxes), strict=True):
        covered = [(rest, hit) for rest in free if (hit := _intersection(rest, box)) is not None]
        if not covered:
            continue
        if isinstance(write.content, str):
            raise UnknownContentError(write.content)
        # The content with the dims of its box.
        by_stride = sorted(range(len(write.view.shape)), key=lambda dim: -write.view.strides[dim])
        recorded = RecordedTensor(write.content).permute(by_stride)
        source = _lazy(recorded.reshape([stop - start for start, stop in box]))
        for rest, hit in covered:
            spans = [
                [(low - first, high - first)] for (low, high), (first, _) in zip(hit, view_box, strict=True)
            ]
            part = source
            for dim, ((start, _), (low, high)) in enumerate(zip(box, hit, strict=True)):
                part = lazy.take(part, dim, ((low - start, high - start),))
            parts.append((part, spans))
            free.remove(rest)
            free += _difference(rest, hit)
    if free:
        rest_size = sum(math.prod(stop - start for start, stop in box) for box in free)
        raise UnknownContentError(f"{rest_size} of its {math.prod(view.shape)} elements were not written")
    content = RecordedTensor(lazy.assemble(dtype, sizes, parts))
    ordered = content.reshape([view.shape[dim] for dim in order])
    return _lazy(ordered.permute([order.index(dim) for dim in range(len(order))]))


def _lazy(tensor: torch.Tensor) -> LazyTensor:
    assert isinstance(tensor, RecordedTensor)
    return tensor.lazy


def _merged(view: View) -> list[tuple[int, int]]:
    """Return size and stride of a view's dims by descending stride, with contiguous ones merged."""
    dims = sorted(((s, n) for n, s in zip(view.shape, view.strides, strict=True) if n > 1), reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, size in dims:
        if merged and merged[-1][1] == stride * size:
            size, stride = merged.pop()[0] * size, stride
        merged.append((size, stride))
    return merged


def _sizes(view: View, radices: Sequence[int]) -> list[int] | None:
    """Return the extent of a view in each digit; None if it is not a box."""
    sizes = [1] * len(radices)
    for size, stride in _merged(view):
        digit = radices.index(stride)
        while size > 1:
            base = radices[digit - 1] // radices[digit] if digit else size
            if sizes[digit] > 1 or (size > base and size % base):
                return None
            sizes[digit] = min(size, base)
            size, digit = -(-size // base), digit - 1
    return sizes


def _boxes_of(view: View, others: Sequence[View]) -> tuple[Box, list[Box], list[int]]:
    """Return a view and others as boxes of digits, and the extents of the view's box.

    Digits are counted from the start of the storage, or, if the storage has more than this view and the view
    begins in the middle of a row, from the start of the view.
    """
    strides = {1, *(stride for each in (view, *others) for _, stride in _merged(each))}
    radices = sorted(strides, reverse=True)
    if 0 in radices or any(larger % smaller for larger, smaller in pairwise(radices)):
        raise UnknownContentError(f"it was written with strides {radices}")
    for origin in (0, view.offset):
        view_box, *boxes = (_box_of(one, origin, radices) for one in (view, *others))
        overlaps = [box for box in boxes if box is not None]
        if view_box is not None and len(overlaps) == len(boxes):
            return view_box, overlaps, [stop - start for start, stop in view_box]
    raise UnknownContentError("it was written in stretches that are not boxes")


def _box_of(view: View, origin: int, radices: Sequence[int]) -> Box | None:
    """Return a view as a box of digits, counted from the element ``origin``; None if it is not a box."""
    sizes, rest = _sizes(view, radices), view.offset - origin
    if sizes is None:
        return None
    box: list[Range] = []
    for digit, radix in enumerate(radices):
        start, rest = divmod(rest, radix)
        if digit and start + sizes[digit] > radices[digit - 1] // radix:
            return None
        box.append((start, start + sizes[digit]))
    return tuple(box)


def _intersection(one: Box, other: Box) -> Box | None:
    overlap = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return overlap if all(start < stop for start, stop in overlap) else None


def _difference(box: Box, inner: Box) -> Iterator[Box]:
    """Yield a box without a box in it, as boxes."""
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, inner, strict=True)):
        for span in ((start, low), (high, stop)):
            if span[0] < span[1]:
                yield (*inner[:dim], span, *box[dim + 1 :])
