"""Calls that may crash, take long or fill the memory: each in a process that ends by itself.

Clients choose schemas and arguments of templates, and the libraries that read them recurse, loop and
multiply as they are told. A thread could not be ended, and a crash in it would end the server. So rank 0
forks a ``ForkServer`` before it uses a GPU or starts a thread. That process has no client's data; for a call
it forks one more, with the imports and the tokenizer already in memory. The kernel ends a process that
exceeds its limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..openai_api.schemas import BadRequest

WALL_FACTOR = 5
"""A call may take this many times its processor time: other processes compute as well."""
MEMORY_BYTES = 2 * 2**30
"""Memory that a call may use beyond what its process has at the start."""
STACK_BYTES = 2 * 2**20
"""Stack of a call: a quarter of the stack that the ranks' threads have, which go on with its value."""
NICE_OF_ALL, NICE_OF_FEW = 5, 19
"""The ranks compute first, then calls that every request makes, then calls that few requests make."""
_PREPARE, _FORK = b"p", b"f"
_RETURNED, _REFUSED, _RAISED = b"r", b"b", b"x"


class CallEndedError(Exception):
    """The process of a call ended: it took too long, too much memory, or crashed."""


class ForkServer:
    """A process that forks one for each call, with the value of ``prepare`` in its memory.

    Make it in the main thread, before other threads and CUDA's state exist.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._control.close()
                _fork_for_calls(theirs)
            finally:
                os._exit(1)
        theirs.close()

    def prepare(self, make: Callable[..., Any], *args: Any) -> None:
        """Call a function in the server process, which keeps its value for all later calls."""
        with self._opened(_PREPARE) as connection:
            _send(connection, pickle.dumps((make, args)))
            answer = _received(connection)
        if answer[:1] != _RETURNED:
            raise RuntimeError(f"{make.__name__}: {answer[1:].decode()}")

    def open(self) -> socket.socket:
        """Return a connection to a new process for calls."""
        return self._opened(_FORK)

    def is_running(self) -> bool:
        """Return whether the process lives."""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        return False

    def close(self) -> None:
        """End the process and all calls."""
        self._control.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _opened(self, kind: bytes) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [kind], [theirs.fileno()])
        return ours


class BoundedCalls:
    """Calls of one kind."""

    def __init__(
        self, server: ForkServer, cpu_s: float, num_at_a_time: int, *, keeps_processes: bool
    ) -> None:
        self.cpu_s = cpu_s
        self._server = server
        self._keeps_processes = keeps_processes
        self._idle: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(num_at_a_time)

    def call(self, function: Callable[..., bytes], *args: Any) -> bytes:
        """Return the value of ``function(prepared value, *args)``."""
        try:
            nice = NICE_OF_ALL if self._keeps_processes else NICE_OF_FEW
            request = pickle.dumps((function, args, self.cpu_s, nice))
        except RecursionError as error:
            raise BadRequest("the request has too many levels") from error
        connection = self._sent(request)
        try:
            answer = _received(connection)
        except OSError as error:
            connection.close()
            raise CallEndedError from error
        if self._keeps_processes:
            self._idle.append(connection)
        else:
            connection.close()
        if answer[:1] == _REFUSED:
            raise BadRequest(*json.loads(answer[1:]))
        if answer[:1] != _RETURNED:
            raise RuntimeError(answer[1:].decode(errors="replace"))
        return answer[1:]

    def _sent(self, request: bytes) -> socket.socket:
        """Send a request to an idle process that still lives, or a new one; return the connection."""
        with contextlib.suppress(IndexError):  # none is idle
            while True:
                connection = self._idle.pop()
                with contextlib.suppress(BrokenPipeError):
                    _send(connection, request)
                    return connection
                connection.close()
        connection = self._server.open()
        _send(connection, request)
        return connection

    async def awaited(self, function: Callable[..., bytes], *args: Any) -> bytes:
        """Return the value of a function that uses ``call``; other tasks of the loop run meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _fork_for_calls(control: socket.socket) -> None:
    """Fork processes until the owner of the other end closes it or dies; then end all of them."""
    os.setsid()  # a group of its own, which ends together and gets no interrupt of a terminal
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 needs it for the requests that it still answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)  # a process with threads cannot be forked
    prepared: Any = None
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            os.killpg(0, signal.SIGKILL)
        with socket.socket(fileno=descriptors[0]) as connection:
            if kind == _PREPARE:
                make, args = pickle.loads(_received(connection))
                status, prepared = _attempted(make, *args)
                _send(connection, status if status == _RETURNED else status + prepared)
                gc.collect()
                gc.freeze()  # a collection in a child would copy all of this memory
            elif os.fork() == 0:
                control.close()
                try:
                    _make_calls(connection, prepared)
                finally:
                    os._exit(0)


def _make_calls(connection: socket.socket, prepared: Any) -> None:
    """Make the calls that come, in a process of its own, until the connection is closed."""
    output = os.memfd_create("output")
    for number in (1, 2):
        os.dup2(output, number)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    most_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    for limit, value in ((resource.RLIMIT_AS, most_bytes), (resource.RLIMIT_STACK, STACK_BYTES)):
        most = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if most < 0 else min(value, most), most))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    while True:
        try:
            function, args, cpu_s, nice = pickle.loads(_received(connection))
        except ConnectionError:
            return
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * cpu_s)
        status, value = _attempted(function, prepared, *args)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, status + value)


def _attempted(function: Callable[..., Any], *args: Any) -> tuple[bytes, Any]:
    try:
        return _RETURNED, function(*args)
    except BadRequest as error:
        return _REFUSED, json.dumps([str(error), error.parameter, error.status]).encode()
    except MemoryError:
        os._exit(1)  # what is left of it may not do for the next call
    except Exception as error:
        return _RAISED, f"{type(error).__name__}: {error}".encode(errors="replace")


def printed() -> str:
    """Return the text that this process has printed; libraries print warnings of ignored things."""
    sys.stdout.flush()
    sys.stderr.flush()
    size = os.lseek(2, 0, os.SEEK_END)
    text = os.pread(2, size, 0).decode(errors="replace")
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return text


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(8, "big") + content)


def _received(connection: socket.socket) -> bytes:
    """Return the next message."""
    size = int.from_bytes(_exactly(connection, 8), "big")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            raise ConnectionResetError("the other end was closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
