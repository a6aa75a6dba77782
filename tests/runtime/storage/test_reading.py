"""A rank's tensors: mapped, or through staging buffers, with the same bytes; errors leave no thread."""

from __future__ import annotations

import dataclasses
import errno
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shardconv_runtime
import torch
from converted import llama_plan, random_llama, write_directory
from quantized_checkpoints import dequantized
from quick_calls import real_fsync
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.header import STORED_NAME, ShardFile, read_header
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing, ParameterPlan
from shardconv_runtime.loading import packed_models, rank_files
from shardconv_runtime.storage import reading
from shardconv_runtime.storage.pinned_reading import ALIGNMENT, DeviceEvent, staged
from shardconv_runtime.storage.reading import ReadAhead, mapped
from torch import Tensor

Read = Callable[[Sequence[ShardFile]], Generator[tuple[str, Tensor]]]


class Done:
    """The event of a copy that was made at once."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class Host:
    """A device without streams: the CPU's own memory."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.finished = False
        self.threads: set[int] = set()

    def enter_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def buffer(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.full((num_bytes,), 0xEE, dtype=torch.uint8))
        return self.buffers[-1]

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xDD, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        target.copy_(source)
        return Done()

    def publish(self, event: DeviceEvent) -> None:
        event.synchronize()

    def finish(self) -> None:
        self.finished = True


class LateEvent:
    def __init__(self, copied: Future[Any]) -> None:
        self._copied = copied

    def synchronize(self) -> None:
        self._copied.result()


