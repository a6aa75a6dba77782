"""The process groups of the ranks of a model."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Private: only here can a group be given a name, see ``_new_group``. No other file knows of it.
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from ..errors import LaunchError, RanksTimeoutError

JOIN_TIMEOUT_S = 300
"""How long a rank waits for the others when a group of them is made or connected."""

SETTLE_S = 0.1
"""How long a process that ends lets gloo's threads run. They free the tensors of the last collective, which
takes the interpreter's lock; a thread that asks for it while the interpreter goes down aborts the process."""

GLOO_LOOP = "gloo_tcp_loop"
"""Name of a thread in which gloo waits for what other processes send; it has none before torch 2.13."""

PATIENT_TIMEOUT_S = 30 * 24 * 3600
"""How long a control message may take: a rank may wait for a person at rank 0."""

_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...], str], dist.ProcessGroup]]
_subgroups = WeakKeyDictionary()


def needs_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether ranks share one GPU, so that tensors are gathered through the memory of the host."""
    return device.type == "cuda" and "cuda:gloo" in dist.get_backend_config(group)


def control_group(group: dist.ProcessGroup, ranks: tuple[int, ...] | None = None) -> dist.ProcessGroup:
    """Return a gloo group of the same processes, for control messages: waiting for these needs no GPU.

    Args:
        ranks: global ranks of the processes that exchange messages, ascending; by default all.
    """
    _settle_at_exit()
    made = _subgroup(group, ranks or _ranks(group), "gloo")
    made.set_timeout(timedelta(seconds=PATIENT_TIMEOUT_S))
    return made


def loop_group(group: dist.ProcessGroup, timeout_s: float | None) -> dist.ProcessGroup:
    """Return another gloo group of the same processes, for messages of a separate thread."""
    _settle_at_exit()
    made = _subgroup(group, _ranks(group), "gloo", "loop")
    made.set_timeout(timedelta(seconds=PATIENT_TIMEOUT_S if timeout_s is None else timeout_s))
    calm_gloo()
    return made


def start_group(device: torch.device, timeout_s: float | None) -> None:
    """Start the default process group from the launcher's environment: nccl for a cuda device, otherwise
    gloo.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        raise RanksTimeoutError(
            "cannot join the other processes at MASTER_ADDR and MASTER_PORT, or one of them ended; its own "
            f"output says why ({str(error).splitlines()[0]})"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise LaunchError(
            f"cannot start a {backend} process group from the environment: {str(error).splitlines()[0]}; "
            "start the program with torchrun"
        ) from error


def check_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that a process group serves a device."""
    served = set(_device_types(group))
    if device.type not in served:
        raise LaunchError(
            f"the process group serves {', '.join(sorted(served))}, but the model should be on {device}; "
            f"pass device=, or start the group with a backend for {device.type}"
        )


def _device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of devices that a group serves, ``cpu:gloo,cuda:nccl`` in torch's words."""
    return [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]


def axes_group(group: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of these members of ``group``."""
    ranks = _ranks(group)
    if len(members) == len(ranks):
        return group
    chosen = tuple(ranks[member] for member in members)
    if list(chosen) != sorted(chosen):
        raise LaunchError(f"the ranks of the given group must ascend, they are {list(ranks)}")
    return _subgroup(group, chosen, None)


def warm_up(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Run a collective in each group. NCCL connects a group in its first one, and fails only then. Gloo's
    loops are calmed.

    A default group that is bound to a device would connect when it is started. But groups of some ranks would
    then be split off its communicator, in which all processes take part, not only the members.
    """
    try:
        for group in groups:
            work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
            work.wait(timedelta(seconds=JOIN_TIMEOUT_S))
        calm_gloo()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise RanksTimeoutError(
            f"rank {dist.get_rank()} cannot communicate with other ranks: {first}"
        ) from error


def calm_gloo() -> None:
    """Keep gloo's event loops from preempting other threads as they wake up: ``SCHED_BATCH``, see sched(7).

    A loop polls as long as another thread holds the lock of a connection with events. If it has preempted
    that thread, it polls for a whole time slice. With two ranks on two idle cores, a sum of 4 kB took 540
    calls of ``epoll_wait`` and 1.1 ms, and takes 0.3 ms so. The price is paid beside other programs that
    occupy all cores: a loop waits for its turn, which made steps of 8 ms with one sum up to a tenth slower.

    Loops that were given a policy keep it. Nothing happens where there is no such policy, where a sandbox
    forbids to set it, or before torch 2.13, where loops cannot be told from other threads.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in Path("/proc/self/task").glob("*"):
        try:
            is_loop, number = (thread / "comm").read_text().strip() == GLOO_LOOP, int(thread.name)
            if is_loop and os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # it has ended, or may not
            continue


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of collectives of a group, which groups of its ranks would not inherit."""
    options = getattr(group._get_backend(torch.device(_device_types(group)[0])), "options", None)
    is_nccl = dist.get_backend(group) == "nccl"
    default = (is_nccl and default_pg_nccl_timeout) or default_pg_timeout
    timeout: timedelta = getattr(options, "_timeout", None) or default
    return timeout


def abort_groups(group: dist.ProcessGroup) -> None:
    """Begin to end the collectives over nccl of a group and of groups of its ranks; none can follow.

    Each group has its own thread: NCCL may wait in one for the end of another one.
    """
    over_nccl = (
        g for g in (group, *_subgroups.get(group, {}).values()) if "nccl" in dist.get_backend_config(g)
    )
    for made in over_nccl:
        threading.Thread(target=made.abort, name="shardconv abort", daemon=True).start()


@cache
def _settle_at_exit() -> None:
    atexit.register(time.sleep, SETTLE_S)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _subgroup(
    group: dist.ProcessGroup, ranks: tuple[int, ...], backend: str | None, purpose: str = ""
) -> dist.ProcessGroup:
    """Return a group of some ranks of ``group``, made once for a purpose and kept as long as ``group``.

    Only its members take part in making it, so several groups can load different models at a time.
    """
    made = _subgroups.setdefault(group, {})
    key = (backend or dist.get_backend(group), ranks, purpose)
    if key not in made:
        timeout = timedelta(seconds=JOIN_TIMEOUT_S) if backend else timeout_of(group)
        try:
            made[key] = _new_group(group, ranks, key[0], purpose, timeout)
        except (RuntimeError, ValueError) as error:
            raise RanksTimeoutError(
                f"ranks {', '.join(map(str, ranks))} could not form a group: one ended or did not join; "
                f"its own output says why ({str(error).splitlines()[0]})"
            ) from error
    return made[key]


def _new_group(
    group: dist.ProcessGroup, ranks: tuple[int, ...], backend: str, purpose: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group, which its members find under a name that describes it.

    ``new_group`` counts the groups of this process for the name: processes that made others before, of
    other models, would wait for each other under different names.
    """
    content = f"{group.group_name} {backend} {ranks} {purpose}"
    name = f"shardconv_{hashlib.sha256(content.encode()).hexdigest()[:32]}"
    number = ranks.index(dist.get_rank())
    with _not_split():
        made: dist.ProcessGroup
        made, _ = _c10d._new_process_group_helper(
            len(ranks),
            number,
            list(ranks),
            dist.Backend(backend),
            group.get_group_store(),
            name,  # type: ignore[arg-type]
            timeout=timeout,
            group_desc="shardconv",
        )
    _c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    return made


@contextmanager
def _not_split() -> Iterator[None]:
    """Keep torch from splitting the communicator of a default group that is bound to a device."""
    world = dist.group.WORLD
    assert world is not None, "the group is one of its own"
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
