"""The tensors of PyTorch files, as lazy tensors over their bytes if the file stores them contiguously."""

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

from ..errors import DamagedModelError, SourceError, UnsupportedError, brief
from ..format.header import STORED_NAME, dtype_name
from .lazy_tensor import ComputedLeaf, FileLeaf, LazyTensor, StridedBox, from_leaf

_GLOBAL = re.compile(r"(?:GLOBAL|Unsupported class) (\S+)")
"""The class that the unpickler refuses, in its message."""


_ENTRY_BYTES = 30
"""Size of the zip header before a name: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT"""


def pickled_tensors(file: Path) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of a PyTorch file.

    A tensor whose bytes are not stored as they are is computed from the full file when it is needed.

    Yields:
        (name, tensor).
    """
    records = _records(file)
    load = cache(lambda: load_pickled(file, "cpu"))
    for name, tensor in load_pickled(file, "meta").items():
        dtype = dtype_name(tensor.dtype)
        if tensor.layout != torch.strided or dtype not in STORED_NAME:
            raise UnsupportedError(
                f"{file}: {name} is {tensor.layout} of dtype {dtype}, which is not supported"
            )
        offset = _storage_offset(file, name, tensor, records)
        if offset is None:
            leaf = ComputedLeaf(f"{file}: {name}", _reader(load, name), dtype, tensor.numel())
            yield name, from_leaf(leaf, tensor.shape)
        else:
            storage = FileLeaf(file, offset, dtype, tensor.untyped_storage().nbytes() // tensor.itemsize)
            shape = tuple(tensor.shape)
            if tensor.numel() == 0:
                window = LazyTensor(storage.dtype, shape, ())
            else:
                piece = StridedBox(
                    (0,) * len(shape), shape, storage, int(tensor.storage_offset()), tuple(tensor.stride())
                )
                window = LazyTensor(storage.dtype, shape, (piece,))
            yield name, window


def load_pickled(file: Path, device: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a PyTorch file, unpickled with ``weights_only``.

    Returns:
        Global tensors by name, with the shapes, strides and dtypes of the file.
    """
    if _is_swapped(file):
        raise SourceError(
            f"{file} was written by a machine of another byte order; load it with torch, then save it again"
        )
    try:
        tensors: Any = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # the unpickler may raise anything on a corrupt file
        if match := _GLOBAL.search(str(error)):
            raise SourceError(
                f"{file} holds {match[1]}, which might run code, so the file is not loaded; save only the "
                "tensors, as safetensors"
            ) from error
        raise DamagedModelError(
            f"{file} cannot be read by torch.load ({brief(error, 100)}); download or copy it again"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()
    ):
        raise SourceError(f"{file} does not hold a dict of tensors; name a file of weights")
    return tensors


def _is_swapped(file: Path) -> bool:
    """Return whether a zip file has another byte order; torch cannot load it to the meta device."""
    try:
        with zipfile.ZipFile(file) as archive:
            marks = [name for name in archive.namelist() if name.endswith("/byteorder")]
            return any(archive.read(name).decode() != sys.byteorder for name in marks)
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return False  # torch.load raises the error


def _records(file: Path) -> dict[int, int]:
    """Return the offset and size of the uncompressed records of a zip file; empty for other files."""
    if not zipfile.is_zipfile(file):
        return {}
    sizes_by_offset = {}
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
            for info in archive.infolist():
                if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                    raw.seek(info.header_offset)
                    lengths = struct.unpack("<HH", raw.read(_ENTRY_BYTES)[-4:])
                    sizes_by_offset[info.header_offset + _ENTRY_BYTES + sum(lengths)] = info.file_size
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, struct.error) as error:
        raise DamagedModelError(
            f"{file} is damaged ({brief(error, 100)}); download or copy it again"
        ) from error
    return sizes_by_offset


def _storage_offset(file: Path, name: str, tensor: torch.Tensor, records: dict[int, int]) -> int | None:
    """Return the byte where a tensor's storage begins; None unless it is a strided window of it."""
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset not in records or tensor.is_conj() or tensor.is_neg() or not _is_nested(tensor):
        return None
    assert isinstance(offset, int)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    if records[offset] < max(end, tensor.untyped_storage().nbytes()):
        raise DamagedModelError(
            f"{file}: {name} needs more than the {records[offset]} bytes stored for it; download or copy it "
            "again"
        )
    return offset


def _is_nested(tensor: torch.Tensor) -> bool:
    """Return whether elements do not overlap, and strides exceed the extent of dims with smaller ones."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def _reader(load: Callable[[], dict[str, torch.Tensor]], name: str) -> Callable[[], torch.Tensor]:
    return lambda: load()[name].resolve_conj().resolve_neg()
