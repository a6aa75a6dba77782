"""The dim of a device mesh over which one model is tensor-parallel."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import LaunchError

TP = "tp"
"""Name of the dim of a device mesh that loads one model together."""


def tp_group(mesh: DeviceMesh, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The processes of a device mesh that load one model together.

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
    return mesh.get_group(TP)
