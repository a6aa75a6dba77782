"""torchao: the library's values, and parts of them."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import save_torchao
from packed_cases import MemoryCheckpoint, Tensors, even_parts, helds, require_equal_parts
from shardconv_runtime.errors import SourceError
from shardconv_runtime.packed.formats import check_values, dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import Found, WeightSlice


def header(kind: str = "Int8Tensor", block: Any = None, *parts: str) -> dict[str, str]:
    """What a file says about one weight."""
    said = {"_type": kind, "_data": {"block_size": block}, "_tensor_data_names": ["qdata", "scale", *parts]}
    return {"a.weight": json.dumps(said), "tensor_names": json.dumps(["a.weight"])}


def find(tensors: Tensors, metadata: dict[str, str]) -> tuple[Found, Tensors]:
    """The one packed parameter."""
    checkpoint = MemoryCheckpoint(tensors, metadata)
    ((name, found),) = format_of_checkpoint({"quant_method": "torchao"}, "here").find(checkpoint).items()
    assert name == "a.weight"
    return found, checkpoint.stored(found)


@settings(deadline=None)
@given(st.data())
def test_any_part(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    block = data.draw(st.sampled_from([(1, columns), (rows, columns), (1, 8), (16, 4)]))
    grid = -(-rows // block[0]), -(-columns // block[1])
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = {"a._weight_scale": torch.rand(grid), "a._weight_qdata": torch.randn(rows, columns)}
    parts = data.draw(st.sampled_from([(), ("zero_point",)]))
    if parts:
        tensors["a._weight_zero_point"] = torch.randint(-99, 99, grid, dtype=torch.int8)
        tensors["a._weight_qdata"] = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    else:
        tensors["a._weight_qdata"] = tensors["a._weight_qdata"].to(torch.float8_e4m3fn)
    kind = "Int8Tensor" if parts else "Float8Tensor"
    found, stored = find(tensors, header(kind, list(block), *parts))
    require_equal_parts(found, stored, data.draw(helds(found)))


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_that_were_packed_are_freed_at_once(kind: str) -> None:
    """A conversion packs all weights of a model, and garbage is collected rarely."""
    config = getattr(pytest.importorskip("torchao.quantization"), kind)()
    settings = SimpleNamespace(get_apply_tensor_subclass=lambda: config)
    packed_format = format_of_checkpoint({"quant_method": "torchao"}, "here")

    def num_tensors() -> int:
        packed_format.packed(torch.ones(4, 8), SimpleNamespace(quantization_config=settings))
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        assert num_tensors() == num_tensors()
    finally:
        gc.enable()


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_checkpoints_of_the_library(kind: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    checkpoint = MemoryCheckpoint.of(save_torchao(tmp_path / "model", getattr(quantization, kind)()))
    said = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = format_of_checkpoint(said, "here").find(checkpoint)
    library, _ = unflatten_tensor_state_dict(dict(checkpoint.values), dict(checkpoint.metadata))
    assert len(found) == 7
    for name, parameter in found.items():
        tensors, whole = checkpoint.stored(parameter), WeightSlice.whole(parameter.shape)
        check_values(parameter.packing, tensors, whole, name)
        for dtype in (torch.bfloat16, torch.float32):
            local = dequantize(parameter.packing, tensors, whole, dtype)
            assert torch.equal(local, library[name].dequantize(dtype))
        for held in even_parts(parameter, 3):
            require_equal_parts(parameter, tensors, held)


def test_blocks_that_the_header_leaves_out() -> None:
    tensors = {
        "a._weight_qdata": torch.ones(4, 6).to(torch.float8_e4m3fn),
        "a._weight_scale": torch.arange(4.0)[:, None],
    }
    found, stored = find(tensors, header("Float8Tensor"))
    local = dequantize(found.packing, stored, WeightSlice.whole(found.shape), torch.float32)
    assert torch.equal(local, torch.arange(4.0)[:, None].expand(4, 6))


@pytest.mark.parametrize(("metadata", "message"), [
    (header("Int4Tensor"), "a.weight is quantized by torchao as Int4Tensor; Int8Tensor"),
    (header("Int8Tensor", None, "act_pre_scale"), "with act_pre_scale, which is not covered"),
    (header("Int8Tensor", [1]), r"a.weight of \[4, 6\] is quantized by torchao in blocks of \[1\]"),
    (header("Int8Tensor", [2, 6]), r"a._weight_scale is float32 \[4, 1\], and should be .* \[2, 1\]"),
    (header("Int8Tensor", [1, 6], "zero_point"), "a._weight_zero_point is missing from the checkpoint"),
    (header("Float8Tensor", [1, 6]), "a._weight_qdata is int8 .*, and should be float8_e4m3fn"),
    ({"tensor_names": "[]", "a.weight": "{"}, "a.weight: its entry in the header is not JSON"),
    ({"tensor_names": "[]", "a.weight": "[]"}, "a.weight: its entry in the header is not in"),
    ({"tensor_names": "[]"}, "a._weight_qdata belongs to no weight that torchao has packed"),
    ({}, "the files have no tensor_names in their headers"),
])  # fmt: skip
def test_headers_that_do_not_fit_are_refused(metadata: dict[str, str], message: str) -> None:
    tensors = {"a._weight_qdata": torch.ones(4, 6, dtype=torch.int8), "a._weight_scale": torch.ones(4, 1)}
    with pytest.raises(SourceError, match=message):
        find(tensors, metadata)
