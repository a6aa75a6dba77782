"""Compare a finished output with the files that a run would write there, without reading all of it.

A run into a finished output does nothing if the output is its own: the same command again, or the last
part of several that is started again. Any other output is refused. Headers, sizes, small files and a few
elements of each tensor are compared; ``verify`` compares every byte.
"""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from shardconv_runtime.checkpoint.copying import read_tensors
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor, stored, take
from shardconv_runtime.files.converted_files import ConvertedFiles
from shardconv_runtime.format.header import data_start
from shardconv_runtime.storage.file_access import header, read_bytes

from .job import TargetFile

SAMPLE = 64
"""Elements of a tensor that are compared."""

SHOWN = 5
"""Differences that a message names."""

Copies = Callable[[Path], object]
"""Writes the files that are not weights to a directory."""


def difference_of_files(
    out: ConvertedFiles, files: Sequence[TargetFile], copies: Copies, owners: Collection[str] | None = None
) -> str:
    """Return the differences between a finished directory and the files that a run would write.

    Args:
        out: the finished directory.
        files: the files of weights that would be written.
        copies: writes the other files to a directory, as the run would.
        owners: the owners whose tensors the run has, to be compared; None: all.

    Returns:
        The differences as text; empty if there are none.
    """
    differences = [*_of_names(out, files), *_of_copies(out.directory, copies)]
    differences = differences or list(_of_tensors(out, files, owners))
    rest = len(differences) - SHOWN
    return ", ".join(differences[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _of_names(out: ConvertedFiles, files: Sequence[TargetFile]) -> Iterator[str]:
    """Yield differences of the files of weights by their names, headers and sizes."""
    written = out.weight_files()
    if unexpected := sorted(written.keys() ^ {file.path for file in files}):
        yield (
            f"the file {unexpected[0]} is in one of the two only; do --max-file-size and --keep-unused agree?"
        )
    for file in (file for file in files if file.path in written):
        if written[file.path] != file.num_bytes or _beginning(out, file) != file.header:
            yield f"{file.path} has other tensors"


def _beginning(out: ConvertedFiles, file: TargetFile) -> bytes:
    return read_bytes(out.file(file.path), len(file.header))


def _of_copies(out: Path, copies: Copies) -> Iterator[str]:
    """Yield differences of the files that are not weights."""
    with tempfile.TemporaryDirectory() as directory:
        copies(Path(directory))
        for copy in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
            name = copy.relative_to(directory).as_posix()
            if not (out / name).is_file() or not filecmp.cmp(copy, out / name, shallow=False):
                yield f"{name} changed"


def _of_tensors(
    out: ConvertedFiles, files: Sequence[TargetFile], owners: Collection[str] | None
) -> Iterator[str]:
    """Yield tensors with other values; the headers of the files are equal."""
    names, expected, actual = [], [], []
    for file in (file for file in files if owners is None or file.owner in owners):
        for name, planned, stored_tensor in _samples(out, file):
            names.append(name)
            expected.append(planned)
            actual.append(stored_tensor)
    for name, one, other in zip(names, read_tensors(expected), read_tensors(actual), strict=True):
        if not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            yield f"{name} has other values"


def _samples(out: ConvertedFiles, file: TargetFile) -> Iterator[tuple[str, LazyTensor, LazyTensor]]:
    """Yield the first elements of each tensor of a file: its name, as planned and as written.

    Tensors that must be computed are left out: reading an element would compute all of them.
    """
    path = out.file(file.path)
    _, tensors = header(path)
    start = data_start(file.num_bytes, tensors)
    for name, entry in tensors.items():
        planned = file.tensor(name)
        is_computed = any(isinstance(piece.leaf, ComputedLeaf) for piece in planned.pieces)
        if not is_computed and planned.shape == entry.shape:  # elements of 4 bits are stored in pairs
            yield name, _first(planned), _first(stored(path, start, entry))


def _first(tensor: LazyTensor) -> LazyTensor:
    """Return the first elements of a tensor along its last dim."""
    for dim, extent in enumerate(tensor.shape):
        count = SAMPLE if dim == len(tensor.shape) - 1 else 1
        tensor = take(tensor, dim, ((0, min(count, extent)),))
    return tensor
