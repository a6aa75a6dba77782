"""Whether the ranks of a model get the same inputs: with different ones they would compute nothing of use.

To compare them costs a message between the ranks, so only the calls 1, 2, 4, 8 ... of a model are compared: a
data loader that shares its samples out over all processes is found in the first, and tokens that each process
draws for itself in the second or soon after. To compare all calls is an option.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

# Private, but nothing public keeps these messages out of the counts of CommDebugMode and its kin.
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.agreement import exchange
from ..comm.mesh import Launch
from ..inference.paged_model import PAGED
from ..inference.same_calls import digest, require_alike

CALL_TIMEOUT_S = 1800
"""How long a rank waits for the others to call the model: one of them may prepare data."""

VARIABLE = "SHARDCONV_CHECK_INPUTS"
"""Environment variable that has all calls compared."""


_REMEDY = (
    "its ranks compute one result together: give all of them the same (a sampler shares data out over "
    "replicas, not over the ranks of one; shardconv_runtime.from_rank_0 sends a value of rank 0 to all)"
)


def compare_inputs(
    model: nn.Module, start: Launch, *, always: bool, unless: Callable[[], bool] | None = None
) -> None:
    """Compare the inputs of a model's calls between its ranks, in place.

    Args:
        model: of this rank, complete.
        start: the ranks.
        always: compare those of every call; the environment variable has the same effect.
        unless: tells of a call that its ranks do not make it at about the same time.

    A call that Dynamo traces compares nothing, except that of ``load(compile=True)``.
    """
    comparison = _Comparison(start, always or os.environ.get(VARIABLE, "0") not in ("", "0"), unless)
    compiled = model._compiled_call_impl
    if compiled is None:
        model.register_forward_pre_hook(comparison, prepend=True, with_kwargs=True)
        return

    def compared(*args: Any, **kwargs: Any) -> Any:
        comparison(model, args, kwargs)
        return compiled(*args, **kwargs)

    model._compiled_call_impl = compared


class _Comparison:
    """Forward pre-hook of a model."""

    def __init__(self, start: Launch, always: bool, unless: Callable[[], bool] | None) -> None:
        self._start = start
        self._always = always
        self._unless = unless
        self._num_calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model has the same ranks."""
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or PAGED.get() or (self._unless is not None and self._unless()):
            return
        self._num_calls += 1
        if self._always or self._num_calls & (self._num_calls - 1) == 0:
            _compare(self._start, args, kwargs)


def _summary(value: Any) -> str:
    """What should be equal on all ranks: whole numbers exactly, and of computed values the kind and shape.

    Floating-point values may differ in their last bits, and parts of an encoder's output may be this rank's.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return f"{value.dtype} {list(value.shape)}"
    return digest(value) if isinstance(value, (Tensor, int, float, str, bool)) else type(value).__name__


def _compare(start: Launch, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ``LaunchError``, on all ranks, if the arguments differ or a rank did not come."""
    given = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
    digests = {name: _summary(value) for name, value in given.items()}
    with _disable_current_modes():
        calls = exchange(start, digests, CALL_TIMEOUT_S if start.timeout_s is None else start.timeout_s)
    require_alike("the model was called", calls, _REMEDY)
