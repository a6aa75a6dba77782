"""Fills modules of a quantized format's library on a rank from stored tensors.

The stored tensors are parts of the checkpoint's tensors. Tensors that name a position or a shape of the full
weight are changed to name the local one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..format.header import dtype_name
from ..format.plan import PackedDim, Packing
from ..packed.bnb import Blocks, block_factors, plain_state
from ..packed.fp8 import SCALES
from ..packed.stored_weights import WeightSlice
from .fused_products import joined

BNB_CPU_ROWS = 32
"""Rows of a tile of bitsandbytes' kernel for CPUs with AVX512 for bfloat16, which fails on other shapes."""

KEEPS_MODULES = frozenset({"torchao"})
"""Methods that quantize tensors, which plain modules then hold."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a packed weight."""

    packing: Packing
    tensors: Mapping[str, Tensor]
    """Local stored tensors by their names in the packing, in the shape of its dims."""
    held: WeightSlice
    """The part of the weight that they are."""
    dtype: torch.dtype
    """The dtype of activations."""

    def dims(self, name: str) -> tuple[PackedDim, ...]:
        """Return the dims of a stored tensor."""
        return next(stored.dims for stored in self.packing.tensors if stored.name == name)


def fill_module(module: nn.Module, attribute: str, part: Part) -> None:
    """Give a module its part of a packed weight.

    Args:
        module: the module of the format's library.
        attribute: name of the weight in it.
        part: the part of the weight.

    Raises:
        PlanError: the module lacks a tensor.
    """
    _FILL.get(part.packing.method, _fill_as_stored)(module, attribute, part)


def is_repacked(module: nn.Module, part: Part) -> bool:
    """Return whether a module moves its weight to other memory when it is first called."""
    is_on_cpu = next(iter(part.tensors.values())).device.type == "cpu"
    may_repack = bool(getattr(module, "support_avx512bf16_for_cpu", False))
    return part.packing.method == "bnb_4bit" and is_on_cpu and may_repack


def _fill_as_stored(module: nn.Module, attribute: str, part: Part) -> None:
    """Fill a module that has a tensor for each stored one."""
    for stored, tensor in part.tensors.items():
        name = stored.replace("*", attribute)
        table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        if table.get(name) is None:
            raise PlanError(
                f"a {type(module).__name__} has no tensor {name!r}; the installed package is another version"
            )
        # Floating-point tensors get the dtype that the module declares, as in transformers.
        own = table[name].dtype
        if own != tensor.dtype and own.is_floating_point and tensor.is_floating_point() and own.itemsize > 1:
            tensor = tensor.to(own)
        table[name] = nn.Parameter(tensor, requires_grad=False) if table is module._parameters else tensor


def _fill_gptq(module: nn.Module, attribute: str, part: Part) -> None:
    """Fill a module of GPTQ; groups are counted from the first local one if factors are sharded."""
    groups, indices = part.dims("scales")[0], part.tensors["g_idx"]
    if groups.of is not None:
        local = part.held.local_steps(groups.of, groups.step)
        indices = local.to(device=indices.device, dtype=indices.dtype)
    _fill_as_stored(module, attribute, replace(part, tensors={**part.tensors, "g_idx": indices}))


def _fill_bnb_4bit(module: nn.Module, attribute: str, part: Part) -> None:
    """Fill a module of bitsandbytes with the local shape, and the factors of the local blocks."""
    from bitsandbytes.nn import Params4bit  # an optional library

    tensors, held = part.tensors, part.held
    key = next(name for name in tensors if ".quant_state." in name)
    blocks = Blocks.of(tensors[key])
    state: dict[str, Any] = {
        "quant_type": key.rpartition("__")[2],
        "blocksize": blocks.size,
        "dtype": dtype_name(blocks.dtype),
        "shape": list(held.local_shape),
        "quant_map": tensors["*.quant_map"],
        **_factors(tensors, blocks, held),
    }
    rows, columns = held.local_shape
    if rows % BNB_CPU_ROWS or columns % blocks.size:
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # a flag of the module
    codes = tensors["*"].reshape(-1, 1)
    module._parameters[attribute] = Params4bit.from_prequantized(
        data=codes, quantized_stats=state, requires_grad=False, device=codes.device, module=module
    )


