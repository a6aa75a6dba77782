"""float8 with a factor for each row."""

from __future__ import annotations

import pytest
import torch
from packed_cases import MemoryCheckpoint, even_parts, require_equal_parts
from shardconv_runtime.errors import SourceError
from shardconv_runtime.packed.formats import dequantize, format_of_checkpoint
from shardconv_runtime.packed.stored_weights import WeightSlice

SETTINGS = {"quant_method": "fbgemm_fp8"}
TENSORS = {
    "a.weight": torch.ones(5, 6).to(torch.float8_e4m3fn),
    "a.weight_scale": torch.arange(5.0)[:, None],
    "a.input_scale_ub": torch.ones(1),
}


def test_values_and_parts() -> None:
    checkpoint = MemoryCheckpoint(TENSORS)
    found = format_of_checkpoint(SETTINGS, "here").find(checkpoint)["a.weight"]
    stored = checkpoint.stored(found)
    local = dequantize(found.packing, stored, WeightSlice.whole(found.shape), torch.float32)
    assert torch.equal(local, torch.arange(5.0)[:, None].expand(5, 6))
    for held in even_parts(found, 2):
        require_equal_parts(found, stored, held)


@pytest.mark.parametrize(("changed", "message"), [
    ({"a.weight_scale": torch.ones(5)}, r"a.weight_scale is float32 \[5\], and should be float32 \[5, 1\]"),
    ({"b.input_scale_ub": torch.ones(1)}, "b.input_scale_ub belongs to no weight that fbgemm_fp8"),
    ({"a.weight": torch.ones(2, 5, 6)}, r"a.weight is \[2, 5, 6\], and should have two dims"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        format_of_checkpoint(SETTINGS, "here").find(MemoryCheckpoint(TENSORS | changed))
