"""Measure the devices of this machine: memory, products, launches and collectives, in less than a minute.

As many processes as devices work at the same time, since cores share the bandwidth of the memory. Each time
is the shortest of several, and in each of these the slowest process counts.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from shardconv_runtime.comm.collectives import ProcessCommunicator
from shardconv_runtime.errors import OptionError
from torch import Tensor, nn

from .machines import Device, Link, ProductRate, devices_text, num_cores, read_devices

REPEATS = 3
"""Times in a row of which the shortest counts."""
ROUNDS = 2
"""Rounds of all products, since other programs of the machine may run for seconds."""
MIN_S = 0.01
"""Shorter calls are repeated within one time, so that clocks and barriers do not count."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
"""Numbers of rows of products."""
DTYPES = (torch.float32, torch.bfloat16)
MESSAGES = (1 << 12, 1 << 20, 1 << 23)
"""Bytes of the tensors of collectives: as in decoding, and as in a prefill."""
MODEL_CODE = {"cpu": 2.0, "cuda": 2.5}
"""Time of an operator in the code of a model, divided by the time in ``_SmallLayer``. On a CPU it is fitted
on tokens at tp 1 (``docs/hardware.md``); on a GPU it is assumed, since no file was measured on one."""
LAYERS = 40
"""Layers with the smallest operators."""
EVICTING_SIZE = 1024
"""Rows and columns of the matrices between them, whose 4 MB are more than a core's own cache."""
ATTENTION_LENGTH = 512
"""Tokens of a prompt."""
KERNELS = 500
"""Kernels of a CUDA graph, of which one takes microseconds."""
LEAST_COLLECTIVE_S = 1e-6
"""For a difference of two times that noise has made negative."""
FILE_BYTES = 1 << 28
MAX_PROCESSES = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes and sizes of the tensors, beyond the caches of the device."""

    copy_bytes: int
    matrix: int
    """Rows and columns of a matrix."""
    matrices: int
    """Matrices that take turns."""


ON_HOST = Sizes(1 << 26, 2048, 6)
ON_GPU = Sizes(1 << 30, 8192, 2)


def num_devices() -> int:
    """Return the number of GPUs of this machine, or of the cores that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return num_cores()


def measured_device(processes: int | None = None, sizes: Sizes | None = None) -> Device:
    """Measure this machine.

    Args:
        processes: ranks that work at the same time; by default one for each GPU or core.
        sizes: sizes of tensors; by default beyond the caches.

    Raises:
        ShardconvError: there are fewer GPUs than processes.
    """
    count = processes or num_devices()
    if not 1 <= count <= MAX_PROCESSES:
        raise OptionError(f"{count} processes cannot be measured; give 1 to {MAX_PROCESSES}")
    if torch.cuda.is_available() and count > torch.cuda.device_count():
        raise OptionError(f"there are {torch.cuda.device_count()} GPUs for {count} processes; give fewer")
    with tempfile.TemporaryDirectory(prefix="shardconv-measure-") as scratch:
        result = Path(scratch) / "device.json"
        arguments = (count, scratch, result, sizes)
        mp.spawn(_rank, arguments, nprocs=count)  # type: ignore[attr-defined, no-untyped-call]
        return read_devices(result)[0]


