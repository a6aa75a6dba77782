"""GPTQ: the library's values, and parts of them, in act-order too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import dense_model, gptq_module, save_gptq
from packed_cases import MemoryCheckpoint, Tensors, even_parts, granularity, helds, require_equal_parts
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.packed.formats import check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import Found, WeightSlice

WORDS = torch.iinfo(torch.int32)


def words(*shape: int) -> torch.Tensor:
    """Random bits."""
    return torch.randint(WORDS.min, WORDS.max, shape, dtype=torch.int32)


def weight(outputs: int, inputs: int, group: int, bits: int = 4, *, act_order: bool = False) -> Tensors:
    """The tensors of a weight."""
    index = torch.arange(inputs, dtype=torch.int32) // group
    groups = int(index.max()) + 1
    return {
        "a.qweight": words(inputs * bits // 32, outputs),
        "a.qzeros": words(groups, outputs * bits // 32),
        "a.scales": torch.rand(groups, outputs).half(),
        "a.g_idx": index[torch.randperm(inputs)] if act_order else index,
    }


def find(tensors: Tensors, **said: Any) -> tuple[Found, Tensors]:
    """The one packed parameter."""
    checkpoint = MemoryCheckpoint(tensors)
    ((name, found),) = format_of_checkpoint({"quant_method": "gptq"} | said, "here").find(checkpoint).items()
    assert name == "a.weight"
    return found, checkpoint.stored(found)


@settings(deadline=None)
@given(st.data())
def test_any_part(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([2, 4, 8]))
    outputs, inputs = 16 * data.draw(st.integers(1, 5)), 16 * data.draw(st.integers(1, 9))
    group = data.draw(st.sampled_from([8, 16, 32, 48, inputs]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = weight(outputs, inputs, group, bits, act_order=data.draw(st.booleans()))
    found, stored = find(tensors, checkpoint_format=data.draw(st.sampled_from(["gptq", "gptq_v2"])))
    require_equal_parts(found, stored, data.draw(helds(found)))


def test_steps() -> None:
    """In act-order, and with one group, the groups limit nothing."""
    steps = {
        "in order": granularity(find(weight(16, 96, 32))[0], 1),
        "act-order": granularity(find(weight(16, 96, 32, act_order=True))[0], 1),
        "one group": granularity(find(weight(16, 96, 96))[0], 1),
        "outputs": granularity(find(weight(16, 96, 32))[0], 0),
    }
    assert steps == {"in order": 32, "act-order": 8, "one group": 8, "outputs": 8}


@pytest.mark.formats
@pytest.mark.parametrize(("bits", "group", "act_order", "form"), [
    (4, 64, False, "gptq"), (4, 32, True, "gptq"), (4, 128, False, "gptq_v2"), (4, -1, True, "gptq"),
    (8, 64, True, "gptq_v2"), (2, 64, False, "gptq"), (8, -1, False, "gptq"),
])  # fmt: skip
def test_checkpoints_of_the_library(
    bits: int, group: int, act_order: bool, form: str, tmp_path: Path
) -> None:
    pytest.importorskip("gptqmodel")
    save_gptq(tmp_path / "model", bits, group, act_order=act_order, form=form)
    checkpoint = MemoryCheckpoint.of(tmp_path / "model")
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = format_of_checkpoint(said, "here").find(checkpoint)
    assert len(found) == 7
    for name, parameter in found.items():
        tensors, whole = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        check_values(parameter.packing, tensors, whole, name)
        expected = by_library(tensors, bits, group, form)
        assert torch.equal(dequantize(parameter.packing, tensors, whole, torch.float16), expected)
        for held in even_parts(parameter, 3):
            require_equal_parts(parameter, tensors, held)


def by_library(tensors: Tensors, bits: int, group: int, form: str) -> torch.Tensor:
    """What the library's module computes of a weight after it has loaded these tensors."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    inputs, outputs = len(tensors["g_idx"]), tensors["qweight"].shape[1]
    module = TorchLinear(bits, group, False, True, inputs, outputs)
    module.load_state_dict(tensors)
    if form == "gptq":
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    return module.eval().dequantize_weight().T


@pytest.mark.formats
def test_the_integers_are_those_that_were_packed() -> None:
    pytest.importorskip("gptqmodel")
    torch.manual_seed(0)
    linear = dense_model().model.layers[0].mlp.down_proj
    for bits, bound in ((8, 0.02), (4, 0.2)):
        module = gptq_module(linear, bits, 64, act_order=True)
        stored = {f"a.{name}": getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        found, tensors = find(stored, checkpoint_format="gptq_v2")
        local = dequantize(found.packing, tensors, WeightSlice.whole(found.shape), torch.float32)
        assert (local - linear.weight).abs().max() < bound * linear.weight.abs().max()


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("a.qweight", words(12, 15), r"a.qzeros is int32 \[3, 2\], and should be int32 \[3, 2\]|a.scales is"),
    ("a.qweight", words(9, 16), r"a.qweight has 9 words for 96 inputs, that is 3 bits; 2, 4 and 8 are"),
    ("a.qweight", words(96), r"a.qweight is \[96\], and should have two dims"),
    ("a.qzeros", words(3, 3), r"a.qzeros is int32 \[3, 3\], and should be int32 \[3, 2\]"),
    ("a.scales", torch.rand(3, 16).double(), r"a.scales is float64 \[3, 16\], and should be float16 or"),
    ("a.scales", None, r"a.scales is missing from the checkpoint, which has a.qweight"),
    ("a.qweight", None, r"a.qzeros belongs to no weight that gptq has packed"),
    ("a.g_idx", None, r"a.g_idx is missing"),
    ("a.g_idx", torch.tensor(0).int(), "that is 384 bits; 2, 4 and 8 are"),
    ("a.g_idx", torch.zeros(96, 1).int(), r"a.g_idx is int32 \[96, 1\], and should be int32 \[96\]"),
    ("a.g_idx", torch.full((96,), 3, dtype=torch.int32), "a.g_idx names a group outside of the 3"),
    ("a.g_idx", torch.full((96,), -1, dtype=torch.int32), "a.g_idx names a group outside of the 3"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: torch.Tensor | None, message: str) -> None:
    tensors = weight(16, 96, 32)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(SourceError, match=message):
        find(tensors)


@pytest.mark.parametrize(("said", "message"), [
    ({"bits": 3}, "here is quantized with gptq in 3 bits; 2, 4 and 8 are covered; convert the unquantized"),
    ({"bits": 4, "checkpoint_format": "marlin"}, "in the variant marlin"),
])  # fmt: skip
def test_variants_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        format_of_checkpoint({"quant_method": "gptq"} | said, "here")


def test_values_are_checked() -> None:
    for act_order, wrong in ((True, 3), (True, -1), (False, 0)):
        found, tensors = find(weight(16, 96, 32, act_order=act_order))
        held = WeightSlice.whole(found.shape)
        check_values(found.packing, tensors, held, "a.weight")
        index = tensors["g_idx"].clone()
        index[50] = wrong
        with pytest.raises(CheckpointError, match=r"a.weight: g_idx"):
            check_values(found.packing, tensors | {"g_idx": index}, held, "a.weight")
        scales = tensors["scales"].clone()
        scales[1, 1] = float("nan")
        with pytest.raises(CheckpointError, match="stored tensor scales has values"):
            check_values(found.packing, tensors | {"scales": scales}, held, "a.weight")
