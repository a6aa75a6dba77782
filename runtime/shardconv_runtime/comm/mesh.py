"""The processes of a launch as ranks of a plan's mesh."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import LaunchError
from ..format.dims import axes_of
from ..format.module_steps import AllGatherStep, AllReduceStep, LocalRowsStep, ReduceScatterStep
from ..format.plan import ModulePlan, Plan
from ..format.slices import group_of
from .collectives import AllReduce, ProcessCommunicator
from .launchers import env_int, other_launcher
from .process_groups import axes_group, check_group, control_group, start_group, warm_up


def find_device(device: torch.device | str | None, num_local: int) -> torch.device:
    """Return the device of this process, with an index if it is a GPU.

    A GPU without an index is the one to which the process is bound, by ``torch.cuda.set_device`` or
    ``init_process_group(device_id=)``, otherwise the GPU of the launcher's local rank. If a process sees only
    one GPU, it is that one: launchers may show each process its own.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type != "cuda" or (chosen.index is not None and torch.cuda.is_available()):
        return chosen
    if not torch.cuda.is_available():
        raise LaunchError(f"the model should be on {chosen}, but torch finds no cuda; pass device='cpu'")
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and world.bound_device_id is not None:
        return torch.device("cuda", world.bound_device_id.index)
    if torch.cuda.current_device():  # GPU 0 may be current without having been chosen
        return torch.device("cuda", torch.cuda.current_device())
    count, local = torch.cuda.device_count(), env_int("LOCAL_RANK", -1)
    if count == 1:
        return torch.device("cuda", 0)
    if local < 0:  # a launcher that fills one host after the other; duplicates are found once all have joined
        return torch.device("cuda", env_int("RANK", 0) % count)
    num_processes = max(local + 1, num_local)
    if num_processes > count:
        raise LaunchError(
            f"the launcher started {num_processes} processes on this host, where {count} GPUs are visible, "
            f"and each rank needs its own GPU; start {count} processes per host (torchrun --nproc-per-node "
            f"{count}), or pass device='cpu'"
        )
    return torch.device("cuda", local)


@dataclass(frozen=True)
class Launch:
    """This process among those that load one model.

    Attributes:
        group: all of them; None if there is only this one.
        control: a gloo group of the same processes, for control messages.
        timeout_s: how long a rank waits for the others while the model is used; None: torch's default.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    timeout_s: float | None = None


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes, of a group or of the launcher's environment; starts no group."""
    if group is not None or dist.is_initialized():
        return dist.get_world_size(group)
    return env_int("WORLD_SIZE", 1)


def rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank, without starting a group."""
    if group is None and not dist.is_initialized():
        return env_int("RANK", 0)
    rank_in_group = dist.get_rank(group)
    if rank_in_group < 0:
        raise LaunchError("this process is not in the group that was given to load the model")
    return rank_in_group


def check_world_size(plan: Plan, group: dist.ProcessGroup | None, stages_per_process: int) -> None:
    """Check that there is one process for each rank of the plan, or of this many stages."""
    num_processes, num_planned = world_size(group), plan.tp
    made_for = f"tp={plan.tp}"
    if plan.stages is not None:
        num_planned *= plan.stages.count // stages_per_process
        made_for += f" and {plan.stages.count} stages"
        made_for += f", {stages_per_process} in each process" if stages_per_process > 1 else ""
    if num_processes != num_planned:
        raise LaunchError(
            f"the model was converted for {made_for}, and {num_processes} process(es) load it; "
            f"start it with: torchrun --nproc-per-node {num_planned} your_script.py"
            + (" (or pass a group of that size)" if num_processes > 1 else other_launcher())
        )


def launch(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
) -> Launch:
    """Join the other processes; start the default process group if there is none.

    The backend is nccl for a cuda device, gloo otherwise. A single process that no launcher started
    needs no group and gets none.
    """
    everyone = group is None and not dist.is_initialized()
    found_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found_device.type == "cuda":
        found_device = find_device(found_device, env_int("LOCAL_WORLD_SIZE", 0) if everyone else 0)
    if found_device.type == "cuda":
        torch.cuda.set_device(found_device)
    if everyone and "RANK" not in os.environ:
        return Launch(0, 1, found_device)

    if everyone:
        start_group(found_device, timeout_s)
    rank_in_group = rank(group)
    group = group or dist.group.WORLD
    assert group is not None
    check_group(group, found_device)
    return Launch(
        rank_in_group, dist.get_world_size(group), found_device, group, control_group(group), timeout_s
    )


def connect(
    plan: Plan,
    start: Launch,
    all_reduce: AllReduce | None = None,
    more_axes: Iterable[Iterable[int]] = (),
) -> ProcessCommunicator:
    """Connect process groups for the sets of mesh axes that the plan uses; return the communicator."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    all_axes = range(len(plan.mesh))  # over which ranks compare their values
    for axes in sorted(used_axes(plan, (*more_axes, all_axes))):
        members = group_of(plan.mesh, axes, start.rank)
        if len(members) > 1 and start.group is not None:
            groups[axes] = axes_group(start.group, members)
    if groups:
        warm_up(groups.values(), start.device)
    return ProcessCommunicator(start.rank, plan.mesh, groups, all_reduce, start.device)


def can_capture(start: Launch) -> bool:
    """Return whether a CUDA graph can hold the ranks' collectives: with nccl, or for a single rank."""
    if start.device.type != "cuda":
        return False
    return start.world_size == 1 or "nccl" in dist.get_backend_config(start.group)


def used_axes(plan: Plan, more: Iterable[Iterable[int]] = ()) -> set[tuple[int, ...]]:
    """Return the sets of mesh axes of more than one rank over which a forward pass communicates."""
    used = [axes for entry in plan.modules for axes in _axes_of_module(entry)]
    return {tuple(sorted(axis for axis in axes if plan.mesh[axis] > 1)) for axes in (*used, *more)} - {()}


def _axes_of_module(entry: ModulePlan) -> Iterable[Iterable[int]]:
    for boundary in (*entry.inputs, *entry.outputs):
        if isinstance(boundary, AllReduceStep):
            yield boundary.axes
        elif isinstance(boundary, AllGatherStep | ReduceScatterStep | LocalRowsStep):
            yield axes_of(boundary.layout)
    if entry.norm is not None:
        yield entry.norm.axes


# A device mesh: the dim over which one model is tensor-parallel, and all of its processes.

TP = "tp"
"""Name of the dim of a device mesh over which one model is tensor-parallel."""
PP = "pp"
"""Name of the dim over which a model is cut into stages."""


def data_dims(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the dims of a mesh along which processes hold copies of one model, or parts of its tensors."""
    return tuple(name for name in mesh.mesh_dim_names or () if name not in (TP, PP))


def model_group(mesh: DeviceMesh, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the processes of a device mesh that load one model together: the ranks of all of its stages."""
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
    """Return all processes of a mesh, with a group for control messages; each of them calls this."""
    world = dist.group.WORLD
    assert world is not None, "the mesh has started it"
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    control = control_group(world, ranks)
    return Launch(ranks.index(dist.get_rank()), len(ranks), device, control, control)
