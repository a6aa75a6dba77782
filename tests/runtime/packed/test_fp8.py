"""float8 as transformers reads it: its values, and parts of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import experts_model, save_fp8
from packed_cases import MemoryCheckpoint, Tensors, even_parts, granularity, helds, require_equal_parts
from quantized_checkpoints import BLOCK, dense_config, experts_config, save_quantized
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.packed.formats import check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import Found, WeightSlice
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

FACTORS = ("float32", "bfloat16", "float8_e8m0fnu", "uint8")


def values(*shape: int) -> torch.Tensor:
    """Random values in float8."""
    return torch.randn(shape).to(torch.float8_e4m3fn)


def factors(dtype: str, *shape: int) -> torch.Tensor:
    """Random factors; bytes are exponents."""
    if dtype == "uint8":
        return torch.randint(100, 140, shape, dtype=torch.uint8)
    return torch.rand(shape).add(0.25).to(getattr(torch, dtype))


def find(tensors: Tensors, **said: Any) -> tuple[Found, Tensors]:
    """The one packed parameter."""
    checkpoint = MemoryCheckpoint(tensors)
    (found,) = format_of_checkpoint({"quant_method": "fp8"} | said, "here").find(checkpoint).values()
    return found, checkpoint.stored(found)


@settings(deadline=None)
@given(st.data())
def test_any_part(data: st.DataObject) -> None:
    shape = [data.draw(st.integers(1, 40)) for _ in range(data.draw(st.sampled_from([2, 3])))]
    block = data.draw(st.sampled_from([None, (8, 8), (1, 32), (16, 4)]))
    sizes = block or shape[-2:]
    grid = [*shape[:-2], *(-(-shape[i - 2] // sizes[i]) for i in range(2))]
    if block is None and len(shape) == 2:
        grid = data.draw(st.sampled_from([[], [1], [1, 1]]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = {
        "a.weight": values(*shape),
        "a.weight_scale_inv": factors(data.draw(st.sampled_from(FACTORS)), *grid),
    }
    if data.draw(st.booleans()):
        tensors["a.activation_scale"] = torch.tensor(0.5)
    found, stored = find(tensors, weight_block_size=block)
    require_equal_parts(found, stored, data.draw(helds(found)))


def test_exponents_for_short_blocks() -> None:
    tensors = {"a.weight": values(5, 64), "a.weight_scale_inv": factors("uint8", 5, 2)}
    found, _ = find(tensors, quant_method="mxfp8")
    assert [granularity(found, dim) for dim in range(2)] == [1, 32]


def test_steps() -> None:
    """A block that is longer than the dim limits nothing."""
    found, _ = find(
        {"a.weight": values(40, 24), "a.weight_scale_inv": torch.rand(3, 1)}, weight_block_size=[16, 32]
    )
    assert [granularity(found, dim) for dim in range(2)] == [16, 1]


@pytest.mark.parametrize("scale", [".scale", ".qscale_weight", ".weight_scale_inv", ".weight_scale"])
def test_other_names_of_factors(scale: str) -> None:
    tensors = {"a.weight": values(4, 6), f"a{scale}": torch.tensor([2.0]), "b.scale": torch.ones(3)}
    found, stored = find(tensors, weight_block_size=None)
    local = dequantize(found.packing, stored, WeightSlice.whole(found.shape), torch.float32)
    assert torch.equal(local, tensors["a.weight"].float() * 2)


@pytest.mark.parametrize("kind", ["float", "ue8m0"])
@pytest.mark.parametrize("shape", [(64, 96), (3, 64, 32)])
def test_values_of_transformers(kind: str, shape: tuple[int, ...]) -> None:
    """Its own quantization, and its dequantization of that."""
    torch.manual_seed(0)
    config = transformers.FineGrainedFP8Config(weight_block_size=(16, 32), scale_fmt=kind)
    ops = SimpleNamespace(quantization_config=config)
    made = Fp8Quantize(ops).convert({"a.gate_up_proj": [torch.randn(shape)]})
    made = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
    found, stored = find(made, weight_block_size=[16, 32], scale_fmt=kind)
    weight, scale = made["a.gate_up_proj"], made["a.gate_up_proj_scale_inv"]
    for dtype in (torch.bfloat16, torch.float32):
        expected = Fp8Dequantize(ops)._dequantize_one(weight, scale, dtype)
        local = dequantize(found.packing, stored, WeightSlice.whole(found.shape), dtype)
        assert torch.equal(local, expected)
    for held in even_parts(found, 3):
        require_equal_parts(found, stored, held)


@pytest.mark.parametrize(("config", "cls"), [
    (dense_config, transformers.Qwen3ForCausalLM), (experts_config, transformers.DeepseekV3ForCausalLM),
])  # fmt: skip
def test_checkpoints(config: Any, cls: Any, tmp_path: Path) -> None:
    save_quantized(config(), cls, tmp_path / "model")
    checkpoint = MemoryCheckpoint.of(tmp_path / "model")
    plain = MemoryCheckpoint.of(tmp_path / "model-plain").values
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = format_of_checkpoint(said, "here").find(checkpoint)
    assert found.keys() == {n for n, t in checkpoint.values.items() if t.dtype == torch.float8_e4m3fn}
    for name, parameter in found.items():
        tensors = checkpoint.stored(parameter)
        local = dequantize(parameter.packing, tensors, WeightSlice.whole(parameter.shape), torch.bfloat16)
        assert torch.equal(local, plain[name])
        assert granularity(parameter, 0) in (1, BLOCK)
        for held in even_parts(parameter, 3):
            require_equal_parts(parameter, tensors, held)


@pytest.mark.parametrize("kind", ["float", "ue8m0"])
def test_checkpoints_of_transformers(kind: str, tmp_path: Path) -> None:
    """It dequantizes on a CPU; per-expert matrices are stacked there."""
    save_fp8(tmp_path / "model", experts_model(), (16, 32), scale_fmt=kind)
    checkpoint = MemoryCheckpoint.of(tmp_path / "model")
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = format_of_checkpoint(said, "here").find(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    expected = dict(model.named_parameters())
    assert len(found) == 4 + 4 * 3
    for name, parameter in found.items():
        tensors, whole = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        local = dequantize(parameter.packing, tensors, whole, torch.bfloat16)
        if "experts" not in name:
            assert torch.equal(local, expected[name])
            continue
        prefix, expert, kind = name.removesuffix(".weight").rsplit(".", 2)
        merged = "down_proj" if kind == "down_proj" else "gate_up_proj"
        matrix = expected[f"{prefix}.{merged}"][int(expert)]
        start = len(local) if kind == "up_proj" else 0
        assert torch.equal(local, matrix[start : start + len(local)])


@pytest.mark.parametrize(("tensors", "message"), [
    ({"a.weight_scale_inv": torch.ones(3, 3)}, r"a.weight_scale_inv is float32 \[3, 3\], .*\[3, 2\]"),
    ({"a.weight_scale_inv": None}, "a.weight is in float8 and lacks a.weight_scale_inv; convert"),
    ({"a.weight": None}, "a.weight is missing from the checkpoint, which has a.weight_scale_inv"),
    ({"a.weight": torch.ones(40, 24)}, r"a.weight is float32 .*should be float8_e4m3fn"),
    ({"a.weight": values(40)}, r"a.weight is \[40\], and should have two dims"),
    ({"a.activation_scale": torch.ones(3)}, r"a.activation_scale is float32 \[3\], and should be"),
    ({"b.activation_scale": torch.ones(1)}, r"b.activation_scale belongs to no weight that fp8 has packed"),
    ({"a.input_scale": torch.ones(1)}, r"a.input_scale belongs to no weight that fp8 has packed"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, torch.Tensor | None], message: str) -> None:
    right = {"a.weight": values(40, 24), "a.weight_scale_inv": torch.ones(3, 2)}
    changed = {name: tensor for name, tensor in (right | tensors).items() if tensor is not None}
    with pytest.raises(SourceError, match=message):
        find(changed, weight_block_size=[16, 16])


@pytest.mark.parametrize(("said", "message"), [
    ({"weight_block_size": [16]}, r"here is quantized with fp8 in blocks of \[16\]"),
    ({"expert_dtype": "fp4"}, "here has experts in fp4 in addition to fp8; convert"),
])  # fmt: skip
def test_variants_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        format_of_checkpoint({"quant_method": "fp8"} | said, "here")


@pytest.mark.parametrize("dtype", FACTORS)
def test_values_are_checked(dtype: str) -> None:
    found, stored = find({"a.weight": values(4, 6), "a.weight_scale_inv": factors(dtype, 1, 1)})
    held = WeightSlice.whole(found.shape)
    check_values(found.packing, stored, held, "a.weight")
    broken = torch.full((1, 1), 255, dtype=torch.uint8)
    if dtype != "uint8":
        broken = torch.full((1, 1), float("nan")).to(getattr(torch, dtype))
    with pytest.raises(CheckpointError, match=r"a.weight: its stored tensor \*_scale_inv has values"):
        check_values(found.packing, stored | {"*_scale_inv": broken}, held, "a.weight")
