"""All processes that hold a model: its ranks, and the data-parallel ones that hold the same rank's part.

A model on tp x dp processes is loaded by groups of tp. What is written of it must be written once, so all of
them have to know of each other: from the mesh of its DTensors (``fully_shard``), from
``DistributedDataParallel``, or because the caller says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..comm import agreement
from ..comm.mesh import Launch, control_group
from ..errors import LaunchError
from ..loaded import loaded, unwrapped

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Everyone:
    """This process among all that hold one model."""

    launch: Launch
    """All of them; ``control`` is a group for words between them."""
    rank: int
    """Of the plan."""
    is_first: bool
    """It is the first of the data-parallel processes of its rank: the one that writes."""

    @property
    def is_leader(self) -> bool:
        """It does what is done once."""
        return self.is_first and self.rank == 0

    def agree(self, error: Exception | None, timeout_s: float | None = None) -> None:
        """Return only if all are well, see ``agreement.agree``."""
        agreement.agree(self.launch, error, timeout_s)


def everyone(model: nn.Module, replicas: dist.ProcessGroup | None = None) -> Everyone:
    """Find all processes of a model; each of them calls it.

    Modules of ``fully_shard`` that a forward pass left whole are sharded again.

    Args:
        model: of ``load``, or a wrapper of it.
        replicas: the processes that hold the same rank's part, where neither DTensors nor a
            ``DistributedDataParallel`` say it.

    Raises:
        LaunchError: its data parallelism mixes ranks of the model, or another process did not come.
        PlanError: ``load`` did not make the model.
    """
    start = loaded(model).launch
    for module in unwrapped(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    groups = [replicas] if replicas is not None else _data_parallel_groups(model)
    if not groups:
        return Everyone(start, start.rank, True)
    me = dist.get_rank()
    own = (me,) if start.group is None else tuple(dist.get_process_group_ranks(start.group))
    ranks = set(own)
    for group in groups:
        if mixed := set(dist.get_process_group_ranks(group)).intersection(own) - {me}:
            raise LaunchError(
                f"the processes {me} and {min(mixed)} hold parts of one model, and its data parallelism "
                "takes them for copies; give it the dim of the device mesh that the model was not loaded on"
            )
        along = Launch(dist.get_rank(group), group.size(), start.device, group, control_group(group))
        ranks.update(*agreement.exchange(along, tuple(ranks)))
    ordered = tuple(sorted(ranks))
    control = _control(ordered)
    launch = Launch(ordered.index(me), len(ordered), start.device, control, control)
    return Everyone(launch, start.rank, all(dist.get_rank(group) == 0 for group in groups))


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh that the model's parameters are sharded over beside tensor parallelism; None: none.

    Raises:
        LaunchError: there is more than one.
    """
    meshes = {p.device_mesh for p in unwrapped(model).parameters() if isinstance(p, DTensor)}
    if len(meshes) > 1:
        raise LaunchError("the model's parameters are DTensors of several device meshes; use one for all")
    return next(iter(meshes), None)


def _data_parallel_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    mesh = mesh_of(model)
    if mesh is not None:
        return [mesh.get_group(dim) for dim in range(mesh.ndim)]
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    return [wrapper.process_group for wrapper in wrappers[:1]]


def _control(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A gloo group of these processes, made once."""
    world = dist.group.WORLD
    assert world is not None, "its subgroups exist"
    if len(ranks) == world.size():
        return control_group(world)
    groups = _made.setdefault(world, {})
    if ranks not in groups:
        made = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        groups[ranks] = control_group(made)
    return groups[ranks]