class Late(Host):
    """Copies some time after it was told to, in order, as the stream of a device does."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = ThreadPoolExecutor(1)

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        def later() -> None:
            time.sleep(0.002)
            target.copy_(source)

        return LateEvent(self._stream.submit(later))

    def finish(self) -> None:
        self._stream.shutdown()
        super().finish()


def through_buffers(shards: Sequence[ShardFile]) -> Iterator[tuple[str, Tensor]]:
    return staged(shards, Late(), buffer_bytes=1024, num_buffers=3)


@pytest.fixture(params=[mapped, through_buffers])
def read(request: pytest.FixtureRequest) -> Read:
    found: Read = request.param
    return found


def written(path: Path, tensors: dict[str, Tensor]) -> ShardFile:
    save_file(tensors, path)
    return ShardFile(path, path.stat().st_size, read_header(path)[1])


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def odd_tensors() -> dict[str, Tensor]:
    """Of all sizes next to a buffer of 1024 bytes, without elements, and without dims."""
    sizes = (0, 1, 7, 255, 256, 257, 700, 1023, 1024, 1025, 2048, 5000, 3, 0, 12)
    tensors = {f"bytes.{index}": random_bytes(size) for index, size in enumerate(sizes)}
    return {
        **tensors,
        "empty": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "number": torch.tensor(1.5),
        "matrix": torch.randn(5, 7, dtype=torch.float64),
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert found[name].is_contiguous()
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardconv")]


def test_tensors_of_several_files(tmp_path: Path, read: Read) -> None:
    tensors = odd_tensors()
    parts = [{f"{i}.{name}": tensor + i for name, tensor in tensors.items()} for i in range(3)]
    shards = [written(tmp_path / f"{i}.safetensors", part) for i, part in enumerate(parts)]
    assert_same(dict(read(shards)), {name: tensor for part in parts for name, tensor in part.items()})
    assert not reading_threads()


@pytest.mark.parametrize("dtype", sorted(STORED_NAME))
def test_every_dtype(tmp_path: Path, read: Read, dtype: str) -> None:
    stored = random_bytes(16, 32)
    tensor = (stored > 99) if dtype == "bool" else stored.view(getattr(torch, dtype))
    shard = written(tmp_path / "x", {"x": tensor, "none": tensor[:0]})
    assert_same(dict(read([shard])), load_file(shard.path))


def test_no_file_and_files_without_bytes(tmp_path: Path, read: Read) -> None:
    assert dict(read([])) == {}
    empty = [written(tmp_path / "nothing", {}), written(tmp_path / "empty", {"x": torch.empty(0, 4)})]
    assert dict(read(empty))["x"].shape == (0, 4)


def test_each_tensor_has_a_storage_of_its_own(tmp_path: Path, read: Read) -> None:
    tensors = {name: tensor for name, tensor in odd_tensors().items() if tensor.numel()}
    found = dict(read([written(tmp_path / "x", tensors)]))
    for tensor in found.values():
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    for tensor in found.values():
        tensor.zero_()
    assert all(tensor._version == 2 for tensor in found.values()), "writes to one do not count for others"


# --- mapped


def maps(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mappings")
def test_a_mapping_is_private_writable_and_lives_as_long_as_its_tensors(tmp_path: Path) -> None:
    shard = written(tmp_path / "x", {"a": torch.ones(4096), "b": torch.zeros(4096)})
    before, descriptors = shard.path.read_bytes(), len(os.listdir("/proc/self/fd"))
    found = dict(mapped([shard]))
    assert [line.split()[1] for line in maps(shard.path)] == ["rw-p"]
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a file needs no descriptor"
    found["a"].fill_(7)
    assert shard.path.read_bytes() == before
    last = found.pop("a")
    found.clear()
    gc.collect()
    assert maps(shard.path)
    assert torch.equal(last, torch.full((4096,), 7.0))
    del last
    assert not maps(shard.path)


def test_a_file_that_is_gone_or_shorter_cannot_be_mapped(tmp_path: Path) -> None:
    shard = written(tmp_path / "x", {"a": torch.ones(100)})
    os.truncate(shard.path, shard.num_bytes - 1)
    with pytest.raises(CheckpointError, match=r"/x: cannot be mapped into memory"):
        dict(mapped([shard]))
    shard.path.unlink()
    with pytest.raises(CheckpointError, match=r"/x: cannot be mapped into memory"):
        dict(mapped([shard]))


# --- staged


@pytest.mark.parametrize("num_buffers", [1, 2, 5])
@pytest.mark.parametrize("buffer_bytes", [1, 100, 256, 1000, 1 << 20])
def test_any_ring_gives_the_same_tensors(tmp_path: Path, buffer_bytes: int, num_buffers: int) -> None:
    host, tensors = Host(), odd_tensors()
    shard = written(tmp_path / "x", tensors)
    found = dict(staged([shard], host, buffer_bytes=buffer_bytes, num_buffers=num_buffers))
    assert_same(found, tensors)
    assert len(host.buffers) <= num_buffers
    assert all(buffer.numel() <= buffer_bytes for buffer in host.buffers)
    assert host.finished


def test_each_thread_that_reads_is_told_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's first call of CUDA would go to the first GPU."""
    shard = written(tmp_path / "x", odd_tensors())
    device, readers = Host(), set()
    read = os.preadv

    def watched(*args: Any) -> int:
        readers.add(threading.get_ident())
        return read(*args)

    monkeypatch.setattr(os, "preadv", watched)
    list(staged([shard], device))
    assert readers
    assert readers <= device.threads
    assert threading.get_ident() not in device.threads


def test_a_buffer_is_filled_again_only_when_it_was_copied(tmp_path: Path) -> None:
    tensors = {str(i): random_bytes(900) for i in range(60)}
    shard = written(tmp_path / "x", tensors)
    assert_same(dict(staged([shard], Late(), buffer_bytes=1024, num_buffers=2)), tensors)


def test_small_tensors_share_an_aligned_slab(tmp_path: Path) -> None:
    tensors = {str(i): random_bytes(100) for i in range(5000)}
    shard = written(tmp_path / "x", tensors)
    host = Host()
    found = dict(staged([shard], host))
    assert_same(found, tensors)
    first = min(tensor.data_ptr() for tensor in found.values())
    assert sorted((t.data_ptr() - first) for t in found.values()) == [ALIGNMENT * i for i in range(5000)]
    assert len(host.buffers) == 1
    assert host.buffers[0].numel() == 4999 * ALIGNMENT + 100, "no more than is needed"


