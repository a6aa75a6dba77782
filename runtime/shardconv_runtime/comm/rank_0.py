"""Values of rank 0 on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import LaunchError
from .mesh import rank
from .process_groups import control_group

T = TypeVar("T")


def from_rank_0(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The value that ``make`` returns on rank 0, on every rank; the others wait for it as long as it takes.

    For values that only one process can have: a prompt that a person types, a request from the network.

    Args:
        make: called on rank 0 alone; its value is pickled.
        group: the processes that take part; by default all.

    Raises:
        Exception: on rank 0, the error that ``make`` raised.
        LaunchError: on the others, if ``make`` raised or rank 0 ended.

    Example:
        >>> prompt = shardconv_runtime.from_rank_0(lambda: input("> "))
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is None or dist.get_world_size(group) == 1:
        return make()
    if rank(group) != 0:
        return cast(T, _received(group))
    try:
        value = make()
        pickled = pickle.dumps(value)
    except BaseException as error:
        _send(group, (b"", f"{type(error).__name__}: {error}"))
        raise
    _send(group, (pickled, None))
    return value


def _send(group: dist.ProcessGroup, message: tuple[bytes, str | None]) -> None:
    dist.broadcast_object_list([message], group_src=0, group=control_group(group))


def _received(group: dist.ProcessGroup) -> Any:
    received: list[Any] = [None]
    try:
        dist.broadcast_object_list(received, group_src=0, group=control_group(group))
    except (RuntimeError, LaunchError) as error:
        raise LaunchError(f"rank 0 ended; its own output says why ({str(error).splitlines()[0]})") from error
    pickled, failure = received[0]
    if failure is not None:
        raise LaunchError(f"rank 0: {failure}")
    return pickle.loads(pickled)
