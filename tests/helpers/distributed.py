"""Runs a function in several gloo processes and brings back what it returns or raises."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from typing import IO, Any

from ports import free_port

TIMEOUT_S = 300
"""How long ranks may take; then it is told where each of them waits."""


class RankFailed(AssertionError):
    """A rank raised something that the test did not expect."""


def run_processes(
    num_processes: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    start_group: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` in processes that see torchrun's environment; return the results by rank.

    Args:
        num_processes: world size.
        function: importable (a top-level function of a test module); finds its rank in the environment.
        args: picklable; the same for each rank.
        env: more environment variables.
        start_group: start the default gloo group before the call. All ranks have joined when one is called.

    Raises:
        RankFailed: some rank raised or died; the message has its traceback.
    """
    outcomes = run_outcomes(num_processes, function, *args, env=env, start_group=start_group)
    failed = [(rank, text) for rank, (_, text, _) in enumerate(outcomes) if text is not None]
    if failed:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in failed))
    return [result for result, _, _ in outcomes]


def run_errors(num_processes: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Like ``run_processes`` for calls that should fail: the exception that each rank raised, or None."""
    return [error for _, _, error in run_outcomes(num_processes, function, *args, **options)]


def run_errors_of_each(
    num_processes: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **options: Any
) -> list[list[BaseException | None]]:
    """The same of several calls in the same processes: for each call, its errors by rank."""
    ranks = run_processes(num_processes, _errors_of_each, function, calls, **options)
    return list(map(list, zip(*ranks, strict=True)))


def _errors_of_each(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> list[BaseException | None]:
    found: list[BaseException | None] = []
    for args in calls:
        try:
            function(*args)
            found.append(None)
        except Exception as error:
            found.append(error.with_traceback(None))
    return found


def run_outcomes(
    num_processes: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    start_group: bool = False,
) -> list[tuple[Any, str | None, BaseException | None]]:
    """For each rank its result, the text of its traceback and its exception."""
    _import_runtime()
    context = multiprocessing.get_context("fork")
    port = free_port()
    joined = context.Barrier(num_processes) if start_group else None
    processes, pipes, stacks = [], [], []
    for rank in range(num_processes):
        reader, writer = context.Pipe(duplex=False)
        variables = {**torchrun_env(rank, num_processes, port), **(env or {})}
        stacks.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        process = context.Process(
            target=_child, args=(writer, stacks[-1], variables, joined, function, args), daemon=True
        )
        process.start()
        writer.close()
        processes.append(process)
        pipes.append(reader)
    limit = time.monotonic() + TIMEOUT_S
    try:
        while (waiting := [pipe for pipe in pipes if not pipe.poll()]) and time.monotonic() < limit:
            wait(waiting, limit - time.monotonic())
        found = [_receive(pipe) if pipe.poll() else None for pipe in pipes]
        if None in found:
            where = _where_they_are(processes, stacks)
            for process in processes:
                process.kill()
            missing = [rank for rank, each in enumerate(found) if each is None]
            print(f"ranks {missing} gave no answer in {TIMEOUT_S} s", *where, sep="\n", file=sys.stderr)
            return [
                each or (None, f"no answer in {TIMEOUT_S} s; it was at\n{text}", TimeoutError())
                for each, text in zip(found, where, strict=True)
            ]
        return found
    finally:
        for process, file in zip(processes, stacks, strict=True):
            process.join(5)
            if process.is_alive():
                process.kill()
            file.close()


def _where_they_are(processes: Sequence[Any], stacks: Sequence[IO[str]]) -> list[str]:
    """The stacks of all threads of each rank that lives."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)
    for file in stacks:
        file.seek(0)
    return [file.read() for file in stacks]


@cache
def _import_runtime() -> None:
    """Import what ranks import when they need it, so that not each of them compiles it."""
    import shardconv_runtime

    for module in pkgutil.walk_packages(shardconv_runtime.__path__, "shardconv_runtime."):
        if module.name.startswith(("shardconv_runtime.serving.endpoints", "shardconv_runtime.integrations.")):
            continue  # they need packages that may be missing
        importlib.import_module(module.name)


def torchrun_env(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """What torchrun would set for a rank on this host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def forget_launcher() -> None:
    """This process, a rank, is one that no launcher started."""
    for name in torchrun_env(0, 1, 0):
        if name != "OMP_NUM_THREADS":
            os.environ.pop(name, None)


def _without_log_threads() -> None:
    """Have the logger of gptqmodel write anew: the thread that wrote in the parent is not in a fork, and a
    flush would wait for it."""
    buffer = sys.modules.get("logbar.buffer")
    if buffer is not None:
        buffer._CACHED_WRAPPERS.clear()


def _child(
    writer: Connection,
    stacks: IO[str],
    env: dict[str, str],
    joined: Barrier | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # a search for garbage would copy all memory of the parent
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.update(env)
    _without_log_threads()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if joined is not None:
            dist.init_process_group("gloo")
            joined.wait(TIMEOUT_S)
        outcome: tuple[Any, str | None, Any] = (function(*args), None, None)
    except BaseException as error:
        outcome = (None, traceback.format_exc(), error)
    writer.send_bytes(_dumps(outcome))
    writer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # no atexit handlers of the parent


def _dumps(outcome: tuple[Any, str | None, Any]) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:
        result, text, error = outcome
        return pickle.dumps((None, text or f"cannot pickle {result!r}", RuntimeError(str(error))))


def _receive(pipe: Connection) -> tuple[Any, str | None, BaseException | None]:
    try:
        outcome: tuple[Any, str | None, BaseException | None] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "the process died", ChildProcessError()
    return outcome


def comm_counts(counter: Any) -> Counter[str]:
    """What a ``CommDebugMode`` has seen, by kind: a sum in place is a sum."""
    found: Counter[str] = Counter()
    for op, count in counter.get_comm_counts().items():
        name = str(op).rpartition(".")[2].strip("')>")
        found["all_reduce" if name == "allreduce_" else name] += count
    return found
