"""The files to write, planned to the byte before anything is written.

A safetensors file is its header and its tensors at offsets that follow from names, dtypes and shapes, so
that its parts can be written in any order.
The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardconv_runtime.dtypes import STORED_NAME

from ..tensors.lazy import LazyTensor, Shape, item_bytes

ALIGNMENT = 64
"""Tensors begin at a multiple of so many bytes, a cache line where they are mapped: headers are padded with
spaces."""

LEAST_ALIGNMENT = 8
"""That of the safetensors library, whose files are to be had byte for byte."""

_LENGTH_BYTES = 8
"""Of the length of the header, with which a file begins."""

assert sys.byteorder == "little", "safetensors files are little endian"


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A safetensors file that is to be written."""

    path: str
    """Relative to the output directory, with ``/``."""
    owner: str
    """Whose it is: one process at a time writes the files of an owner."""
    header: bytes
    offsets: Mapping[str, int]
    """The byte at which each tensor begins, in the order of the file."""
    num_bytes: int
    tensor: Callable[[str], LazyTensor] = field(repr=False, compare=False)
    """What a tensor is made of; called where the file is written."""


def target_file(
    path: str,
    owner: str,
    declared: Mapping[str, tuple[str, Shape]],
    metadata: Mapping[str, str],
    tensor: Callable[[str], LazyTensor],
    alignment: int = ALIGNMENT,
) -> TargetFile:
    """Lay out a file; the same arguments give the same bytes.

    Args:
        path: relative to the output directory.
        owner: whose it is.
        declared: torch's name of the dtype and the shape of each tensor; wider dtypes go first, which
            keeps all aligned.
        metadata: of the header.
        tensor: what a tensor is made of.
        alignment: of the first tensor, in bytes.
    """
    ordered = sorted(declared.items(), key=lambda item: -item_bytes(item[1][0]))
    fields: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    begins, end = [], 0
    for name, (dtype, shape) in ordered:
        begin, end = end, end + math.prod(shape) * item_bytes(dtype)
        begins.append(begin)
        fields[name] = {"dtype": STORED_NAME[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + begin for (name, _), begin in zip(ordered, begins, strict=True)}
    return TargetFile(path, owner, header, offsets, len(header) + end, tensor)


def split(num_bytes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive names that together stay within ``limit`` bytes, or are alone."""
    parts: list[list[str]] = []
    held = 0
    for name, size in num_bytes.items():
        if not parts or held + size > limit:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts
