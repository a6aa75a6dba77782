"""Gates: identities between parameters and their modules that sum gradients over ranks.

A replicated parameter that ranks apply to different parts of the activations has a Partial gradient: a
term of a sum on each rank. While its module runs, such a parameter is replaced by the output of a gate,
whose backward sums the gradient over the ranks that share it. Positions that are sharded over a mesh axis
are left out of the sum over it, segment by segment.

A hook on the parameter itself would not suffice: under FSDP the gradient reaches another tensor than the
one that the optimizer holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..comm.steps import apply, unchanged
from ..errors import RefusedCallError
from ..format.plan import ParameterPlan
from ..format.stored_layout import holds_values, sums
from ..parallel.boundary import renumber

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class GradientGate:
    """The identity on one parameter.

    Backward: all_reduces of the gradient over the axes on which it is Partial; zeros on ranks where a Partial
    parameter holds none of its values. Gradients in low precision are summed in float32.
    """

    def __init__(self, comm: Communicator, entry: ParameterPlan, axes: Iterable[int]) -> None:
        self._comm = comm
        self._sums = sums(entry, comm.mesh, comm.rank, axes)
        self._is_zero = not holds_values(entry, comm.mesh, comm.rank)

    @property
    def is_open(self) -> bool:
        """Return whether gradients pass unchanged."""
        return not self._sums and not self._is_zero

    def __call__(self, parameter: Tensor) -> Tensor:
        """Return the local parameter, of its shape and dtype; see the class for the backward."""
        return apply(parameter, unchanged, self._backward)

    def _backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the local parameter, of its shape and dtype; one all_reduce for each sum."""
        if self._is_zero:
            return torch.zeros_like(gradient)
        if not self._sums:
            return gradient
        wide = gradient.float() if gradient.dtype in _LOW_PRECISION else gradient
        if len(self._sums) == 1 and self._sums[0].is_full:
            return self._comm.all_reduce(wide, self._sums[0].axes).to(gradient.dtype)
        out = wide.clone(memory_format=torch.contiguous_format)
        for each in self._sums:
            positions = [
                torch.cat([torch.arange(*span, device=wide.device) for span in spans])
                for spans in each.positions
            ]
            index = torch.meshgrid(*positions, indexing="ij")
            out[index] = self._comm.all_reduce(wide[index], each.axes)
        return out.to(gradient.dtype)


@dataclass(frozen=True, slots=True)
class Gated:
    """A parameter with its gate: ``name`` of ``owner``, at ``fqn`` in the model."""

    owner: nn.Module
    name: str
    fqn: str
    gate: GradientGate


def attach_gates(module: nn.Module, gated: Sequence[Gated]) -> None:
    """Replace parameters of a module and its submodules by the outputs of their gates while it runs."""
    if gated:
        swap = _Swap(tuple(gated))
        renumber(module, module.register_forward_pre_hook(swap.before, prepend=True))
        # always_call, since recomputation ends a forward pass early.
        renumber(module, module.register_forward_hook(swap.after, always_call=True))


class _Swap:
    """Forward hooks of one module."""

    def __init__(self, gated: tuple[Gated, ...]) -> None:
        self._gated = gated
        self._parameters: list[nn.Parameter | None] = [None] * len(gated)
        self._replacements: list[Tensor | None] = [None] * len(gated)

    def before(self, module: nn.Module, args: Any) -> None:
        """Replace the parameters; restore those that a failed call left replaced first."""
        for index, each in enumerate(self._gated):
            tensors: dict[str, Any] = each.owner._parameters
            parameter = tensors[each.name]
            if self._parameters[index] is not None and parameter is self._replacements[index]:
                parameter = self._parameters[index]
            self._parameters[index] = parameter
            tensors[each.name] = self._replacements[index] = each.gate(parameter)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Restore the parameters."""
        for index, each in enumerate(self._gated):
            if self._replacements[index] is None:
                continue  # the forward pass failed before this module
            if each.owner._parameters[each.name] is not self._replacements[index]:
                raise RefusedCallError(
                    f"{each.fqn} was replaced while a module around its own ran, so its gradient would not "
                    "be summed over the ranks; apply fully_shard to that outer module, not inside of it"
                )
            each.owner._parameters[each.name] = self._parameters[index]
            self._parameters[index] = self._replacements[index] = None
