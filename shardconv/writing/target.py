"""Files to write, planned to the byte before the first one is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardconv_runtime.format.shard_files import ALIGNMENT, FileLayout, lay_out
from shardconv_runtime.tensors.lazy_tensor import LazyTensor, Shape

LEAST_ALIGNMENT = 8
"""Alignment of the safetensors library, for files with the same bytes as its own."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A safetensors file to write."""

    path: str
    """Relative to the output directory, with ``/``."""
    owner: str
    """A rank or the common part; one process at a time writes the files of an owner."""
    layout: FileLayout
    tensor: Callable[[str], LazyTensor] = field(repr=False, compare=False)
    """The source of a tensor, by name; called when the file is written."""

    @property
    def header(self) -> bytes:
        """The first bytes of the file."""
        return self.layout.header

    @property
    def offsets(self) -> Mapping[str, int]:
        """Name -> offset of its first byte in the file, in the order of the file."""
        return self.layout.offsets

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.layout.num_bytes


def target_file(
    path: str,
    owner: str,
    declared: Mapping[str, tuple[str, Shape]],
    metadata: Mapping[str, str],
    tensor: Callable[[str], LazyTensor],
    alignment: int = ALIGNMENT,
) -> TargetFile:
    """Lay out a file; deterministic.

    Args:
        path: relative to the output directory.
        owner: see ``TargetFile.owner``.
        declared: torch's name of the dtype and the shape of each tensor.
        metadata: of the header.
        tensor: the source of a tensor, by name.
        alignment: of the first tensor, in bytes.
    """
    return TargetFile(path, owner, lay_out(declared, metadata, alignment), tensor)