def _factors(tensors: Mapping[str, Tensor], blocks: Blocks, held: WeightSlice) -> dict[str, Any]:
    """Return the factors of the local blocks, nested if as many share a factor as the library supposes."""
    factors = tensors["*.absmax"].reshape(-1)
    if not blocks.nested_size:
        return {"absmax": factors}
    columns = held.local_shape[1]
    first = torch.arange(0, held.local_shape[0] * columns, blocks.size)
    rows = held.positions(0)[first // columns] * held.shape[1]
    shared = (rows + held.positions(1)[first % columns]) // blocks.size // blocks.nested_size
    nested, codes = tensors["*.nested_absmax"], tensors["*.nested_quant_map"]
    begins = shared[:: blocks.nested_size]
    if torch.equal(begins.repeat_interleave(blocks.nested_size)[: len(shared)], shared):
        return {
            "absmax": factors,
            "nested_absmax": nested[begins.to(nested.device)],
            "nested_blocksize": blocks.nested_size,
            "nested_quant_map": codes,
            "nested_dtype": "float32",
            "nested_offset": blocks.nested_offset,
        }
    flat = codes[factors.int()] * nested[shared.to(nested.device)] + blocks.nested_offset
    return {"absmax": flat}


def _fill_bnb_8bit(module: nn.Module, attribute: str, part: Part) -> None:
    from bitsandbytes.nn import Int8Params  # an optional library

    values = part.tensors["*"]
    weight = Int8Params(values, requires_grad=False, CB=values, SCB=part.tensors["SCB"])
    module._parameters[attribute] = weight


def _fill_fp8(module: nn.Module, attribute: str, part: Part) -> None:
    """Fill a module of fp8 under the names that transformers uses."""
    known = {**dict.fromkeys(SCALES.values(), "*_scale_inv"), "qscale_act": "activation_scale"}
    renamed = {known.get(name, name): tensor for name, tensor in part.tensors.items()}
    _fill_as_stored(module, attribute, replace(part, tensors=renamed))


def _fill_torchao(module: nn.Module, attribute: str, part: Part) -> None:
    """Fill a plain module with a tensor of the library's class, with the local size of blocks."""
    from torchao.quantization import Float8Tensor, Int8Tensor  # an optional library

    values, scale = part.tensors["_*_qdata"], part.tensors["_*_scale"]
    steps = {dim.of: dim.step for dim in part.dims("_*_scale")}
    block = [steps.get(dim, size) for dim, size in enumerate(values.shape)]
    if values.dtype == torch.int8:
        zeros = part.tensors.get("_*_zero_point")
        tensor = Int8Tensor(values, scale, block, part.dtype, zero_point=zeros)
    else:
        tensor = Float8Tensor(values, scale, block, dtype=part.dtype)
    module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)


def _fill_compressed(module: nn.Module, attribute: str, part: Part) -> None:
    """Fill a module with a factor for each row, in the layout of the kernel, and none of the inputs."""
    values = part.tensors["*"]
    scale = part.tensors["*_scale"].float().reshape(1, -1).expand(1, values.shape[0]).contiguous()
    known = {"*": values, "*_scale": scale}
    _fill_as_stored(module, attribute, replace(part, tensors=known))


_FILL: dict[str, Callable[[nn.Module, str, Part], None]] = {
    "bnb_4bit": _fill_bnb_4bit,
    "bnb_8bit": _fill_bnb_8bit,
    "compressed_tensors": _fill_compressed,
    "fp8": _fill_fp8,
    "gptq": _fill_gptq,
    "torchao": _fill_torchao,
}
"""Method of the packing -> function that fills a module; other methods hold tensors as they are stored."""


# Joins the stored tensors of several packed weights to the tensors of one weight, which has the rows of all.
#
# That works in formats whose stored tensors run along the rows of the weight (its outputs) in their first
# dim, or are flat in the order of rows: each weight keeps its part of the memory. Formats that pack columns
# first (GPTQ, AWQ) are left out.

_Stored = Mapping[str, tuple[Tensor, int | None]]
"""Name -> tensor, and the number of rows or values for each of its positions; None: the tensor must be the
same for all weights."""


