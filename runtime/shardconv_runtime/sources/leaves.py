"""The tensors of weight files, not read: where each one's bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from shardconv_runtime.dtypes import TORCH_NAME
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.header import ShardFile, read_header

from ..tensors.lazy import LazyTensor, stored
from .pickled import pickled_tensors


def lazy_tensors(files: Iterable[Path]) -> dict[str, LazyTensor]:
    """The tensors of safetensors or PyTorch files by their names.

    Of a PyTorch file of the zip format only the pickle is read. One of the older format, which has no
    place for each tensor, is read whole when the first of its tensors is needed.

    Raises:
        SourceError: a file cannot be read, or holds a tensor that another one holds too.
    """
    found: dict[str, LazyTensor] = {}
    for file in files:
        read = _safetensors if file.suffix == ".safetensors" else pickled_tensors
        for name, tensor in read(file):
            if name in found:
                raise SourceError(f"{file} holds {name}, and so does another file; remove one of them")
            found[name] = tensor
    return found


def _safetensors(file: Path) -> Iterator[tuple[str, LazyTensor]]:
    try:
        _, tensors = read_header(file)
    except CheckpointError as error:
        reason = str(error).removesuffix("; copy or convert it again")
        raise SourceError(f"{reason}; download or copy it again") from error
    shard = ShardFile(file, file.stat().st_size, tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in TORCH_NAME:
            raise SourceError(f"{file}: {name} is of dtype {tensor.dtype}, which torch has not")
        yield name, stored(shard, name)
