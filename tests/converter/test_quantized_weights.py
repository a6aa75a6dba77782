"""Parts of quantized weights: ranks that are converted alone get the bytes of a whole conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_conversions import dense, mixture, saved
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import MANIFEST_NAME

import shardconv
from shardconv.arguments import Writing
from shardconv.quantized_weights import Library, _with_part, union


@pytest.fixture
def quantized_values(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of values that libraries have quantized."""
    numbers: list[int] = []
    compute = Library._error

    def counted(self: Library, name: str, weight: torch.Tensor, parts: Any) -> float:
        numbers.append(weight.numel())
        return compute(self, name, weight, parts)

    monkeypatch.setattr(Library, "_error", counted)
    return numbers


def require_parts_of(source: Path, directory: Path, scheme: str, tp: int, numbers: list[int]) -> list[float]:
    """Convert at once and rank by rank, and compare; the part of all values that each rank has quantized."""
    convert = shardconv.convert
    convert(source, directory / "whole", tp, quantize=scheme, check=False)
    total, shares = sum(numbers), []
    for rank in range(tp):
        numbers.clear()
        part = Writing(ranks=[rank])
        convert(source, directory / "parts", tp, quantize=scheme, check=False, writing=part)
        shares.append(sum(numbers) / total)
    files = [path.relative_to(directory / "whole") for path in (directory / "whole").rglob("*")]
    for path in (path for path in files if path.suffix and path.name != MANIFEST_NAME):
        assert (directory / "parts" / path).read_bytes() == (directory / "whole" / path).read_bytes()
    one, other = (manifest.read(directory / name).quantization_errors for name in ("whole", "parts"))
    assert one is not None
    assert other == pytest.approx(one, rel=0.1)
    return shares


def test_blocks_are_quantized_once(tmp_path: Path, quantized_values: list[int]) -> None:
    """Three and five blocks for two ranks, in rows and in columns; keys are one block, which both compute."""
    shares = require_parts_of(saved(dense(), tmp_path), tmp_path, "fp8", 2, quantized_values)
    assert sum(shares) == pytest.approx(1.087, abs=0.001)
    assert max(shares) < 0.7


def test_experts_are_quantized_once(tmp_path: Path, quantized_values: list[int]) -> None:
    shares = require_parts_of(saved(mixture(384), tmp_path), tmp_path, "fp8", 3, quantized_values)
    assert sum(shares) < 1.2  # attention has two heads of keys for three ranks
    assert max(shares) < 0.5


LIBRARIES = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "torchao_int8": "torchao"}


@pytest.mark.formats
@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        ("nf4", 1),
        ("w4a16", 1),
        ("int8", 1.5),
        ("fp8_dynamic", 1.5),
        ("torchao_int8", 1.5),
    ],
)
def test_other_schemes(scheme: str, most: float, tmp_path: Path, quantized_values: list[int]) -> None:
    """Rows that have one factor are quantized whole if ranks hold their columns."""
    pytest.importorskip(LIBRARIES.get(scheme, "compressed_tensors"))
    shares = require_parts_of(saved(dense(), tmp_path), tmp_path, scheme, 2, quantized_values)
    assert sum(shares) <= most + 0.01


def test_positions_beside_a_part_are_computed_from_the_whole() -> None:
    values = torch.arange(60.0).reshape(6, 10)
    whole = lazy_tensor.from_leaf(ComputedLeaf("whole", lambda: -values, "float32", 60), (6, 10))
    places = [((1, 2), (4, 6)), ((0, 3), (8, 9))]
    rows, columns = (torch.cat([torch.arange(*span) for span in spans]) for spans in places)
    inner = values[rows][:, columns]
    part = lazy_tensor.from_leaf(ComputedLeaf("part", lambda: inner, "float32", inner.numel()), inner.shape)
    expected = -values
    expected[rows[:, None], columns] *= -1
    assert torch.equal(read_tensor(_with_part(whole, part, places)), expected)


def test_ranges_are_joined() -> None:
    assert union([(4, 6), (0, 2), (1, 3), (3, 3), (6, 7)]) == ((0, 3), (4, 7))
