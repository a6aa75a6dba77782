"""The modules that compute with packed weights: transformers' own, of the library of the quantized format.

They take the places of plain modules on the meta device, with local shapes, and are filled with this rank's
stored tensors. Nothing is dequantized. The steps of the plan run in hooks around them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

# Layers of packed weights and of one input that are computed as one product: see ``fused_products``.
#
# A module of the format's library computes the product; its weight has the rows of all members. This module
# is in no model: the members are, with their names, and with parts of its memory.
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Communicator
from ..errors import CheckpointError, PlanError
from ..format.dims import axes_of
from ..format.plan import ModulePlan, Packing, ParameterPlan, local_shape
from ..format.slices import coordinates
from ..packed.formats import fill_module, format_of
from ..packed.packed_format import Part, Rows
from ..packed.quantizers import Quantized, quantizer_of
from ..packed.stored_weights import WeightSlice
from .attribute_overrides import raise_flags
from .boundary import attach, forward_signature
from .fused_products import (
    FusedLinear,
    FusedProduct,
    Places,
    add_products,
    are_in_place,
    at_present,
    joined,
    joined_parameter,
    linear_members,
)
from .layers import ColumnParallelLinear

WEIGHT = "weight"


class PackedProduct(FusedProduct):
    """The product of layers of packed weights.

    Once a weight of a member is replaced or moved, the members compute by themselves. Members of copies do so
    too.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__(members)
        self.wide: nn.Module | None = None
        """Computes the rows of all members; None if each member computes separately."""
        self._weights: Places = ()
        """All tensors that the weight of ``wide`` spans."""
        self._waiting: dict[int, Part] = {}

    def fill(self, index: int, part: Part) -> None:
        """Give a member its part of a packed weight; all get theirs once the last one is here."""
        self._waiting[index] = part
        if len(self._waiting) < len(self.members):
            return
        parts = [self._waiting.pop(index) for index in range(len(self.members))]
        joined_weight = (
            None
            if format_of(parts[0].packing.method).is_repacked(self.members[0], parts[0])
            else joined_parts(parts)
        )
        if joined_weight is not None:
            spanning, parts = joined_weight
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
    """A base in front of a class of a format's library: the layer's product is a part of a larger one."""

    product: PackedProduct
    index: int
    """The index in the group."""
    library_class: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        needs_grad = torch.is_grad_enabled() and input.requires_grad
        parts = None if needs_grad else self.product.parts(self.index, input)
        return super().forward(input) if parts is None else parts[self.index]  # type: ignore[misc, no-any-return]

    def train(self, mode: bool = True) -> FusedModule:
        """Return some libraries compute otherwise in training."""
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
    """Make the layers of each group members of a product, in place, before they are filled."""
    products = []
    for group in groups:
        members: Sequence[nn.Module] = [model.get_submodule(fqn) for fqn in group]
        if all(type(module) in (nn.Linear, ColumnParallelLinear) for module in members):
            members = linear_members(model, group)
        else:
            for module in members:
                module.__class__ = _fused_class(type(module))  # type: ignore[assignment, arg-type]
        products.append(PackedProduct(members))
    add_products(model, products)
    return tuple(products)


@cache
def _fused_class(library_class: type[nn.Module]) -> type[nn.Module]:
    """Return a class of the same name."""
    said = {"__module__": library_class.__module__, "library_class": library_class}
    return type(library_class.__name__, (FusedModule, library_class), said)


def _wide(member: nn.Module, rows: int) -> nn.Module:
    """Return a module like a member that was not filled, for a weight of ``rows`` rows."""
    if isinstance(member, FusedLinear):
        return nn.Linear(member.local_shape[1], rows, False, device="meta")
    assert isinstance(member, FusedModule)
    wide: Any = object.__new__(member.library_class)
    nn.Module.__init__(wide)
    member_attributes = {*wide.__dict__, "product", "index"}
    library_attributes = {
        name: value for name, value in vars(member).items() if name not in member_attributes
    }
    wide.__dict__.update(copy.deepcopy(library_attributes))
    wide._parameters.update(member._parameters)
    wide._buffers.update(member._buffers)
    wide.out_features = rows
    return wide.train(member.training)  # type: ignore[no-any-return]


