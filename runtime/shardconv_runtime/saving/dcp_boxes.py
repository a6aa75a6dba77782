"""Boxes of global tensors in torch's distributed checkpoints (DCP).

DCP's own planners support shards that are one range of a dim. These planners list the boxes that a process
writes and needs, through torch's documented interface
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). The result is an ordinary checkpoint that
DCP and its tools read, each tensor under its name with its global shape.
"""

from __future__ import annotations

import io
import math
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..comm.mesh import Launch
from ..errors import CheckpointError, RanksTimeoutError
from ..format.dims import Dim
from ..format.plan import ParameterPlan
from ..format.slices import Mesh, Range, ranges
from ..format.stored_layout import holds_values
from .local_windows import LocalWindow

# The part of a global tensor that a process holds, as boxes.
#
# A rank's positions of a dim are ranges, so that a local tensor is a grid of boxes. A data-parallel process
# may hold only a **window** of its rank's tensor. If several ranks hold the same positions, the lowest
# of them **owns** them: the owned boxes of all ranks tile the tensor.


class Box(NamedTuple):
    """A box of a global tensor, and its position in a window of the local one."""

    offsets: tuple[int, ...]
    """The offsets in the global tensor."""
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    """The offsets in the window."""


def held_boxes(entry: ParameterPlan, mesh: Mesh, rank: int, window: LocalWindow) -> list[Box]:
    """Return the boxes that fill a window of a rank's tensor; none of a Partial tensor where it is zero.

    Args:
        window: local positions.
    """
    if not holds_values(entry, mesh, rank):
        return []
    pieces = [_pieces(ranges(dim, mesh, rank), *part) for dim, part in zip(entry.dims, window, strict=True)]
    return [_box(chosen) for chosen in product(*pieces)]


def owned_boxes(entry: ParameterPlan, mesh: Mesh, rank: int, window: LocalWindow) -> list[Box]:
    """Return the parts of ``held_boxes`` that no lower rank holds; arguments as there.

    Boxes of two ranks may overlap without being equal (segments of a dim that are sharded over different
    axes), so they are divided wherever a box of some rank begins or ends.
    """
    if not holds_values(entry, mesh, rank):
        return []
    values = sum(1 << other for other in range(math.prod(mesh)) if holds_values(entry, mesh, other))
    pieces = []
    for dim, part in zip(entry.dims, window, strict=True):
        bounds, holders = _cells(dim, mesh)
        pieces.append(
            [
                (piece, holders[bisect_left(bounds, piece.start + 1) - 1])
                for local_piece in _pieces(ranges(dim, mesh, rank), *part)
                for piece in _divided(local_piece, bounds)
            ]
        )
    boxes = []
    for chosen in product(*pieces):
        holding = values
        for _, mask in chosen:
            holding &= mask
        if holding & -holding == 1 << rank:
            boxes.append(_box([piece for piece, _ in chosen]))
    return boxes


class _Piece(NamedTuple):
    start: int
    """The global start."""
    size: int
    local_start: int
    """The start in the window."""


def _pieces(held: Iterable[Range], first: int, last: int) -> list[_Piece]:
    """Return the ranges of local positions from ``first`` up to ``last``."""
    pieces, local = [], 0
    for start, stop in held:
        begin, end = max(local, first), min(local + stop - start, last)
        if begin < end:
            pieces.append(_Piece(start + begin - local, end - begin, begin - first))
        local += stop - start
    return pieces


def _divided(piece: _Piece, bounds: Sequence[int]) -> list[_Piece]:
    """Return the parts of a piece between the bounds inside of it."""
    inside = bounds[bisect_left(bounds, piece.start + 1) : bisect_left(bounds, piece.start + piece.size)]
    ends = [piece.start, *inside, piece.start + piece.size]
    return [
        _Piece(start, stop - start, piece.local_start + start - piece.start) for start, stop in pairwise(ends)
    ]


@lru_cache(maxsize=256)
def _cells(dim: Dim, mesh: Mesh) -> tuple[list[int], list[int]]:
    """Return the bounds of ranks' ranges of a dim, and as bits the ranks that hold each cell."""
    ranges_of_ranks = [ranges(dim, mesh, rank) for rank in range(math.prod(mesh))]
    bounds = sorted({end for spans in ranges_of_ranks for span in spans for end in span})
    holders = [0] * len(bounds)
    for rank, spans in enumerate(ranges_of_ranks):
        for start, stop in spans:
            for cell in range(bisect_left(bounds, start), bisect_left(bounds, stop)):
                holders[cell] |= 1 << rank
    return bounds, holders


