"""compressed-tensors: the library's values, and parts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import save_compressed
from packed_cases import MemoryCheckpoint, Tensors, even_parts, granularity, helds, require_equal_parts
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.packed.formats import check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import Found, WeightSlice

WORDS = torch.iinfo(torch.int32)
GROUPED = {"num_bits": 4, "strategy": "group", "group_size": 64}
FP8 = {"num_bits": 8, "type": "float"}
WEIGHTS = {
    "int4": GROUPED,
    "int4-asymmetric": GROUPED | {"symmetric": False},
    "int4-channel": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "int8-packed": GROUPED | {"num_bits": 8, "group_size": 32},
    "int2": GROUPED | {"num_bits": 2},
    "fp8-tensor": FP8 | {"strategy": "tensor"},
    "fp8-channel": FP8 | {"strategy": "channel"},
    "fp8-block": FP8 | {"strategy": "block", "block_structure": [64, 128]},
    "mxfp8": FP8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    | {"scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    | {"scale_dtype": "torch.uint8"},
}
"""Settings of weights."""


def config(*weights: dict[str, Any], form: str = "pack-quantized", **others: Any) -> dict[str, Any]:
    """The settings of a checkpoint."""
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": w} for i, w in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups} | others


def words(*shape: int) -> torch.Tensor:
    """Random bits."""
    return torch.randint(WORDS.min, WORDS.max, shape, dtype=torch.int32)


def integers(rows: int, columns: int, groups: int, bits: int = 4, *, zeros: bool = False) -> Tensors:
    """The tensors of a weight of packed integers."""
    tensors = {
        "a.weight_packed": words(rows, -(-columns * bits // 32)),
        "a.weight_scale": torch.rand(rows, groups).bfloat16(),
        "a.weight_shape": torch.tensor([rows, columns]),
    }
    if zeros:
        tensors["a.weight_zero_point"] = words(-(-rows * bits // 32), groups)
    return tensors


def find(tensors: Tensors, said: dict[str, Any]) -> tuple[Found, Tensors]:
    """The one packed parameter."""
    checkpoint = MemoryCheckpoint(tensors)
    ((name, found),) = format_of_checkpoint(said, "here").find(checkpoint).items()
    assert name == "a.weight"
    return found, checkpoint.stored(found)


@settings(deadline=None)
@given(st.data())
def test_any_part_of_packed_integers(data: st.DataObject) -> None:
    bits, group = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.sampled_from([4, 8, 32, 40, None]))
    rows, groups = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    columns = groups * group if group else data.draw(st.integers(1, 90))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = integers(rows, columns, groups if group else 1, bits, zeros=data.draw(st.booleans()))
    if group and data.draw(st.booleans()):
        tensors["a.weight_g_idx"] = (torch.randperm(columns) // group).int()
    weights = {"num_bits": bits, "strategy": "group" if group else "channel", "group_size": group}
    found, stored = find(tensors, config(weights))
    require_equal_parts(found, stored, data.draw(helds(found)))


@settings(deadline=None)
@given(st.data())
def test_any_part_of_floats(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), 32 * data.draw(st.integers(1, 3))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    kind = data.draw(st.sampled_from([k for k, w in WEIGHTS.items() if w.get("type") == "float"]))
    weights = WEIGHTS[kind]
    shape = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 64), -(-columns // 128))}
    scale = torch.rand(shape.get(weights["strategy"], (rows, columns // weights.get("group_size", 1))))
    if weights.get("scale_dtype") == "torch.uint8":
        scale = (scale * 255).to(torch.uint8)
    tensors = {"a.weight_scale": scale.bfloat16() if scale.is_floating_point() else scale}
    if weights["num_bits"] == 8:
        tensors["a.weight"] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    else:
        tensors["a.weight_packed"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    if kind == "nvfp4":
        tensors["a.weight_scale"] = scale.to(torch.float8_e4m3fn)
        tensors["a.weight_global_scale"] = torch.tensor([700.0])
    found, stored = find(tensors, config(weights, form="mixed-precision"))
    require_equal_parts(found, stored, data.draw(helds(found)))


@pytest.mark.formats
@pytest.mark.parametrize("kind", WEIGHTS)
def test_checkpoints_of_the_library(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    require_values_of_the_library(save_compressed(tmp_path / "model", {".*_proj": WEIGHTS[kind]}))


@pytest.mark.formats
@pytest.mark.parametrize("weights", [
    {"num_bits": 8, "strategy": "channel"},
    {"num_bits": 8, "strategy": "tensor"},
    {"num_bits": 8, "strategy": "channel", "symmetric": False},
    {"num_bits": 4, "strategy": "group", "group_size": 64},
    FP8 | {"strategy": "channel"},
])  # fmt: skip
def test_quantized_inputs(weights: dict[str, Any], tmp_path: Path) -> None:
    """With them the library does not pack integers: each is a byte."""
    pytest.importorskip("compressed_tensors")
    inputs = {"num_bits": 8, "dynamic": True, "strategy": "token", "type": weights.get("type", "int")}
    save_compressed(tmp_path / "model", {".*_proj": weights}, inputs)
    require_values_of_the_library(tmp_path / "model")
    assert not any(name.endswith("_packed") for name in MemoryCheckpoint.of(tmp_path / "model").values)


@settings(deadline=None)
@given(st.data())
def test_any_part_of_integers_in_bytes(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 20)), 8 * data.draw(st.integers(1, 5))
    strategy = data.draw(st.sampled_from(["tensor", "channel", "group"]))
    shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // 8)}[strategy]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = {
        "a.weight": torch.randint(-128, 128, (rows, columns), dtype=torch.int8),
        "a.weight_scale": torch.rand(shape).half(),
    }
    if data.draw(st.booleans()):
        tensors["a.weight_zero_point"] = torch.randint(-128, 128, shape, dtype=torch.int8)
    weights = {"num_bits": 8, "strategy": strategy, "group_size": 8 if strategy == "group" else None}
    found, stored = find(tensors, config(weights, form="int-quantized"))
    require_equal_parts(found, stored, data.draw(helds(found)))


@pytest.mark.formats
def test_several_groups_of_modules(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    groups = {".*down_proj": "int4-asymmetric", ".*(gate|up)_proj": "int8-packed", ".*": "fp8-block"}
    save_compressed(tmp_path / "model", {p: WEIGHTS[kind] for p, kind in groups.items()})
    require_values_of_the_library(tmp_path / "model")


def require_values_of_the_library(directory: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    checkpoint = MemoryCheckpoint.of(directory)
    said = json.loads((directory / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(said).config_groups.values()
    plain = MemoryCheckpoint.of(directory.with_name("model-plain")).values
    found = format_of_checkpoint(said, "here").find(checkpoint)
    assert len(found) == 7
    for name, parameter in found.items():
        module = name.removesuffix(".weight")
        scheme = next(s for s in schemes if match_name(module, s.targets[0]))
        parts = {n: t for n, t in checkpoint.values.items() if n.startswith(f"{module}.weight")}
        state = {n.rpartition(".")[2]: t for n, t in parts.items()}
        expected = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
        tensors, whole = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        check_values(parameter.packing, tensors, whole, name)
        assert torch.equal(dequantize(parameter.packing, tensors, whole, expected.dtype), expected)
        bound = 0.6 if scheme.weights.num_bits == 2 else 0.25
        assert (expected - plain[name]).abs().max() < bound * plain[name].abs().max()
        for held in even_parts(parameter, 3):
            require_equal_parts(parameter, tensors, held)


def test_steps() -> None:
    """Zero points are packed along the outputs; groups in any order limit nothing."""
    plain, zeros = integers(16, 96, 3), integers(16, 96, 3, zeros=True)
    index = {"a.weight_g_idx": (torch.arange(96) // 32).int()}
    shuffled = {"a.weight_g_idx": (torch.arange(96) % 3).int()}
    steps = []
    for tensors in (plain, zeros, plain | index, plain | shuffled):
        found, _ = find(tensors, config(GROUPED | {"group_size": 32}))
        steps.append([granularity(found, dim) for dim in range(2)])
    assert steps == [[1, 32], [8, 32], [1, 32], [1, 8]]


def test_factors_of_inputs_are_kept() -> None:
    tensors = {
        "a.weight": torch.ones(4, 6).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(1),
        "a.input_scale": torch.ones(1),
    }
    found, _ = find(tensors, config(WEIGHTS["fp8-tensor"], form="float-quantized"))
    assert found.tensors["input_scale"] == "a.input_scale"


@pytest.mark.parametrize(("changed", "message"), [
    ({"a.weight_scale": torch.ones(16, 5)}, r"a.weight_scale is \[16, 5\], .*, which fits no group"),
    ({"a.weight_shape": torch.tensor([16, 64])}, r"for .*\[16, 64\], which fits no"),
    ({"a.weight_shape": torch.tensor([8, 96])}, r"a.weight_shape says \[8, 96\], and the weight has 16 rows"),
    ({"a.weight_shape": torch.tensor([16])}, r"a.weight_shape is not the shape of a matrix"),
    ({"a.weight_shape": None}, "a.weight_shape is missing from the checkpoint"),
    ({"a.weight_scale": None}, "a.weight_packed belongs to no weight that compressed-tensors has packed"),
    ({"a.weight_packed": None}, "a.weight is missing from the checkpoint, which has a.weight_scale"),
    ({"a.weight_zero_point": words(3, 3)}, r"a.weight_zero_point is .* be int32 \[2, 3\]"),
    ({"a.weight_g_idx": torch.zeros(9).int()}, "a.weight_g_idx has no group for each of 96 inputs"),
    ({"a.weight_g_idx": torch.full((96,), 3).int()}, "a.weight_g_idx names a group outside of the 3"),
    ({"b.input_scale": torch.ones(1)}, "b.input_scale belongs to no weight"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(changed: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = integers(16, 96, 3) | changed
    with pytest.raises(SourceError, match=message):
        find({n: t for n, t in tensors.items() if t is not None}, config(GROUPED | {"group_size": 32}))


@pytest.mark.parametrize(("said", "message"), [
    (config(GROUPED, form="marlin-24"), "in the format marlin-24; float-quantized, .* are covered"),
    (config(GROUPED, kv_cache_scheme={"num_bits": 8}), "with kv_cache_scheme, which is not covered"),
    (config(GROUPED, sparsity_config={"format": "sparse-bitmask"}), "and sparse, which is not covered"),
    (config() | {"config_groups": {"FP8": ["Linear"]}}, r"in the group \['Linear'\], which is not covered"),
    (config(GROUPED | {"num_bits": "four"}), "with settings that cannot be read"),
    (config({"strategy": "token"}), "with one factor for each token"),
    (config({"strategy": "group"}), "in groups of None"),
    (config({"strategy": "block"}), "in blocks of None"),
])  # fmt: skip
def test_variants_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=f"here is quantized with compressed-tensors {message}"):
        format_of_checkpoint(said, "here")


def test_values_are_checked() -> None:
    tensors = integers(16, 96, 3) | {"a.weight_g_idx": (torch.arange(96) % 3).int()}
    found, stored = find(tensors, config(GROUPED | {"group_size": 32}))
    held = WeightSlice.whole(found.shape)
    check_values(found.packing, stored, held, "a.weight")
    for part, value, message in (
        ("*_shape", torch.tensor([96, 16]), r"is \[16, 96\], and its stored shape says \[96, 16\]"),
        ("*_g_idx", torch.full((96,), 3).int(), "g_idx names a group outside of the 3"),
        ("*_scale", torch.full((16, 3), float("inf")).bfloat16(), r"\*_scale has values that are not finite"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_values(found.packing, stored | {part: value}, held, "a.weight")
