"""Control messages between the ranks of one model, apart from the tensors that the model computes.

Errors that only some ranks can have are gathered from all ranks before the model's first collective
(``agree``), so that each of them raises and none hangs.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import InputsDifferError, LaunchError, RanksTimeoutError
from .mesh import Launch, can_capture
from .waiting import hinting

T = TypeVar("T")

AGREE_TIMEOUT_S = 300
"""How long a rank waits for the others if all should arrive at about the same time."""

CONNECT_TIMEOUT_S = 900
"""How long a rank waits for the others to be connected; longer than these wait for it in a group."""

READ_TIMEOUT_S = 3600
"""How long a rank waits for the others to have read their files."""

DOWNLOAD_TIMEOUT_S = 24 * 3600
"""How long a rank waits for the others to have downloaded their files."""


def agree(start: Launch, error: Exception | None, timeout_s: float | None = None) -> None:
    """Tell the others whether this rank failed; return only if none did."""
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
        failed_ranks = f" (ranks {', '.join(map(str, failed))} failed)" if len(failed) > 1 else ""
        raise LaunchError(f"rank {first}: {text}{failed_ranks}")


def together(start: Launch, stage: Callable[[], T], timeout_s: float | None = None) -> T:
    """Run a stage that may fail on only one rank; return its result once all ranks have run it."""
    outcome: list[T] = []
    error: Exception | None = None
    try:
        outcome.append(stage())
    except Exception as failure:
        error = failure
    agree(start, error, timeout_s)
    return outcome[0]


def exchange(start: Launch, value: T, timeout_s: float | None = None, call: str = "") -> list[T]:
    """Return the value of each rank, on every rank; only the own one in a job of one process."""
    if start.control is None:
        return [value]
    timeout_s = AGREE_TIMEOUT_S if timeout_s is None else timeout_s
    call = _CALL.get() or call
    messages: list[Any] = [None] * start.world_size
    try:
        with hinting(start.rank, call or "a message to all ranks", timeout_s):
            dist.monitored_barrier(start.control, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
            dist.all_gather_object(messages, (call, value), group=start.control)
    except RuntimeError as failure:
        raise RanksTimeoutError(
            f"rank {start.rank}: another rank did not answer within {timeout_s:.0f} s or ended; "
            f"its own output says why ({str(failure).splitlines()[0]})"
        ) from failure
    calls = [name for name, _ in messages]
    for other, name in enumerate(calls):
        if name and calls[0] and name != calls[0]:
            raise InputsDifferError(
                f"rank {other} is in {name} while rank 0 is in {calls[0]}, and ranks compute and save "
                "together; make the same calls in the same order on all ranks"
            )
    return [value for _, value in messages]


def require_own_gpus(start: Launch) -> None:
    """Check that each rank has its own GPU, which nccl needs; every rank calls it."""
    if start.world_size > 1 and can_capture(start):
        error = shared_gpu_error(exchange(start, describe_gpu(start.device)))
        if error is not None:
            raise error


def describe_gpu(device: torch.device) -> tuple[str, str]:
    """Return the host and the UUID of a GPU. It does not depend on ``CUDA_VISIBLE_DEVICES``."""
    properties = torch.cuda.get_device_properties(device)
    return socket.gethostname(), str(properties.uuid)


def shared_gpu_error(gpus: list[tuple[str, str]]) -> LaunchError | None:
    """Return the error if two ranks would use one GPU, otherwise None."""
    first: dict[tuple[str, str], int] = {}
    for number, gpu in enumerate(gpus):
        if first.setdefault(gpu, number) != number:
            host, identity = gpu
            return LaunchError(
                f"ranks {first[gpu]} and {number} use the same GPU ({identity} on {host}), and nccl needs "
                "one for each rank; let each process see or bind its own (CUDA_VISIBLE_DEVICES, "
                "torch.cuda.set_device, load(device=)), or start the group with gloo"
            )
    return None


_CALL: ContextVar[str] = ContextVar("CALL", default="")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def named_call(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator: control messages of the function have its name, unless it runs in another call.

    If ranks make different calls, the messages of one would be read as those of the other.
    """

    def decorated(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _CALL.get():
                return function(*args, **kwargs)
            token = _CALL.set(name)
            try:
                return function(*args, **kwargs)
            finally:
                _CALL.reset(token)

        return cast(_Function, call)

    return decorated