def _box(pieces: Sequence[_Piece]) -> Box:
    return Box(
        tuple(piece.start for piece in pieces),
        tuple(piece.size for piece in pieces),
        tuple(piece.local_start for piece in pieces),
    )


@dataclass(frozen=True)
class BoxedTensor:
    """The boxes of a global tensor that a process writes or fills."""

    name: str
    shape: tuple[int, ...]
    """The global shape."""
    local: Tensor
    """The local tensor that holds the boxes."""
    boxes: tuple[Box, ...]
    """The boxes to write or to fill."""

    def part(self, box: Box) -> Tensor:
        """Return the local elements of a box, as a view of shape ``box.sizes``."""
        view = self.local
        for dim, (start, size) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
            view = view.narrow(dim, start, size)
        return view


def write(tensors: Sequence[BoxedTensor], directory: Path, launch: Launch) -> None:
    """Write the boxes of all processes, which tile each tensor; every process calls it.

    Args:
        tensors: local, of this process; it may lack some of the checkpoint's tensors.
    """
    with _errors(f"{directory} cannot be written"):
        save(
            {},
            storage_writer=FileSystemWriter(directory),
            planner=_Writer(tensors),
            process_group=launch.control,
            no_dist=launch.control is None,
        )


def read(tensors: Sequence[BoxedTensor], directory: Path, launch: Launch) -> None:
    """Fill the boxes of each tensor from a checkpoint; every process calls it.

    Args:
        tensors: local, of this process; changed in place.
    """
    with _errors(f"{directory} cannot be read"):
        load(
            {},
            storage_reader=FileSystemReader(directory),
            planner=_Reader(tensors),
            process_group=launch.control,
            no_dist=launch.control is None,
        )


class _Writer(SavePlanner):
    def __init__(self, tensors: Sequence[BoxedTensor]) -> None:
        self._parts = {(t.name, box.offsets): (t, box) for t in tensors for box in t.boxes}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor has received the tensors."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(tensor, box) for tensor, box in self._parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None, "each box has offsets"
        tensor, box = self._parts[write_item.index.fqn, tuple(write_item.index.offset)]
        return tensor.part(box).detach().contiguous()


class _Reader(LoadPlanner):
    def __init__(self, tensors: Sequence[BoxedTensor]) -> None:
        self._tensors = tensors
        self._parts = {(t.name, box.offsets): t.part(box) for t in tensors for box in t.boxes}
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None, "set_up_planner has received it"
        return LoadPlan([item for t in self._tensors for item in _read_items(t, self._metadata)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is bytes, not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None, "each box has offsets"
        view = self._parts[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)]
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, size)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: ``resolve_tensor`` returned a view, so the elements are in place."""


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _write_item(tensor: BoxedTensor, box: Box) -> WriteItem:
    properties = TensorProperties(dtype=tensor.local.dtype)
    return WriteItem(
        index=MetadataIndex(tensor.name, torch.Size(box.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(tensor.shape)),
    )


def _read_items(tensor: BoxedTensor, metadata: Metadata) -> list[ReadItem]:
    """Return the stored chunks that fill the boxes."""
    stored = metadata.state_dict_metadata.get(tensor.name)
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint lacks {tensor.name}")
    if tuple(stored.size) != tensor.shape or stored.properties.dtype != tensor.local.dtype:
        raise CheckpointError(
            f"{tensor.name} is {stored.properties.dtype} {list(stored.size)} in the checkpoint, "
            f"and {tensor.local.dtype} {list(tensor.shape)} was expected"
        )
    items = create_read_items_for_chunk_list(tensor.name, stored, [_chunk(box) for box in tensor.boxes])
    expected = sum(math.prod(box.sizes) for box in tensor.boxes)
    covered = sum(math.prod(item.lengths) for item in items)
    if expected != covered:
        raise CheckpointError(
            f"the checkpoint has {covered} of {expected} elements of {tensor.name} for this rank"
        )
    return items


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """Raise DCP's errors in one line, on all processes, and silence its warning about a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"{what}: process {rank}: {cause}") from error
    except RuntimeError as error:  # of the group; DCP catches the errors of files
        raise RanksTimeoutError(f"{what}: another process ended ({str(error).splitlines()[0]})") from error
