"""Whether the ranks make the same call of their model; if not, they would misread each other's messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputsDifferError
from ..format.header import dtype_name
from .agreement import exchange
from .mesh import Launch

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
                raise InputsDifferError(
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
