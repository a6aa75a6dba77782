"""Seconds of operators and collectives, calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardconv.hardware.cost_model import (
    ATTENTION_KERNELS,
    collective_seconds,
    eager_seconds,
    graph_seconds,
    operator_seconds,
)
from shardconv.hardware.machines import Cluster, Device, Link, ProductRate
from shardconv.hardware.rank_work import CallWork, CollectiveWork, OperatorWork

DEVICE = Device(
    name="D",
    memory_bytes=10**9,
    bandwidth=1e9,
    flops={"float32": 1e12},
    operator_s=0.0,
    kernel_s=1e-6,
    inside=Link(1e8, 1e-6, 1e-5),
    between=Link(1e7, 1e-5, 1e-5),
    disk_bandwidth=1e9,
    host_bandwidth=1e9,
    is_measured=True,
)
CLUSTER = Cluster(2, 4, DEVICE)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (OperatorWork("product", "float32", flops=5e9, num_bytes=1e6), 5e-3),  # bound by operations
        (OperatorWork("product", "float32", flops=5e8, num_bytes=1e6), 1e-3),  # bound by bytes
        (OperatorWork("other", "float32", num_bytes=2e6), 2e-3),
        (OperatorWork("free", "float32"), 0.0),
    ],
)
def test_an_operator_takes_the_longer_of_operations_and_bytes(work: OperatorWork, seconds: float) -> None:
    assert operator_seconds(work, DEVICE) == pytest.approx(seconds)


def test_measured_rates_of_other_operators_and_attention_count() -> None:
    device = replace(DEVICE, other_bandwidth=1e8, attention_flops=1e10)
    assert operator_seconds(OperatorWork("other", "float32", num_bytes=2e6), device) == pytest.approx(2e-2)
    attention = OperatorWork("attention", "float32", flops=1e8, num_bytes=1e6)
    assert operator_seconds(attention, device) == pytest.approx(1e-2)


def test_products_follow_the_measured_times_by_rows() -> None:
    curve = (ProductRate(1, 1e-9), ProductRate(3, 2e-9), ProductRate(100, 50e-9))
    device = replace(DEVICE, products={"float32": curve})

    def seconds(rows: int) -> float:
        return operator_seconds(OperatorWork("product", "float32", 2 * rows * 1e6, 0, 1e6), device)

    assert [seconds(rows) for rows in (1, 2, 3, 100)] == pytest.approx([1e-3, 1.5e-3, 2e-3, 50e-3])
    assert seconds(200) == pytest.approx(100e-3)  # as many operations per second as with 100


@pytest.mark.parametrize(
    ("op", "ranks", "seconds"),
    [
        # call + rounds * depth * latency + bytes of the ring / (0.8 or 1.0 of) the bandwidth
        ("all_reduce", (0, 1, 2, 3), 1e-5 + 4 * 1e-6 + 2 * 3 / 4 * 1e6 / 1e8),
        ("all_gather", (0, 1, 2, 3), 1e-5 + 2 * 1e-6 + 3 / 4 * 1e6 / 1e8),
        ("reduce_scatter", (0, 1), 1e-5 + 1e-6 + 1 / 2 * 1e6 / 1e8),
        # One adapter of each host, then four of them.
        ("all_reduce", (0, 4), 1e-5 + 2 * 1e-5 + 1e6 / 1e7),
        ("all_reduce", tuple(range(8)), 1e-5 + 4 * 1e-6 + 2 * 1e-5 + 2 * 7 / 8 * 1e6 / 4e7),
        ("all_reduce", (3,), 0.0),
    ],
)
def test_a_collective_takes_latencies_and_the_bytes_of_a_ring(
    op: str, ranks: tuple[int, ...], seconds: float
) -> None:
    assert collective_seconds(CollectiveWork(op, ranks, 10**6), CLUSTER) == pytest.approx(seconds)


def test_operators_between_products_are_one_kernel_of_a_graph() -> None:
    product = OperatorWork("product", "float32", num_bytes=1e6)
    small, large = (OperatorWork("other", "float32", num_bytes=n) for n in (1e5, 3e5))
    view = OperatorWork("free", "float32")
    cached = OperatorWork("other", "float32", num_bytes=9e6, cache_bytes=9e6)
    attention = OperatorWork("attention", "float32", num_bytes=1e6)
    events = (small, view, large, cached, product, attention)
    work = CallWork(tuple((event, 3) for event in events))
    kernels = 1 + 1 + ATTENTION_KERNELS
    assert graph_seconds(work, CLUSTER).total_s == pytest.approx(3 * (kernels * 1e-6 + 0.3e-3 + 1e-3 + 1e-3))


def test_a_host_starts_operators_beside_a_device_and_is_one_on_a_cpu() -> None:
    work = CallWork(((OperatorWork("other", "float32", num_bytes=1e6), 10),))
    device = replace(DEVICE, operator_s=2e-3)
    beside = eager_seconds(work, replace(CLUSTER, device=device))
    assert beside.total_s == pytest.approx(0.02)
    on_host = eager_seconds(work, replace(CLUSTER, device=replace(device, is_host=True)))
    assert on_host.total_s == pytest.approx(0.01 + 0.02)
