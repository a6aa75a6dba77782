"""Copying puts every byte of every file exactly once, however the work is cut."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazy_cases import DTYPES, Files, Pair, bits, name_of, pairs, random_tensor, same, spans, take_torch
from shardconv_runtime.checkpoint import copying, lazy_tensor
from shardconv_runtime.checkpoint.copying import (
    PlacedTensor,
    plan_units,
    read_tensor,
    run,
)
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, FileLeaf, StridedBox
from shardconv_runtime.errors import SourceError

slow_to_draw = settings(
    max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

sizes_in_bytes = st.sampled_from((1, 3, 8, 16, 24, 50, 100, 1 << 12))
"""Of units and bands: so small that every row is cut somewhere."""


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """One directory for all examples."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


class Record:
    """The sinks of all units: what each put where."""

    def __init__(self) -> None:
        self.puts: list[tuple[int, int, bytes]] = []

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Keep a copy: the buffer is used again."""
        self.puts.append((file, offset, bytes(data)))

    def content(self, file: int, num_bytes: int) -> bytes:
        """A file, each byte of which was put exactly once."""
        found: list[int] = [-1] * num_bytes
        for index, offset, data in self.puts:
            if index == file:
                assert all(value == -1 for value in found[offset : offset + len(data)]), "put twice"
                assert offset + len(data) <= num_bytes
                found[offset : offset + len(data)] = data
        assert -1 not in found, "not put"
        return bytes(found)


def tiny(unit: int, band: int, workers: int = 2) -> mock._patch_dict:
    """Small units and bands."""
    return mock.patch.multiple(
        copying,
        UNIT_BYTES=unit,
        BAND_BYTES=band,
        num_workers=lambda remote=False: workers,
        MAX_WORKERS=workers,
    )


def lay_out(targets: Sequence[Sequence[Pair]]) -> tuple[list[PlacedTensor], list[bytes]]:
    """Tensors end to end in files, and what the files are to hold."""
    placed, contents = [], []
    for file, held in enumerate(targets):
        content = b""
        for tensor, expected in held:
            placed.append(PlacedTensor(tensor, file, len(content)))
            content += bits(expected)
        contents.append(content)
    return placed, contents


def check(placed: list[PlacedTensor], contents: list[bytes], memory: int) -> None:
    """Carry out and compare."""
    record = Record()
    run(plan_units(placed, memory), lambda: record, lambda unit, sink: None)
    for file, content in enumerate(contents):
        assert record.content(file, len(content)) == content


@slow_to_draw
@given(st.data(), sizes_in_bytes, sizes_in_bytes, st.integers(1, 5000))
def test_random_expressions_in_several_files(
    directory: Path, data: st.DataObject, unit: int, band: int, memory: int
) -> None:
    files = Files(directory)
    targets = data.draw(st.lists(st.lists(pairs(files, steps=4), max_size=3), min_size=1, max_size=3))
    with tiny(unit, band):
        check(*lay_out(targets), memory)


@slow_to_draw
@given(st.data(), sizes_in_bytes, sizes_in_bytes, st.integers(1, 5000), st.integers(1, 3))
def test_slices_of_one_leaf_for_several_ranks(
    directory: Path, data: st.DataObject, unit: int, band: int, memory: int, workers: int
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    real = random_tensor(dtype, shape, 1)
    tensor = Files(directory).add(real)
    targets = []
    for _ in range(data.draw(st.integers(1, 4))):
        part: Pair = tensor, real
        for dim, size in enumerate(shape):
            chosen = data.draw(spans(size))
            part = lazy_tensor.take(part[0], dim, chosen), take_torch(part[1], dim, chosen)
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(len(shape))))
            part = lazy_tensor.permute(part[0], order), part[1].permute(tuple(order))
        targets.append([part])
    with tiny(unit, band, workers):
        check(*lay_out(targets), memory)


@slow_to_draw
@given(st.data(), sizes_in_bytes, sizes_in_bytes)
def test_units_may_run_in_any_order(directory: Path, data: st.DataObject, unit: int, band: int) -> None:
    placed, contents = lay_out([[data.draw(pairs(Files(directory), steps=4))]])
    record = Record()
    with tiny(unit, band):
        units = plan_units(placed, 1000)
        run(data.draw(st.permutations(units)), lambda: record, lambda unit, sink: None)
    assert record.content(0, len(contents[0])) == contents[0]


def test_a_strided_window_of_a_leaf(tmp_path: Path) -> None:
    """As a tensor that was saved together with the storage that it is a view of."""
    storage = random_tensor("float32", (60,), 3)
    leaf = Files(tmp_path).add(storage).pieces[0].leaf
    real = storage.as_strided((3, 4), (16, 3), 5)
    tensor = lazy_tensor.LazyTensor("float32", (3, 4), (StridedBox((0, 0), (3, 4), leaf, 5, (16, 3)),))
    for unit, band in itertools.product((1, 8, 40, 1000), repeat=2):
        with tiny(unit, band):
            assert same(read_tensor(tensor), real)


def test_a_leaf_that_is_computed_serves_all_files_at_once() -> None:
    calls: list[int] = []

    def compute() -> torch.Tensor:
        calls.append(threading.get_ident())
        return torch.arange(24, dtype=torch.int64)

    full = lazy_tensor.from_leaf(ComputedLeaf("test", compute, "int64", 24), (4, 6))
    parts = [
        (lazy_tensor.take(full, 1, ((i, i + 2),)), torch.arange(24).reshape(4, 6)[:, i : i + 2])
        for i in (0, 4)
    ]
    with tiny(8, 8):
        check(*lay_out([[part] for part in parts]), 100)
    assert len(calls) == 1


def test_one_tensor_at_a_time_is_computed() -> None:
    running, most = 0, 0

    def compute() -> torch.Tensor:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return torch.zeros(2, dtype=torch.int64)

    leaves = [lazy_tensor.from_leaf(ComputedLeaf(str(i), compute, "int64", 2), (2,)) for i in range(5)]
    with tiny(64, 64):
        assert same(read_tensor(lazy_tensor.concatenate(leaves, 0)), torch.zeros(10, dtype=torch.int64))
    assert most == 1


class TestErrors:
    """What cannot be read is one error that names the file and the place."""

    def read(self, path: Path, num_elements: int) -> None:
        """Read int64 elements from byte 8 of a file on."""
        read_tensor(lazy_tensor.from_leaf(FileLeaf(path, 8, "int64", num_elements), (num_elements,)))

    def test_a_file_that_was_cut_off(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.write_bytes(bytes(100))
        with pytest.raises(SourceError, match=r"/a ends before byte 101: it was cut off since its header"):
            self.read(path, 12)

    def test_a_file_that_is_gone(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="gone cannot be read at byte 8: No such file or directory"):
            self.read(tmp_path / "gone", 12)

    def test_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="cannot be read at byte 8: Is a directory"):
            self.read(tmp_path, 12)

    def test_the_error_of_a_sink_stops_all_workers(self, tmp_path: Path) -> None:
        tensor = Files(tmp_path).add(random_tensor("float32", (10_000,), 1))
        puts: list[int] = []

        class Failing:
            def put(self, file: int, offset: int, data: memoryview) -> None:
                puts.append(offset)
                time.sleep(0.0005)
                if len(puts) >= 4:  # several threads put
                    raise OSError(28, "No space left on device")

        every_other = lazy_tensor.take(tensor, 0, [(i, i + 1) for i in range(0, 10_000, 2)])
        with tiny(10_000, 4), pytest.raises(OSError, match="No space"):
            run(plan_units([PlacedTensor(every_other, 0, 0)], 1000), Failing, lambda unit, sink: None)
        assert len(puts) < 100

    def test_the_error_of_a_computation_comes_through(self) -> None:
        def fail() -> torch.Tensor:
            raise SourceError("the weights are gone")

        with pytest.raises(SourceError, match="the weights are gone"):
            read_tensor(lazy_tensor.from_leaf(ComputedLeaf("test", fail, "int64", 3), (3,)))


def test_no_more_is_read_than_is_needed(tmp_path: Path) -> None:
    """A column slice reads the file once; a row slice reads its rows only."""
    real = random_tensor("float32", (64, 8), 2)
    tensor = Files(tmp_path).add(real)
    read: list[int] = []
    preadv = copying.os.preadv

    def counting(handle: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(handle, buffers, offset))
        return read[-1]

    def read_for(*parts: lazy_tensor.LazyTensor) -> int:
        read.clear()
        units = plan_units([PlacedTensor(part, file, 0) for file, part in enumerate(parts)], 10_000)
        run(units, Record, lambda unit, sink: None)
        return sum(read)

    with tiny(256, 128), mock.patch.object(copying.os, "preadv", counting):
        assert read_for(*(lazy_tensor.take(tensor, 1, ((i, i + 2),)) for i in (0, 2, 4, 6))) <= 64 * 8 * 4
        assert read_for(lazy_tensor.take(tensor, 0, ((16, 32),))) == 16 * 8 * 4
        assert read_for(lazy_tensor.permute(tensor, (1, 0))) == 64 * 8 * 4


def test_names_of_dtypes() -> None:
    assert all(name_of(random_tensor(dtype, (2,), 0)) == dtype for dtype in DTYPES)
