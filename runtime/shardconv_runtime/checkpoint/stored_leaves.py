"""The weight files of a model: checks that they are complete, and their tensors as lazy tensors."""

from __future__ import annotations

import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, SourceError, brief
from ..files.remote_files import RemoteFile, remote_header
from ..format.header import STORED_NAME, TORCH_NAME, StoredTensor, data_start, dtype_name, read_header
from .lazy_tensor import ComputedLeaf, FileLeaf, LazyTensor, StridedBox, from_leaf, stored
from .model_directory import Index

# The tensors of PyTorch files, as lazy tensors over their bytes if the file stores them contiguously.


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
            raise SourceError(f"{file}: {name} is {tensor.layout} of dtype {dtype}, which is not supported")
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
        found: Any = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # the unpickler may raise anything on a corrupt file
        if match := _GLOBAL.search(str(error)):
            raise SourceError(
                f"{file} holds {match[1]}, which might run code, so the file is not loaded; save only the "
                "tensors, as safetensors"
            ) from error
        raise SourceError(
            f"{file} cannot be read by torch.load ({brief(error, 100)}); download or copy it again"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise SourceError(f"{file} does not hold a dict of tensors; name a file of weights")
    return found


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


def _storage_offset(file: Path, name: str, tensor: torch.Tensor, records: dict[int, int]) -> int | None:
    """Return the byte where a tensor's storage begins; None unless it is a strided window of it."""
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset not in records or tensor.is_conj() or tensor.is_neg() or not _is_nested(tensor):
        return None
    assert isinstance(offset, int)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    if records[offset] < max(end, tensor.untyped_storage().nbytes()):
        raise SourceError(
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


WeightFile = Path | RemoteFile


def validate(files: Iterable[WeightFile]) -> None:
    """Check that each safetensors file is complete, by its header and its size."""
    for file in files:
        if file.suffix == ".safetensors":
            header_of(file)


def header_of(file: WeightFile) -> tuple[int, dict[str, StoredTensor]]:
    """Return the byte where the tensors of a safetensors file begin, and the tensors in the order of their
    bytes.
    """
    tensors = _header(file)[1]
    return data_start(num_bytes(file), tensors), tensors


def metadata_of(file: WeightFile) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    return _header(file)[0]


def _header(file: WeightFile) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    try:
        return remote_header(file) if isinstance(file, RemoteFile) else read_header(file)
    except CheckpointError as error:
        reason = str(error).removesuffix("; copy or convert it again")
        raise SourceError(f"{reason}; download or copy it again") from error


def num_bytes(file: WeightFile) -> int:
    """Return the size of a file, local or on the Hub."""
    return file.num_bytes if isinstance(file, RemoteFile) else file.stat().st_size


def stored_dtype(file: WeightFile) -> str | None:
    """Return the dtype that ``from_pretrained`` takes from a weight file if no config has one.

    The first floating-point tensor determines it, in the order in which the libraries list tensors:
    safetensors sorts by name, not in the order of the bytes. Formats of 8 bits and less are not dtypes of a
    model.

    Returns:
        The name of the dtype, for example ``"bfloat16"``; None if no tensor is floating-point.
    """
    if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
        _, tensors = header_of(file)
        found = [TORCH_NAME.get(tensor.dtype, "") for _, tensor in sorted(tensors.items())]
    else:
        found = [dtype_name(tensor.dtype) for tensor in load_pickled(file, "meta").values()]
    return next((name for name in found if name in ("float64", "float32", "bfloat16", "float16")), None)


# Names of tensors in checkpoints that were saved of a wrapped model: without the wrapper's part.
#
# ``torch.compile``, ``DistributedDataParallel``, FSDP, activation checkpointing and trainers put a model
# into their own module, or wrap modules inside of it. A state dict that is taken of the wrapper has
# names such as ``_orig_mod.lm_head.weight`` or
# ``model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight``.

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names of wrapped modules that no model uses for its own parts."""

_ORDINARY = "module"
"""The name in ``DistributedDataParallel``, which a model may use as well."""

_MOST_LEVELS = 4
"""Most levels of modules around a model, each of which has a name."""


def without_wrappers(names: Collection[str]) -> Iterator[Mapping[str, str]]:
    """Yield other names for all tensors of a checkpoint, the likeliest first.

    The caller finds out which of them belong to the model.

    Yields:
        Name -> without the parts of wrappers. Two tensors never get one name.
    """
    known = [dict.fromkeys(names, "")]  # only to compare
    for left_out in (_WRAPPERS, _WRAPPERS | {_ORDINARY}):
        found = {name: ".".join(p for p in name.split(".") if p not in left_out) for name in names}
        for _ in range(_MOST_LEVELS):
            if found not in known and any(old != new for old, new in found.items()):
                known.append(found)
                if len(set(found.values())) == len(found):
                    yield found
            parts: dict[str, set[str]] = {}
            for name in found.values():
                outermost, _, rest = name.partition(".")
                parts.setdefault(outermost, set()).add(rest)
            first, *others = sorted(parts, key=lambda part: -len(parts[part]))
            if others and all(parts[other] == parts[first] for other in others):
                raise SourceError(
                    f"the checkpoint has tensors of several models, whose names begin with {first}. and "
                    f"{', '.join(f'{other}.' for other in others)}; save only one of them"
                )
            found = {old: name.removeprefix(f"{first}.") for old, name in found.items()}


def wrapped_name(names: Collection[str]) -> str | None:
    """Return a name that shows that the checkpoint is one of a wrapped model; None if there is none."""
    return next((name for name in names if not _WRAPPERS.isdisjoint(name.split("."))), None)


def lazy_tensors(files: Iterable[WeightFile], index: Index | None = None) -> dict[str, LazyTensor]:
    """Return the tensors of safetensors or PyTorch files by their names.

    Only the pickle of a PyTorch file in the zip format is read. A file of the older format is read completely
    when the first of its tensors is needed.
    """
    found: dict[str, dict[str, LazyTensor]] = {}
    for file in files:
        if isinstance(file, RemoteFile):
            name_in_index = file.name
        else:
            name_in_index = (file if index is None else file.relative_to(index.path.parent)).as_posix()
        if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
            start, headers = header_of(file)
            tensors = {}
            for name, header in headers.items():
                if header.dtype not in TORCH_NAME:
                    raise SourceError(
                        f"{file}: {name} has the dtype {header.dtype}, which shardconv does not read; save "
                        "it in another one, or remove it if the model does not use it"
                    )
                tensors[name] = stored(file, start, header)
        else:
            tensors = dict(pickled_tensors(file))
        for name, tensor in tensors.items():
            found.setdefault(name, {})[name_in_index] = tensor
    return {name: _chosen(name, held, index) for name, held in found.items()}


def _chosen(name: str, held: Mapping[str, LazyTensor], index: Index | None) -> LazyTensor:
    """Return the tensor among those that files hold under one name."""
    named = "" if index is None else index.weight_map.get(name, "")
    if named in held:
        return held[named]
    if len(held) > 1:
        first, second = list(held)[:2]
        where = "an index of the files" if index is None else index.path
        raise SourceError(f"both {first} and {second} hold {name}; name one of them in {where}")
    return next(iter(held.values()))


def header_metadata(files: Iterable[WeightFile]) -> dict[str, str]:
    """Return the metadata in the headers of the safetensors files among these, merged over all files."""
    found: dict[str, str] = {}
    for file in files:
        if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
            found.update(metadata_of(file))
    return found
