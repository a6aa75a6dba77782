"""Values of rank 0 on every rank: those that a user hands over, and its random state."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import LaunchError, RanksTimeoutError
from .host_numbers import host_states, set_host_states
from .mesh import Launch, rank
from .process_groups import control_group

V = TypeVar("V")


def from_rank_0(make: Callable[[], V], group: dist.ProcessGroup | None = None) -> V:
    """Call a function on rank 0 and return its value on every rank.

    Use it for values that only one process can get, for example a prompt that a person types. The other
    ranks wait without a time limit.

    Args:
        make: called only on rank 0. Its value is pickled.
        group: the processes that take part; by default all.

    Raises:
        Exception: on rank 0, the error that ``make`` raised.
        LaunchError: on the other ranks, if ``make`` raised an error or rank 0 ended.

    Example:
        >>> prompt = shardconv_runtime.from_rank_0(lambda: input("> "))
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is None or dist.get_world_size(group) == 1:
        return make()
    if rank(group) != 0:
        received: list[Any] = [None]
        try:
            dist.broadcast_object_list(received, group_src=0, group=control_group(group))
        except (RuntimeError, LaunchError) as lost:
            why = str(lost).splitlines()[0]
            raise RanksTimeoutError(f"rank 0 ended; its own output says why ({why})") from lost
        content, failure = received[0]
        if failure is not None:
            raise LaunchError(f"rank 0: {failure}")
        return cast(V, pickle.loads(content))
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


@contextmanager
def without_drawing() -> Iterator[None]:
    """Set all random states on the CPU back afterwards: numbers that rank 0 alone draws would leave it with
    others than the ranks that wait for it."""
    before = host_states()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            set_host_states(before)


def share_rng_state(start: Launch) -> None:
    """Continue on every rank with the random state of rank 0, so that all draw the same tokens."""
    if start.group is None:
        return
    torch.set_rng_state(_from_rank_0(torch.get_rng_state(), start))
    if start.device.type == "cuda":
        state = torch.cuda.get_rng_state(start.device)
        torch.cuda.set_rng_state(_from_rank_0(state, start), start.device)


def _from_rank_0(state: torch.Tensor, start: Launch) -> torch.Tensor:
    received = state.to(start.device)
    dist.broadcast(received, group_src=0, group=start.group)
    return received.cpu()