def _weights(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where a module has tensors other than a bias."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, name) for name in tensors if name != "bias")


class PackedModules:
    """The packed parameters of a model that is loaded: ``replace``, ``fill`` for each of them, ``finish``.

    The linear layers in ``apart``, for example of adapters, do not belong to the quantized model.
    """

    def __init__(
        self,
        quantized: Quantized,
        parameters: Mapping[str, ParameterPlan],
        comm: Communicator,
        apart: Collection[str] = (),
    ) -> None:
        self._packings = {name: p for name, e in parameters.items() if (p := e.packing) is not None}
        self.names = frozenset(self._packings)
        self._parameters = parameters
        self._comm = comm
        self._apart = apart
        self._quantized = quantized
        rows = [local_shape(parameters[name], comm.mesh, comm.rank)[0] for name in self._packings]
        self._quantizer = quantizer_of(quantized, self._packings.values(), rows)
        self._model: nn.Module | None = None
        self._without_bias: list[nn.Module] = []
        self._fused: dict[str, tuple[PackedProduct, int]] = {}
        """Name of a weight -> the product of its module, and the module's index in the product."""

    def replace(
        self, model: nn.Module, entries: Mapping[str, ModulePlan], *, training: bool = False
    ) -> dict[nn.Module, nn.Module]:
        """Have the format's quantizer replace the modules of packed weights; hook the plan's steps to them.

        Returns the new modules by the plain ones; if these have other names, they are still there.
        """
        for name in self.names:
            self._localize(model, name)
        with _without(model, self._apart):
            plain = dict(model.named_modules())
            self._quantizer.preprocess_model(
                model=model,
                dtype=self._quantized.dtype,
                device_map={"": self._quantized.device},
                checkpoint_files=None,
            )
            now = dict(model.named_modules())
        replaced = {name: now[name] for name in plain if name in now and now[name] is not plain[name]}
        inner = {name for name in plain if any(name.startswith(f"{owner}.") for owner in replaced)}
        if lost := sorted(inner & entries.keys()):
            raise PlanError(f"{lost[0]}: the plan changes it, and the module that takes its place has none")
        replaced = {name: module for name, module in replaced.items() if name not in inner}
        _require_packed(replaced, self._packings)
        self._model = model
        for name, module in replaced.items():
            if name in entries:
                entry = self._prepared(name, entries[name], plain[name], module)
                attach(module, entry, self._comm, forward_signature(plain[name]), training)
        return {plain[name]: module for name, module in replaced.items()}

    def _prepared(self, fqn: str, entry: ModulePlan, plain: nn.Module, module: nn.Module) -> ModulePlan:
        """Return the steps around a new module, whose attributes get their local values."""
        # The module was made from one with overrides; the values that it read are local already.
        for override in entry.overrides:
            value = override.local[0] if len(override.local) == 1 else override.local[self._comm.rank]
            current = getattr(
                module, override.attribute, value
            )  # paths into a config lead to the overridden copy
            if current not in (override.value, value):
                raise PlanError(
                    f"{fqn}: cannot override {override.attribute}: it is {current}, and was {override.value}"
                )
            if hasattr(module, override.attribute):
                setattr(module, override.attribute, value)
        raise_flags(module, tuple(flag for flag in entry.flags if getattr(module, flag, None) is not True))
        weight = self._parameters.get(f"{fqn}.weight")
        if entry.category != "row" or type(plain) is not nn.Linear or weight is None:
            return entry
        bias = self._parameters.get(f"{fqn}.bias")
        coords = coordinates(self._comm.mesh, self._comm.rank)
        is_first = all(coords[axis] == 0 for axis in axes_of(weight.dims[1]))
        if bias is not None and not bias.partial and not is_first:  # of the terms of the sum one has the bias
            self._without_bias.append(module)
        return entry

    def fuse(self, groups: Sequence[tuple[str, ...]]) -> None:
        """Have modules compute their products as one, if their formats allow it; before they are filled."""
        assert self._model is not None, "modules are replaced before they are fused"
        joinable = [
            g for g in groups if all(format_of(self._packings[f"{n}.weight"].method).can_be_joined for n in g)
        ]
        for group, product in zip(joinable, fuse_packed(self._model, joinable), strict=True):
            self._fused |= {f"{fqn}.weight": (product, index) for index, fqn in enumerate(group)}

    def fill(self, name: str, tensors: Mapping[str, Tensor], held: WeightSlice) -> None:
        """Give a module its stored tensors."""
        assert self._model is not None, "modules are replaced before they are filled"
        owner, _, attribute = name.rpartition(".")
        part = Part(self._packings[name], tensors, held, self._quantized.dtype)
        if name in self._fused:
            product, index = self._fused[name]
            product.fill(index, part)
        else:
            fill_module(self._model.get_submodule(owner), attribute, part)

    def finish(self) -> None:
        """Finish the modules once all tensors of the model are on the device."""
        model = self._model
        assert model is not None, "modules are replaced before they are filled"
        present_modules = set(model.modules())  # modules of other stages are not
        for module in present_modules.intersection(self._without_bias):
            module.bias.data.zero_()  # type: ignore[union-attr, operator]  # the first rank adds it
        model.hf_quantizer = self._quantizer
        self._quantizer.postprocess_model(model)
        for name, module in model.named_modules():
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.is_meta:
                    raise CheckpointError(
                        f"no file had {name}.{attribute}, which a {type(module).__name__} needs"
                    )

    def _localize(self, model: nn.Module, name: str) -> None:
        """Give the plain module of a packed weight its local shape, for the quantizer to copy."""
        module, entry = model.get_submodule(name.rpartition(".")[0]), self._parameters[name]
        shape = local_shape(entry, self._comm.mesh, self._comm.rank)
        if 0 in shape:
            raise PlanError(
                f"{name} is packed, and has too few groups for this number of ranks: rank {self._comm.rank} "
                "holds none of it; convert for fewer ranks, or pass dequantize=True"
            )
        if type(module) is nn.Linear:
            module.out_features, module.in_features = shape
            module.weight = nn.Parameter(
                torch.empty(shape, dtype=getattr(torch, entry.dtype), device="meta"), requires_grad=False
            )
        elif len(entry.dims) == 2:
            raise PlanError(
                f"{name} is packed, and computed by a {type(module).__name__}, which is not a plain linear "
                "layer; pass dequantize=True"
            )


@contextmanager
def _without(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Take modules out of a model for a while."""
    places = [(model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2]) for fqn in names]
    modules = [(parent, name, parent._modules[name]) for parent, name in places]
    for parent, name, _ in modules:
        parent._modules[name] = nn.Identity()
    try:
        yield
    finally:
        for parent, name, module in modules:
            parent._modules[name] = module


def _require_packed(replaced: Iterable[str], packings: Mapping[str, Packing]) -> None:
    expected = {
        name.rpartition(".")[0]
        for name, packing in packings.items()
        if not format_of(packing.method).keeps_modules
    }
    if plain := sorted(expected.difference(replaced)):
        raise PlanError(
            f"{plain[0]}: its weight is packed, but transformers would compute it with a plain weight "
            f"({len(plain)} such); pass dequantize=True, or convert with --dtype"
        )
    if extra := sorted(set(replaced).difference(expected)):
        raise PlanError(
            f"{extra[0]}: transformers would compute it with a packed weight, and the plan has a plain one "
            f"({len(extra)} such); pass dequantize=True, or convert with --dtype"
        )


def joined_parts(parts: Sequence[Part]) -> tuple[Part, list[Part]] | None:
    """Return a part with the rows of all parts, and these, which share its memory; None if not exact."""
    methods = {part.packing.method for part in parts}
    packed_format = format_of(methods.pop())
    if methods or not packed_format.can_be_joined or len({part.held.local_shape[1:] for part in parts}) > 1:
        return None
    stored: list[Rows] = []
    for index, part in enumerate(parts):
        rows = packed_format.rows(part, index == len(parts) - 1)
        if rows is None or rows.keys() != (stored or [rows])[0].keys():
            return None
        stored.append(rows)
    if not all(_are_alike([rows[name] for rows in stored]) for name in stored[0]):
        return None
    whole: dict[str, Tensor] = {}
    by_part = [dict(part.tensors) for part in parts]
    for name, (first, step) in stored[0].items():
        if step is None:
            whole[name] = first
            continue
        whole[name], shared = joined([rows[name][0] for rows in stored])
        for tensors, rows, tensor in zip(by_part, stored, shared, strict=True):
            if tensors[name].data_ptr() == rows[name][0].data_ptr():  # others were computed
                tensors[name] = tensor
    shapes = [part.held.local_shape for part in parts]
    joined_slice = WeightSlice.whole((sum(shape[0] for shape in shapes), *shapes[0][1:]))
    spanning = replace(parts[0], tensors=whole, held=joined_slice)
    return spanning, [replace(part, tensors=each) for part, each in zip(parts, by_part, strict=True)]


def _are_alike(stored: Sequence[tuple[Tensor, int | None]]) -> bool:
    first, step = stored[0]
    if len({(tensor.dtype, tensor.device, tensor.shape[1:], each) for tensor, each in stored}) > 1:
        return False
    return step is not None or all(torch.equal(_bytes(first), _bytes(tensor)) for tensor, _ in stored[1:])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