def _rank(rank: int, count: int, scratch: str, result: Path, sizes: Sizes | None) -> None:
    """Measure in one of the processes; rank 0 writes the result."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, num_cores() // count))
    if on_gpu:
        torch.cuda.set_device(device)
    meeting = f"file://{scratch}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    group = dist.new_group(backend="nccl") if on_gpu else dist.group.WORLD
    assert group is not None
    comm = ProcessCommunicator(rank, (count,), {(0,): group}, device=device)
    with torch.inference_mode():
        measured = _Measured(device, sizes or (ON_GPU if on_gpu else ON_HOST), comm)
        value = measured.device_value(count, Path(scratch))
    if rank == 0:
        result.write_text(devices_text([value]))
    dist.destroy_process_group()


def _nothing() -> None:
    pass


def _products(x: Tensor, matrices: list[Tensor]) -> None:
    for matrix in matrices:
        F.linear(x, matrix)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return local [1, 1, width]."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class _SmallLayer(nn.Module):
    """A decoder's layer for one token, so small that only its operators' launches take time.

    Args:
        before_product: called before each product.
    """

    OPERATORS = 48.25
    """Calls of operators, of which a view counts as ``FREE``."""
    HEADS, WIDTH, PAST = 2, 16, 8

    def __init__(self, before_product: Callable[[], None]) -> None:
        super().__init__()
        width, names = self.WIDTH, ("q", "k", "v", "o", "gate", "up", "down")
        self.before_product = before_product
        self.norms = nn.ModuleList(_Norm(width) for _ in range(2))
        self.linears = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names})
        self.act = nn.SiLU()
        self.past: Tensor
        self.register_buffer("past", torch.zeros(1, self.HEADS, self.PAST, width // self.HEADS))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return local [1, 1, width]."""
        y = self.norms[0](x)
        q, k, v = (self._product(name, y).view(1, 1, self.HEADS, -1).transpose(1, 2) for name in "qkv")
        q, k = (each * cos + _rotated(each) * sin for each in (q, k))
        k, v = (torch.cat((self.past, each), 2) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self._product("o", y)
        y = self.norms[1](x)
        return x + self._product("down", self.act(self._product("gate", y)) * self._product("up", y))

    def _product(self, name: str, x: Tensor) -> Tensor:
        self.before_product()
        product: Tensor = self.linears[name](x)
        return product


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class _Measured:
    """The measurements of one process.

    Args:
        device: the device of this process.
        sizes: sizes of tensors.
        comm: collectives of all processes.
    """

    def __init__(self, device: torch.device, sizes: Sizes, comm: ProcessCommunicator) -> None:
        self.device = device
        self.sizes = sizes
        self.comm = comm

    def device_value(self, count: int, scratch: Path) -> Device:
        """Measure everything."""
        is_host = self.device.type == "cpu"
        bandwidth = self._bandwidth()
        products = {str(dtype).removeprefix("torch."): self._products(dtype) for dtype in DTYPES}
        link = self._link()
        if is_host:
            memory, name = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count, "CPU"
        else:
            properties = torch.cuda.get_device_properties(self.device)
            memory, name = properties.total_memory, properties.name.replace(" ", "-")
        return Device(
            name=name,
            memory_bytes=memory,
            bandwidth=bandwidth,
            flops={dtype: 2 * curve[-1].rows / curve[-1].element_s for dtype, curve in products.items()},
            operator_s=self._operator_s(),
            kernel_s=0.0 if is_host else self._kernel_s(),
            inside=link,
            between=link,
            disk_bandwidth=self._disk(scratch),
            host_bandwidth=bandwidth if is_host else self._from_host(),
            is_host=is_host,
            is_measured=True,
            products=products,
            other_bandwidth=self._other_bandwidth(),
            attention_flops=self._attention_flops(),
            sources=(
                f"measured by shardconv env --measure with {count} processes, torch {torch.__version__}",
                "links between hosts were not measured: those inside of the host are in their place",
            ),
        )

    def _seconds(self, call: Callable[[], object], *, alone: bool = True) -> float:
        """Return the shortest time of a call, of the slowest process each.

        Args:
            call: the call.
            alone: the call waits for no other process. On a core, the time of its thread counts then, without
                the time that other programs have the core.
        """
        is_one_thread = self.device.type == "cpu" and torch.get_num_threads() == 1
        now = time.thread_time if alone and is_one_thread else time.perf_counter
        call()
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        # The ranks take the same number, or one of them waits in a collective.
        calls = self._of_slowest(max(1.0, MIN_S / max(time.perf_counter() - start, 1e-7)))
        best = float("inf")
        for _ in range(REPEATS):
            dist.barrier()
            start = now()
            for _ in range(int(calls)):
                call()
            self._synchronize()
            best = min(best, self._of_slowest((now() - start) / int(calls)))
        return best

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @staticmethod
    def _of_slowest(value: float) -> float:
        numbers = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return float(numbers[0])

    def _bandwidth(self) -> float:
        """Return bytes per second of a copy, which reads and writes."""
        source = torch.zeros(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def _other_bandwidth(self) -> float:
        """Return bytes per second of operators on each element, as they stand between products."""
        x = torch.randn(self.sizes.copy_bytes // 64, device=self.device).to(torch.bfloat16)

        def operators() -> None:
            y = F.silu(x)
            y = y * x
            y = y + x
            y = y.float()
            y.to(torch.bfloat16)

        # The operands and the results of five operators.
        num_bytes = (4 + 6 + 6 + 6 + 6) * x.numel()
        return num_bytes / self._seconds(operators)

    def _attention_flops(self) -> float:
        """Return operations per second of causal attention over a prompt, of which half are left out."""
        shape = (1, 8, ATTENTION_LENGTH, 64)
        query, key, value = (torch.randn(shape, device=self.device).to(torch.bfloat16) for _ in range(3))
        call = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        return 4 * query.numel() * ATTENTION_LENGTH / 2 / self._seconds(call)

    def _products(self, dtype: torch.dtype) -> tuple[ProductRate, ...]:
        """Return the times of products with matrices that are not in a cache."""
        size = self.sizes.matrix
        matrices = [torch.randn(size, size, device=self.device).to(dtype) for _ in range(self.sizes.matrices)]
        best = dict.fromkeys(ROWS, float("inf"))
        for _ in range(ROUNDS):
            for rows in ROWS:
                x = torch.randn(rows, size, device=self.device).to(dtype)
                seconds = self._seconds(partial(_products, x, matrices))
                best[rows] = min(best[rows], seconds)
        # Fewer rows take no more time. A longer one is that of other programs.
        shortest = list(itertools.accumulate(reversed(best.values()), min))[::-1]
        return tuple(ProductRate(n, s / len(matrices) / size**2) for n, s in zip(ROWS, shortest, strict=True))

    def _operator_s(self) -> float:
        """Return the seconds of an operator inside of modules; their Python code takes most of the time.

        On a host, a large product runs before each small one, as in a model: the code and the data of the
        operators leave the caches, so that they take two to four times as long.
        """
        is_host = self.device.type == "cpu"
        is_one_thread = is_host and torch.get_num_threads() == 1
        now = time.thread_time if is_one_thread else time.perf_counter
        matrices = itertools.cycle(torch.zeros(self.sizes.matrices, EVICTING_SIZE, EVICTING_SIZE))
        products_s = 0.0

        def large_product() -> None:
            nonlocal products_s
            start = now()
            matrix = next(matrices)
            F.linear(matrix[:1], matrix)
            products_s += now() - start

        layers = [_SmallLayer(large_product if is_host else _nothing) for _ in range(LAYERS)]
        for layer in layers:
            layer.to(self.device, torch.bfloat16)
        x = torch.ones(1, 1, _SmallLayer.WIDTH, dtype=torch.bfloat16, device=self.device)
        angles = x[..., : _SmallLayer.WIDTH // _SmallLayer.HEADS]
        best = float("inf")
        for _ in range(ROUNDS * REPEATS):
            self._synchronize()
            products_s, start = 0.0, now()
            for layer in layers:
                layer(x, angles, angles)
            self._synchronize()
            best = min(best, now() - start - products_s)
        operators = LAYERS * _SmallLayer.OPERATORS
        return MODEL_CODE[self.device.type] * self._of_slowest(best / operators)

    def _kernel_s(self) -> float:
        x = torch.zeros(8, device=self.device)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(KERNELS):
                x.add_(1)
        return self._seconds(graph.replay) / KERNELS

    def _from_host(self) -> float:
        source = torch.zeros(self.sizes.copy_bytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=self.device)
        return source.nbytes / self._seconds(lambda: target.copy_(source, non_blocking=True))

    def _disk(self, scratch: Path) -> float:
        """Return bytes per second of a file that is not in the page cache; of one process, others wait."""
        seconds = 1.0
        if self.comm.rank == 0:
            path = scratch / "file"
            path.write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
            with open(path, "rb", buffering=0) as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                while file.read(1 << 22):
                    pass
                seconds = time.perf_counter() - start
            path.unlink()
        dist.barrier()
        return FILE_BYTES / seconds

    def _collective_s(self, collective: Callable[[], object], product: Callable[[], object]) -> float:
        """Return the seconds of a collective in a model.

        There, ranks wait for each other, and on a CPU the threads of gloo sleep during a product, so that a
        collective between products may take several times as long as one after another.
        """
        if self.device.type == "cuda":
            return self._seconds(collective, alone=False)

        def turns() -> None:
            product()
            collective()

        together_s, product_s = (self._seconds(call, alone=False) for call in (turns, product))
        return max(together_s - product_s, LEAST_COLLECTIVE_S)

    def _link(self) -> Link:
        """Return the link that explains the times of collectives best."""
        ranks = self.comm.num_ranks((0,))
        if ranks == 1:
            return Link(self.sizes.copy_bytes / 1e-2, 0.0, 0.0)  # there is no collective
        matrix = torch.randn(self.sizes.matrix, self.sizes.matrix, device=self.device).to(torch.bfloat16)
        product = partial(F.linear, matrix[:1], matrix)
        sums, gathers = ([float("inf")] * len(MESSAGES) for _ in range(2))
        for _ in range(ROUNDS):
            for index, num_bytes in enumerate(MESSAGES):
                x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=self.device)
                part = x[: len(x) // ranks].clone()
                reduced = partial(self.comm.all_reduce, x, (0,), overwrite=True)
                gathered = partial(self.comm.concatenate, part, (0,))
                reduce_s, gather_s = (self._collective_s(call, product) for call in (reduced, gathered))
                sums[index], gathers[index] = min(sums[index], reduce_s), min(gathers[index], gather_s)
        depth = max(1, (ranks - 1).bit_length())
        # A sum takes two rounds of messages, and a gather one. Most collectives of plans are sums.
        latency = min(max(0.0, sums[0] - gathers[0]), sums[0] / 2) / depth
        call_s = sums[0] - 2 * depth * latency
        sent = [2 * (ranks - 1) / ranks * n for n in MESSAGES]
        moved, spent = sent[-1] - sent[0], sums[-1] - sums[0]
        return Link(moved / max(spent, 1e-9), latency, call_s)
