"""The places of each rank's tensors in converted files, and the first differences in them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from shardconv_runtime.checkpoint.lazy_tensor import FileLeaf, LazyTensor, Shape
from shardconv_runtime.files import manifest
from shardconv_runtime.format.dims import Dim
from shardconv_runtime.format.header import item_bytes
from shardconv_runtime.format.plan import ParameterPlan, Plan
from shardconv_runtime.format.slices import Mesh, ranges
from shardconv_runtime.format.stored_layout import stored_plans
from shardconv_runtime.storage.file_access import WeightFile, is_local

from .shards import Converted


class Span(NamedTuple):
    """The bytes of a rank's shard of a tensor."""

    path: WeightFile
    file: str
    """The path in the directory."""
    begin: int
    """Offset of the first byte in the file."""
    end: int
    name: str
    rank: int | None
    shape: Shape
    """Local shape."""
    dtype: str


class FileSpans:
    """The spans of each file, and the first byte in each of them that differs."""

    def __init__(self, spans: Sequence[Span]) -> None:
        by_file: dict[str, list[Span]] = {}
        for span in spans:
            by_file.setdefault(span.file, []).append(span)
        self.files = [sorted(of_file, key=lambda span: span.begin) for of_file in by_file.values()]
        self.num_bytes = sum(span.end - span.begin for span in spans)
        self._begins = [[span.begin for span in of_file] for of_file in self.files]
        self._lock = threading.Lock()
        self._different: dict[Span, int] = {}

    def note(self, index: int, offset: int) -> None:
        """Note that a byte of a file, which is in a span, differs."""
        span = self.files[index][bisect_right(self._begins[index], offset) - 1]
        with self._lock:
            self._different[span] = min(offset, self._different.get(span, offset))

    def problems(self, plan: Plan, model: str) -> Iterator[str]:
        """Yield a line for each tensor that differs, in the order of the plan."""
        by_name: dict[str, list[tuple[Span, int]]] = {}
        for span, offset in self._different.items():
            by_name.setdefault(span.name, []).append((span, offset))
        count = dict.fromkeys(by_name, 0)
        for spans in self.files:
            for span in spans:
                if span.name in count:
                    count[span.name] += 1
        for name, entry in stored_plans(plan).items():
            if name in by_name:
                differing = sorted(by_name[name], key=lambda item: item[0].rank or 0)
                yield _line(differing, count[name], entry, plan.mesh, model)


def file_spans(converted: Converted, weights: Mapping[str, LazyTensor]) -> FileSpans:
    """Return the spans of all tensors to compare that have elements."""
    files = {}
    if converted.files.objects is None:
        files = {manifest.resolve(converted.directory, e.path): e.path for e in converted.manifest.files}
    spans = []
    for rank, tensors in converted.tensors.items():
        for name, tensor in tensors.items():
            if name in weights and tensor.pieces:
                leaf = tensor.pieces[0].leaf
                assert isinstance(leaf, FileLeaf), "a converted directory is read from files"
                end = leaf.offset + tensor.num_bytes
                file = files[leaf.path] if is_local(leaf.path) else leaf.path.name
                spans.append(Span(leaf.path, file, leaf.offset, end, name, rank, tensor.shape, tensor.dtype))
    return FileSpans(spans)


def _line(
    differing: Sequence[tuple[Span, int]], count: int, entry: ParameterPlan, mesh: Mesh, model: str
) -> str:
    """Return the line for a tensor that differs in some of ``count`` files."""
    span, offset = differing[0]
    element = (offset - span.begin) // item_bytes(span.dtype)
    local = [int(index) for index in np.unravel_index(element, span.shape)]
    position = [
        _global_index(dim, mesh, span.rank or 0, index) for dim, index in zip(entry.dims, local, strict=True)
    ]
    files = f", and in {len(differing)} of {count} files" if count > 1 else ""
    return (
        f"{span.name}: differs from {model} first at {position}, in {span.file} at {local} "
        f"(byte {offset} of the file){files}"
    )


def _global_index(dim: Dim, mesh: Mesh, rank: int, index: int) -> int:
    """Return the global position of a rank's position in a dim."""
    for start, stop in ranges(dim, mesh, rank):
        if index < stop - start:
            return start + index
        index -= stop - start
    raise AssertionError("a local index lies in the rank's shard")
