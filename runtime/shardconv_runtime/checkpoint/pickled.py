"""The tensors of PyTorch files: where each one's bytes are, if they are somewhere as they are."""

from __future__ import annotations

import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import SourceError, brief
from ..format.dtypes import STORED_NAME
from ..tensors.lazy_tensor import ComputedLeaf, FileLeaf, LazyTensor, StridedBox, from_leaf

_GLOBAL = re.compile(r"(?:GLOBAL|Unsupported class) (\S+)")
"""What the unpickler names of an object that it does not make."""

_ENTRY_BYTES = 30
"""Of what comes before the name in a zip file: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT"""


def pickled_tensors(file: Path) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of a PyTorch file by name; it is read when a tensor has no place of its own in it.

    Raises:
        SourceError: it cannot be read, or holds something else.
    """
    records = _records(file)
    load = cache(lambda: load_pickled(file, "cpu"))
    for name, tensor in load_pickled(file, "meta").items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or dtype not in STORED_NAME:
            raise SourceError(f"{file}: {name} is {tensor.layout} of dtype {dtype}, which is not supported")
        offset = _place(file, name, tensor, records)
        if offset is None:
            leaf = ComputedLeaf(f"{file}: {name}", _reader(load, name), dtype, tensor.numel())
            yield name, from_leaf(leaf, tensor.shape)
        else:
            storage = FileLeaf(file, offset, dtype, tensor.untyped_storage().nbytes() // tensor.itemsize)
            yield name, _window(storage, tensor)


def load_pickled(file: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a PyTorch file, unpickled with ``weights_only``.

    Raises:
        SourceError: torch cannot read it, or it holds something else.
    """
    if _is_swapped(file):
        raise SourceError(
            f"{file} was written by a machine of another byte order; load it with torch here, save it again"
        )
    try:
        found: Any = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # the unpickler may raise anything on a corrupt file
        if match := _GLOBAL.search(str(error)):
            raise SourceError(
                f"{file} holds {match[1]}, which is no tensor, and might run code: it is not loaded; "
                "save the tensors alone, as safetensors"
            ) from error
        raise SourceError(
            f"{file} cannot be read by torch.load ({brief(error, 100)}); download or copy it again"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise SourceError(f"{file} does not hold a dict of tensors; give a file of weights")
    return found


def _is_swapped(file: Path) -> bool:
    """Whether a zip file says so; torch dies of that if it makes no real tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            marks = [name for name in archive.namelist() if name.endswith("/byteorder")]
            return any(archive.read(name).decode() != sys.byteorder for name in marks)
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return False  # torch says what is wrong with it


def _records(file: Path) -> dict[int, int]:
    """Offset and size of what is in a zip file as it is; nothing of another file."""
    if not zipfile.is_zipfile(file):
        return {}
    found = {}
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
            for info in archive.infolist():
                if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                    raw.seek(info.header_offset)
                    lengths = struct.unpack("<HH", raw.read(_ENTRY_BYTES)[-4:])
                    found[info.header_offset + _ENTRY_BYTES + sum(lengths)] = info.file_size
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, struct.error) as error:
        raise SourceError(f"{file} is damaged ({brief(error, 100)}); download or copy it again") from error
    return found


def _place(file: Path, name: str, tensor: torch.Tensor, records: dict[int, int]) -> int | None:
    """Where a tensor's storage begins; None where that does not say what its elements are."""
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset not in records or tensor.is_conj() or tensor.is_neg() or not _nests(tensor):
        return None
    assert isinstance(offset, int)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    if records[offset] < max(end, tensor.untyped_storage().nbytes()):
        raise SourceError(
            f"{file}: {name} needs more than the {records[offset]} bytes that are there for it; "
            "download or copy it again"
        )
    return offset


def _nests(tensor: torch.Tensor) -> bool:
    """Whether each element has a place of its own, and a dim with a larger stride goes around the others."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def _window(storage: FileLeaf, tensor: torch.Tensor) -> LazyTensor:
    """A tensor that may be a strided part of its storage."""
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return LazyTensor(storage.dtype, shape, ())
    piece = StridedBox(
        (0,) * len(shape), shape, storage, int(tensor.storage_offset()), tuple(tensor.stride())
    )
    return LazyTensor(storage.dtype, shape, (piece,))


def _reader(load: Callable[[], dict[str, torch.Tensor]], name: str) -> Callable[[], torch.Tensor]:
    return lambda: load()[name].resolve_conj().resolve_neg()