def test_reads_that_stop_early_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = odd_tensors()
    shard = written(tmp_path / "x", tensors)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at, real=os.preadv: real(fd, [views[0][:37]], at))
    assert_same(dict(through_buffers([shard])), tensors)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    shard = written(tmp_path / "x", {str(i): random_bytes(1000) for i in range(50)})
    os.truncate(shard.path, shard.start + 30_500)
    with pytest.raises(CheckpointError, match=rf"/x: ends at byte {shard.start + 30_500}, and was longer"):
        dict(through_buffers([shard]))
    assert not reading_threads()


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = written(tmp_path / "x", {str(i): random_bytes(1000) for i in range(50)})

    def fail_in_the_middle(fd: int, views: list[memoryview], at: int, real: Any = os.preadv) -> int:
        if at >= shard.start + 20_000:
            raise OSError(errno.EIO, "Input/output error")
        num_bytes: int = real(fd, views, at)
        return num_bytes

    monkeypatch.setattr(os, "preadv", fail_in_the_middle)
    found: dict[str, Tensor] = {}
    with pytest.raises(CheckpointError) as caught:
        found.update(through_buffers([shard]))
    assert str(caught.value).startswith(
        f"{shard.path}: cannot be read at byte {shard.start + 20_000} (Input/output error)"
    )
    assert len(found) == 20
    assert not reading_threads()
    shard.path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        dict(through_buffers([shard]))


def test_whoever_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    shard = written(tmp_path / "x", {str(i): random_bytes(1000) for i in range(50)})
    host, descriptors = Late(), len(os.listdir("/proc/self/fd"))
    reading = staged([shard], host, buffer_bytes=1024)
    next(reading)
    assert reading_threads()
    reading.close()
    assert host.finished
    assert not reading_threads()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_interrupt_ends_all_threads(tmp_path: Path) -> None:
    shard = written(tmp_path / "x", {str(i): random_bytes(1000) for i in range(50)})
    counter = itertools.count()

    class Interrupted(Late):
        def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
            if next(counter) == 9:
                raise KeyboardInterrupt
            return super().copy(target, source)

    host = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        dict(staged([shard], host, buffer_bytes=1024))
    assert host.finished
    assert not reading_threads()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    from shardconv_runtime.loading import rank_files

    tensors = odd_tensors() | {f"large.{i}": random_bytes(50 << 20) for i in range(4)}
    shard = written(tmp_path / "x", tensors)
    device = torch.device("cuda", 0)
    for _ in range(3):  # in memory that the round before wrote to
        found = {n: t.clone() for n, t in rank_files.tensors([shard], device)}
        assert all(t.device == device for t in found.values())
        assert_same({n: t.cpu() for n, t in found.items()}, tensors)
    assert all(t.data_ptr() % ALIGNMENT == 0 for _, t in rank_files.tensors([shard], device))


# --- tensors that share memory


@pytest.mark.parametrize("buffer_bytes", [0, 1, 1000, 1 << 20])
def test_adjacent_tensors_share_a_storage(tmp_path: Path, buffer_bytes: int) -> None:
    """Two of three groups: one lies apart in the file, or in another order."""
    names = ("a", "b", "c", "d", "e", "f", "g")
    tensors = {name: random_bytes(7, 5 + index) for index, name in enumerate(names)}
    shard = written(tmp_path / "x", tensors)
    assert tuple(shard.tensors) == names
    adjacent = (("b", "c", "d"), ("e", "g"), ("f",), ("g", "a"))
    if buffer_bytes:
        found = dict(staged([shard], Late(), adjacent, buffer_bytes=buffer_bytes))
    else:
        found = dict(mapped([shard], adjacent))
    assert_same(found, tensors)
    storages = {name: tensor.untyped_storage()._cdata for name, tensor in found.items()}
    assert storages["b"] == storages["c"] == storages["d"]
    assert len(set(storages.values())) == 5
    assert all(found[x]._base is None for x in "bcd")
    assert found["c"].data_ptr() == found["b"].data_ptr() + found["b"].nbytes


# --- in the model


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_staged_model_is_the_mapped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (1,)), shards=3)
    by_mapping = shardconv_runtime.load(path, dtype=dtype).state_dict()
    monkeypatch.setattr(rank_files, "tensors", lambda shards, *_: through_buffers(shards))
    by_staging = shardconv_runtime.load(path, dtype=dtype).state_dict()
    assert_same(by_staging, by_mapping)
    wanted = torch.float64 if dtype is None else getattr(torch, dtype)
    assert {tensor.dtype for tensor in by_staging.values()} == {wanted}
    assert not reading_threads()


