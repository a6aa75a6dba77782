"""Linear layers of one input that are computed as one product, for inference.

The layers of a group (such as those for queries, keys and values) are called one after another with the same
tensor. The first one multiplies it with a matrix that spans the weights of all, which lie next to each other
in memory, and returns its part of the result; the others take theirs. A layer that is given another tensor
computes by itself, so that a group that is called in any other way is slower, and no less right.

Parameters keep their names: each has a part of the memory that the group shares. That part is a separate
storage, so that libraries that save parameters see no shared memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..comm.collectives import refuse_gradient
from ..errors import PlanError
from ..storage.windows import tensor_at, tensor_within
from .layers import ColumnParallelLinear, Steps, finish

# Tensors in the memory of a storage, which are no views of each other to autograd.


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the tensor that spans these along their first dim, and these in its memory, each in a separate
    storage.

    Their numbers are moved next to each other if they are not.

    Args:
        parts: tensors of one dtype, on one device, whose shapes differ only in the first dim.
    """
    first = parts[0]
    with torch.no_grad(), torch.inference_mode(first.is_inference()):
        shape = (sum(len(part) for part in parts), *first.shape[1:])
        if not first.is_meta and _are_adjacent(parts):
            whole = tensor_within(first.untyped_storage(), int(first.storage_offset()), shape, first.dtype)
        else:
            whole = torch.empty(shape, dtype=first.dtype, device=first.device)
        if whole.is_meta:
            return whole, list(parts)
        views, at = [], int(whole.storage_offset()) * whole.itemsize
        for part in parts:
            views.append(tensor_at(whole.untyped_storage(), at, part.nbytes, part.dtype, tuple(part.shape)))
            if views[-1].data_ptr() != part.data_ptr():
                views[-1].copy_(part)
            at += part.nbytes
    return whole, views


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    """Return whether tensors are in one storage, one after another."""
    at = parts[0].storage_offset()
    storage = parts[0].untyped_storage()
    for part in parts:
        if not (part.is_contiguous() and part.untyped_storage() is storage):
            return False
        if part.storage_offset() != at:
            return False
        at += part.numel()
    return True


MAX_ROWS = 1024
"""Most rows of an input (tokens) for one product: the result of all members lives as long as the last part of
it, which would raise the memory of long prefills."""

_PRODUCTS = "_shardconv_fused"
"""Attribute of a model: its products."""

Places = tuple[tuple[dict[str, Any], str, Tensor, int], ...]
"""(tensors of a module, name, tensor, its address)."""


class FusedProduct:
    """The product of a group of layers."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = tuple(members)
        for index, member in enumerate(members):
            member.product, member.index = self, index
        self.last = len(self.members) - 1
        # The shape of a packed weight says nothing; its module has local sizes.
        shapes = [getattr(m, "local_shape", (m.out_features, m.in_features)) for m in members]
        self.sizes = [rows for rows, _ in shapes]
        self.max_elements = MAX_ROWS * max((columns for _, columns in shapes), default=0)
        """Most elements of an input."""
        self.weight: nn.Parameter | None = None
        """Spans the weights, ``[sum of out_features, in_features]``; None: each member computes by itself."""
        self.bias: nn.Parameter | None = None
        self._made_of: Places | None = None
        """All tensors that ``weight`` and ``bias`` span."""
        self._held: tuple[Tensor, int | None, Sequence[Tensor]] | None = None
        """The last input, its version, and the parts, until the last member has taken its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedProduct:
        """Return a product of copies, whose parameters are joined before they are used."""
        other = memo[id(self)] = type(self)(())
        other.members = copy.deepcopy(self.members, memo)
        other.last, other.sizes, other.max_elements = self.last, self.sizes, self.max_elements
        return other

    def parts(self, index: int, input: Tensor) -> Sequence[Tensor] | None:
        """Return the parts of all members, each local ``[..., out_features]``; None: the member computes by
        itself.
        """
        if index:
            product_parts = self._held  # once: another thread may run the model
            if product_parts is None or product_parts[0] is not input or product_parts[1] != _version(input):
                return None
            if index == self.last:
                self._held = None
            return product_parts[2]
        self._held = None
        if not torch.compiler.is_compiling():
            self.refresh()
        product = None if input.numel() > self.max_elements else self.product_of(input)
        if product is None:
            return None
        parts = product.split_with_sizes(self.sizes, -1)
        self._held = (input, _version(input), parts)
        return parts

    def product_of(self, input: Tensor) -> Tensor | None:
        """Return the product of all members, local ``[..., sum of out_features]``.

        It is None if each member should compute separately.
        """
        return None if self.weight is None else F.linear(input, self.weight, self.bias)

    def refresh(self) -> None:
        """Join the parameters of the members again, if any of them was replaced or moved."""
        if are_in_place(self._made_of):
            return
        weights = [member._parameters.get("weight") for member in self.members]
        biases = [member._parameters.get("bias") for member in self.members]
        has_bias = any(bias is not None for bias in biases)
        self.span(
            joined_parameter(weights), joined_parameter(biases) if has_bias else None, has_bias=has_bias
        )

    def span(self, weight: nn.Parameter | None, bias: nn.Parameter | None, *, has_bias: bool) -> None:
        """Multiply with these, until a parameter of a member is replaced or moved."""
        is_whole = weight is not None and (bias is not None or not has_bias)
        self.weight, self.bias = (weight, bias) if is_whole else (None, None)
        self._made_of = at_present((m._parameters, name) for m in self.members for name in ("weight", "bias"))


