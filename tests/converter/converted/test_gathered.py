"""Bands: the same tensor, in few long writes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import FileLeaf, LazyTensor
from shardconv_runtime.files.manifest import Source
from shardconv_runtime.format.dims import Dim, Leaf
from shardconv_runtime.format.plan import CodeInfo, ModelInfo, ParameterPlan, Plan

from shardconv.converted import derived_directory, shards
from shardconv.reporting.progress import Silent
from shardconv.writing import fill
from shardconv.writing.job import target_file
from shardconv.writing.outputs import Output, WriteOptions
from shardconv.writing.workspace import Claim, opened
from shardconv.writing.writer import Origin, write


def in_file(path: Path, tensor: torch.Tensor) -> LazyTensor:
    """A tensor as a file of its own."""
    path.write_bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return lazy_tensor.from_leaf(FileLeaf(path, 0, dtype, tensor.numel()), tensor.shape)


def by_columns(path: Path, tensor: torch.Tensor, parts: int) -> LazyTensor:
    """A tensor whose last dim is divided among files."""
    files = [in_file(path / f"{i}", part) for i, part in enumerate(tensor.chunk(parts, -1))]
    return lazy_tensor.concatenate(files, tensor.dim() - 1)


@pytest.mark.parametrize("shape", [(20, 8), (3, 8, 8), (1, 20, 8), (20, 1, 8)])
@pytest.mark.parametrize("band", [1, 5, 50, 10**6])
def test_bands_are_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], band: int
) -> None:
    monkeypatch.setattr(derived_directory, "BAND_BYTES", band)
    expected = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    tensor = by_columns(tmp_path, expected, 4)
    assert derived_directory.is_interleaved(tensor)
    bands = derived_directory.gathered("w", tensor)
    largest = max(math.prod(piece.shape) * 2 for piece in bands.pieces)
    assert largest <= max(band, 2)
    assert len(bands.pieces) * min(max(band, 2), expected.nbytes) < 4 * expected.nbytes, "full, mostly"
    assert torch.equal(read_tensor(bands), expected)
    assert torch.equal(
        read_tensor(lazy_tensor.take(bands, len(shape) - 1, ((1, 3), (6, 7)))), expected[..., [1, 2, 6]]
    )


def test_what_needs_no_bands(tmp_path: Path) -> None:
    rows = [in_file(tmp_path / f"{i}", torch.zeros(50, 24)) for i in range(4)]
    assert not derived_directory.is_interleaved(lazy_tensor.concatenate(rows, 0)), "whole rows are long"
    (tmp_path / "few").mkdir()
    assert not derived_directory.is_interleaved(by_columns(tmp_path / "few", torch.zeros(8, 16), 4)), (
        "few runs"
    )
    (tmp_path / "wide").mkdir()
    wide = by_columns(tmp_path / "wide", torch.zeros(40, 1 << 16), 4)
    assert not derived_directory.is_interleaved(wide), "long runs"
    assert not derived_directory.is_interleaved(in_file(tmp_path / "scalar", torch.zeros(())))
    assert not derived_directory.is_interleaved(lazy_tensor.zeros("float32", (0, 5)))


def test_what_bands_would_read_many_times_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    tensor = by_columns(tmp_path / "x", torch.zeros(100, 24), 4)
    transposed = lazy_tensor.permute(lazy_tensor.concatenate([tensor, tensor], 0), (1, 0))
    assert derived_directory.gathered("w", transposed) is transposed
    cast = lazy_tensor.cast(tensor, "float16")
    assert cast is not None
    assert derived_directory.gathered("w", cast) is cast
    bands = derived_directory.gathered("w", tensor)
    assert derived_directory.gathered("w", bands) is bands


@pytest.mark.parametrize("in_bands", [False, True])
def test_there_are_few_writes(tmp_path: Path, in_bands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix of which each rank has columns: one for each band, not for each row of each rank."""
    expected = torch.randn(1000, 64)
    (tmp_path / "parts").mkdir()
    tensor = by_columns(tmp_path / "parts", expected, 8)
    if in_bands:
        tensor = derived_directory.gathered("w", tensor)
    file = target_file("w.safetensors", "me", {"w": ("float32", (1000, 64))}, {}, lambda name: tensor)
    writes: list[int] = []
    pwrite = os.pwrite

    def counting(handle: int, data: memoryview, offset: int) -> int:
        writes.append(len(data))
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", counting)
    with opened(tmp_path / "out", {"a": 1}, [file], Claim({"me"}), tell=print) as workspace:
        fill.fill(workspace, memory=1 << 24, progress=Silent())
        assert workspace.checksums() is not None
        data = (workspace.path / file.path).read_bytes()[len(file.header) :]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(1000, 64), expected)
    assert len(writes) == 2 if in_bands else len(writes) > 5000


def plan(dim: Dim, ranks: int) -> Plan:
    """Columns of a matrix for each rank."""
    entry = ParameterPlan(("w",), (Leaf(300), dim), "float32")
    code = CodeInfo("0", "0", (), "0" * 64)
    return Plan(ranks, (ranks,), ModelInfo("no.module:Model", "float32", 0), code, (entry,), ())


def test_columns_for_other_ranks(tmp_path: Path) -> None:
    expected = torch.randn(300, 96)
    source = {"w": in_file(tmp_path / "w", expected)}
    for tp, name in ((8, "first"), (6, "second")):
        output = Output.prepare(tmp_path / name, overwrite=False, source=tmp_path / "none")
        origin = Origin(Source("x"), {}, lambda directory: [])
        done = write(
            plan(Leaf(96, (0,)), tp),
            source,
            output,
            origin,
            WriteOptions(10**9, 1 << 20),
            Silent(),
        )
        assert done
        weights = shards.read(tmp_path / name).weights()
        assert derived_directory.is_interleaved(weights["w"])
        source = {"w": derived_directory.gathered("w", weights["w"])}
        assert torch.equal(read_tensor(source["w"]), expected)
