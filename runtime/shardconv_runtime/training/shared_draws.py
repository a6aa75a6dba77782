"""The ranks of a model draw from one random state while it is trained.

Replicated activations need the same dropout on every rank. Ranks that were seeded differently, or of which
one has drawn numbers for something else, would drift apart without an error.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.mesh import Launch
from ..errors import LaunchError
from .random_streams import states


def compare_draws(model: nn.Module, start: Launch) -> None:
    """Compare the random states of the ranks in each forward pass in training mode that draws numbers.

    A pass that draws nothing sends no message. In compiled code nothing is compared.

    Args:
        model: the complete model of this rank.
        start: the ranks.
    """
    comparison = _Comparison(start)
    for module in {id(part): part for part in (model, getattr(model, "base_model", model))}.values():
        module.register_forward_pre_hook(comparison.before, prepend=True)
        module.register_forward_hook(comparison.after)


class _Comparison:
    """Forward hooks of a model and of the part of it that callers may call by itself."""

    def __init__(self, start: Launch) -> None:
        self._start = start
        self._caller: nn.Module | None = None
        """The outermost module that runs."""
        self._before: tuple[Tensor, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Comparison:
        """Return hooks of a copy of the model, on the same ranks."""
        return _Comparison(self._start)

    def before(self, module: nn.Module, args: Any) -> None:
        """Note the random state."""
        if module.training and not torch.compiler.is_compiling() and self._caller in (None, module):
            self._caller, self._before = module, states()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare the noted state between the ranks, if numbers were drawn since.

        Raises:
            LaunchError: the ranks drew from other states.
        """
        if self._caller is not module or torch.compiler.is_compiling():
            return
        before, self._caller = self._before, None
        if all(torch.equal(a, b) for a, b in zip(before, states(), strict=True)):
            return
        with _disable_current_modes():
            digest = zlib.crc32(b"".join(state.numpy().tobytes() for state in before))
            largest = torch.tensor([digest, -digest])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._start.control)
        if largest.sum():
            raise LaunchError(
                "the ranks of a model drew random numbers (dropout) from different states, so their "
                "replicated activations differ; seed them alike (with the seed plus the number of the "
                "replica, not of the rank), and draw other numbers from a torch.Generator of its own, as a "
                "DataLoader with generator= does"
            )
