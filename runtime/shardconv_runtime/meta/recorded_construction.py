"""Build a model with transformers' initialization on the meta device, and draw one tensor without the others.

The special cases of parents and neighbors are recorded with the rest, so each tensor gets the values of the
real model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .lazy_init import Chain, LazyInit, Step, Window, fixed_seed, windows_in
from .meta_model import building

aten = torch.ops.aten

TRUNCATED = nn.init._no_grad_trunc_normal_
"""Private in torch (2.13), but every reference to ``trunc_normal_`` calls it, wherever it was imported to. On
a meta tensor it does nothing, and as separate steps it would draw until no element is outside of the
range."""

ELEMENTWISE = {nn.init.uniform_, nn.init.normal_, TRUNCATED, aten.normal_.default, aten.uniform_.default}
"""Functions that draw each element independently from one distribution, so parts can be drawn separately."""


def draw(step: Step, tensor: Tensor, seed: int) -> None:
    """Run an elementwise step on another tensor, in place. Several threads may do this at the same time."""
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = tree_map_only(Window, lambda _: tensor, (step.args, step.kwargs))
    with torch.no_grad():
        step.func(*args, **{**kwargs, "generator": generator})


Seeds = Callable[[int], int]
"""Function from the index of a step to its seed."""


class Construction(LazyInit):  # type: ignore[no-untyped-call]
    """While active, build models on the meta device; each step that draws has a seed."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self._seeds = seeds

    @contextmanager
    def active(self) -> Iterator[Construction]:
        """Record the operators of the block, including those that torch leaves out on the meta device.

        Only one thread at a time builds a model.
        """
        with building, self, _OnCpu():
            nn.init._no_grad_trunc_normal_ = self._truncated
            try:
                yield self
            finally:
                nn.init._no_grad_trunc_normal_ = TRUNCATED

    def elementwise(self, tensor: Tensor, chain: Chain) -> Step | None:
        """Return the only step that draws a tensor, if it draws each element independently."""
        if len(chain.indices) != 1 or not tensor.is_contiguous() or not Window.of(tensor).spans:
            return None
        step = self.steps[chain.indices[0]]
        drawn = windows_in((*step.args, *step.kwargs.values()))
        alike = len(drawn) == 1 and drawn[0].dtype == tensor.dtype
        return step if alike and step.func in ELEMENTWISE else None

    def run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step with its seed; memory without values is NaN."""
        step = self.steps[index]
        if kwargs.get("generator") is not None:  # the state of the model's own generator is not recorded
            kwargs = {**kwargs, "generator": None}
        with fixed_seed(self._seeds(index) if step.is_random else None):
            outputs = super().run(index, args, kwargs)
        if step.is_blank and (outputs.is_floating_point() or outputs.is_complex()):
            outputs.fill_(torch.nan)
        return outputs

    def _truncated(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record a truncated draw; called instead of ``TRUNCATED``."""
        if not tensor.is_meta:
            made: Tensor = TRUNCATED(tensor, *args, **kwargs)
            return made
        self.record(TRUNCATED, (tensor, *args), kwargs, tensor)
        return tensor


class _OnCpu(TorchFunctionMode):
    """Pretend to models and initializers that meta tensors are on the CPU. Code of torch and ours sees the
    truth.

    torch's initializers skip some meta tensors. transformers skips a model's initialization if a new empty
    tensor is on the meta device. Data that is moved to a tensor's device would be lost on the meta device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKING and _is_misled(sys._getframe(1).f_globals.get("__name__", "")):
            return _ASKING[func]
        return func(*args, **(kwargs or {}))


_ASKING = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.device.__get__: torch.device("cpu"),  # type: ignore[attr-defined]
}


_OWN = ("torch", "shardconv_runtime", "shardconv")


def _is_misled(module: str) -> bool:
    """Return whether this is an initializer of torch's, or the code of a model."""
    return module == nn.init.__name__ or module.partition(".")[0] not in _OWN
