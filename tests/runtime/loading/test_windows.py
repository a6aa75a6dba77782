"""Parts of tensors of a file that are mapped: only what lies there as it is, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.errors import SourceError
from shardconv_runtime.format.header import data_start, parse_header
from shardconv_runtime.loading.by_plan import Windows

MATRIX = torch.arange(48, dtype=torch.float32).reshape(8, 6)


@pytest.fixture
def matrix(tmp_path: Path) -> LazyTensor:
    """In a file behind another tensor."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, dtype=torch.int64), "b": MATRIX}, path)
    data = path.read_bytes()
    tensors = parse_header(lambda offset, count: data[offset : offset + count], len(data), "file")[1]
    return lazy_tensor.stored(path, data_start(len(data), tensors), tensors["b"])


def test_rows_are_mapped_and_may_be_written(matrix: LazyTensor) -> None:
    windows, rows = Windows(), lazy_tensor.take(matrix, 0, [(2, 5)])
    found = windows.window(rows)
    assert found is not None
    assert torch.equal(found, MATRIX[2:5])
    assert found.untyped_storage().nbytes() == 3 * 6 * 4
    found.zero_()
    assert torch.equal(read_tensor(rows), MATRIX[2:5]), "no file was changed"


def test_what_does_not_lie_there_as_it_is_is_not_mapped(matrix: LazyTensor) -> None:
    windows, narrow = Windows(), lazy_tensor.cast(matrix, "bfloat16")
    assert narrow is not None
    for tensor in (
        lazy_tensor.take(matrix, 1, [(0, 3)]),
        lazy_tensor.take(matrix, 0, [(0, 2), (4, 6)]),
        lazy_tensor.permute(matrix, (1, 0)),
        narrow,
        lazy_tensor.zeros("float32", (2, 2)),
        lazy_tensor.concatenate([matrix, matrix], 0),
    ):
        assert windows.window(tensor) is None
    assert windows.window(matrix) is not None


def test_what_is_mapped_once_is_not_mapped_again(matrix: LazyTensor) -> None:
    """Two parameters would be one: a step of an optimizer would change both."""
    windows = Windows()
    assert windows.window(lazy_tensor.take(matrix, 0, [(0, 4)])) is not None
    assert windows.window(lazy_tensor.take(matrix, 0, [(4, 8)])) is not None
    assert windows.window(lazy_tensor.take(matrix, 0, [(3, 5)])) is None
    assert windows.window(matrix) is None


def test_a_file_that_is_gone_is_an_error(matrix: LazyTensor) -> None:
    leaf = matrix.pieces[0].leaf
    assert isinstance(leaf, lazy_tensor.FileLeaf)
    assert isinstance(leaf.path, Path)
    leaf.path.unlink()
    with pytest.raises(SourceError, match=r"model\.safetensors: cannot be mapped into memory"):
        Windows().window(matrix)
