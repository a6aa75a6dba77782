"""Devices, links between them, and clusters, as values; imports no torch.

``devices.json`` has the data sheets of common devices. ``shardconv env --measure FILE`` writes the same
format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from shardconv_runtime.errors import OptionError
from shardconv_runtime.format.field_checks import fail
from shardconv_runtime.format.typed_json import MalformedError, dump_document, load_document, read_text

FORMAT, VERSION = "shardconv-hardware", 1
MAX_DEVICES = 2**16
"""Most devices of a cluster."""

_CLUSTER = re.compile(r"(?:(?:(?P<hosts>\d{1,5})x)?(?P<devices>\d{1,5})x)?(?P<name>[A-Za-z][^\s]*)")


@dataclass(frozen=True, slots=True)
class Link:
    """A device's connection to the others: inside its host, or to other hosts."""

    bandwidth: float
    """Bytes per second that a device sends in one direction."""
    latency_s: float
    """Seconds until the next device has a small message."""
    call_s: float
    """Seconds of a collective in addition to its messages."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or min(self.latency_s, self.call_s) < 0:
            fail("", "the bandwidth must be above 0, and seconds 0 or more")


@dataclass(frozen=True, slots=True)
class ProductRate:
    """The time of a product of some rows with a large matrix."""

    rows: int
    element_s: float
    """Seconds for each element of the matrix."""

    def __post_init__(self) -> None:
        if self.rows < 1 or not self.element_s > 0:
            fail("", "rows and seconds must be above 0")


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device, and its links."""

    name: str
    """As in ``--on``, without regard to case."""
    memory_bytes: int
    bandwidth: float
    """Bytes per second of the memory."""
    flops: Mapping[str, float]
    """dtype -> dense operations per second of products of large matrices."""
    operator_s: float
    """Seconds in which the host starts an operator in the code of a model, outside of a graph."""
    kernel_s: float
    """Seconds of the smallest kernel in a CUDA graph, with the gap behind it."""
    inside: Link
    """The link to other devices of the same host."""
    between: Link
    """The link to devices of other hosts, of which each device has one."""
    disk_bandwidth: float
    """Bytes per second at which a host reads files."""
    host_bandwidth: float
    """Bytes per second from the memory of the host to a device."""
    is_host: bool = False
    """Whether the device is the processor of the host: operators do not run while other code starts
    more."""
    is_measured: bool = False
    """Whether the rates were measured; otherwise they are from a data sheet, which no program reaches."""
    products: Mapping[str, tuple[ProductRate, ...]] | None = None
    """dtype -> measured times by the number of rows, ascending."""
    other_bandwidth: float | None = None
    """Measured bytes per second of operators on each element; None: the bandwidth of the memory."""
    attention_flops: float | None = None
    """Measured operations per second of attention; None: a part of the rate of products."""
    sources: tuple[str, ...] = ()
    """The sources of the numbers."""

    def __post_init__(self) -> None:
        rates = (self.bandwidth, self.disk_bandwidth, self.host_bandwidth, *self.flops.values())
        if self.memory_bytes < 1 or not self.flops or min(rates) <= 0:
            fail("", "the memory and all rates must be above 0")
        if min(self.operator_s, self.kernel_s) < 0:
            fail("", "seconds must be 0 or more")
        for dtype, curve in (self.products or {}).items():
            rows = [point.rows for point in curve]
            if not rows or rows != sorted(set(rows)):
                fail(f"products.{dtype}", "the rows must ascend")


@dataclass(frozen=True, slots=True)
class Devices:
    """A file of devices."""

    version: int
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal hosts with equal devices. Ranks are counted through the devices of the first host, then on."""

    hosts: int
    devices: int
    """Devices of each host."""
    device: Device

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.hosts * self.devices

    @property
    def name(self) -> str:
        """The cluster as in ``--on``."""
        return f"{self.hosts}x{self.devices}x{self.device.name}"

    def host_of(self, rank: int) -> int:
        """Return the number of the host of a rank."""
        return rank // self.devices

    def require(self, ranks: int) -> None:
        """Raise ``ShardconvError`` if there are fewer devices than ranks."""
        if ranks > self.num_devices:
            raise OptionError(
                f"{self.name} has {self.num_devices} devices for {ranks} ranks; name more hosts or devices"
            )

    def spread(self, ranks: Sequence[int]) -> Spread:
        """Return how ranks are distributed over hosts."""
        counts: dict[int, int] = {}
        for rank in ranks:
            host = self.host_of(rank)
            counts[host] = counts.get(host, 0) + 1
        return Spread(len(ranks), len(counts), min(counts.values()), max(counts.values()))


@dataclass(frozen=True, slots=True)
class Spread:
    """How the ranks of a group are distributed over hosts."""

    ranks: int
    hosts: int
    fewest: int
    """Ranks on the host with the fewest."""
    most: int


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_cluster(text: str, file: str | os.PathLike[str] | None = None) -> Cluster:
    """Return the cluster of a text such as ``2x8xH100``, ``8xH100`` (one host) or ``H100`` (one device).

    Args:
        text: hosts, devices of each host, and the name of a device.
        file: a file of more devices, which come before the ones of the table.

    Raises:
        ShardconvError: it is not such a text, or there is no such device.
    """
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise OptionError(f"{text!r} is no cluster; give hosts x devices x device, for example 2x8xH100")
    hosts, devices = int(match["hosts"] or 1), int(match["devices"] or 1)
    if not 1 <= hosts * devices <= MAX_DEVICES:
        raise OptionError(f"{text!r} has {hosts * devices:,} devices; give 1 to {MAX_DEVICES:,}")
    known = (*(read_devices(Path(file)) if file is not None else ()), *known_devices())
    for device in known:
        if device.name.casefold() == match["name"].casefold():
            return Cluster(hosts, devices, device)
    names = ", ".join(dict.fromkeys(device.name for device in known))
    raise OptionError(
        f"{text!r}: there is no device {match['name']!r}; give one of {names}, or with "
        "--hardware a file that shardconv env --measure FILE writes"
    )


def read_devices(path: Path) -> tuple[Device, ...]:
    """Read a file of devices.

    Raises:
        ShardconvError: it is not such a file; the message names the key.
    """
    try:
        return load_document(Devices, read_text(path), FORMAT, VERSION).devices
    except MalformedError as error:
        raise OptionError(
            f"{path} is no file of devices: {error}; shardconv env --measure FILE writes one"
        ) from error


def devices_text(devices: Sequence[Device]) -> str:
    """Return the text of a file of devices."""
    return dump_document(Devices(VERSION, tuple(devices)), FORMAT)


@cache
def known_devices() -> tuple[Device, ...]:
    """Return the devices of the table."""
    text = files(__package__).joinpath("devices.json").read_text("utf-8")
    return load_document(Devices, text, FORMAT, VERSION).devices
