"""Layers of packed weights and of one input that are computed as one product: see ``fused_products``.

The product is that of a module of the format's library whose weight has the rows of all members. It is in no
model: the members are, with their names, and with parts of its memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .fused_products import (
    FusedLinear,
    FusedProduct,
    Places,
    add_products,
    are_in_place,
    at_present,
    joined_parameter,
    linear_members,
)
from .layers import ColumnParallelLinear
from .packed_joins import joined_parts
from .packed_values import Part, fill_module, is_repacked

WEIGHT = "weight"


class PackedProduct(FusedProduct):
    """The product of layers of packed weights.

    Once a weight of a member is replaced or moved, the members compute by themselves, and so do those of
    copies.

    Args:
        members: the layers in the order in which they are called; not filled.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__(members)
        self.wide: nn.Module | None = None
        """Has the rows of all; None: each member computes by itself."""
        self._weights: Places = ()
        """Of all that the weight of ``wide`` spans."""
        self._waiting: dict[int, Part] = {}

    def fill(self, index: int, part: Part) -> None:
        """Give a member its part of a packed weight; all get theirs once the last one is here.

        Args:
            index: of the member.
            part: of its weight.

        Raises:
            PlanError: a module lacks a tensor.
        """
        self._waiting[index] = part
        if len(self._waiting) < len(self.members):
            return
        parts = [self._waiting.pop(index) for index in range(len(self.members))]
        found = None if is_repacked(self.members[0], parts[0]) else joined_parts(parts)
        if found is not None:
            spanning, parts = found
            self.wide = _wide(self.members[0], sum(self.sizes))
            fill_module(self.wide, WEIGHT, spanning)
        for member, part in zip(self.members, parts, strict=True):
            fill_module(member, WEIGHT, part)
        self._weights = at_present(place for member in self.members for place in _weights(member))

    def product_of(self, input: Tensor) -> Tensor | None:
        """See ``FusedProduct``."""
        return None if self.wide is None else self.wide(input)  # type: ignore[no-any-return]

    def refresh(self) -> None:
        """Join biases again that were replaced or moved; without the weights there is no product any more."""
        if self.wide is None or are_in_place(self._made_of):
            return
        biases = [member._parameters.get("bias") for member in self.members]
        has_bias = any(bias is not None for bias in biases)
        bias = joined_parameter(biases) if has_bias else None
        if not are_in_place(self._weights) or (has_bias and bias is None):
            self.wide = None
            return
        self.wide._parameters["bias"] = bias
        owners = (*self.members, self.wide)
        self._made_of = (*self._weights, *at_present((owner._parameters, "bias") for owner in owners))


class FusedModule(nn.Module):
    """Before a class of a format's library: a layer whose product is a part of a larger one."""

    product: PackedProduct
    index: int
    """In the group."""
    library_class: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        needs_grad = torch.is_grad_enabled() and input.requires_grad
        parts = None if needs_grad else self.product.parts(self.index, input)
        return super().forward(input) if parts is None else parts[self.index]  # type: ignore[misc, no-any-return]

    def train(self, mode: bool = True) -> FusedModule:
        """Some libraries compute otherwise in training."""
        super().train(mode)
        if self.product.wide is not None:
            self.product.wide.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> FusedModule:
        """Move or cast the parameters; after the last member of a group the product is given up."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.index == self.product.last:
            self.product.refresh()
        return self


def fuse_packed(model: nn.Module, groups: Sequence[tuple[str, ...]]) -> tuple[PackedProduct, ...]:
    """Make the layers of each group members of a product, in place, before they are filled.

    Args:
        model: with the modules of the format's library, or of plain ones that hold its tensors.
        groups: FQNs, in the order of the calls.

    Raises:
        PlanError: a plain member has steps on its input.
    """
    products = [PackedProduct(_members(model, group)) for group in groups]
    add_products(model, products)
    return tuple(products)


def _members(model: nn.Module, group: Sequence[str]) -> Sequence[nn.Module]:
    """The modules of a format's library with another class; plain ones that hold its tensors are replaced."""
    modules = [model.get_submodule(fqn) for fqn in group]
    if all(type(module) in (nn.Linear, ColumnParallelLinear) for module in modules):
        return linear_members(model, group)
    for module in modules:
        module.__class__ = _fused_class(type(module))  # type: ignore[assignment, arg-type]
    return modules


@cache
def _fused_class(library_class: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name."""
    said = {"__module__": library_class.__module__, "library_class": library_class}
    return type(library_class.__name__, (FusedModule, library_class), said)


def _wide(member: nn.Module, rows: int) -> nn.Module:
    """A module like a member that was not filled, for a weight of ``rows`` rows."""
    if isinstance(member, FusedLinear):
        return nn.Linear(member.local_shape[1], rows, False, device="meta")
    assert isinstance(member, FusedModule)
    wide: Any = object.__new__(member.library_class)
    nn.Module.__init__(wide)
    own = {*wide.__dict__, "product", "index"}
    known = {name: value for name, value in vars(member).items() if name not in own}
    wide.__dict__.update(copy.deepcopy(known))
    wide._parameters.update(member._parameters)
    wide._buffers.update(member._buffers)
    wide.out_features = rows
    return wide.train(member.training)  # type: ignore[no-any-return]


def _weights(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a module has tensors other than a bias."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, name) for name in tensors if name != "bias")
