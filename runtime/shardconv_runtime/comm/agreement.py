"""Control messages between the ranks of one model, apart from the tensors that the model computes.

Errors that only some ranks can have are gathered from all ranks before the model's first collective
(``agree``), so that each of them raises and none hangs.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LaunchError
from ..format.header import dtype_name
from .mesh import Launch, can_capture, rank
from .process_groups import control_group
from .waiting import hinting

# Values of rank 0 on every rank.

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
            raise LaunchError(f"rank 0 ended; its own output says why ({why})") from lost
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


# The random state of rank 0 on every rank.


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


# The call of the user that control messages belong to.
#
# If ranks make different calls, the messages of one would be read as those of the other.

_CALL: ContextVar[str] = ContextVar("CALL", default="")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def named_call(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator: control messages of the function have its name, unless it runs in another call."""

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
        others = f" (ranks {', '.join(map(str, failed))} failed)" if len(failed) > 1 else ""
        raise LaunchError(f"rank {first}: {text}{others}")


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
        raise LaunchError(
            f"rank {start.rank}: another rank did not answer within {timeout_s:.0f} s or ended; "
            f"its own output says why ({str(failure).splitlines()[0]})"
        ) from failure
    calls = [name for name, _ in messages]
    for other, name in enumerate(calls):
        if name and calls[0] and name != calls[0]:
            raise LaunchError(
                f"rank {other} is in {name} while rank 0 is in {calls[0]}, and ranks compute and save "
                "together; make the same calls in the same order on all ranks"
            )
    return [value for _, value in messages]


# Whether the ranks call a method of their model alike.

CALL_TIMEOUT_S = 1800
"""How long a rank waits for the others to call the model: one of them may prepare data."""

PAGED: ContextVar[bool] = ContextVar("PAGED", default=False)
"""Whether this thread calls a model for continuous batching. Its inputs are the same on all ranks by
construction, and its control messages may not come between the messages of another thread."""


def require_same_call(start: Launch, method: str, given: Mapping[str, Any]) -> None:
    """Check that all ranks call a method with the same arguments."""
    digests = {name: digest(value) for name, value in given.items()}
    compare_calls(method, exchange(start, digests, start.timeout_s, method))


def require_same_inputs(start: Launch, given: Mapping[str, Any]) -> None:
    """Check that all ranks call their model, at about the same time, with the same inputs."""
    summaries = {name: _summary(value) for name, value in given.items()}
    timeout_s = CALL_TIMEOUT_S if start.timeout_s is None else start.timeout_s
    calls = exchange(start, summaries, timeout_s, "a call of the model")
    remedy = (
        "its ranks compute one result together: give all of them the same (a sampler shares data out over "
        "replicas, not over the ranks of one; shardconv_runtime.from_rank_0 sends a value of rank 0 to all)"
    )
    require_alike("the model was called", calls, remedy)


@dataclass(frozen=True, eq=False)
class _Floats:
    """A floating-point tensor, whose last bits may differ between ranks that have computed it."""

    dtype: str
    shape: tuple[int, ...]
    norm: float
    """The norm of the elements x / (1 + |x|)."""
    projection: float
    """The sum of these elements, each times a factor that depends on its position."""

    @classmethod
    def of(cls, x: Tensor) -> _Floats:
        """Summarize a tensor of any shape."""
        flat = x.detach().reshape(-1).double()
        flat = (flat / (1 + flat.abs())).nan_to_num(
            nan=2.0, posinf=1.0, neginf=-1.0
        )  # masks have huge values
        # Factors without a period that the rows of an image could have.
        factors = (torch.arange(len(flat), device=flat.device) * 0.7390851332151607).cos()
        return cls(dtype_name(x.dtype), tuple(x.shape), float(flat.norm()), float(flat @ factors.double()))

    def __eq__(self, other: object) -> bool:
        """Return whether the other tensor is the same up to rounding."""
        if not isinstance(other, _Floats) or (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        allowed = _ROUNDING.get(self.dtype, 1e-3) * max(self.norm, other.norm)
        differences = (self.norm - other.norm, self.projection - other.projection)
        return all(abs(each) <= allowed for each in differences)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}, {self.norm:.6g}, {self.projection:.6g}"


_ROUNDING = {"bfloat16": 3e-2, "float16": 1e-2}
"""Largest difference that counts as rounding, relative to the norm; 1e-3 for wider dtypes."""


def _summary(value: Any) -> str | _Floats:
    """Return the part of a value that must be equal on all ranks: integers exactly, computed values up to
    rounding."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return _Floats.of(value)
    return digest(value) if isinstance(value, (Tensor, int, float, str, bool)) else type(value).__name__


def compare_calls(method: str, calls: Sequence[Mapping[str, str]]) -> None:
    """Compare the digests of arguments by name, of each rank."""
    remedy = "call it alike on every rank (shardconv_runtime.from_rank_0 sends a value of rank 0 to all)"
    require_alike(f"{method} was called", calls, remedy)


def require_alike(what: str, calls: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """Compare descriptions of arguments by name between the ranks."""
    for caller, call in enumerate(calls):
        for name in sorted(call.keys() | calls[0].keys()):
            if call.get(name) != calls[0].get(name):
                raise LaunchError(
                    f"{what} with another {name} on rank {caller} ({call.get(name)}) than on rank 0 "
                    f"({calls[0].get(name)}); {remedy}"
                )


def brief_digest(values: Sequence[Any], name: str) -> str:
    """Return the number of values and a hash of them, for lists that are too long for a message."""
    return f"{len(values)} {name}, sha256 {hashlib.sha256(repr(values).encode()).hexdigest()[:12]}"


def digest(value: Any) -> str:
    """Return a short text that is equal for equal values; for objects of unknown classes, the class."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        content_digest = hashlib.sha256(content.tobytes()).hexdigest()
        return f"{dtype_name(value.dtype)} {list(value.shape)}, sha256 {content_digest[:12]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {digest(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(digest, value))})"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    if hasattr(value, "to_diff_dict"):
        return f"{type(value).__name__} {value.to_diff_dict()!r}"
    return type(value).__qualname__


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
