"""bitsandbytes: the library's values, and parts of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from library_checkpoints import save_bnb
from packed_cases import MemoryCheckpoint, Tensors, even_parts, helds, require_equal_parts
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.packed.formats import check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import Found, WeightSlice

SETTINGS = {"quant_method": "bitsandbytes"}


def state(shape: tuple[int, ...], block: int = 64, **said: Any) -> torch.Tensor:
    """A quantization state as the library writes it."""
    text = json.dumps({"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": shape} | said)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def four_bits(rows: int, columns: int, block: int = 64, *, nested: bool = False) -> Tensors:
    """The tensors of a weight."""
    factors = -(-rows * columns // block)
    tensors = {
        "a.weight": torch.randint(0, 256, (-(-rows * columns // 2), 1), dtype=torch.uint8),
        "a.weight.quant_map": torch.randn(16),
        "a.weight.absmax": torch.rand(factors),
        "a.weight.quant_state.bitsandbytes__nf4": state((rows, columns), block),
    }
    if nested:
        tensors["a.weight.absmax"] = torch.randint(0, 256, (factors,), dtype=torch.uint8)
        tensors["a.weight.nested_absmax"] = torch.rand(-(-factors // 256))
        tensors["a.weight.nested_quant_map"] = torch.randn(256)
        tensors["a.weight.quant_state.bitsandbytes__nf4"] = state(
            (rows, columns), block, nested_blocksize=256, nested_dtype="float32", nested_offset=0.125
        )
    return tensors


def find(tensors: Tensors) -> tuple[Found, Tensors]:
    """The one packed parameter."""
    checkpoint = MemoryCheckpoint(tensors)
    ((name, found),) = format_of_checkpoint(SETTINGS, "here").find(checkpoint).items()
    assert name == "a.weight"
    return found, checkpoint.stored(found)


@settings(deadline=None)
@given(st.data())
def test_any_part_of_4_bits(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([64, 128]))
    rows = data.draw(st.integers(1, 12))
    columns = data.draw(st.sampled_from([32, 64, 96, 128, 320, 2 * 64 * 7]))
    assume(rows * columns > block)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    found, tensors = find(four_bits(rows, columns, block, nested=data.draw(st.booleans())))
    require_equal_parts(found, tensors, data.draw(helds(found)))


def test_nested_factors_of_more_than_one_block() -> None:
    found, tensors = find(four_bits(96, 320, nested=True))
    for held in even_parts(found, 3):
        require_equal_parts(found, tensors, held)


@pytest.mark.formats
@pytest.mark.parametrize("settings", [
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    {"load_in_8bit": True},
], ids=["nf4", "nested", "fp4", "storage", "int8"])  # fmt: skip
def test_checkpoints_of_the_library(settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    checkpoint = MemoryCheckpoint.of(save_bnb(tmp_path / "model", **settings))
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = format_of_checkpoint(said, "here").find(checkpoint)
    assert len(found) == 7
    for name, parameter in found.items():
        tensors, whole = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        check_values(parameter.packing, tensors, whole, name)
        expected = by_library(checkpoint, name)
        assert torch.equal(dequantize(parameter.packing, tensors, whole, expected.dtype), expected)
        for held in even_parts(parameter, 4):
            require_equal_parts(parameter, tensors, held)


def by_library(checkpoint: MemoryCheckpoint, name: str) -> torch.Tensor:
    """What the library's own functions in torch compute of a weight."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import QuantState, dequantize_blockwise, int8_vectorwise_dequant

    values = checkpoint.values
    if values[name].dtype == torch.int8:
        return int8_vectorwise_dequant(values[name], values[f"{name.removesuffix('.weight')}.SCB"])
    parts = {n.removeprefix(f"{name}."): t for n, t in values.items() if n.startswith(f"{name}.")}
    quantized = QuantState.from_dict(parts, torch.device("cpu"))
    factors = quantized.absmax
    if quantized.nested:
        factors = dequantize_blockwise(factors, quantized.state2) + quantized.offset
    codes = values[name].view(torch.uint8).reshape(-1)
    code, size, shape = quantized.code, quantized.blocksize, quantized.shape
    with torch.compiler.set_stance("force_eager"):
        return _dequantize_4bit_compute(codes, factors, code, size, shape, quantized.dtype)


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("a.weight", torch.zeros(100, 1, dtype=torch.uint8), r"a.weight is uint8 \[100, 1\], .* \[128, 1\]"),
    ("a.weight.absmax", torch.zeros(5), r"a.weight.absmax is float32 \[5\], and should be float32 \[4\]"),
    ("a.weight.absmax", None, r"a.weight.absmax is missing from the checkpoint"),
    ("a.weight.quant_state.bitsandbytes__nf4", None, r"(map|absmax) belongs to no weight"),
    ("a.weight.quant_state.bitsandbytes__nf4", state((4, 128)), r"be uint8 \[256, 1\] for .* \[4, 128\]"),
    ("a.weight.quant_state.bitsandbytes__nf4", state((-4, -64)), r"has the shape \[-4, -64\]"),
    ("a.weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8), "cannot be read"),
    ("a.weight.quant_state.bitsandbytes__nf4", state((4, 64), dtype="load"), "names the dtype"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: torch.Tensor | None, message: str) -> None:
    tensors = four_bits(4, 64)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(SourceError, match=message):
        find(tensors)


def test_a_layout_of_old_gpus_is_refused() -> None:
    tensors = {"a.weight": torch.zeros(4, 6, dtype=torch.int8), "a.SCB": torch.ones(4)}
    find(tensors)
    with pytest.raises(SourceError, match=r"a.weight_format: the weight is not row by row"):
        find(tensors | {"a.weight_format": torch.tensor(2, dtype=torch.uint8)})


def test_values_are_checked() -> None:
    found, tensors = find(four_bits(4, 64))
    held = WeightSlice.whole(found.shape)
    check_values(found.packing, tensors, held, "a.weight")
    broken = tensors | {"*.absmax": torch.full((4, 1), math.inf)}
    with pytest.raises(
        CheckpointError, match=r"a.weight: its stored tensor \*.absmax has values that are not"
    ):
        check_values(found.packing, broken, held, "a.weight")
    for wrong, message in (
        (state((8, 32)), r"is \[4, 64\], and its .* says \[8, 32\]"),
        (state((0, 1)), "shape"),
    ):
        name = "*.quant_state.bitsandbytes__nf4"
        length = len(tensors[name])
        lying = torch.nn.functional.pad(wrong, (0, length - len(wrong)), value=32)
        with pytest.raises(CheckpointError, match=message):
            check_values(found.packing, tensors | {name: lying}, held, "a.weight")
    with pytest.raises(CheckpointError, match=r"\* is torch.uint8 \[3, 32\], and should be uint8 \[4, 32\]"):
        check_values(found.packing, tensors | {"*": tensors["*"][:3]}, held, "a.weight")
