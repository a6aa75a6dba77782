"""MXFP4 experts: the values of transformers, and parts of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import save_mxfp4
from packed_cases import MemoryCheckpoint, Tensors, even_parts, granularity, helds, require_equal_parts
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.packed.formats import check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import Found, WeightSlice
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

NAME = "model.layers.0.mlp.experts.down_proj"


def weight(experts: int, outputs: int, blocks: int) -> Tensors:
    """The tensors of the experts."""
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (experts, outputs, blocks, 16), dtype=torch.uint8),
        f"{NAME}_scales": torch.randint(0, 255, (experts, outputs, blocks), dtype=torch.uint8),
    }


def find(tensors: Tensors) -> tuple[Found, Tensors]:
    """The one packed parameter."""
    checkpoint = MemoryCheckpoint(tensors)
    ((name, found),) = format_of_checkpoint({"quant_method": "mxfp4"}, "here").find(checkpoint).items()
    assert name == NAME
    return found, checkpoint.stored(found)


@settings(deadline=None)
@given(st.data())
def test_any_part(data: st.DataObject) -> None:
    sizes = (data.draw(st.integers(1, size)) for size in (4, 12, 5))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    found, stored = find(weight(*sizes))
    require_equal_parts(found, stored, data.draw(helds(found)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_of_transformers(dtype: torch.dtype) -> None:
    """All exponents but the one that stands for no number; the largest values are infinite."""
    torch.manual_seed(0)
    tensors = weight(3, 17, 5)
    found, stored = find(tensors)
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=dtype)
    assert tuple(expected.shape) == found.shape == (3, 160, 17)
    assert torch.equal(dequantize(found.packing, stored, WeightSlice.whole(found.shape), dtype), expected)
    assert [granularity(found, dim) for dim in range(3)] == [1, 32, 1]


def test_checkpoints(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.of(save_mxfp4(tmp_path / "model"))
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = format_of_checkpoint(said, "here").find(checkpoint)
    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config, dtype=torch.bfloat16
    )
    assert len(found) == 2
    for name, parameter in found.items():
        tensors, whole = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        check_values(parameter.packing, tensors, whole, name)
        local = dequantize(parameter.packing, tensors, whole, torch.bfloat16)
        assert torch.equal(local, model.get_parameter(name))
        for held in even_parts(parameter, 2):
            require_equal_parts(parameter, tensors, held)


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("scales", None, "down_proj_scales is missing from the checkpoint, which has"),
    ("blocks", None, "down_proj_scales belongs to no weight that mxfp4 has packed"),
    ("scales", torch.zeros(2, 3, 5, dtype=torch.uint8), r"down_proj_scales is uint8 \[2, 3, 5\], and"),
    ("blocks", torch.zeros(2, 3, 4, 8, dtype=torch.uint8), r"down_proj_blocks is uint8 .* \[2, 3, 4, 16\]"),
    ("blocks", torch.zeros(2, 3, 64, dtype=torch.uint8), "and should have four dims"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: torch.Tensor | None, message: str) -> None:
    tensors = weight(2, 3, 4)
    del tensors[f"{NAME}_{name}"]
    if tensor is not None:
        tensors[f"{NAME}_{name}"] = tensor
    with pytest.raises(SourceError, match=message):
        find(tensors)


def test_values_are_checked() -> None:
    found, stored = find(weight(2, 3, 4))
    held = WeightSlice.whole(found.shape)
    stored["*_blocks"].fill_(255)
    check_values(found.packing, stored, held, NAME)
    stored["*_scales"][1, 2, 3] = 255
    with pytest.raises(CheckpointError, match=r"its stored tensor \*_scales has values"):
        check_values(found.packing, stored, held, NAME)
