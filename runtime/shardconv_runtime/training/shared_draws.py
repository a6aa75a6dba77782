"""The ranks of a model draw from one random state while it is trained.

Replicated activations need the same dropout on every rank, and the same masks if code draws them with numpy.
Ranks that were seeded differently, or of which one has drawn numbers for something else, would drift apart
without an error.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.host_numbers import HostStates, digests, host_states
from ..comm.mesh import Launch
from ..errors import InputsDifferError, RefusedCallError
from .random_streams import states


def compare_draws(model: nn.Module, start: Launch, *, draws_on_host: bool) -> None:
    """Compare the random states of the ranks in each forward pass in training mode that draws numbers.

    A pass that draws nothing sends no message. In compiled code nothing is compared.
    """
    comparison = _Comparison(start, draws_on_host)
    for module in {id(part): part for part in (model, getattr(model, "base_model", model))}.values():
        module.register_forward_pre_hook(comparison.before, prepend=True)
        module.register_forward_hook(comparison.after)


class _Comparison:
    """Forward hooks of a model and of the part of it that callers may call by itself."""

    def __init__(self, start: Launch, draws_on_host: bool) -> None:
        self._start = start
        self._draws_on_host = draws_on_host
        self._caller: nn.Module | None = None
        """The outermost module that runs."""
        self._before: tuple[Tensor, ...] = ()
        self._host_before: HostStates | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Comparison:
        """Return hooks of a copy of the model, on the same ranks."""
        return _Comparison(self._start, self._draws_on_host)

    def before(self, module: nn.Module, args: Any) -> None:
        """Note the random states."""
        if module.training and not torch.compiler.is_compiling() and self._caller in (None, module):
            self._caller, self._before, self._host_before = module, states(), host_states()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare the noted states between the ranks, if numbers were drawn since.

        Python's numbers count only if the plan knows of them: a thread of another library may draw some.
        """
        if self._caller is not module or torch.compiler.is_compiling():
            return
        before, host_before, self._caller = self._before, self._host_before, None
        assert host_before is not None, "noted with the caller"
        pairs = zip(digests(host_before), digests(host_states()), strict=True)
        on_host = [noted if noted != now else b"" for noted, now in pairs]
        if on_host[0] and not self._draws_on_host:
            raise RefusedCallError(
                f"{type(module).__name__}: its code drew random numbers with numpy in training mode, and the "
                "plan is not made for its use of them, for example masks of activations; convert the "
                "model again with the config that it is trained with, or set the options that ask for them "
                "to 0 (mask_time_prob, mask_feature_prob) or False (apply_spec_augment)"
            )
        is_same = all(torch.equal(a, b) for a, b in zip(before, states(), strict=True))
        # Ranks may decide by their own numbers whether to draw; so all take part if any may have drawn.
        if is_same and not self._draws_on_host:
            return
        with _disable_current_modes():
            drawn = [] if is_same else [state.numpy().tobytes() for state in before]
            digest = zlib.crc32(b"".join([*drawn, *(on_host if self._draws_on_host else ())]))
            largest = torch.tensor([digest, -digest])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._start.control)
        if largest.sum():
            raise InputsDifferError(
                "the ranks of a model drew random numbers (dropout) from different states, so their "
                "replicated activations differ; seed them alike (with the seed plus the number of the "
                "replica, not of the rank; transformers.set_seed seeds numpy and Python as well), and draw "
                "other numbers from a torch.Generator of its own, as a DataLoader with generator= does"
            )
