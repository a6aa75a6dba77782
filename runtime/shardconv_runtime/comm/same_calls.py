"""Whether the ranks call a method of their model alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..errors import LaunchError
from .agreement import exchange
from .mesh import Launch

CALL_TIMEOUT_S = 1800
"""How long a rank waits for the others to call the model: one of them may prepare data."""

PAGED: ContextVar[bool] = ContextVar("PAGED", default=False)
"""Whether this thread calls a model for continuous batching: its inputs are the same on all ranks by how they
are made, and no control message may come between those of another thread."""


def require_same_call(start: Launch, method: str, given: Mapping[str, Any]) -> None:
    """Check that all ranks call a method with the same arguments.

    Raises:
        LaunchError: they do not, or a rank does not call it.
    """
    digests = {name: digest(value) for name, value in given.items()}
    compare_calls(method, exchange(start, digests, start.timeout_s))


def require_same_inputs(start: Launch, given: Mapping[str, Any]) -> None:
    """Check that all ranks call their model, at about the same time, with the same inputs.

    Raises:
        LaunchError: on all ranks; they do not, or a rank does not call it.
    """
    digests = {name: _summary(value) for name, value in given.items()}
    calls = exchange(start, digests, CALL_TIMEOUT_S if start.timeout_s is None else start.timeout_s)
    remedy = (
        "its ranks compute one result together: give all of them the same (a sampler shares data out over "
        "replicas, not over the ranks of one; shardconv_runtime.from_rank_0 sends a value of rank 0 to all)"
    )
    require_alike("the model was called", calls, remedy)


def _summary(value: Any) -> str:
    """What should be equal on all ranks: whole numbers exactly, and of computed values the kind and shape.

    Floating-point values may differ in their last bits, and parts of an encoder's output may be this rank's.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return f"{value.dtype} {list(value.shape)}"
    return digest(value) if isinstance(value, (Tensor, int, float, str, bool)) else type(value).__name__


def compare_calls(method: str, calls: Sequence[Mapping[str, str]]) -> None:
    """Compare the digests of arguments by name, of each rank.

    Raises:
        LaunchError: they differ.
    """
    remedy = "call it alike on every rank (shardconv_runtime.from_rank_0 sends a value of rank 0 to all)"
    require_alike(f"{method} was called", calls, remedy)


def require_alike(what: str, calls: Sequence[Mapping[str, str]], remedy: str) -> None:
    """Compare what is known of arguments by name, of each rank.

    Args:
        what: the beginning of the message, such as "generate was called".
        calls: of each rank.
        remedy: the end of the message.

    Raises:
        LaunchError: they differ.
    """
    for rank, call in enumerate(calls):
        for name in sorted(call.keys() | calls[0].keys()):
            if call.get(name) != calls[0].get(name):
                raise LaunchError(
                    f"{what} with another {name} on rank {rank} ({call.get(name)}) than on rank 0 "
                    f"({calls[0].get(name)}); {remedy}"
                )


def digest(value: Any) -> str:
    """A short text that is equal for equal values; for objects of unknown classes, the class."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        content_digest = hashlib.sha256(content.tobytes()).hexdigest()
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}, sha256 {content_digest[:12]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {digest(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(digest, value))})"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    if hasattr(value, "to_diff_dict"):
        return f"{type(value).__name__} {value.to_diff_dict()!r}"
    return type(value).__qualname__
