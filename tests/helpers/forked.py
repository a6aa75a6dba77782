"""Commands in child processes that need not import torch and transformers again, which takes ten seconds.

A child is forked from this process, is given arguments, an environment and standard streams of its own, and
runs a function as a new interpreter would run a script. It can be killed, stopped and starved like any other.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from distributed import torchrun_env
from ports import free_port

POLL_S = 0.005

subprocess_run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
"""Also where ``run_python`` is in its place."""


class Forked:
    """A child process: what the tests use of ``subprocess.Popen``.

    Args:
        function: is called in the child, whose exit code is that of the ``SystemExit`` it may raise, or zero.
        args: of the function.
        argv: what the child finds in ``sys.argv``.
        env: the child's whole environment; as here by default.
        stdin: what it can read.
        max_file_bytes: no file that it writes may become larger.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: Any,
        argv: Sequence[str] = ("forked",),
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        max_file_bytes: int | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._streams = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
        self._streams[0].write(stdin.encode())
        self._streams[0].seek(0)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # a search for garbage would copy all memory of the parent
            try:
                _become_a_command(self._streams, argv, env, max_file_bytes)
                code = _run(function, args)
            except BaseException:
                code = 70
            os._exit(code)  # no atexit handlers of the parent

    def poll(self) -> int | None:
        """The exit code if it has ended, negative for the signal that killed it."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; what was printed on standard output and on standard error.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds, and was killed.
        """
        limit = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > limit:
                self.send_signal(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(POLL_S)
        return _text(self._streams[1]), _text(self._streams[2])


def run_forked(
    function: Callable[..., object], *args: Any, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Call a function in a child, and wait for its end; the options are those of ``Forked``."""
    child = Forked(function, *args, **options)
    out, errors = child.communicate(timeout)
    assert child.returncode is not None
    return subprocess.CompletedProcess(["forked"], child.returncode, out, errors)


def run_script(path: Path) -> None:
    """Run a script as ``python path`` does, with ``sys.argv`` as it is."""
    import runpy

    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def run_python(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """In place of ``subprocess.run``: do what a command of this interpreter does, in forked processes.

    Args:
        command: of Python code (``-c``), of shardconv, of a script, or of torchrun on this host.
        options: ``env`` counts; the others are about streams and times, and what is printed is printed here.

    Raises:
        subprocess.CalledProcessError: it failed, and ``check`` is set.
    """
    if command[0] != sys.executable:
        return subprocess_run(command, **options)
    match command[1:]:
        case ["-c", code, *rest]:
            children = [(exec, (code, {"__name__": "__main__"}), ["-c", *rest], {})]
        case ["-m", "shardconv", *rest]:
            from shardconv import cli

            children = [(cli.main, (), ["shardconv", *rest], {})]
        case ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, script, *rest]:
            port = free_port()
            children = [
                (run_script, (Path(script),), [script, *rest], torchrun_env(rank, int(count), port))
                for rank in range(int(count))
            ]
        case [script, *rest]:
            children = [(run_script, (Path(script),), [script, *rest], {})]
        case _:
            raise ValueError(f"{command}: no command of Python")
    env = options.get("env") or os.environ
    begun = [Forked(do, *args, argv=argv, env={**env, **more}) for do, args, argv, more in children]
    for child in begun:
        for stream, text in zip(
            (sys.stdout, sys.stderr), child.communicate(options.get("timeout", 600)), strict=True
        ):
            stream.write(text)
    codes = [child.returncode or 0 for child in begun]
    if any(codes) and options.get("check"):
        raise subprocess.CalledProcessError(max(codes, key=abs), list(command))
    return subprocess.CompletedProcess(list(command), max(codes, key=abs))


def _become_a_command(
    streams: Sequence[BinaryIO],
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    max_file_bytes: int | None,
) -> None:
    """Leave nothing of the tests in the child but the modules that were imported."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = list(argv)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))


def _run(function: Callable[..., object], args: Sequence[Any]) -> int:
    code: object = 0
    try:
        function(*args)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _text(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read().decode()
