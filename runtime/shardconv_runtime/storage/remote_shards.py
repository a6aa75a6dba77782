"""Tensors of shards that are read over a network, into memory of this process: no file is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..format.header import ShardFile
from .reading import Adjacent, FileSpan, stretches
from .remote_files import RangeReader
from .windows import tensor_at

NUM_THREADS = 16
"""Concurrent requests: one connection to an object store brings some 100 MB/s, a host has links of many."""

PIECE_BYTES = 16 << 20
"""Bytes of one request."""

AHEAD_BYTES = 1 << 29
"""Bytes that are requested before the tensors are taken, which may be cast or moved one by one."""


SLAB_BYTES = 1 << 26
"""Most bytes of tensors that share memory, and so requests; a larger tensor shares none."""


def fetched(shards: Sequence[ShardFile], adjacent: Adjacent = ()) -> Generator[tuple[str, Tensor]]:
    """Yield local tensors of stored shapes, in the order of the files."""
    begun: deque[tuple[_Slab, torch.UntypedStorage, list[Future[None]]]] = deque()
    ahead = 0
    pool = ThreadPoolExecutor(NUM_THREADS, "shardconv-fetch")
    try:
        for shard in shards:
            reader = shard.path.reader()
            for slab in _slabs(shard, adjacent):
                storage = torch.UntypedStorage(slab.num_bytes)  # type: ignore[no-untyped-call]
                begun.append((slab, storage, _requested(pool, reader, shard.start + slab.begin, storage)))
                ahead += slab.num_bytes
                while ahead > AHEAD_BYTES:
                    ahead -= begun[0][0].num_bytes
                    yield from _taken(*begun.popleft())
        while begun:
            yield from _taken(*begun.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Slab:
    """Tensors that are next to each other in a file."""

    spans: tuple[FileSpan, ...]

    @property
    def begin(self) -> int:
        return self.spans[0].begin

    @property
    def num_bytes(self) -> int:
        return self.spans[-1].end - self.begin


def _slabs(shard: ShardFile, adjacent: Adjacent) -> Iterator[_Slab]:
    spans: list[FileSpan] = []
    for span in stretches(shard, adjacent):
        if spans and (span.begin != spans[-1].end or span.end - spans[0].begin > SLAB_BYTES):
            yield _Slab(tuple(spans))
            spans = []
        spans.append(span)
    if spans:
        yield _Slab(tuple(spans))


def _requested(
    pool: ThreadPoolExecutor, reader: RangeReader, begin: int, storage: torch.UntypedStorage
) -> list[Future[None]]:
    """Request bytes of a file for a storage, and return the pieces to wait for."""
    size = storage.nbytes()
    as_bytes: Any = tensor_at(storage, 0, size, torch.uint8, (size,)).numpy()
    memory, starts = memoryview(as_bytes), range(0, size, PIECE_BYTES)
    return [pool.submit(reader.read_into, begin + at, memory[at : at + PIECE_BYTES]) for at in starts]


def _taken(
    slab: _Slab, storage: torch.UntypedStorage, requests: list[Future[None]]
) -> Iterator[tuple[str, Tensor]]:
    for request in requests:
        request.result()
    for span in slab.spans:
        yield from span.at(storage, span.begin - slab.begin)
