"""Compare a converted directory in an object store with its source, byte for byte.

Its files are made again from the source as if they were sent to a store, in order and in bounded memory. Each
part is compared with the same range of the object that is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from shardconv_runtime.checkpoint.lazy_tensor import FileLeaf, LazyTensor, zeros
from shardconv_runtime.checkpoint.packed_plan import shard
from shardconv_runtime.files.shard_files import FileLayout
from shardconv_runtime.format.stored_layout import stored_plans
from shardconv_runtime.storage.file_access import is_local
from shardconv_runtime.storage.remote_files import RangeReader, RemoteFile

from ..arguments import MEMORY
from ..reporting.progress import Progress
from ..writing.fill import fill
from ..writing.job import TargetFile
from ..writing.streamed_files import StreamedFiles
from .file_spans import FileSpans, Span
from .shards import Converted


def compare_objects(
    converted: Converted, spans: FileSpans, weights: Mapping[str, LazyTensor], progress: Progress
) -> None:
    """Note the first difference in each span.

    Args:
        converted: a directory in an object store.
        spans: the spans of the tensors to compare.
        weights: the global tensors that they should be parts of, by name.
    """
    parameters, mesh = stored_plans(converted.plan), converted.plan.mesh

    def expected(of_rank: Mapping[str, LazyTensor], rank: int | None, name: str) -> LazyTensor:
        if name not in weights:  # it is a problem already, and in no span
            return zeros(of_rank[name].dtype, of_rank[name].shape)
        return shard(parameters[name], weights[name], mesh, rank or 0)

    files = []
    for of_file in spans.files:
        rank, path, stored = of_file[0].rank, of_file[0].file, _object_of(of_file)
        of_rank, offsets = converted.tensors[rank], {}
        for name, tensor in of_rank.items():
            leaf = tensor.pieces[0].leaf if tensor.pieces else None
            if isinstance(leaf, FileLeaf) and leaf.path == stored:
                offsets[name] = leaf.offset
        header = bytes(min(offsets.values()))  # no span holds it
        layout = FileLayout(header, offsets, stored.num_bytes)
        files.append(TargetFile(path, path.split("/")[0], layout, partial(expected, of_rank, rank)))
    fill(_Compared(converted.files.name, files, spans), memory=MEMORY, progress=progress, title="comparing")


def _object_of(spans: Sequence[Span]) -> RemoteFile:
    """Return the file of some spans."""
    path = spans[0].path
    assert not is_local(path)
    return path


@dataclass(frozen=True)
class _Compared:
    """A directory in an object store whose files are compared where others are written."""

    name: str
    files: Sequence[TargetFile]
    spans: FileSpans

    is_in_order = True

    @property
    def owners(self) -> Collection[str]:
        """Return all owners."""
        return {file.owner for file in self.files}

    def missing(self) -> list[int]:
        """Return the indices of all files."""
        return list(range(len(self.files)))

    def target(self, missing: Sequence[int], memory: int) -> StreamedFiles:
        """Begin to compare files."""
        files = {index: self.files[index] for index in missing}
        return StreamedFiles(files, self, memory // 2, lambda index, digests: None)

    def stream(self, name: str, parts: Iterator[memoryview], part_bytes: int, num_requests: int) -> str:
        """Compare the parts of a file."""
        index = next(index for index, file in enumerate(self.files) if file.path == name)
        reader = _object_of(self.spans.files[index]).reader()
        offset = 0
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(num_requests, "compare") as pool:
            for part in parts:
                if len(pending) == num_requests:
                    pending.popleft().result()
                pending.append(pool.submit(self._compare, index, reader, offset, part))
                offset += len(part)
            for each in pending:
                each.result()
        return ""

    def _compare(self, index: int, reader: RangeReader, offset: int, part: memoryview) -> None:
        """Note the first difference of a part in each span."""
        stored = np.frombuffer(reader.read(offset, len(part)), np.uint8)
        expected = np.frombuffer(part, np.uint8)
        if np.array_equal(stored, expected):
            return
        end = offset + len(part)
        for span in self.spans.files[index]:
            begin, stop = max(span.begin, offset) - offset, min(span.end, end) - offset
            different = stored[begin:stop] != expected[begin:stop] if begin < stop else np.empty(0)
            if different.any():
                self.spans.note(index, offset + begin + int(different.argmax()))
