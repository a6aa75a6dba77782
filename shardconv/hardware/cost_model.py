"""Seconds of operators and collectives on a device: a roofline, launches, and links.

An operator takes the longer of its operations at the rate of products and its bytes at the bandwidth of the
memory (Williams et al., Roofline, 2009). Outside of a graph the host starts one operator after another, and a
device that is not the host works meanwhile, so that the slower of both counts. In a graph each kernel has a
shortest time, and operators between two products are one kernel, as a compiler makes them.

A collective takes latencies along a tree, and its bytes in a ring over the slowest link of its group
(Thakur et al., Optimization of collective communication operations in MPICH, 2005).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .machines import Cluster, Device, Link, ProductRate
from .rank_work import CallWork, CollectiveWork, Event, OperatorWork, sent_bytes

EFFICIENCY = {"product": 0.79, "attention": 0.4, "bytes": 0.87, "link": 0.8}
"""Part of a data sheet's rate that is reached. Products and bytes: one H200 (784 of 990 TFLOP/s, 4.2 of 4.8
TB/s, ``docs/gpu.md``). Links: all_reduce of large tensors over NVLink (nccl-tests, ``docs/hardware.md``).
Attention: not measured here; kernels on an H100 reach a third to two thirds."""
ATTENTION_KERNELS = 6
"""Kernels of attention over a cache in a compiled step, counted on an H200 (``docs/gpu.md``)."""
FREE = 0.25
"""Time in which the host starts an operator that moves nothing, such as a view, in times of others."""
COLLECTIVE = 6.4
"""The same for a collective on a GPU: 66 of them take 6.8 ms more in an eager token (``docs/gpu.md``)."""


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """The parts of the time of a call."""

    compute_s: float
    """Operators on the device, with the shortest times of kernels."""
    collective_s: float
    host_s: float
    """The host starts the operators; 0 in a graph."""
    is_host: bool
    """Whether the device is the host, so that these times add up."""

    @property
    def total_s(self) -> float:
        """The time of the call."""
        device_s = self.compute_s + self.collective_s
        return device_s + self.host_s if self.is_host else max(device_s, self.host_s)


def eager_seconds(work: CallWork, cluster: Cluster) -> CallSeconds:
    """Return the time of a call whose operators are started one by one."""
    device = cluster.device
    compute = host = 0.0
    for event, count in work.events:
        if isinstance(event, OperatorWork):
            factor = FREE if event.kind == "free" else 1.0
            compute += count * operator_seconds(event, device)
        else:  # the time that was measured on a host is the time of the whole call
            factor = 0.0 if device.is_host else COLLECTIVE
        host += count * device.operator_s * factor
    return CallSeconds(compute, _collectives(work.events, cluster), host, device.is_host)


def graph_seconds(work: CallWork, cluster: Cluster) -> CallSeconds:
    """Return the time of a compiled call in a CUDA graph, with its cache in static memory."""
    device = cluster.device
    compute = 0.0
    for kernels, event, count in _kernels(work.events):
        compute += count * (kernels * device.kernel_s + operator_seconds(event, device))
    return CallSeconds(compute, _collectives(work.events, cluster), 0.0, device.is_host)


def _kernels(events: Sequence[tuple[Event, int]]) -> Iterator[tuple[int, OperatorWork, int]]:
    """Yield (number of kernels, work, number of layers). Neighbors between two products are one kernel.

    It reads and writes as much as the largest of them.
    """
    operators = [
        (event, count)
        for event, count in events
        if not isinstance(event, OperatorWork) or event.kind != "free"
    ]
    groups = itertools.groupby(operators, key=lambda item: (_is_fusible(item[0]), item[1]))
    for (is_fusible, count), members in groups:
        works = [event for event, _ in members if isinstance(event, OperatorWork)]
        if is_fusible:
            most = max(work.num_bytes - work.cache_bytes for work in works)
            yield 1, OperatorWork("other", works[0].dtype, num_bytes=most), count
        else:
            yield from ((ATTENTION_KERNELS if w.kind == "attention" else 1, w, count) for w in works)


def _is_fusible(event: Event) -> bool:
    return isinstance(event, OperatorWork) and event.kind == "other"


def operator_seconds(work: OperatorWork, device: Device) -> float:
    """Return the time of an operator on the device, without its launch."""
    if work.kind == "free":
        return 0.0
    bytes_s = work.num_bytes / (device.bandwidth * _efficiency("bytes", device))
    if work.kind == "other":
        return bytes_s if device.other_bandwidth is None else work.num_bytes / device.other_bandwidth
    if work.kind == "attention" and device.attention_flops is not None:
        return max(work.flops / device.attention_flops, bytes_s)
    curve = (device.products or {}).get(work.dtype)
    if work.kind == "product" and curve and work.elements:
        rows = max(1.0, work.flops / (2 * work.elements))
        return max(work.elements * _element_seconds(curve, rows), bytes_s if rows > curve[-1].rows else 0.0)
    rate = device.flops.get(work.dtype) or device.flops.get("float32") or min(device.flops.values())
    return max(work.flops / (rate * _efficiency(work.kind, device)), bytes_s)


def _efficiency(kind: str, device: Device) -> float:
    return 1.0 if device.is_measured else EFFICIENCY[kind]


def _element_seconds(curve: Sequence[ProductRate], rows: float) -> float:
    """Return the seconds for each element of a matrix, between the measured numbers of rows."""
    if rows >= curve[-1].rows:
        return curve[-1].element_s * rows / curve[-1].rows
    for low, high in itertools.pairwise(curve):
        if rows <= high.rows:
            part = (rows - low.rows) / (high.rows - low.rows)
            return low.element_s + part * (high.element_s - low.element_s)
    return curve[0].element_s


def _collectives(events: Iterable[tuple[Event, int]], cluster: Cluster) -> float:
    collectives = ((event, count) for event, count in events if isinstance(event, CollectiveWork))
    return sum(count * collective_seconds(event, cluster) for event, count in collectives)


def collective_seconds(work: CollectiveWork, cluster: Cluster) -> float:
    """Return the time of a collective, with the links of its group.

    A ring through several hosts leaves each of them through as many adapters as the group has ranks there.
    """
    spread, device = cluster.spread(work.ranks), cluster.device
    if spread.ranks == 1:
        return 0.0
    rounds = 2 if work.op == "all_reduce" else 1
    latency = rounds * _depth(spread.most) * device.inside.latency_s
    bandwidth = device.inside.bandwidth
    call_s = device.inside.call_s
    if spread.hosts > 1:
        latency += rounds * _depth(spread.hosts) * device.between.latency_s
        through = spread.fewest * device.between.bandwidth
        bandwidth = min(bandwidth, through) if spread.most > 1 else through
        call_s = max(call_s, device.between.call_s)
    return call_s + latency + sent_bytes(work) / (bandwidth * _efficiency("link", device))


def message_seconds(num_bytes: float, link: Link, device: Device) -> float:
    """Return the time of a message from one device to another."""
    return link.call_s + link.latency_s + num_bytes / (link.bandwidth * _efficiency("link", device))


def _depth(ranks: int) -> int:
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0
