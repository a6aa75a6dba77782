"""A rank's tensors out of the byte ranges of its files, whose headers were read before.

For the CPU they are views of a private mapping of each file: nothing is copied or even read until it is
used, and the page cache is the memory of all processes that load the same files. For a GPU they go through
pinned buffers, see ``staged_reading``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..format.header import TORCH_NAME, ShardFile, StoredTensor
from ..parallel.shared_storage import tensor_at, tensor_within

REMEDY = "copy the directory again, or convert the model again"

Adjacent = Sequence[tuple[str, ...]]
"""Names of tensors that share memory where they lie next to each other in a file, in this order."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Tensors that lie next to each other in a file, and share memory: one, or several of one dtype."""

    tensors: tuple[tuple[str, StoredTensor], ...]

    @property
    def begin(self) -> int:
        """The first byte, counted from the first one of all tensors of the file."""
        return self.tensors[0][1].offsets[0]

    @property
    def end(self) -> int:
        """The byte after the last one, counted in the same way."""
        return self.tensors[-1][1].offsets[1]

    @property
    def num_bytes(self) -> int:
        """Of all of them; there are no gaps."""
        return self.end - self.begin

    def at(self, storage: torch.UntypedStorage, begin: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors, of stored shapes and dtypes, whose bytes begin at ``begin`` of a storage.

        They share a storage of their own, but are no views of each other to autograd.
        """
        dtype = getattr(torch, TORCH_NAME[self.tensors[0][1].dtype])
        memory = tensor_at(storage, begin, self.num_bytes, dtype, (self.num_bytes // dtype.itemsize,))
        for name, stored in self.tensors:
            offset = (stored.offsets[0] - self.begin) // dtype.itemsize
            yield name, tensor_within(memory.untyped_storage(), offset, stored.shape, dtype)


def stretches(shard: ShardFile, adjacent: Adjacent = ()) -> Iterator[FileSpan]:
    """The tensors of a file in its order."""
    first = {names[0]: names for names in adjacent}
    todo = list(shard.tensors.items())
    at = 0
    while at < len(todo):
        names = first.get(todo[at][0], ())
        found = todo[at : at + len(names)]
        are_next = tuple(name for name, _ in found) == names and len({s.dtype for _, s in found}) == 1
        taken = tuple(found) if are_next else (todo[at],)
        yield FileSpan(taken)
        at += len(taken)


def mapped(shards: Sequence[ShardFile], adjacent: Adjacent = ()) -> Generator[tuple[str, Tensor]]:
    """Local tensors of stored shapes in private, writable mappings of the files, which no write changes.

    Args:
        shards: the files.
        adjacent: tensors that share memory.

    Raises:
        CheckpointError: a file cannot be mapped.
    """
    for shard in shards:
        try:
            storage = map_file(shard.path, shard.num_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{shard.path}: cannot be mapped into memory ({error}); {REMEDY}"
            ) from error
        for stretch in stretches(shard, adjacent):
            yield from stretch.at(storage, shard.start + stretch.begin)


def map_file(path: Path, num_bytes: int) -> Any:
    """The storage of a private, writable mapping of a file.

    Raises:
        OSError: it cannot be mapped; the message is one line.
    """
    try:
        return torch.UntypedStorage.from_file(str(path), False, num_bytes)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error
