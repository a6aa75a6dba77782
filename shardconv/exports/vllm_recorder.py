"""Records vLLM's loader for all ranks: ``python -m shardconv.exports.vllm_recorder FOLDER``.

It is a separate program, since vLLM prints as it likes and keeps globals. It imports vLLM at once, which
takes most of its time, while the program that started it finds the checkpoint. When that program has written
FOLDER/request, it sends a line; without one, nothing is recorded. Each rank is a fork of the process that has
imported all modules and made vLLM's config. The rank writes its answer to FOLDER/answer-RANK. An error that
concerns all ranks is in FOLDER/failure. This package pickles these files for itself.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from shardconv_runtime.errors import ShardconvError, brief

from .vllm_calls import require_known
from .vllm_state import FAILURE, LOG, REQUEST, Failure, Request, answer_name, last_line

T = TypeVar("T")

TARGET = "VLLM_TARGET_DEVICE"
"""The variable of the environment with the device for which vLLM chooses its parameters."""

MAX_PROCESSES = 4
"""The most processes that run at a time."""


def main(folder: str) -> None:
    """Import vLLM, wait for a line, and record the ranks of the request."""
    files = Path(folder)
    gc.disable()  # imported modules stay
    imported = _tried(_import)
    if not sys.stdin.readline():
        return
    if isinstance(imported, Failure):
        return _write(files / FAILURE, imported)
    from . import vllm_rank  # has been imported above

    request: Request = pickle.loads((files / REQUEST).read_bytes())
    config: Any = _tried(lambda: vllm_rank.engine_config(request))
    if isinstance(config, Failure):
        return _write(files / FAILURE, config)
    gc.freeze()  # a fork's collector does not write to shared pages
    gc.enable()
    running: dict[int, int] = {}
    for rank in range(request.tp):
        if len(running) == min(MAX_PROCESSES, len(os.sched_getaffinity(0))):
            _wait(running, files)
        running[_forked(partial(vllm_rank.answer, request, config, rank), rank, files)] = rank
    while running:
        _wait(running, files)


def _import() -> None:
    """Import vLLM's loader."""
    import torch  # reports its errors to the program that waits, like the other modules

    if TARGET not in os.environ and not torch.accelerator.is_available():
        # A build of vLLM for GPUs finds no device on a machine without GPUs.
        os.environ[TARGET] = "cpu"
    import_module("vllm")
    require_known()
    import_module(f"{__package__}.vllm_rank")


def _forked(record: Callable[[], object], rank: int, files: Path) -> int:
    """Return the id of a process that records a rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    # This is the new process, which writes the answer of the rank and ends.
    status = 1
    try:
        log = os.open(files / f"{LOG}-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _write(files / answer_name(rank), _tried(record))
        sys.stdout.flush()
        sys.stderr.flush()
        status = 0
    finally:
        os._exit(status)  # nothing of the forked process is cleaned up: it belongs to the other one


def _wait(running: dict[int, int], files: Path) -> None:
    """Wait for one of the processes; one that died without an answer gets one."""
    process, status = os.wait()
    rank = running.pop(process)
    path = files / answer_name(rank)
    if not path.is_file():
        code = os.waitstatus_to_exitcode(status)
        _write(path, Failure(f"its process ended with {code}: {last_line(files / f'{LOG}-{rank}')}"))


def _tried(run: Callable[[], T]) -> T | Failure:
    try:
        return run()
    except Exception as error:  # vLLM's own, of any kind
        traceback.print_exc()
        if isinstance(error, ShardconvError):
            return Failure(str(error))
        return Failure(f"{type(error).__name__}: {brief(error, 400)}")


def _write(path: Path, found: object) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(pickle.dumps(found))
    os.replace(new, path)


if __name__ == "__main__":
    from . import vllm_recorder  # pickles name it so, and not __main__

    vllm_recorder.main(*sys.argv[1:])
