"""Ports on localhost for the processes that tests and benchmarks start."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_FIRST = 20000


def free_port() -> int:
    """Return a port on localhost that nobody listens on and that the system gives to nobody by itself.

    A process binds it only later. One of the ports that the system hands out can be taken in between by gloo,
    a client's connection or another test: once in some thousand runs, a test that is right fails.
    """
    for port in _ports(os.getpid()):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable")


@cache
def _ports(pid: int) -> Iterator[int]:
    """The ports below those of the system, from a place of this process's own on, round and round."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:  # not Linux: IANA's range for it
        text = "49152"
    ports = range(_FIRST, max(int(text.split()[0]), _FIRST + 1000))
    return itertools.islice(itertools.cycle(ports), pid * 641 % len(ports), None)
