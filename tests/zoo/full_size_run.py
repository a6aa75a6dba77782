"""Plans many models at their sizes, each in a fork of one process that has imported everything."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .full_size import Measured, Sized, measure_planning
from .sweep import append

SECONDS = 120
"""Limit for one model at one tp, of a core."""
WALL_SECONDS = 3 * SECONDS
"""The same on the clock: other processes may share the cores."""
MEMORY = 6 * 2**30
"""Limit of a fork's address space, above that of its parent."""


def run(
    todo: Iterable[tuple[Sized, int]],
    results: Path,
    tell: Callable[[dict[str, Any]], None],
    check: bool,
) -> None:
    """Measure each model at each tp, append the results to a file, and tell each."""
    _warm_up()
    for model, tp in todo:
        row = in_fork(model, tp, check)
        append(results, row)
        tell(row)


def _warm_up() -> None:
    """What torch and transformers import at first use must not be counted for a model."""
    import torch

    from shardconv.arguments import SolveOptions
    from shardconv.passes import solve_plan

    from .models import build
    from .tasks import specification

    torch.set_num_threads(1)
    solve_plan(specification(build("causal", "llama")), SolveOptions(2, check=False))


def in_fork(model: Sized, tp: int, check: bool) -> dict[str, Any]:
    """What ``measure_planning`` finds in a fork of this process, or how that ended."""
    with tempfile.NamedTemporaryFile("r") as file:
        started = time.perf_counter()
        child = os.fork()
        if not child:
            _child(model, tp, check, Path(file.name))
        status = _wait(child, started + WALL_SECONDS)
        text = file.read()
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    lost = Measured(*model.key, tp, wall_s=time.perf_counter() - started, checked=check)
    is_late = status in (None, signal.SIGXCPU)
    lost.status = "timeout" if is_late else "crash"
    lost.message = f"took more than {SECONDS} s of a core" if is_late else f"ended with status {status}"
    return asdict(lost)


def _child(model: Sized, tp: int, check: bool, target: Path) -> None:
    """Measure and leave, without anything that the parent does at its end."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        target.write_text(json.dumps(asdict(measure_planning(model, tp, check=check))))
        os._exit(0)
    finally:
        os._exit(1)


def _wait(child: int, deadline: float) -> int | None:
    """The exit status; None where the child was ended at the deadline."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.perf_counter() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)
