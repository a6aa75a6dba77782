"""The processes that hold a model: the ranks of each of its data-parallel replicas.

A model on tp x dp processes is loaded by groups of tp ranks. It must be saved once, so its replicas have to
know of each other: from the mesh of their DTensors (``fully_shard``), from ``DistributedDataParallel``, or
because the caller passes their process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from ..errors import CheckpointError, LaunchError
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
        """Run a stage on every process; return its result here once all have run it.

        Args:
            stage: runs no collective.
            timeout_s: how long to wait for the other processes, see ``agreement.agree``.

        Raises:
            Exception: raised by ``stage`` on this process; an ``OSError`` as a ``CheckpointError``.
            LaunchError: ``stage`` raised on another process.
        """

        def readable() -> T:
            try:
                return stage()
            except OSError as failure:
                raise CheckpointError(
                    f"{failure.filename or 'the checkpoint'}: {failure.strerror or failure}"
                ) from failure

        return agreement.together(self.launch, readable, timeout_s)


def replicas_of(model: nn.Module, group: dist.ProcessGroup | None = None) -> Replicas:
    """Find all processes of a model; each of them calls it.

    Modules of ``fully_shard`` that a forward pass left unsharded are sharded again.

    Args:
        model: returned by ``load``, or a wrapper of it.
        group: the processes that hold the same rank's shards, for models without DTensors and outside of
            ``DistributedDataParallel``.

    Raises:
        LaunchError: the data parallelism mixes ranks of the model, or another process did not come.
        PlanError: ``load`` did not return the model.
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
    own = (me,) if start.group is None else tuple(dist.get_process_group_ranks(start.group))
    ranks = set(own)
    for along in groups:
        if mixed := set(dist.get_process_group_ranks(along)).intersection(own) - {me}:
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

    Raises:
        LaunchError: the DTensors have several meshes.
    """
    meshes = {p.device_mesh for p in unwrapped(model).parameters() if isinstance(p, DTensor)}
    if len(meshes) > 1:
        raise LaunchError("the model's parameters are DTensors of several device meshes; use one for all")
    return next(iter(meshes), None)


def full_tensor(tensor: DTensor) -> Tensor:
    """Return all of a tensor, gathered when all processes that hold parts of it call this.

    Processes without a part would issue their next collectives at once. NCCL's watchdog ends a process whose
    collective is not over in time, however slowly another process writes in the meantime.

    Args:
        tensor: a tensor of any shape, sharded over data-parallel processes.

    Raises:
        LaunchError: one of these processes did not come.
    """
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            along = tensor.device_mesh.get_group(dim)
            agreement.exchange(_processes(along, tensor.device), None, agreement.READ_TIMEOUT_S)
    return tensor.full_tensor()


def _processes(group: dist.ProcessGroup, device: torch.device) -> Launch:
    return Launch(dist.get_rank(group), group.size(), device, group, control_group(group))
