"""The processes that hold a model, and a directory that they write together.

A model on tp x dp processes is loaded by groups of tp ranks. It must be saved once, so its replicas have to
know of each other: from the mesh of their DTensors (``fully_shard``), from ``DistributedDataParallel``, or
because the caller passes their process group.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..comm import agreement
from ..comm.mesh import Launch
from ..comm.process_groups import control_group
from ..errors import CheckpointError, LaunchError, OutputExistsError, ShardconvError
from ..loaded import loaded, unwrapped

T = TypeVar("T")


@dataclass(frozen=True)
class Replicas:
    """This process among all processes that hold one model."""

    launch: Launch
    """All of these processes; ``control`` is a group for control messages between them."""
    rank: int
    """The rank in the plan."""
    is_first: bool
    """This process is in the first replica, which writes."""
    place: int = 0
    """The place among the processes that share the stages of a model."""

    @property
    def is_leader(self) -> bool:
        """Return whether this process does the work that is done once."""
        return self.is_first and self.rank == 0 and self.place == 0

    def agree(self, error: Exception | None, timeout_s: float | None = None) -> None:
        """Return only if no process has an error, see ``agreement.agree``."""
        agreement.agree(self.launch, error, timeout_s)

    def together(self, stage: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run a stage on every process; return its result here once all have run it."""

        def readable() -> T:
            try:
                return stage()
            except ShardconvError:
                raise
            except OSError as failure:
                raise CheckpointError(
                    f"{failure.filename or 'the checkpoint'}: {failure.strerror or failure}"
                ) from failure

        return agreement.together(self.launch, readable, timeout_s)