class FusedLinear(ColumnParallelLinear):
    """A linear layer whose product is a part of a larger one; shapes are as in ``ColumnParallelLinear``."""

    product: FusedProduct
    index: int
    """The index in the group."""

    def __init__(self, linear: nn.Linear) -> None:
        sharded = linear if isinstance(linear, ColumnParallelLinear) else None
        local_shape = rows, columns = tuple(linear.weight.shape)
        super().__init__(
            columns,
            rows,
            linear.bias is not None,
            steps=Steps(outputs=() if sharded is None else sharded.outputs),
            training=sharded is None,  # a plain layer passes gradients on
            device=torch.device("meta"),
        )
        self.local_shape = local_shape
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._parameters.update(linear._parameters)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if not self._has_backward and input.requires_grad:
            refuse_gradient(input)
        needs_grad = (input.requires_grad or self.weight.requires_grad) and torch.is_grad_enabled()
        parts = None if needs_grad else self.product.parts(self.index, input)
        y = F.linear(input, self.weight, self.bias) if parts is None else parts[self.index]
        return finish(self.outputs, y) if self.outputs else y

    def _apply(self, fn: Any, recurse: bool = True) -> FusedLinear:
        """Move or cast the parameters; the last member of a group joins them again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.index == self.product.last:
            self.product.refresh()
        return self


def fuse(model: nn.Module, groups: Sequence[tuple[str, ...]]) -> None:
    """Replace the linear layers of each group, in place.

    Args:
        model: a model of local shapes, as ``build.apply_plan`` converts it.
    """
    products = [FusedProduct(linear_members(model, group)) for group in groups]
    for product in products:
        product.refresh()
    add_products(model, products)


def linear_members(model: nn.Module, group: Sequence[str]) -> list[FusedLinear]:
    """Replace the linear layers of a group, in place; they need a product."""
    members = []
    for fqn in group:
        try:
            module = model.get_submodule(fqn)
        except AttributeError as error:
            raise PlanError(f"{fqn}: this module of the plan is missing from the model") from error
        if type(module) not in (nn.Linear, ColumnParallelLinear):
            raise PlanError(f"{fqn}: the plan fuses it, and it is a {type(module).__name__}")
        if isinstance(module, ColumnParallelLinear) and module.inputs:
            raise PlanError(f"{fqn}: the plan fuses it, and has steps on its input")
        assert isinstance(module, nn.Linear)
        members.append(FusedLinear(module))
    for fqn, member in zip(group, members, strict=True):
        parent, _, name = fqn.rpartition(".")
        model.get_submodule(parent)._modules[name] = member
    return members


def fused_products(model: nn.Module) -> tuple[FusedProduct, ...]:
    """Return the products of a model whose layers were fused; none of another one."""
    products: tuple[FusedProduct, ...] = model.__dict__.get(_PRODUCTS, ())
    return products


def add_products(model: nn.Module, products: Iterable[FusedProduct]) -> None:
    """Register more products with a model, for ``fused_products``."""
    model.__dict__[_PRODUCTS] = (*fused_products(model), *products)


def refresh_fused(model: nn.Module) -> None:
    """Join replaced or moved parameters again, before compiled code runs, which does not check."""
    for product in fused_products(model):
        product.refresh()


def at_present(places: Iterable[tuple[dict[str, Any], str]]) -> Places:
    """Return the tensors at these places now, without those that are None."""
    tensors_at_places = ((tensors, name, tensors.get(name)) for tensors, name in places)
    return tuple((tensors, name, t, _address(t)) for tensors, name, t in tensors_at_places if t is not None)


def are_in_place(places: Places | None) -> bool:
    """Return whether no tensor was replaced or moved."""
    if places is None:
        return False
    for tensors, name, tensor, address in places:  # for each product: a loop is fastest
        if tensors.get(name) is not tensor or (tensor.data_ptr() or _address(tensor)) != address:
            return False
    return True


def _version(input: Tensor) -> int | None:
    """Return the counter of writes, read after a product, as some libraries write to inputs and undo it."""
    return None if torch.compiler.is_compiling() or input.is_inference() else input._version


def _address(tensor: Tensor) -> int:
    """Return the address of the first number; in torchao's tensors, of the first inner tensor's."""
    address = tensor.data_ptr()
    if address or not is_traceable_wrapper_subclass(tensor):
        return address
    return int(getattr(tensor, tensor.__tensor_flatten__()[0][0]).data_ptr())


def joined_parameter(parts: Sequence[nn.Parameter | None]) -> nn.Parameter | None:
    """Return a parameter that spans these along their first dim; None if they are not alike."""
    parameters = [part for part in parts if type(part) is nn.Parameter and part.layout == torch.strided]
    kinds = {(part.dtype, part.device, part.shape[1:]) for part in parameters}
    if len(parameters) < len(parts) or len(kinds) > 1:
        return None
    whole, views = joined(parameters)
    if not whole.is_meta:
        for part, tensor in zip(parameters, views, strict=True):
            part.data = tensor
    return nn.Parameter(whole, requires_grad=False)
