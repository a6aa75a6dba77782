"""Packed weights of one input as one weight: the same numbers, in the same memory, or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from packed_cases import MemoryCheckpoint
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing
from shardconv_runtime.packed.bnb import Bnb4Bit, Bnb8Bit
from shardconv_runtime.packed.formats import dequantize, format_of
from shardconv_runtime.packed.packed_format import Part
from shardconv_runtime.packed.stored_weights import WeightSlice
from shardconv_runtime.parallel.packed_modules import joined_parts
from torch import Tensor

COLUMNS = 64
ROWS, WHOLE = PackedDim(0, 1), PackedDim(None, 1)
VALUES = (ROWS, PackedDim(1, 1))
PACKED = {"qweight": (torch.zeros(1, 8, dtype=torch.int32), (PackedDim(1, COLUMNS), ROWS))}


def part(method: str, rows: int, tensors: Mapping[str, tuple[Tensor, tuple[PackedDim, ...]]]) -> Part:
    """All of a weight."""
    stored = tuple(PackedTensor(n, str(t.dtype).partition(".")[2], dims) for n, (t, dims) in tensors.items())
    held = WeightSlice.whole((rows, COLUMNS))
    return Part(Packing(method, stored), {n: t for n, (t, _) in tensors.items()}, held, torch.float32)


def float8(rows: int, block: int | None, **inputs: Tensor) -> Part:
    """In blocks of some rows and 32 columns, or with one factor."""
    values = torch.randn(rows, COLUMNS).to(torch.float8_e4m3fn), VALUES
    scale = torch.rand(1), (WHOLE,)
    if block is not None:
        scale = torch.rand(-(-rows // block), 2), (PackedDim(0, block), PackedDim(1, 32))
    others = {name: (tensor, (WHOLE,)) for name, tensor in inputs.items()}
    return part("fp8", rows, {"*": values, "*_scale_inv": scale, **others})


def float8_of_rows(rows: int, one_factor: bool = False) -> Part:
    values = torch.randn(rows, COLUMNS).to(torch.float8_e4m3fn), VALUES
    scale = (torch.rand(1), (WHOLE,)) if one_factor else (torch.rand(rows, 1), (ROWS, WHOLE))
    return part("compressed_tensors", rows, {"*": values, "*_scale": scale})


def integers(rows: int) -> Part:
    values = torch.randint(-127, 128, (rows, COLUMNS), dtype=torch.int8), VALUES
    return part("torchao", rows, {"_*_qdata": values, "_*_scale": (torch.rand(rows, 1), (ROWS, WHOLE))})


def eight_bits(rows: int) -> Part:
    values = torch.randint(-127, 128, (rows, COLUMNS), dtype=torch.int8), VALUES
    layout = torch.tensor(0, dtype=torch.uint8), ()
    return part("bnb_8bit", rows, {"*": values, "SCB": (torch.rand(rows), (ROWS,)), "weight_format": layout})


def four_bits(rows: int, nested: bool = False, size: int = 32) -> Part:
    """As the format's scheme finds it in a checkpoint."""
    count = -(-rows * COLUMNS // size)
    state: dict[str, Any] = {"blocksize": size, "dtype": "float32", "shape": [rows, COLUMNS]}
    tensors = {
        "0.weight": torch.randint(0, 256, (rows * COLUMNS // 2, 1), dtype=torch.uint8),
        "0.weight.absmax": torch.rand(count),
        "0.weight.quant_map": torch.linspace(-1, 1, 16),
    }
    if nested:
        state |= {"nested_blocksize": 16, "nested_offset": float(torch.rand(())), "nested_dtype": "float32"}
        tensors["0.weight.absmax"] = torch.randint(0, 256, (count,), dtype=torch.uint8)
        tensors["0.weight.nested_absmax"] = torch.rand(-(-count // 16))
        tensors["0.weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    checkpoint = MemoryCheckpoint(tensors | {"0.weight.quant_state.bitsandbytes__nf4": said})
    (found,) = Bnb4Bit().find(checkpoint).values()
    return Part(found.packing, checkpoint.stored(found), WeightSlice.whole((rows, COLUMNS)), torch.float32)


def plain(part: Part, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(part.packing, part.tensors, part.held, dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "parts",
    [
        [float8(8, 4), float8(4, 4), float8(6, 4)],
        [float8_of_rows(3), float8_of_rows(5)],
        [integers(3), integers(5), integers(1)],
        [eight_bits(3), eight_bits(5)],
        [four_bits(3), four_bits(5), four_bits(1)],
        [four_bits(2, size=128), four_bits(4, size=128)],
    ],
    ids=["float8", "float8 of rows", "torchao", "8 bits", "4 bits", "4 bits in blocks of rows"],
)
def test_joined_weights_have_the_same_numbers_in_the_same_memory(parts: list[Part]) -> None:
    expected = [plain(part) for part in parts]
    found = joined_parts(parts)
    assert found is not None
    spanning, own = found
    assert spanning.held.local_shape == (sum(map(len, expected)), COLUMNS)
    assert torch.equal(plain(spanning), torch.cat(expected))
    for each, values in zip(own, expected, strict=True):
        assert torch.equal(plain(each), values)
    for name, tensor in spanning.tensors.items():
        if ".quant_state." not in name:
            assert tensor.data_ptr() == own[0].tensors[name].data_ptr()


def test_tensors_that_lie_next_to_each_other_stay_where_they_are() -> None:
    parts = [integers(3), integers(5)]
    memory = torch.cat([part.tensors["_*_qdata"] for part in parts])
    for part, values in zip(parts, memory.split([3, 5]), strict=True):
        part.tensors["_*_qdata"] = values  # type: ignore[index]
    found = joined_parts(parts)
    assert found is not None
    assert found[0].tensors["_*_qdata"].data_ptr() == memory.data_ptr()
    assert found[1][1].tensors["_*_qdata"].data_ptr() == parts[1].tensors["_*_qdata"].data_ptr()


def test_factors_of_factors_are_multiplied_out_for_the_product_alone() -> None:
    parts = [four_bits(3, nested=True), four_bits(5, nested=True)]
    expected = [plain(part) for part in parts]
    found = joined_parts(parts)
    assert found is not None
    spanning, own = found
    assert torch.equal(plain(spanning), torch.cat(expected))
    for before, after, values in zip(parts, own, expected, strict=True):
        assert torch.equal(plain(after), values)
        assert after.tensors["*.absmax"] is before.tensors["*.absmax"]
    assert spanning.tensors["*"].data_ptr() == own[0].tensors["*"].data_ptr()


def test_one_factor_for_a_weight_is_one_for_each_row() -> None:
    parts = [float8_of_rows(3, one_factor=True), float8_of_rows(5, one_factor=True)]
    found = joined_parts(parts)
    assert found is not None
    values = found[0].tensors["*"].float() * found[0].tensors["*_scale"]
    assert torch.equal(values, torch.cat([plain(part) for part in parts]))


SCALE = {"activation_scale": torch.ones(1)}


@pytest.mark.parametrize(
    "parts",
    [
        [float8(6, 4), float8(4, 4)],
        [float8(4, None), float8(4, None)],
        [float8(4, 4), float8(4, 2)],
        [float8(4, 4), float8(4, None)],
        [float8(4, 4, **SCALE), float8(4, 4)],
        [float8(4, 4, **SCALE), float8(4, 4, activation_scale=torch.full((1,), 2.0))],
        [four_bits(4), four_bits(4, size=64)],
        [four_bits(3, size=128), four_bits(1, size=128)],
        [integers(4), eight_bits(4)],
        [part("gptq", 8, PACKED), part("gptq", 8, PACKED)],
    ],
    ids=[
        "part of a block", "other factors", "other blocks", "blocks or none", "inputs quantized or not",
        "other factors of inputs", "blocks of 4 bits", "part of a block of rows", "methods", "columns",
    ],
)  # fmt: skip
def test_what_would_not_be_exact_is_not_joined(parts: list[Part]) -> None:
    assert joined_parts(parts) is None


def test_the_same_factor_of_inputs() -> None:
    assert joined_parts([float8(4, 4, **SCALE), float8(8, 4, activation_scale=torch.ones(1))]) is not None


def test_a_module_that_moves_its_weight_when_it_is_called() -> None:
    """A kernel for CPUs would have memory of its own: two sets of weights."""
    module = torch.nn.Module()
    for moves in (True, False):
        module.support_avx512bf16_for_cpu = moves  # type: ignore[assignment]
        assert Bnb4Bit().is_repacked(module, four_bits(2)) == moves
        assert not Bnb8Bit().is_repacked(module, eight_bits(2))


def test_which_methods() -> None:
    assert format_of("fp8").can_be_joined
    assert not format_of("gptq").can_be_joined
    assert not format_of("awq").can_be_joined
