"""A rank's tensors out of the byte ranges of its files, whose headers were read before.

For the CPU they are views of a private mapping of each file: nothing is copied or even read until it is
used, and the page cache is the memory of all processes that load the same files. For a GPU they go through
pinned buffers, see ``staged_reading``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..format.header import TORCH_NAME, ShardFile, StoredTensor

REMEDY = "copy the directory again, or convert the model again"


def mapped(shards: Sequence[ShardFile]) -> Generator[tuple[str, Tensor]]:
    """Local tensors of stored shapes in private, writable mappings of the files, which no write changes.

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
        for name, stored in shard.tensors.items():
            yield name, stored_tensor(storage, shard.start + stored.offsets[0], stored)


def map_file(path: Path, num_bytes: int) -> Any:
    """The storage of a private, writable mapping of a file.

    Raises:
        OSError: it cannot be mapped; the message is one line.
    """
    try:
        return torch.UntypedStorage.from_file(str(path), False, num_bytes)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def tensor_at(
    storage: torch.UntypedStorage, begin: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """The tensor of this shape whose bytes begin at ``begin``; its storage keeps the memory alive."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    if not num_bytes:
        return tensor.reshape(shape)
    stretch: Any = storage[begin : begin + num_bytes]  # the stub knows of single bytes only
    filled: Tensor = tensor.set_(stretch, 0, shape)  # type: ignore[call-overload]
    return filled


def stored_tensor(storage: torch.UntypedStorage, begin: int, stored: StoredTensor) -> Tensor:
    """The stored tensor, of its shape and dtype, whose bytes begin at ``begin``."""
    dtype = getattr(torch, TORCH_NAME[stored.dtype])
    return tensor_at(storage, begin, stored.offsets[1] - stored.offsets[0], dtype, stored.shape)