def test_blocks_of_float8(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and factors may be in different files; a matrix without blocks stays as it is."""
    values, factors = random_bytes(40, 48).clamp(0, 0x7D).view(torch.float8_e4m3fn), torch.rand(3, 3) + 1
    plain = torch.randn(4, 4, dtype=torch.bfloat16)
    shards = [
        written(tmp_path / "values", {"scaled": values, "plain": plain}),
        written(tmp_path / "factors", {"scaled_scale_inv": factors}),
    ]
    stored = PackedTensor("*", "float8_e4m3fn", (PackedDim(0, 1), PackedDim(1, 1)))
    factor = PackedTensor("*_scale_inv", "float32", (PackedDim(0, 16), PackedDim(1, 16)))
    scaled = ParameterPlan(
        ("scaled",), (Leaf(40), Leaf(48)), "bfloat16", packing=Packing("fp8", (stored, factor))
    )
    plan = dataclasses.replace(
        llama_plan(random_llama().config, (1,), "bfloat16"),
        parameters=(scaled, ParameterPlan(("plain",), (Leaf(4), Leaf(4)), "bfloat16")),
    )
    found = dict(packed_models.unpacked(read(shards), plan, 0))
    assert torch.equal(found["plain"], plain)
    assert torch.equal(found["scaled"], dequantized(values, factors))


def test_an_error_of_the_model_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (1,)))
    host = Late()
    monkeypatch.setattr(rank_files, "tensors", lambda shards, *_: staged(shards, host, buffer_bytes=1024))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rank_files, "nn", SimpleNamespace(Parameter=fail))
    with pytest.raises(RuntimeError, match="no memory"):
        shardconv_runtime.load(path)
    assert host.finished
    assert not reading_threads()


# --- read-ahead


def cached_pieces(path: Path) -> list[bool]:
    descriptor = os.open(path, os.O_RDONLY)
    found = [
        reading._is_cached(descriptor, begin, begin + reading.PIECE_BYTES)
        for begin in range(0, path.stat().st_size, reading.PIECE_BYTES)
    ]
    os.close(descriptor)
    return found


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    path = tmp_path / "cold"
    path.write_bytes(os.urandom(1 << 20) * 32)
    descriptor = os.open(path, os.O_RDONLY)
    real_fsync(descriptor)
    for _ in range(20):  # pages on their way to the kernel's lists stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if not any(cached_pieces(path)):
            break
        time.sleep(0.05)
    os.close(descriptor)
    if any(cached_pieces(path)):
        pytest.skip("this file system keeps files in memory")
    return path


def test_reading_ahead_fills_the_page_cache(cold_file: Path) -> None:
    ReadAhead([(cold_file, 0, cold_file.stat().st_size)]).wait()
    assert all(cached_pieces(cold_file))


def test_reading_ahead_keeps_to_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for, that is: the kernel itself may read a little further."""
    piece = reading.PIECE_BYTES
    files = [tmp_path / "large", tmp_path / "small"]
    for path, num_bytes in zip(files, (2 * piece + 5, 10), strict=True):
        path.write_bytes(bytes(num_bytes))
    monkeypatch.setattr(reading, "_is_cached", lambda *_: False)
    for budget, expected in ((piece - 1, 0), (2 * piece + 4, 2), (2 * piece + 5, 3), (1 << 40, 4)):
        asked: list[int] = []
        monkeypatch.setattr(os, "preadv", lambda fd, views, at, asked=asked: asked.append(at) or 0)
        ReadAhead([(path, 0, path.stat().st_size) for path in files], budget).wait()
        assert sorted(asked) == sorted([0, piece, 2 * piece, 0][:expected])


def test_the_budget_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = reading._budget_bytes()
    assert alone > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert alone / 16 < reading._budget_bytes() < alone / 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert reading._budget_bytes() == 0


def test_reading_ahead_stops_when_told_and_says_nothing_of_errors(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(4 * reading.PIECE_BYTES))
    ahead = ReadAhead([(path, 0, 4 * reading.PIECE_BYTES), (tmp_path / "nowhere", 0, 9)])
    path.unlink()
    ahead.stop()
    ReadAhead([]).stop()
    assert not any(thread.is_alive() for thread in ahead._threads)
