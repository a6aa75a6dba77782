"""bitsandbytes: 4-bit codes with a factor for each block of them, and 8-bit integers with one for each row.

4 bits: the weight is flat, two codes in a byte, the first in the high half. Each ``blocksize`` consecutive
values share a factor, ``absmax``. Nested, these factors are codes themselves, ``nested_blocksize`` of which
share a factor. The rest is JSON in a tensor of bytes, the quantization state. As a rule, a row has a whole
number of blocks. Otherwise the rows of each shard together have whole blocks, or the weight is not sharded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, SourceError
from ..format.header import dtype_name
from ..format.plan import PackedDim, Packing
from .number_formats import looked_up
from .packed_format import PackedFormat, Part, Rows, in_bands
from .stored_weights import REMEDY, Checkpoint, Found, StoredGroup, WeightSlice, info, matrix, require_owners

STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(nf4|fp4)$")
SCALE = ".SCB"
COMPANIONS = (
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
    ".SCB",
    ".weight_format",
)
ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element of a tensor that may hold codes."""
MAX_SIZE = 2**31 - 1
"""Largest size of a dim or a block. Beyond 64 bits torch raises errors without a name."""
MAP_SIZE = 16
CPU_ROWS = 32
"""Rows of a tile of the library's kernel for CPUs with AVX512 for bfloat16, which fails on other shapes."""
NESTED_MAP_SIZE = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantization state: how blocks of values share factors."""

    shape: tuple[int, ...]
    """The shape of the weight; local in a state of a part."""
    dtype: torch.dtype
    """The one that the library dequantizes to."""
    size: int
    """Values in a block."""
    nested_size: int = 0
    """Factors in a block of them; 0: they are not nested."""
    nested_offset: float = 0.0

    @classmethod
    def of(cls, state: Tensor) -> Blocks:
        """Parse the tensor of bytes."""
        try:
            said: dict[str, Any] = json.loads(bytes(state.tolist()).decode())
            dtype = getattr(torch, str(said["dtype"]).removeprefix("torch."))
            nested = int(said.get("nested_blocksize") or 0)
            offset = float(said["nested_offset"]) if nested else 0.0
            shape = tuple(int(size) for size in said["shape"])
            blocks = cls(shape, dtype, int(said["blocksize"]), nested, offset)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"cannot be read: {error!r}") from error
        if blocks.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"names the dtype {blocks.dtype}")
        sizes = (*blocks.shape, blocks.size)
        is_valid = len(sizes) == 3 and min(sizes) >= 1 and nested >= 0 and max(*sizes, nested) <= MAX_SIZE
        if not is_valid or not math.isfinite(offset):
            raise ValueError(f"has the shape {list(blocks.shape)}, blocks of {blocks.size}, offset {offset}")
        return blocks


class Bnb4Bit(PackedFormat):
    """Weights of linear layers in 4 bits; a checkpoint may have others in 8 bits."""

    method = "bnb_4bit"
    quant_methods = ("bitsandbytes",)
    packages = ("bitsandbytes", "accelerate")
    why = "bitsandbytes has the kernels, for CPUs and GPUs"
    quantizer = "bitsandbytes"
    is_of_linear_layers = True
    has_backward = True
    can_be_joined = True
    packers = ("bitsandbytes",)
    skips = "llm_int8_skip_modules"

    def find(self, checkpoint: Checkpoint) -> dict[str, Found]:
        """See ``PackedFormat``."""
        weights = {}
        for name in checkpoint.tensors:
            if match := STATE.match(name):
                weights[match["weight"]] = _four_bits(checkpoint, match["weight"], name)
            elif name.endswith(SCALE):
                module = name.removesuffix(SCALE)
                weights[f"{module}.weight"] = _eight_bits(checkpoint, module)
        require_owners(checkpoint, weights, COMPANIONS, "bitsandbytes")
        return weights

    def scales_tokens(self, settings: Mapping[str, Any]) -> bool:
        """See ``PackedFormat``."""
        return bool(settings.get("load_in_8bit"))

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute codes looked up in the map times the factor of their block, in float32.

        The library's functions in torch compute the same.
        """
        blocks = Blocks.of(_state(packing, tensors))
        both = tensors["*"].contiguous().view(torch.uint8).reshape(-1)
        codes = torch.stack([both >> 4, both & 15], 1).reshape(-1)[: math.prod(held.local_shape)]
        factors = block_factors(tensors, blocks, held).repeat_interleave(blocks.size)[: codes.numel()]
        values = looked_up(tensors["*.quant_map"].float(), codes)
        return (values * factors).to(blocks.dtype).reshape(held.local_shape)

    def schemes(self, dtype: str) -> Mapping[str, Mapping[str, Any]]:
        """See ``PackedFormat``."""
        four_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        return {
            "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, **four_bits},
            "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
        }

    def packed(self, weight: Tensor, quantizer: Any) -> dict[str, Tensor]:
        """See ``PackedFormat``."""
        settings = quantizer.quantization_config
        if settings.load_in_8bit:
            return _packed_in_8_bits(weight)
        return _packed_in_4_bits(weight, settings.bnb_4bit_quant_type)

    def check(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice, name: str) -> None:
        """Check that the quantization state is the one of a weight of this shape."""
        try:
            blocks = Blocks.of(_state(packing, tensors))
        except ValueError as error:
            raise CheckpointError(f"{name}: its quantization state {error}") from error
        if blocks.shape != held.shape:
            raise CheckpointError(
                f"{name} is {list(held.shape)}, and its quantization state says {list(blocks.shape)}"
            )

    def fill(self, module: nn.Module, attribute: str, part: Part) -> None:
        """Fill a module of bitsandbytes with the local shape, and the factors of the local blocks."""
        from bitsandbytes.nn import Params4bit  # an optional library

        tensors, weight_slice = part.tensors, part.held
        key = next(name for name in tensors if ".quant_state." in name)
        blocks = Blocks.of(tensors[key])
        state: dict[str, Any] = {
            "quant_type": key.rpartition("__")[2],
            "blocksize": blocks.size,
            "dtype": dtype_name(blocks.dtype),
            "shape": list(weight_slice.local_shape),
            "quant_map": tensors["*.quant_map"],
            **_local_factors(tensors, blocks, weight_slice),
        }
        rows, columns = weight_slice.local_shape
        if rows % CPU_ROWS or columns % blocks.size:
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # a flag of the module
        codes = tensors["*"].reshape(-1, 1)
        module._parameters[attribute] = Params4bit.from_prequantized(
            data=codes, quantized_stats=state, requires_grad=False, device=codes.device, module=module
        )

    def is_repacked(self, module: nn.Module, part: Part) -> bool:
        """See ``PackedFormat``."""
        is_on_cpu = next(iter(part.tensors.values())).device.type == "cpu"
        return is_on_cpu and bool(getattr(module, "support_avx512bf16_for_cpu", False))

    def rows(self, part: Part, is_last: bool) -> Rows | None:
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


