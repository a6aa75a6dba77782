"""Whether the ranks of a model get the same inputs: with different ones they would compute nothing of use.

To compare them costs a message between the ranks, so only the calls 1, 2, 4, 8 ... of a model are compared: a
data loader that shares its samples out over all processes is found in the first, and tokens that each process
draws for itself in the second or soon after. To compare all calls is an option.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

# Private, but nothing public keeps these messages out of the counts of CommDebugMode and its kin.
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.mesh import Launch
from ..comm.same_calls import PAGED, require_same_inputs

VARIABLE = "SHARDCONV_CHECK_INPUTS"
"""Environment variable that has all calls compared."""


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
            given = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
            with _disable_current_modes():
                require_same_inputs(self._start, given)
