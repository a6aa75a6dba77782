"""Writes safetensors files one tensor at a time, the same bytes for the same input.

The safetensors library orders the metadata of a file at random and wants all tensors at once.
The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from shardconv_runtime.dtypes import STORED_BITS, STORED_NAME
from torch import Tensor

Shape = tuple[int, ...]

ALIGNMENT = 8
"""The tensors begin at a multiple of so many bytes; the header is padded with spaces."""

BLOCK_BYTES = 1 << 22

assert sys.byteorder == "little", "safetensors files are little endian"


def write_tensors(
    path: Path,
    declared: Mapping[str, tuple[str, Shape]],
    get: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    advance: Callable[[int], object],
) -> tuple[int, str]:
    """Write a file durably under a temporary name, then rename it.

    Args:
        path: where to write.
        declared: torch's name of the dtype and the shape of each tensor.
        get: gives a tensor, local and contiguous; called once for each, one after another.
        metadata: of the file.
        advance: called with the number of bytes of tensors written since the last call.

    Returns:
        The size of the file and its sha256 in hex.
    """
    ordered = dict(sorted(declared.items(), key=lambda item: -_item_bits(item[1][0])))  # keeps them aligned
    digest, num_bytes = hashlib.sha256(), 0
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        header = _header(ordered, metadata)
        file.write(header)
        digest.update(header)
        num_bytes += len(header)
        for name, (dtype, shape) in ordered.items():
            for block in _blocks(get(name), dtype, shape):
                file.write(block)
                digest.update(block)
                num_bytes += len(block)
                advance(len(block))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return num_bytes, digest.hexdigest()


def _item_bits(dtype: str) -> int:
    return STORED_BITS[STORED_NAME[dtype]]


def _header(declared: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, (dtype, shape) in declared.items():
        begin, end = end, end + torch.Size(shape).numel() * _item_bits(dtype) // 8
        fields[name] = {"dtype": STORED_NAME[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _blocks(tensor: Tensor, dtype: str, shape: Shape) -> Iterator[memoryview]:
    assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape), "as declared"
    if tensor.numel() == 0:
        return
    content: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(content), BLOCK_BYTES):
        yield content[start : start + BLOCK_BYTES]
