"""Two hosts on this machine: network namespaces, joined by a link on which every packet takes a while.

The kernel's own delay (``tc netem``) is missing on some machines, so a process moves the packets between two
devices, after the delay. Without one, a pair of virtual devices joins the hosts. This needs root and ``ip``.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HOSTS = ("shardconv-0", "shardconv-1")
"""Names of network namespaces."""
ADDRESSES = ("10.213.0.1", "10.213.0.2")
DEVICE = "wire"
"""Of each host, to the other one."""
MTU = 60000

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@contextmanager
def two_hosts(delay_ms: float) -> Iterator[None]:
    """Two namespaces while the block runs.

    Args:
        delay_ms: of a packet, in each direction.

    Raises:
        SystemExit: the machine does not allow it.
    """
    relay = None
    try:
        for host in HOSTS:
            _ip("netns", "add", host)
        if delay_ms:
            devices = [_tun(f"{DEVICE}{number}") for number in range(2)]
            relay = multiprocessing.get_context("fork").Process(
                target=_move, args=(devices, delay_ms / 1000), daemon=True
            )
            relay.start()
            for device in devices:
                os.close(device)
        else:
            _ip("link", "add", f"{DEVICE}0", "type", "veth", "peer", "name", f"{DEVICE}1")
        for number, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
            _ip("link", "set", "dev", f"{DEVICE}{number}", "netns", host)
            _ip("-n", host, "link", "set", "dev", f"{DEVICE}{number}", "name", DEVICE)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", host, "link", "set", "dev", DEVICE, "mtu", str(MTU), "up")
            _ip("-n", host, "link", "set", "dev", "lo", "up")
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "")
        raise SystemExit(f"error: no network namespaces here: {error} {told}") from error
    finally:
        if relay is not None:
            relay.kill()
        for host in HOSTS:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", host)


def on_host(number: int) -> list[str]:
    """The beginning of a command that runs on a host."""
    return ["ip", "netns", "exec", HOSTS[number]]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _tun(name: str) -> int:
    """A device whose packets are read and written at the descriptor that is returned."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _move(devices: list[int], delay_s: float) -> None:
    """Write what comes from each device to the other one, when its time has come."""
    with suppress(OSError):
        os.nice(-15)  # packets must not wait for the ranks' computations
    waiting: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for device in select.select(devices, [], [], timeout)[0]:
            with suppress(BlockingIOError, OSError):
                while packet := os.read(device, MTU + 100):
                    other = devices[1 - devices.index(device)]
                    waiting[other].append((time.monotonic() + delay_s, packet))
        for device, queue in waiting.items():
            while queue and queue[0][0] <= time.monotonic():
                with suppress(OSError):  # a device that is not up yet
                    os.write(device, queue[0][1])
                queue.popleft()
