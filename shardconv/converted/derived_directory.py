"""Read a converted directory as the source of another directory, in few long reads."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from shardconv_runtime.checkpoint.lazy_tensor import (
    ComputedLeaf,
    FileLeaf,
    LazyTensor,
    StridedBox,
    assemble,
    from_leaf,
    stored,
    take,
)
from shardconv_runtime.errors import DamagedError, OptionError, OutputExistsError, PlanError, SourceError
from shardconv_runtime.files import manifest, small_files
from shardconv_runtime.files.manifest import PARTIAL, UNUSED_NAME, FileEntry, check_size
from shardconv_runtime.files.small_files import entry_of
from shardconv_runtime.format.header import data_start, item_bytes
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.slices import Range
from shardconv_runtime.hub_options import is_url
from shardconv_runtime.storage.file_access import header, is_local

from ..writing.job import known_files
from ..writing.outputs import AnyOutput, Output
from . import shards
from .shards import Converted

if TYPE_CHECKING:
    from shardconv_runtime.checkpoint.resolve import ModelSpec
    from torch import Tensor


def require_apart(out: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Raise ``ShardconvError`` if ``target`` is the converted directory ``out``, or inside of it."""
    if is_url(out) or is_url(target):
        is_inside = f"{os.fspath(target).rstrip('/')}/".startswith(f"{os.fspath(out).rstrip('/')}/")
    else:
        is_inside = Path(target).expanduser().resolve().is_relative_to(Path(out).expanduser().resolve())
    if is_inside:
        raise OptionError(f"{target} is in {out}, which is read; name a directory outside of it")


def prepared_place(directory: str | os.PathLike[str], out: str | os.PathLike[str], last: str) -> AnyOutput:
    """Check that a directory of another kind, or its URL, may be created; see ``prepare``."""
    if not is_url(directory):
        return prepare("DST", directory, out, last)
    from ..writing.store_output import StoredOutput  # it imports the client of the Hub

    require_apart(out, directory)
    url = os.fspath(directory).rstrip("/")
    return StoredOutput.prepare(url, overwrite=False, source=out, last=last)


def require_on_disk(directory: str | os.PathLike[str], format: str) -> None:
    """Refuse a URL as a destination."""
    if is_url(directory):
        raise OptionError(
            f"{directory} is in an object store, to which --format {format} does not write; name a "
            "directory, and copy it there"
        )


def prepare(name: str, directory: str | os.PathLike[str], out: str | os.PathLike[str], last: str) -> Output:
    """Check that a directory of another kind may be created, without creating it, or that it is complete.

    Args:
        name: the name of the directory in messages.
        directory: the directory.
        out: the converted directory that is read.
        last: a pattern of the file that makes the directory complete.
    """
    require_apart(out, directory)
    path = Path(directory).expanduser()
    if path.is_dir() and not known_files(path) and any(file.name != PARTIAL for file in path.iterdir()):
        if any(file.stat().st_size for file in path.glob(last)):
            return Output(path.absolute(), overwrite=False, is_complete=True)
        raise OutputExistsError(f"{name} {directory} is not empty; name another directory")
    return Output.prepare(path, overwrite=False, source=out)


def require_nothing_new(name: str, path: Path) -> None:
    """Raise ``ShardconvError`` if another process has written to the directory since it was empty."""
    if any(file.name != PARTIAL for file in path.iterdir()):
        raise OutputExistsError(f"{name} {path} was written to by others meanwhile; name another directory")


def require_trusted(out: str | os.PathLike[str], plan: Plan, *, trust_remote_code: bool) -> None:
    """Raise ``SourceError`` if a converted directory contains code that is not trusted."""
    if plan.model.trust_remote_code and not trust_remote_code:
        raise SourceError(f"{out} runs custom code; read its *.py files, then pass --trust-remote-code")


def read(out: str | os.PathLike[str], *, trust_remote_code: bool) -> Converted:
    """Open a converted directory."""
    converted = shards.read(out)
    require_trusted(out, converted.plan, trust_remote_code=trust_remote_code)
    return converted


def spec_of(found: Converted) -> ModelSpec:
    """Return the model of a converted directory, without weights."""
    model = found.plan.model
    spec = planned_spec(found.directory, found.plan)
    if spec.class_name != model.class_name:
        raise PlanError(
            f"{found.files.name} was planned as {model.class_name}, and its config.json now gives "
            f"{spec.class_name}; use the version of transformers that it was planned for, or restore the file"
        )
    return spec


def planned_spec(directory: Path, plan: Plan) -> ModelSpec:
    """Return a model without weights, in the dtype and with the ties of its plan. Its code is trusted."""
    from shardconv_runtime.checkpoint.resolve import resolve  # it imports transformers

    trusted, dtype = plan.model.trust_remote_code, plan.model.dtype
    spec = resolve(directory, trust_remote_code=trusted, dtype=dtype, need_weights=False)
    return dataclasses.replace(spec, tied=dict(plan.tied))


def has_sequence_form(plan: Plan) -> bool:
    """Return whether a plan has a sequence-parallel form, which a new plan of the model should have, too."""
    return plan.training is not None and plan.training.sequence is not None