def joined_parts(parts: Sequence[Part]) -> tuple[Part, list[Part]] | None:
    """Return a part with the rows of all parts, and these, which share its memory; None if it is not exact.

    Args:
        parts: parts of weights with inputs of one size.
    """
    methods = {part.packing.method for part in parts}
    rule = _BY_ROWS.get(methods.pop())
    if rule is None or methods or len({part.held.local_shape[1:] for part in parts}) > 1:
        return None
    stored: list[_Stored] = []
    for index, part in enumerate(parts):
        rows = rule(part, index == len(parts) - 1)
        if rows is None or rows.keys() != (stored or [rows])[0].keys():
            return None
        stored.append(rows)
    if not all(_are_alike([found[name] for found in stored]) for name in stored[0]):
        return None
    whole: dict[str, Tensor] = {}
    own = [dict(part.tensors) for part in parts]
    for name, (first, step) in stored[0].items():
        if step is None:
            whole[name] = first
            continue
        whole[name], shared = joined([found[name][0] for found in stored])
        for tensors, found, tensor in zip(own, stored, shared, strict=True):
            if tensors[name].data_ptr() == found[name][0].data_ptr():  # others were computed
                tensors[name] = tensor
    shapes = [part.held.local_shape for part in parts]
    held = WeightSlice.whole((sum(shape[0] for shape in shapes), *shapes[0][1:]))
    spanning = replace(parts[0], tensors=whole, held=held)
    return spanning, [replace(part, tensors=each) for part, each in zip(parts, own, strict=True)]


def can_be_joined(method: str) -> bool:
    """Return whether weights of a method may be joined."""
    return method in _BY_ROWS


def _are_alike(stored: Sequence[tuple[Tensor, int | None]]) -> bool:
    first, step = stored[0]
    if len({(tensor.dtype, tensor.device, tensor.shape[1:], each) for tensor, each in stored}) > 1:
        return False
    return step is not None or all(torch.equal(_bytes(first), _bytes(tensor)) for tensor, _ in stored[1:])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _by_dims(part: Part, is_last: bool) -> _Stored | None:
    """Return tensors whose first dim runs along the rows, and factors of the full weight.

    The rows are full steps, except in the last weight.
    """
    found: dict[str, tuple[Tensor, int | None]] = {}
    rows = part.held.local_shape[0]
    for stored in part.packing.tensors:
        tensor, along = part.tensors[stored.name], [dim.of for dim in stored.dims]
        if along[:1] == [0] and 0 not in along[1:]:
            step = stored.dims[0].step
            if len(tensor) != math.ceil(rows / step) or (rows % step and not is_last):
                return None
            found[stored.name] = tensor, step
        elif len(along) < 2 and set(along) <= {None}:
            found[stored.name] = tensor, None
        else:
            return None
    return found


def _by_blocks(part: Part, is_last: bool) -> _Stored | None:
    """Return codes and factors if a weight is full blocks; factors of factors are multiplied out."""
    key = next(name for name in part.tensors if ".quant_state." in name)
    blocks = Blocks.of(part.tensors[key])
    if math.prod(part.held.local_shape) % blocks.size:
        return None
    factors = block_factors(part.tensors, blocks, part.held)
    return {
        "*": (part.tensors["*"], 1),
        "*.absmax": (factors.reshape(part.tensors["*.absmax"].shape), blocks.size),
        "*.quant_map": (part.tensors["*.quant_map"], None),
        key: (plain_state(blocks), None),
    }


def _with_factors_of_rows(part: Part, is_last: bool) -> _Stored | None:
    """Return the operands of the kernel: values, and a factor for each row."""
    values, scale = part.tensors["*"], part.tensors["*_scale"].reshape(-1, 1)
    return {"*": (values, 1), "*_scale": (scale.expand(len(values), 1), 1)}


_BY_ROWS: dict[str, Callable[[Part, bool], _Stored | None]] = {
    "bnb_4bit": _by_blocks,
    "bnb_8bit": _by_dims,
    "compressed_tensors": _with_factors_of_rows,
    "fp8": _by_dims,
    "torchao": _by_dims,
}
"""Method of the packing -> function of a part, and of whether it is the last one."""
