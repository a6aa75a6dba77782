"""An ordinary model, local or on the Hub, that is loaded with a plan that was made for it."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.boxes import is_run, move_of
from ..checkpoint.checkpoint_weights import lazy_weights, select
from ..checkpoint.copying import read_into
from ..checkpoint.lazy_tensor import FileLeaf, LazyTensor, take
from ..checkpoint.packed_plan import as_planned, flatten, shard
from ..checkpoint.resolve import resolve
from ..errors import PlanError, SourceError
from ..files.manifest import Manifest, Source
from ..files.small_files import entry_of, files_to_copy
from ..format import plan_json
from ..format.fused_groups import adjacent_tensors, in_units
from ..format.header import dtype_name, item_bytes
from ..format.plan import Plan, parameter_plans
from ..format.slices import Rows
from ..format.stored_layout import stored_plans
from ..hub_options import Hub
from ..library_logging import without_library_logging
from ..storage.file_access import is_local
from ..storage.reading import map_file
from ..storage.windows import tensor_at, tensor_within
from .checked_source import CheckedSource

# Tensors that are contiguous in a file are mapped, and nothing is copied.


class Windows:
    """Private, writable mappings of local files, each made once; writing to one changes no file."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._given: dict[FileLeaf, list[tuple[int, int]]] = {}

    def window(self, tensor: LazyTensor) -> Tensor | None:
        """Return the tensor on the CPU as a window of its mapped file.

        Returns None if elements have to be gathered, cast, computed or fetched, or are in another window.
        """
        if len(tensor.pieces) != 1 or tensor.is_cast:
            return None
        (piece,) = tensor.pieces
        leaf, size = piece.leaf, item_bytes(tensor.dtype)
        if not isinstance(leaf, FileLeaf) or not is_local(leaf.path):
            return None
        begin = leaf.offset + piece.offset * size
        end = begin + tensor.num_bytes
        if begin % size or not is_run(move_of(tensor, piece, 0, 0).dims):
            return None
        earlier_windows = self._given.setdefault(leaf, [])
        if any(begin < other_end and other_begin < end for other_begin, other_end in earlier_windows):
            return None
        earlier_windows.append((begin, end))
        dtype = getattr(torch, tensor.dtype)
        if leaf.path not in self._files:
            try:
                self._files[leaf.path] = map_file(leaf.path, leaf.path.stat().st_size)
            except OSError as error:
                raise SourceError(
                    f"{leaf.path}: cannot be mapped into memory ({error}); check that nobody changes it"
                ) from error
        return tensor_at(self._files[leaf.path], begin, tensor.num_bytes, dtype, tensor.shape)


BATCH_BYTES = 1 << 28
"""Most bytes of tensors that are read at once; larger tensors and fused groups are read separately."""


def ordinary(
    model: str | os.PathLike[str],
    solved: Plan,
    hub: Hub,
    *,
    trust_remote_code: bool,
    dtype: torch.dtype | None = None,
) -> CheckedSource:
    """Find the bytes of a model's files that make up each parameter of a plan.

    Args:
        dtype: dtype to load instead of the plan's; ignored for quantized checkpoints.
    """
    is_packed = any(entry.packing for entry in solved.parameters)
    spec = resolve(
        model,
        hub,
        dtype=None if is_packed else solved.model.dtype,
        trust_remote_code=trust_remote_code and solved.model.trust_remote_code,
        stream=True,
    )
    if has_dtype := dtype is not None and spec.quantization is None:
        # Not in the plan's dtype first: float32 weights would be rounded to bfloat16 on the way to float32.
        spec = replace(spec, dtype=dtype_name(dtype))
    if spec.class_name != solved.model.class_name:
        raise PlanError(
            f"the plan is for a {solved.model.class_name}, and {spec.name} is a {spec.class_name}; "
            "make a plan of that model"
        )
    with without_library_logging():  # transformers would log of a model that is not loaded yet
        lazy_tensors = lazy_weights(spec).tensors
    planned, weights = flatten(
        solved, select(spec, lazy_tensors, parameter_plans(solved).keys(), solved.tied)
    )
    if is_packed and parameter_plans(planned) != parameter_plans(solved):
        raise PlanError(
            f"the packed weights of {spec.name} are not the ones in the plan; make a plan of this model"
        )
    assert spec.directory is not None, "it was resolved from a directory or from the Hub"
    entries = [
        entry_of(spec.directory, path) for path in files_to_copy(spec.directory, code=spec.trust_remote_code)
    ]
    name = spec.name if spec.revision else spec.directory.resolve().name
    digest = plan_json.sha256(plan_json.dumps(solved))
    described = Manifest(solved.tp, digest, Source(name, spec.revision), {}, tuple(entries))
    return CheckedSource(spec.directory, described, solved, checkpoint=weights, in_wanted_dtypes=has_dtype)


def local_tensors(
    plan: Plan,
    weights: Mapping[str, LazyTensor],
    rank: int,
    device: torch.device,
    rows: Rows,
    *,
    in_planned_dtypes: bool = True,
) -> Generator[tuple[str, Tensor]]:
    """Yield the local tensors of ``rank``.

    On the CPU, tensors that are contiguous in a local file are mapped; all others are read.

    Args:
        weights: global tensors by the names under which the plan stores them.
        in_planned_dtypes: cast the weights to the dtypes of the plan; otherwise they keep their dtypes.

    Yields:
        Names and local tensors.
    """
    entries = stored_plans(plan)
    if not in_planned_dtypes:
        entries = {name: replace(entry, dtype=weights[name].dtype) for name, entry in entries.items()}
    windows = Windows() if device.type == "cpu" else None
    batch: list[_Unit] = []
    num_bytes = 0
    for names in in_units(entries, adjacent_tensors(plan)):
        unit = {n: shard(entries[n], as_planned(n, entries[n], weights[n]), plan.mesh, rank) for n in names}
        unit = {n: take(part, 0, [rows[n]]) if n in rows else part for n, part in unit.items()}
        window = windows.window(unit[names[0]]) if windows is not None and len(unit) == 1 else None
        if window is not None:
            yield names[0], window
            continue
        unit_bytes = sum(part.num_bytes for part in unit.values())
        if batch and num_bytes + unit_bytes > BATCH_BYTES:
            yield from _read(batch, device)
            batch, num_bytes = [], 0
        batch.append(unit)
        num_bytes += unit_bytes
    yield from _read(batch, device)


_Unit = Mapping[str, LazyTensor]
"""Tensors that share memory: one, or several that the plan fuses."""


def _read(batch: Sequence[_Unit], device: torch.device) -> Generator[tuple[str, Tensor]]:
    memory = [torch.empty(sum(part.num_bytes for part in unit.values()), dtype=torch.uint8) for unit in batch]
    parts = [part for unit in batch for part in unit.values()]
    read_into(parts, [tensor for unit, m in zip(batch, memory, strict=True) for tensor in _parts(unit, m)])
    for unit, read in zip(batch, memory, strict=True):
        yield from zip(unit, _parts(unit, read.to(device)), strict=True)


def _parts(unit: _Unit, memory: Tensor) -> Iterator[Tensor]:
    """Yield the tensors of a unit, one after another in its bytes, uint8 ``[n]``."""
    begin = 0
    for part in unit.values():
        dtype = getattr(torch, part.dtype)
        yield tensor_within(memory.untyped_storage(), begin // dtype.itemsize, part.shape, dtype)
        begin += part.num_bytes
