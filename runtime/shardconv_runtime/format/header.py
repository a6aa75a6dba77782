"""The header of a safetensors file: its dtypes, and where each tensor is. Nothing else is read.

The format: 8 bytes with the length of the header (little endian), the header as JSON, then the
bytes of the tensors without a gap. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .typed_json import MalformedError, decode, from_json

STORED_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits of one element, by the dtype's name in a safetensors header."""

STORED_NAME: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}
"""torch's name of a dtype, as in a plan, to safetensors' name."""


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype, as in a plan: ``bfloat16`` of ``torch.bfloat16``, or of its text."""
    return str(dtype).removeprefix("torch.")


TORCH_NAME: Mapping[str, str] = {stored: name for name, stored in STORED_NAME.items()}
"""safetensors' name of a dtype to torch's."""

_STORED_ELEMENTS: Mapping[str, int] = {"F4": 2}
"""Dtypes of which one element in torch is several in a header, along the last dim -> how many."""


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype, by torch's name."""
    stored = STORED_NAME[dtype]
    return STORED_BITS[stored] * _STORED_ELEMENTS.get(stored, 1) // 8


def stored_shape(dtype: str, shape: Sequence[int]) -> list[int]:
    """Return the shape of a tensor in a header.

    Args:
        dtype: torch's name of the dtype.
    """
    num = _STORED_ELEMENTS.get(STORED_NAME[dtype], 1)
    return [*shape[:-1], shape[-1] * num] if num > 1 else list(shape)


MAX_HEADER_BYTES = 100_000_000
"""Longest header that the safetensors library accepts."""

MAX_NAME_LENGTH = 1000
"""Most characters of a tensor's name."""

MAX_DIMS = 64
"""Most dims of a tensor in torch."""

_LENGTH_BYTES = 8


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: str
    """safetensors' name: ``"BF16"``."""
    shape: tuple[int, ...]
    """In torch: an element of ``float4_e2m1fn_x2`` is two of a header's."""
    offsets: tuple[int, int]
    """Half-open, in bytes from the end of the header."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A safetensors file whose header was read and checked."""

    path: Any
    """A ``Path``, or a file that is read over a network."""
    num_bytes: int
    """The number of bytes of the file, up to the end of the last tensor."""
    tensors: dict[str, StoredTensor]
    """The tensors in the order of their bytes."""

    @property
    def start(self) -> int:
        """Return the byte where the tensors begin."""
        return data_start(self.num_bytes, self.tensors)


def data_start(num_bytes: int, tensors: dict[str, StoredTensor]) -> int:
    """Return the byte of a file where its tensors begin; there are no gaps, and the file ends with them."""
    last = next(reversed(tensors.values()), None)
    return num_bytes - (last.offsets[1] if last else 0)


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and tensors of a safetensors file, in the order of their bytes."""
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return parse_header(lambda offset, count: file.read(count), num_bytes, os.fspath(path))
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from error


def parse_header(
    read: Callable[[int, int], bytes], num_bytes: int, name: str
) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and tensors of a safetensors file, wherever it is, as ``read_header``."""
    try:
        prefix = read(0, _LENGTH_BYTES)
        if len(prefix) < _LENGTH_BYTES:
            raise MalformedError("", f"it has only {num_bytes} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise MalformedError("", f"its header would have {length} bytes")
        if _LENGTH_BYTES + length > num_bytes:
            raise MalformedError("", f"its header has {length} bytes, the file {num_bytes}")
        length = int(length)
        text = read(_LENGTH_BYTES, length).decode("utf-8")
        return _parse(text, num_bytes - _LENGTH_BYTES - length)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name}: the safetensors header is not UTF-8") from error
    except MalformedError as error:
        raise CheckpointError(
            f"{name}: not an intact safetensors file: {error}; copy or convert it again"
        ) from error


def _parse(text: str, num_data_bytes: int) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    header = decode(text)
    if not text.startswith("{") or not isinstance(header, dict):
        raise MalformedError("", "its header is not a JSON object")
    metadata = from_json(Mapping[str, str], header.pop("__metadata__", {}), "__metadata__")
    tensors = {name: _tensor(name, value) for name, value in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].offsets))
    end = 0
    for name, tensor in ordered.items():
        if tensor.offsets[0] != end:
            raise MalformedError(name, f"its bytes begin at {tensor.offsets[0]} and should begin at {end}")
        end = tensor.offsets[1]
    if end != num_data_bytes:
        raise MalformedError("", f"its tensors have {end} bytes, the file holds {num_data_bytes} of them")
    return metadata, ordered


def _plain_entry(value: Any) -> _Entry | None:
    """Read a valid entry fast, without naming faults: there may be a hundred thousand entries."""
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        return None
    numbers = (*shape, *offsets)
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        return None
    return _Entry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _tensor(name: str, value: Any) -> StoredTensor:
    if len(name) > MAX_NAME_LENGTH:
        raise MalformedError("", f"a tensor's name has more than {MAX_NAME_LENGTH} characters")
    entry = _plain_entry(value) or from_json(_Entry, value, name)
    bits = STORED_BITS.get(entry.dtype)
    if bits is None:
        raise MalformedError(f"{name}.dtype", f"unknown dtype {entry.dtype[:40]!r}")
    if any(extent < 0 for extent in entry.shape):
        raise MalformedError(f"{name}.shape", "an extent is negative")
    if len(entry.shape) > MAX_DIMS:
        raise MalformedError(f"{name}.shape", f"more than {MAX_DIMS} dims")
    begin, end = entry.data_offsets
    num_bits = math.prod(entry.shape) * bits
    if begin < 0 or (end - begin) * 8 != num_bits:
        problem = f"{begin} to {end} are not the {num_bits // 8} bytes of {entry.dtype} {list(entry.shape)}"
        raise MalformedError(f"{name}.data_offsets", problem)
    shape, num = entry.shape, _STORED_ELEMENTS.get(entry.dtype, 1)
    if num > 1:
        if not shape or shape[-1] % num:
            problem = f"the last dim of {entry.dtype} is not a multiple of {num}"
            raise MalformedError(f"{name}.shape", problem)
        shape = (*shape[:-1], shape[-1] // num)
    return StoredTensor(entry.dtype, shape, (begin, end))