class Bnb8Bit(PackedFormat):
    """Weights of linear layers in 8 bits, which ``Bnb4Bit`` finds."""

    method = "bnb_8bit"
    packages = Bnb4Bit.packages
    why = Bnb4Bit.why
    quantizer = "bitsandbytes"
    is_of_linear_layers = True
    can_be_joined = True

    def dequantized(self, packing: Packing, tensors: Mapping[str, Tensor], held: WeightSlice) -> Tensor:
        """Compute integers times the factors of their rows / 127, in float32, as the library does."""
        return tensors["*"] * tensors["SCB"].view(-1, 1) * 7.874015718698502e-3

    def fill(self, module: nn.Module, attribute: str, part: Part) -> None:
        """See ``PackedFormat``."""
        from bitsandbytes.nn import Int8Params  # an optional library

        values = part.tensors["*"]
        weight = Int8Params(values, requires_grad=False, CB=values, SCB=part.tensors["SCB"])
        module._parameters[attribute] = weight


def _packed_in_4_bits(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """Return codes, factors that are not nested, and the state."""
    from bitsandbytes import functional  # an optional library

    def pack(rows: Tensor) -> dict[str, Tensor]:
        codes, state = functional.quantize_4bit(rows, quant_type=kind)
        return {"*": codes, "*.absmax": state.absmax}

    _, form = functional.quantize_4bit(weight.to("meta"), quant_type=kind)
    stored = in_bands(weight, form.blocksize, pack)  # so many rows are full blocks
    form.code = functional.get_4bit_type(kind, device="cpu")
    rest = {f"*.{name}": tensor for name, tensor in form.as_dict(packed=True).items()}
    return {**rest, **stored}


def _packed_in_8_bits(weight: Tensor) -> dict[str, Tensor]:
    """Return integers and the factors of their rows; the library rounds the weight to float16 before."""
    from bitsandbytes import functional  # an optional library

    def pack(rows: Tensor) -> dict[str, Tensor]:
        values, factors, _ = functional.int8_vectorwise_quant(rows.to(torch.float16))
        return {"*": values, "SCB": factors}

    return {**in_bands(weight, 1, pack), "weight_format": torch.tensor(0, dtype=torch.uint8)}


def block_factors(tensors: Mapping[str, Tensor], blocks: Blocks, held: WeightSlice) -> Tensor:
    """Return the factors of the local blocks, flat, float32; nested ones as the library computes them."""
    factors = tensors["*.absmax"].reshape(-1)
    if not blocks.nested_size:
        return factors
    columns = held.local_shape[1]
    first = torch.arange(0, math.prod(held.local_shape), blocks.size)
    rows = held.positions(0)[first // columns] * held.shape[1]
    block = (rows + held.positions(1)[first % columns]) // blocks.size
    shared = tensors["*.nested_absmax"][(block // blocks.nested_size).to(factors.device)]
    return tensors["*.nested_quant_map"][factors.int()] * shared + blocks.nested_offset


def plain_state(blocks: Blocks) -> Tensor:
    """Return the bytes of a state without a shape (it says ``[1, 1]``) and without nested factors."""
    said = {"blocksize": blocks.size, "dtype": dtype_name(blocks.dtype), "shape": [1, 1]}
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def _local_factors(tensors: Mapping[str, Tensor], blocks: Blocks, held: WeightSlice) -> dict[str, Any]:
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


def _four_bits(checkpoint: Checkpoint, weight: str, state: str) -> Found:
    try:
        blocks = Blocks.of(checkpoint.read(state))
    except ValueError as error:
        raise SourceError(f"{state}: the quantization state {error}{REMEDY}") from error
    suffixes = [
        "",
        ".absmax",
        ".quant_map",
        *([".nested_absmax", ".nested_quant_map"] if blocks.nested_size else []),
    ]
    names = {f"*{suffix}": f"{weight}{suffix}" for suffix in suffixes}
    group = StoredGroup(checkpoint, blocks.shape, {**names, f"*{state.removeprefix(weight)}": state})
    dtype = checkpoint.tensors[weight].dtype
    if dtype not in ITEM_BYTES:
        raise SourceError(f"{weight} is {dtype}, and should be one of {', '.join(ITEM_BYTES)}{REMEDY}")
    stored = 2 * ITEM_BYTES[dtype]
    count = -(-math.prod(blocks.shape) // stored)
    group.add("*", [dtype], _flat(blocks.shape, stored), (count, 1))
    count = -(-math.prod(blocks.shape) // blocks.size)
    group.add(
        "*.absmax",
        ["uint8"] if blocks.nested_size else ["float32"],
        _flat(blocks.shape, blocks.size),
        (count,),
    )
    group.add("*.quant_map", ["float32"], (PackedDim(None, MAP_SIZE),))
    if blocks.nested_size:
        group.add("*.nested_absmax", ["float32"], (PackedDim(None, -(-count // blocks.nested_size)),))
        group.add("*.nested_quant_map", ["float32"], (PackedDim(None, NESTED_MAP_SIZE),))
    length = info(checkpoint, state, weight).shape[0]
    group.add(f"*{state.removeprefix(weight)}", ["uint8"], (PackedDim(None, length),))
    return group.found(Bnb4Bit.method)


def _eight_bits(checkpoint: Checkpoint, module: str) -> Found:
    weight, layout = f"{module}.weight", f"{module}.weight_format"
    names = {"*": weight, "SCB": f"{module}{SCALE}"}
    if layout in checkpoint.tensors:
        names["weight_format"] = layout
    group = StoredGroup(checkpoint, matrix(checkpoint, weight, f"{module}{SCALE}"), names)
    group.add("*", ["int8"], (PackedDim(0, 1), PackedDim(1, 1)))
    group.add("SCB", ["float32"], (PackedDim(0, 1),))
    if layout in names.values():
        group.add("weight_format", ["uint8"], ())
        if int(checkpoint.read(layout)) != 0:
            raise SourceError(f"{layout}: the weight is not row by row, but in a layout of old GPUs{REMEDY}")
    return group.found(Bnb8Bit.method)


def _flat(shape: tuple[int, ...], step: int) -> tuple[PackedDim, ...]:
    """Return the dims of a flat tensor with one element for each ``step`` values of a matrix."""
    rows, columns = shape
    if columns % step == 0:
        return PackedDim(0, 1), PackedDim(1, step)
    together = step // math.gcd(step, columns)
    if rows % together == 0:
        return PackedDim(0, together), PackedDim(1, columns), PackedDim(None, together * columns // step)
    return PackedDim(0, rows), PackedDim(1, columns), PackedDim(None, -(-rows * columns // step))


def _state(packing: Packing, tensors: Mapping[str, Tensor]) -> Tensor:
    return next(tensors[stored.name] for stored in packing.tensors if ".quant_state." in stored.name)
