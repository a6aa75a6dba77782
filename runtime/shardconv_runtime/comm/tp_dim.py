"""A device mesh: the dim over which one model is tensor-parallel, and all of its processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import LaunchError
from .mesh import Launch
from .process_groups import axes_group, control_group

TP = "tp"
"""Name of the dim of a device mesh over which one model is tensor-parallel."""
PP = "pp"
"""Name of the dim over which a model is cut into stages."""


def data_dims(mesh: DeviceMesh) -> tuple[str, ...]:
    """The dims of a mesh along which processes hold copies of one model, or parts of its tensors."""
    return tuple(name for name in mesh.mesh_dim_names or () if name not in (TP, PP))


def model_group(mesh: DeviceMesh, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The processes of a device mesh that load one model together: the ranks of all of its stages.

    Raises:
        LaunchError: the mesh has no dim of that name, or a group was given as well.
    """
    if group is not None:
        raise LaunchError("give group= or mesh=, not both")
    if TP not in (mesh.mesh_dim_names or ()):
        raise LaunchError(
            f"the mesh has the dims {mesh.mesh_dim_names}, and none of them is named {TP!r}; make it with "
            'init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))'
        )
    if PP not in (mesh.mesh_dim_names or ()):
        return mesh.get_group(TP)
    world = dist.group.WORLD
    assert world is not None, "the mesh has started it"
    along = tuple(name for name in mesh.mesh_dim_names or () if name in (TP, PP))
    return axes_group(world, tuple(mesh[along].mesh.flatten().tolist()))


def mesh_processes(mesh: DeviceMesh, device: torch.device) -> Launch:
    """All processes of a mesh, for control messages between them; each of them calls it.

    Args:
        mesh: it has this process.
        device: of this process.

    Raises:
        LaunchError: one of them did not join.
    """
    world = dist.group.WORLD
    assert world is not None, "the mesh has started it"
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    control = control_group(world, ranks)
    return Launch(ranks.index(dist.get_rank()), len(ranks), device, control, control)
