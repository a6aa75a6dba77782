"""What happens to gradients on their way to the parameters.

A parameter that ranks hold alike, but use on different parts of the activations, has a different gradient on
each: a term of a sum. While its module runs, such a parameter is replaced by itself behind an identity
whose backward sums the gradient over the ranks that share it. Positions that are split over a mesh axis are
left out of the sum over it, segment by segment.

A hook on the parameter itself would not do: under FSDP the gradient reaches another tensor than the one that
the optimizer holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator, apply, unchanged
from ..errors import PlanError
from ..format.grad_sums import Sum, sums
from ..format.layout_hash import holds_values
from ..format.plan import ParameterPlan
from ..parallel.boundary import renumber

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class GradientGate:
    """The identity of one parameter, whose backward makes the gradient right.

    Gradients in low precision are summed in float32.

    Args:
        comm: the ranks.
        entry: the parameter's plan.
        axes: mesh axes over which the gradient is a Partial.
    """

    def __init__(self, comm: Communicator, entry: ParameterPlan, axes: Iterable[int]) -> None:
        self._comm = comm
        self._sums = sums(entry, comm.mesh, comm.rank, axes)
        self._is_zero = not holds_values(entry, comm.mesh, comm.rank)

    @property
    def is_open(self) -> bool:
        """Whether gradients pass as they are."""
        return not self._sums and not self._is_zero

    def __call__(self, parameter: Tensor) -> Tensor:
        return apply(parameter, unchanged, self._backward)

    def _backward(self, gradient: Tensor) -> Tensor:
        if self._is_zero:
            return torch.zeros_like(gradient)
        if not self._sums:
            return gradient
        wide = gradient.float() if gradient.dtype in _LOW_PRECISION else gradient
        if len(self._sums) == 1 and self._sums[0].is_whole:
            return self._comm.all_reduce(wide, self._sums[0].axes).to(gradient.dtype)
        out = wide.clone(memory_format=torch.contiguous_format)
        for each in self._sums:
            index = _index(each, wide.device)
            out[index] = self._comm.all_reduce(wide[index], each.axes)
        return out.to(gradient.dtype)


@dataclass(frozen=True, slots=True)
class Gated:
    """A parameter and its gate: ``name`` of ``owner``, at ``fqn`` in the model."""

    owner: nn.Module
    name: str
    fqn: str
    gate: GradientGate


def attach_gates(module: nn.Module, gated: Sequence[Gated]) -> None:
    """Put parameters, of a module or of modules inside of it, behind their gates while it runs."""
    if gated:
        swap = _Swap(tuple(gated))
        renumber(module, module.register_forward_pre_hook(swap.before, prepend=True))
        # Always, since recomputation ends a forward pass early.
        renumber(module, module.register_forward_hook(swap.after, always_call=True))


class _Swap:
    """Forward hooks of one module."""

    def __init__(self, gated: tuple[Gated, ...]) -> None:
        self._gated = gated
        self._parameters: list[nn.Parameter | None] = [None] * len(gated)
        self._replacements: list[Tensor | None] = [None] * len(gated)

    def before(self, module: nn.Module, args: Any) -> None:
        """Replace; what an earlier call that failed has left behind is put back first."""
        for index, each in enumerate(self._gated):
            tensors: dict[str, Any] = each.owner._parameters
            parameter = tensors[each.name]
            if self._parameters[index] is not None and parameter is self._replacements[index]:
                parameter = self._parameters[index]
            self._parameters[index] = parameter
            tensors[each.name] = self._replacements[index] = each.gate(parameter)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put the parameters back.

        Raises:
            PlanError: something else has replaced them meanwhile, so that their gradients would be wrong.
        """
        for index, each in enumerate(self._gated):
            if self._replacements[index] is None:
                continue  # a forward pass that failed before it came here
            if each.owner._parameters[each.name] is not self._replacements[index]:
                raise PlanError(
                    f"{each.fqn} was exchanged while a module around its own ran, and its gradient would not "
                    "be summed over the ranks; wrap the module around it, or none inside of it (fully_shard)"
                )
            each.owner._parameters[each.name] = self._parameters[index]
            self._parameters[index] = self._replacements[index] = None


def _index(part: Sum, device: torch.device) -> tuple[Tensor, ...]:
    """What a local tensor is indexed with to get the positions of a sum."""
    spans = [torch.cat([torch.arange(*span, device=device) for span in each]) for each in part.positions]
    return torch.meshgrid(*spans, indexing="ij")