def replicas_of(model: nn.Module, group: dist.ProcessGroup | None = None) -> Replicas:
    """Find all processes of a model; each of them calls it.

    Modules of ``fully_shard`` that a forward pass left unsharded are sharded again.
    """
    source = loaded(model)
    start, place = source.launch, {"rank": source.rank, "place": source.place}
    for module in unwrapped(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if group is not None:
        groups = [group]
    elif (mesh := mesh_of(model)) is not None:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    else:
        wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        groups = [wrapper.process_group for wrapper in wrappers[:1]]
    if not groups:
        return Replicas(start, is_first=True, **place)
    me = dist.get_rank()
    model_ranks = (me,) if start.group is None else tuple(dist.get_process_group_ranks(start.group))
    ranks = set(model_ranks)
    for along in groups:
        if mixed := set(dist.get_process_group_ranks(along)).intersection(model_ranks) - {me}:
            raise LaunchError(
                f"the processes {me} and {min(mixed)} are ranks of one model, but replicas for its data "
                "parallelism; pass it the dim of the device mesh that the model was not loaded on"
            )
        ranks.update(*agreement.exchange(_processes(along, start.device), tuple(ranks)))
    ordered = tuple(sorted(ranks))
    world = dist.group.WORLD
    assert world is not None, "its subgroups exist"
    control = control_group(world, ordered)
    launch = Launch(ordered.index(me), len(ordered), start.device, control, control)
    return Replicas(launch, is_first=all(dist.get_rank(along) == 0 for along in groups), **place)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that the model's DTensors are sharded over in addition to tensor parallelism; None
    without DTensors.
    """
    meshes = {p.device_mesh for p in unwrapped(model).parameters() if isinstance(p, DTensor)}
    if len(meshes) > 1:
        raise LaunchError("the model's parameters are DTensors of several device meshes; use one for all")
    return next(iter(meshes), None)


def full_tensor(tensor: DTensor) -> Tensor:
    """Return all of a tensor, gathered when all processes that hold parts of it call this.

    Processes without a part would issue their next collectives at once. NCCL's watchdog ends a process whose
    collective is not over in time, however slowly another process writes in the meantime.
    """
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            along = tensor.device_mesh.get_group(dim)
            agreement.exchange(_processes(along, tensor.device), None, agreement.READ_TIMEOUT_S)
    return tensor.full_tensor()


def _processes(group: dist.ProcessGroup, device: torch.device) -> Launch:
    return Launch(dist.get_rank(group), group.size(), device, group, control_group(group))


# A directory that many processes write and that appears only once it is complete.
#
# It is made next to its final path, and renamed when all of it is on disk. A directory that it replaces is
# renamed first, and removed last, so that at any moment one of the two is complete:
#
#     .OUT.partial-TOKEN     being written
#     .OUT.replaced-TOKEN    was OUT; only while OUT is replaced
#
# The next run that writes to OUT cleans up after a run that died. The processes need a shared file system.


KnownFiles = Callable[[Path], Collection[str]]
"""Returns the files of a directory that may be replaced, relative to it; raises ``CheckpointError`` if the
directory is of another kind."""


@dataclass(frozen=True)
class Staging:
    """A directory that is being made."""

    out: Path
    """Its final path."""
    path: Path
    """Its path until ``commit``."""

    def commit(self) -> None:
        """Move the directory to its final path; one process calls it, when all is written."""
        for path in self.path.rglob("*"):
            if path.is_dir():
                _fsync(path)
        _fsync(self.path)
        if not self.out.exists() or not any(self.out.iterdir()):
            self.path.rename(self.out)
            _fsync(self.out.parent)
            return
        replaced = _beside(self.out, "replaced", self.path.name.rpartition("-")[2])
        self.out.rename(replaced)
        try:
            self.path.rename(self.out)
        except OSError:
            replaced.rename(self.out)
            raise
        _fsync(self.out.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove the directory; one process calls it."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def staged(
    replicas: Replicas, out: Path, *, overwrite: bool, known: KnownFiles, apart_from: Path | None = None
) -> Iterator[Staging]:
    """Make a staging directory, and remove it if the context raises; see ``begin`` for the arguments."""
    staging = begin(replicas, out, overwrite=overwrite, known=known, apart_from=apart_from)
    try:
        yield staging
    except BaseException:
        if replicas.is_leader:
            staging.discard()
        raise


def begin(
    replicas: Replicas, out: Path, *, overwrite: bool, known: KnownFiles, apart_from: Path | None = None
) -> Staging:
    """Check on one process that a directory may be made, and make its staging directory."""
    made: Path | None = None
    error: Exception | None = None
    if replicas.is_leader:
        try:
            _require_free(out, overwrite, known, apart_from)
            out.parent.mkdir(parents=True, exist_ok=True)
            for rest in (*_left(out, "partial"), *_left(out, "replaced")):
                shutil.rmtree(rest)
            made = _beside(out, "partial", secrets.token_hex(8))
            made.mkdir()
        except ShardconvError as failure:
            error = failure
        except OSError as failure:
            error = CheckpointError(f"{out} cannot be made: {failure.strerror or failure}")
            error.__cause__ = failure
        except Exception as failure:
            error = failure
    replicas.agree(error)
    path = next(path for path in agreement.exchange(replicas.launch, made) if path is not None)
    staging = Staging(out, path)
    try:
        unshared = CheckpointError(
            f"{out}: rank 0 made {path}, which this rank does not see; use a file system that all ranks share"
        )
        replicas.agree(None if path.is_dir() else unshared)
    except ShardconvError:
        if replicas.is_leader:
            staging.discard()
        raise
    return staging


def _require_free(out: Path, overwrite: bool, known: KnownFiles, apart_from: Path | None) -> None:
    if apart_from is not None and (out.is_relative_to(apart_from) or apart_from.is_relative_to(out)):
        raise OutputExistsError(
            f"of {out} and {apart_from}, which was loaded, one contains the other; name another directory"
        )
    # Put back a replaced directory after a run that died between two renames.
    for replaced in _left(out, "replaced"):
        if not out.exists():
            replaced.rename(out)
    if out.exists() and not out.is_dir():
        raise OutputExistsError(f"{out} is a file; name a directory that does not exist yet")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise OutputExistsError(f"{out} is not empty; name another directory, or pass overwrite=True")
    try:
        written = known(out)
    except CheckpointError as error:
        raise OutputExistsError(f"{out} cannot be replaced: {error}; name another directory") from error
    files = (file for file in out.rglob("*") if file.is_symlink() or not file.is_dir())
    if foreign_files := sorted({file.relative_to(out).as_posix() for file in files} - set(written)):
        raise OutputExistsError(
            f"{out} holds {foreign_files[0]}, which shardconv did not write; move it away first"
        )


def _beside(out: Path, kind: str, token: str) -> Path:
    return out.with_name(f".{out.name}.{kind}-{token}")


def _left(out: Path, kind: str) -> list[Path]:
    """Return directories that earlier runs left next to ``out``."""
    if not out.parent.is_dir():
        return []
    return sorted(path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.{kind}-"))


def _fsync(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
