"""The process groups of the ranks of a model."""

from __future__ import annotations

import atexit
import time
from datetime import timedelta
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import LaunchError

JOIN_TIMEOUT_S = 300
"""How long a rank waits for the others where a group of them is made."""

SETTLE_S = 0.1
"""How long a process that ends lets gloo's threads run. They free the tensors of the last collective, which
takes the interpreter's lock; a thread that asks for it while the interpreter goes down aborts the process."""

PATIENT_TIMEOUT_S = 30 * 24 * 3600
"""How long a control message may take: a rank may wait for a person at rank 0."""

_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]]
_subgroups = WeakKeyDictionary()


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same processes over gloo, for control messages: waiting for one needs no GPU, and may be long."""
    _settle_at_exit()
    made = _subgroup(group, _ranks(group), "gloo")
    made.set_timeout(timedelta(seconds=PATIENT_TIMEOUT_S))
    return made


def start_group(device: torch.device, timeout_s: float | None) -> None:
    """Start the default process group from the launcher's environment: nccl for a cuda device, else gloo.

    Raises:
        LaunchError: the environment lacks a launcher's variables, or the others cannot be joined.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        raise LaunchError(
            "cannot join the other processes at MASTER_ADDR and MASTER_PORT, or one of them ended; its own "
            f"output says why ({str(error).splitlines()[0]})"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise LaunchError(
            f"cannot start a {backend} process group from the environment: {str(error).splitlines()[0]}; "
            "start the program with torchrun"
        ) from error


def check_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that a process group serves a device.

    Raises:
        LaunchError: it does not.
    """
    served = {kind.type for kind in group._device_types}
    if device.type not in served:
        raise LaunchError(
            f"the process group serves {', '.join(sorted(served))}, but the model should be on {device}; "
            f"pass device=, or start the group with a backend for {device.type}"
        )


def axes_group(group: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of these members of ``group``.

    Raises:
        LaunchError: the ranks of ``group`` do not ascend.
    """
    ranks = _ranks(group)
    if len(members) == len(ranks):
        return group
    chosen = tuple(ranks[member] for member in members)
    if list(chosen) != sorted(chosen):
        raise LaunchError(f"the ranks of the given group must ascend, they are {list(ranks)}")
    return _subgroup(group, chosen, None)


@cache
def _settle_at_exit() -> None:
    atexit.register(time.sleep, SETTLE_S)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _subgroup(group: dist.ProcessGroup, ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup:
    """A group of some ranks of ``group``, made once and kept as long as ``group`` is.

    Only its members take part in making it, so several groups can load different models at a time.

    Raises:
        LaunchError: a member did not join.
    """
    made = _subgroups.setdefault(group, {})
    key = (backend or dist.get_backend(group), ranks)
    if key not in made:
        try:
            made[key] = dist.new_group(
                list(ranks),
                backend=backend or dist.get_backend(group),
                timeout=timedelta(seconds=JOIN_TIMEOUT_S) if backend else _timeout(group),
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            raise LaunchError(
                f"ranks {', '.join(map(str, ranks))} could not form a group: one ended or did not join; "
                f"its own output says why ({str(error).splitlines()[0]})"
            ) from error
    return made[key]


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of the group may take; a group of some of its ranks would not inherit it."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)
