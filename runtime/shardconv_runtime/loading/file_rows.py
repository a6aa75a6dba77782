"""Some rows of the tensors of a file: what a process reads that shares a rank's tensors with others.

The first dim of a stored tensor is its outermost one, so that consecutive rows are consecutive bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..format.header import ShardFile, StoredTensor
from ..format.slices import Range, Rows


def with_rows(shards: Sequence[ShardFile], rows: Rows) -> list[ShardFile]:
    """The same files with parts of their tensors: of those in ``rows``, these positions of the first dim."""
    return [_of_file(shard, rows) for shard in shards]


def _of_file(shard: ShardFile, rows: Rows) -> ShardFile:
    tensors = {n: _of_tensor(t, rows[n]) if n in rows else t for n, t in shard.tensors.items()}
    last = next(reversed(tensors.values()), None)
    return ShardFile(shard.path, shard.start + (last.offsets[1] if last else 0), tensors)


def _of_tensor(tensor: StoredTensor, row: Range) -> StoredTensor:
    (start, stop), (begin, end) = row, tensor.offsets
    row_bytes = (end - begin) // tensor.shape[0] if tensor.shape[0] else 0
    offsets = begin + start * row_bytes, begin + stop * row_bytes
    return StoredTensor(tensor.dtype, (stop - start, *tensor.shape[1:]), offsets)
