"""Control messages between the ranks of one model, apart from the tensors that the model computes.

Errors that one rank alone can have are gathered from all ranks before the model's first collective
(``agree``), so that each of them raises and none hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import LaunchError
from .mesh import Launch

T = TypeVar("T")

AGREE_TIMEOUT_S = 300
"""How long a rank waits for the others where all should arrive at about the same time."""

CONNECT_TIMEOUT_S = 900
"""How long a rank waits for the others to be connected; longer than these wait for it in a group."""

READ_TIMEOUT_S = 3600
"""How long a rank waits for the others to have read their files."""

DOWNLOAD_TIMEOUT_S = 24 * 3600
"""How long a rank waits for the others to have downloaded their files."""


def agree(start: Launch, error: Exception | None, timeout_s: float | None = None) -> None:
    """Tell the others whether this rank failed; return only if none did.

    Args:
        start: the ranks.
        error: of this rank, if it failed.
        timeout_s: how long to wait for the others, ``AGREE_TIMEOUT_S`` by default.

    Raises:
        Exception: this rank's own error.
        LaunchError: the error of the first rank that has one, or a rank did not answer.
    """
    if start.control is None:
        if error is not None:
            raise error
        return
    text = None if error is None else str(error) or type(error).__name__
    try:
        texts: list[str | None] = exchange(start, text, timeout_s)
    except LaunchError as failure:
        if error is not None:
            raise error from failure
        raise
    if error is not None:
        raise error
    failed = {number: text for number, text in enumerate(texts) if text is not None}
    if failed:
        first, text = next(iter(failed.items()))
        others = f" (ranks {', '.join(map(str, failed))} failed)" if len(failed) > 1 else ""
        raise LaunchError(f"rank {first}: {text}{others}")


def together(start: Launch, stage: Callable[[], T], timeout_s: float | None = None) -> T:
    """Run a stage that may fail on one rank alone; return its result once all ranks have run it.

    Args:
        start: the ranks.
        stage: runs no collective.
        timeout_s: how long to wait for the others, ``AGREE_TIMEOUT_S`` by default.

    Raises:
        Exception: raised by ``stage`` on this rank.
        LaunchError: ``stage`` raised on another rank, or a rank did not answer.
    """
    outcome: list[T] = []
    error: Exception | None = None
    try:
        outcome.append(stage())
    except Exception as failure:
        error = failure
    agree(start, error, timeout_s)
    return outcome[0]


def exchange(start: Launch, value: T, timeout_s: float | None = None) -> list[T]:
    """The value of each rank, on every rank; of this process alone where it is the only one.

    Args:
        start: the ranks.
        value: picklable, small.
        timeout_s: how long to wait for the others, ``AGREE_TIMEOUT_S`` by default.

    Raises:
        LaunchError: a rank did not answer.
    """
    if start.control is None:
        return [value]
    timeout_s = AGREE_TIMEOUT_S if timeout_s is None else timeout_s
    values: list[Any] = [None] * start.world_size
    try:
        dist.monitored_barrier(start.control, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
        dist.all_gather_object(values, value, group=start.control)
    except RuntimeError as failure:
        raise LaunchError(
            f"rank {start.rank}: another rank did not answer within {timeout_s:.0f} s or ended; "
            f"its own output says why ({str(failure).splitlines()[0]})"
        ) from failure
    return values
