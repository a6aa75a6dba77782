"""Boxes of global tensors in torch's distributed checkpoints (DCP).

DCP's own planners support shards that are one range of a dim. These planners list the boxes that a process
writes and needs, through torch's documented interface
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). The result is an ordinary checkpoint that
DCP and its tools read, each tensor under its name with its global shape.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from ..errors import CheckpointError, LaunchError
from .held_boxes import Box


@dataclass(frozen=True)
class BoxedTensor:
    """The boxes of a global tensor that a process writes or fills."""

    name: str
    shape: tuple[int, ...]
    """Global."""
    local: Tensor
    """Holds the boxes."""
    boxes: tuple[Box, ...]
    """To write, or to fill."""

    def part(self, box: Box) -> Tensor:
        """The local elements of a box, as a view of shape ``box.sizes``."""
        view = self.local
        for dim, (start, size) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
            view = view.narrow(dim, start, size)
        return view


def write(tensors: Sequence[BoxedTensor], directory: Path, launch: Launch) -> None:
    """Write the boxes of all processes, which tile each tensor; every process calls it.

    Args:
        tensors: local, of this process; it may lack some of the checkpoint's tensors.
        directory: exists, the same for all.
        launch: the processes.

    Raises:
        CheckpointError: some process cannot write; all raise.
        LaunchError: another process ended.
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
        directory: of the checkpoint.
        launch: the processes.

    Raises:
        CheckpointError: the checkpoint cannot be read, or lacks elements; all raise.
        LaunchError: another process ended.
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
        """The constructor has received the tensors."""

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
        """The elements are in place: ``resolve_tensor`` returned a view."""


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
    """The stored chunks that fill the boxes.

    Raises:
        CheckpointError: the checkpoint lacks the tensor or some elements, or has another shape or dtype.
    """
    found = metadata.state_dict_metadata.get(tensor.name)
    if not isinstance(found, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint lacks {tensor.name}")
    if tuple(found.size) != tensor.shape or found.properties.dtype != tensor.local.dtype:
        raise CheckpointError(
            f"{tensor.name} is {found.properties.dtype} {list(found.size)} in the checkpoint, "
            f"and {tensor.local.dtype} {list(tensor.shape)} was expected"
        )
    items = create_read_items_for_chunk_list(tensor.name, found, [_chunk(box) for box in tensor.boxes])
    wanted, covered = (sum(map(_volume, sizes)) for sizes in (_sizes(tensor), [i.lengths for i in items]))
    if wanted != covered:
        raise CheckpointError(
            f"the checkpoint has {covered} of {wanted} elements of {tensor.name} for this rank"
        )
    return items


def _sizes(tensor: BoxedTensor) -> list[tuple[int, ...]]:
    return [box.sizes for box in tensor.boxes]


def _volume(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """DCP's errors, raised on all processes, in one line; without its warning about a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"{what}: process {rank}: {cause}") from error
    except RuntimeError as error:  # of the group; DCP catches the errors of files
        raise LaunchError(f"{what}: another process ended ({str(error).splitlines()[0]})") from error
