"""AWQ: the library's values, and parts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import save_awq
from packed_cases import MemoryCheckpoint, Tensors, even_parts, helds, require_equal_parts
from shardconv_runtime.errors import SourceError
from shardconv_runtime.packed.formats import check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import Found, WeightSlice

WORDS = torch.iinfo(torch.int32)


def words(*shape: int) -> torch.Tensor:
    """Random bits."""
    return torch.randint(WORDS.min, WORDS.max, shape, dtype=torch.int32)


def weight(outputs: int, inputs: int, group: int) -> Tensors:
    """The tensors of a weight."""
    groups = -(-inputs // group)
    return {
        "a.qweight": words(inputs, outputs // 8),
        "a.qzeros": words(groups, outputs // 8),
        "a.scales": torch.rand(groups, outputs).half(),
    }


def find(tensors: Tensors, **said: Any) -> tuple[Found, Tensors]:
    """The one packed parameter."""
    checkpoint = MemoryCheckpoint(tensors)
    ((name, found),) = format_of_checkpoint({"quant_method": "awq"} | said, "here").find(checkpoint).items()
    assert name == "a.weight"
    return found, checkpoint.stored(found)


@settings(deadline=None)
@given(st.data())
def test_any_part(data: st.DataObject) -> None:
    outputs, inputs = 8 * data.draw(st.integers(1, 7)), 8 * data.draw(st.integers(1, 9))
    group = data.draw(st.sampled_from([8, 16, 32, inputs]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    found, stored = find(weight(outputs, inputs, group), group_size=-1 if group == inputs else group)
    require_equal_parts(found, stored, data.draw(helds(found)))


@pytest.mark.formats
@pytest.mark.parametrize("group", [64, 32, -1])
def test_checkpoints_of_the_library(group: int, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    checkpoint = MemoryCheckpoint.of(save_awq(tmp_path / "model", group))
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = format_of_checkpoint(said, "here").find(checkpoint)
    assert len(found) == 7
    plain = MemoryCheckpoint.of(tmp_path / "model-plain").values
    for name, parameter in found.items():
        tensors, whole = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        check_values(parameter.packing, tensors, whole, name)
        size = parameter.shape[1] if group == -1 else group
        expected = dequantize_gemm(**tensors, bits=4, group_size=size).T
        local = dequantize(parameter.packing, tensors, whole, torch.float16)
        assert torch.equal(local, expected)
        assert (local - plain[name]).abs().max() < 0.2 * plain[name].abs().max()
        for held in even_parts(parameter, 3):
            require_equal_parts(parameter, tensors, held)


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("a.qzeros", words(3, 3), r"a.qzeros is int32 \[3, 3\], and should be int32 \[3, 2\] for a weight of"),
    ("a.scales", None, r"a.scales is missing from the checkpoint, which has a.qweight"),
    ("a.qweight", None, r"a.qzeros belongs to no weight that awq has packed"),
    ("act.scales", torch.ones(16), r"act.scales belongs to no weight that awq has packed"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: torch.Tensor | None, message: str) -> None:
    tensors = weight(16, 96, 32)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(SourceError, match=message):
        find(tensors, group_size=32)


@pytest.mark.parametrize(("said", "message"), [
    ({"bits": 8}, "here is quantized with awq in 8 bits in the variant gemm; 4 bits"),
    ({"version": "gemv"}, "in the variant gemv"),
    ({"group_size": 0}, "in groups of 0"),
])  # fmt: skip
def test_variants_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        format_of_checkpoint({"quant_method": "awq"} | said, "here")