def weights_of(found: Converted) -> dict[str, LazyTensor]:
    """Return the global tensors. Tied tensors are one object under several names."""
    weights = found.weights()
    return weights | {alias: weights[name] for alias, name in found.plan.tied}


def identity(found: Converted) -> dict[str, object]:
    """Return a JSON value that changes if any byte of the files should change, but not by verifying them."""
    manifests = found.stages or (found.manifest,)
    files = [manifest.dumps(dataclasses.replace(each, numerics=None)) for each in manifests]
    return {"manifest": hashlib.sha256("".join(files).encode()).hexdigest()}


def copy_small_files(found: Converted, directory: Path) -> list[FileEntry]:
    """Copy the files that are not weights to ``directory``."""
    return small_files.copy_small_files(found.directory, found.manifest, directory)


def copy_unused(found: Converted, directory: Path) -> list[FileEntry]:
    """Copy the file of tensors that the model does not use, if there is one. For errors see
    ``copy_small_files``."""
    if found.files.objects is None:
        return small_files.copy_unused(found.directory, found.manifest, directory)
    entries = [entry for entry in found.manifest.files if entry.path == UNUSED_NAME]
    for entry in entries:
        found.files.objects.download(UNUSED_NAME, directory / UNUSED_NAME)
        if entry_of(directory, Path(UNUSED_NAME)).checksum != entry.checksum:
            raise DamagedError(f"{found.files.name}: {UNUSED_NAME} is damaged; convert the model again")
    return entries


def errors(found: Converted) -> dict[str, float]:
    """Return the errors of weights that were quantized when they were converted, by FQN."""
    return manifest.quantization_errors(found.stages or (found.manifest,))


def unused(found: Converted) -> dict[str, LazyTensor]:
    """Return the tensors that the model does not use, which were copied from the source."""
    if not any(entry.path == UNUSED_NAME for entry in found.manifest.files):
        return {}
    path = found.files.file(UNUSED_NAME)
    (entry,) = (entry for entry in found.manifest.files if entry.path == UNUSED_NAME)
    if is_local(path):
        check_size(found.directory, entry, "export")
    tensors = header(path)[1]
    start = data_start(entry.num_bytes, tensors)
    return {name: stored(path, start, tensor) for name, tensor in tensors.items()}


# Tensors that interleave stretches of many files, assembled in memory band by band.
#
# If ranks hold columns of a matrix, its rows alternate between short stretches of all their files. Copied
# one by one, each would be a small write. A band of full rows is read from each
# file with one read, and written with one write.


BAND_BYTES = 1 << 22
"""Bytes of a band."""

SHORT_BYTES = 1 << 16
"""Stretches of at least this many bytes are written one by one."""

FEW = 64
"""Up to this many stretches are written one by one, however short."""


def is_interleaved(tensor: LazyTensor) -> bool:
    """Return whether a tensor consists of many short stretches."""
    item = item_bytes(tensor.dtype)
    num_runs = sum(math.prod(piece.shape) // _run(piece, tensor) for piece in tensor.pieces)
    return num_runs > FEW and math.prod(tensor.shape) * item < num_runs * SHORT_BYTES


def gathered(name: str, tensor: LazyTensor) -> LazyTensor:
    """Return the tensor as bands that are assembled in memory when they are needed."""
    if not tensor.shape or tensor.is_cast or not all(map(_is_in_order, tensor.pieces)):
        return tensor
    bands = ((_band(name, tensor, box), [(span,) for span in box]) for box in _boxes(tensor))
    return assemble(tensor.dtype, tensor.shape, bands)


def _run(piece: StridedBox, tensor: LazyTensor) -> int:
    """Return the number of elements of a piece that are adjacent in the tensor."""
    run = 1
    for piece_size, extent in zip(reversed(piece.shape), reversed(tensor.shape), strict=True):
        run *= piece_size
        if piece_size != extent:
            break
    return run


def _is_in_order(piece: StridedBox) -> bool:
    strides = [stride for stride, size in zip(piece.strides, piece.shape, strict=True) if size > 1]
    return isinstance(piece.leaf, FileLeaf) and strides == sorted(strides, reverse=True)


def _boxes(tensor: LazyTensor) -> Iterator[list[Range]]:
    """Yield contiguous boxes of the tensor of at most ``BAND_BYTES`` (or one element), in order."""
    shape, inner = tensor.shape, item_bytes(tensor.dtype)
    dim = len(shape) - 1
    while dim > 0 and inner * shape[dim] <= BAND_BYTES:
        inner *= shape[dim]
        dim -= 1
    step = max(1, BAND_BYTES // inner)
    below = [(0, extent) for extent in shape[dim + 1 :]]
    for outer in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            stop = min(start + step, shape[dim])
            yield [*((index, index + 1) for index in outer), (start, stop), *below]


def _band(name: str, tensor: LazyTensor, box: list[Range]) -> LazyTensor:
    for dim, span in enumerate(box):
        tensor = take(tensor, dim, (span,))
    leaf = ComputedLeaf(name, partial(_read, tensor), tensor.dtype, math.prod(tensor.shape))
    return from_leaf(leaf, tensor.shape)


def _read(tensor: LazyTensor) -> Tensor:
    from shardconv_runtime.checkpoint.copying import read_tensor

    return read_tensor(tensor)
