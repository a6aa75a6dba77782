"""Checkpoints of every format with one thing changed: refused by our errors, or read as what they are."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import MemoryCheckpoint, Tensors
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.packed.formats import QUANT_METHODS, check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import WeightSlice

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def octets(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def text(said: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def float8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [8, 64]}
NESTED = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
INT8 = {"_type": "Int8Tensor", "_data": {"block_size": [1, 6]}, "_tensor_data_names": ["qdata", "scale"]}
COMPRESSED = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}}


def cases() -> dict[str, tuple[dict[str, Any], Tensors]]:
    """Settings, beside the method, and the tensors of a weight or two."""
    return {
        "awq": ({"group_size": 16}, {
            "a.qweight": words(32, 2), "a.qzeros": words(2, 2), "a.scales": torch.rand(2, 16).half(),
        }),
        "bitsandbytes": ({}, {
            "a.weight": octets(256, 1), "a.weight.absmax": octets(8),
            "a.weight.quant_map": torch.randn(16),
            "a.weight.nested_absmax": torch.rand(1), "a.weight.nested_quant_map": torch.randn(256),
            "a.weight.quant_state.bitsandbytes__nf4": text(STATE | NESTED),
            "b.weight": octets(4, 6).view(torch.int8), "b.SCB": torch.rand(4),
            "b.weight_format": torch.tensor(0).byte(),
        }),
        "compressed-tensors": ({"format": "pack-quantized", "config_groups": {"group_0": COMPRESSED}}, {
            "a.weight_packed": words(16, 4), "a.weight_scale": torch.rand(16, 2),
            "a.weight_zero_point": words(2, 2), "a.weight_shape": torch.tensor([16, 32]),
            "a.weight_g_idx": (torch.arange(32) % 2).int(),
        }),
        "fbgemm_fp8": ({}, {
            "a.weight": float8(4, 6), "a.weight_scale": torch.rand(4, 1), "a.input_scale_ub": torch.ones(1),
        }),
        "fp8": ({"weight_block_size": [2, 4]}, {
            "a.weight": float8(4, 6), "a.weight_scale_inv": torch.rand(2, 2),
            "a.activation_scale": torch.ones(()),
        }),
        "gptq": ({"bits": 4}, {
            "a.qweight": words(4, 16), "a.qzeros": words(2, 2), "a.scales": torch.rand(2, 16).half(),
            "a.g_idx": (torch.arange(32) % 2).int(),
        }),
        "mxfp4": ({}, {
            "e.down_proj_blocks": octets(2, 3, 2, 16), "e.down_proj_scales": octets(2, 3, 2),
        }),
        "mxfp8": ({}, {"a.weight": float8(4, 64), "a.weight_scale_inv": octets(4, 2)}),
        "torchao": ({}, {
            "a._weight_qdata": octets(4, 6).view(torch.int8), "a._weight_scale": torch.rand(4, 1),
        }),
    }  # fmt: skip


METADATA = {"torchao": {"tensor_names": '["a.weight"]', "a.weight": json.dumps(INT8)}}


def read(method: str, said: dict[str, Any], checkpoint: MemoryCheckpoint) -> int:
    """Find, check and dequantize all; how many parameters there are."""
    found = format_of_checkpoint(said | {"quant_method": method}, "here").find(checkpoint)
    for name, parameter in found.items():
        tensors, held = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        check_values(parameter.packing, tensors, held, name)
        assert dequantize(parameter.packing, tensors, held, torch.float32).shape == parameter.shape
    return len(found)


def test_every_method_has_a_case() -> None:
    assert set(cases()) == set(QUANT_METHODS)


@pytest.mark.parametrize("method", cases())
def test_unchanged(method: str) -> None:
    torch.manual_seed(0)
    said, tensors = cases()[method]
    read(method, said, MemoryCheckpoint(clean(tensors), METADATA.get(method, {})))


def clean(tensors: Tensors) -> Tensors:
    """Without exponents that stand for no number."""
    return {n: t.clamp(max=254) if n.endswith(("scales", "scale_inv")) else t for n, t in tensors.items()}


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_one_tensor_is_changed(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    method = data.draw(st.sampled_from(sorted(QUANT_METHODS)))
    said, tensors = cases()[method]
    name = data.draw(st.sampled_from(sorted(tensors)))
    match data.draw(st.sampled_from(["missing", "shape", "dtype", "values"])):
        case "missing":
            del tensors[name]
        case "shape":
            shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
            tensors[name] = torch.zeros(shape).to(tensors[name].dtype)
        case "dtype":
            tensors[name] = tensors[name].float().to(data.draw(st.sampled_from(DTYPES)))
        case _:
            size = tensors[name].numel() * tensors[name].element_size()
            tensors[name] = octets(size).view(tensors[name].dtype).reshape(tensors[name].shape)
    checkpoint = MemoryCheckpoint(tensors, METADATA.get(method, {}))
    with suppress(SourceError, CheckpointError):
        read(method, said, checkpoint)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_what_the_files_say_is_changed(data: st.DataObject) -> None:
    """The quantization state, the header, and the settings hold other JSON."""
    anything = st.recursive(
        st.none() | st.booleans() | st.integers(-9, 999) | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=4,
    )
    method = data.draw(st.sampled_from(["bitsandbytes", "torchao", "settings"]))
    if method == "settings":
        method = data.draw(st.sampled_from(sorted(QUANT_METHODS)))
        said, tensors = cases()[method]
        keys = ["bits", "group_size", "weight_block_size", "config_groups", "format", "checkpoint_format"]
        said = said | {data.draw(st.sampled_from(keys)): data.draw(anything)}
        metadata = METADATA.get(method, {})
    else:
        said, tensors = cases()[method]
        original = STATE | NESTED if method == "bitsandbytes" else INT8
        changed = original | {data.draw(st.sampled_from(sorted(original))): data.draw(anything)}
        tensors["a.weight.quant_state.bitsandbytes__nf4"] = text(changed)
        metadata = {"tensor_names": "[]", "a.weight": json.dumps(changed)}
        if method == "torchao":
            del tensors["a.weight.quant_state.bitsandbytes__nf4"]
    with suppress(SourceError, CheckpointError):
        read(method, said, MemoryCheckpoint(clean(tensors), metadata))


@pytest.mark.parametrize("size", [2**31, 2**64, 2.0**64])
@pytest.mark.parametrize("name", ["blocksize", "nested_blocksize"])
def test_sizes_beyond_the_numbers_of_tensors(name: str, size: float) -> None:
    said, tensors = cases()["bitsandbytes"]
    tensors["a.weight.quant_state.bitsandbytes__nf4"] = text(STATE | NESTED | {name: size})
    with pytest.raises((SourceError, CheckpointError), match=r"a\.weight"):
        read("bitsandbytes", said, MemoryCheckpoint(clean(tensors), {}))
