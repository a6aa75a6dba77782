"""The files to write, planned to the byte before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardconv_runtime.format.shard_files import ALIGNMENT, FileLayout, Shape, lay_out
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

LEAST_ALIGNMENT = 8
"""That of the safetensors library, whose files are to be had byte for byte."""


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A safetensors file that is to be written."""

    path: str
    """Relative to the output directory, with ``/``."""
    owner: str
    """Whose it is: one process at a time writes the files of an owner."""
    layout: FileLayout
    tensor: Callable[[str], LazyTensor] = field(repr=False, compare=False)
    """What a tensor is made of; called where the file is written."""

    @property
    def header(self) -> bytes:
        """What the file begins with."""
        return self.layout.header

    @property
    def offsets(self) -> Mapping[str, int]:
        """The byte at which each tensor begins, in the order of the file."""
        return self.layout.offsets

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.layout.num_bytes


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
        declared: torch's name of the dtype and the shape of each tensor.
        metadata: of the header.
        tensor: what a tensor is made of.
        alignment: of the first tensor, in bytes.
    """
    return TargetFile(path, owner, lay_out(declared, metadata, alignment), tensor)
