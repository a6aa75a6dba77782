"""What a coverage run does with one type, in a process of its own: every variant at every tp size."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardconv_runtime.checkpoint.resolve import ModelSpec

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

from .generation import CACHES, generates
from .measure import Result, measure
from .models import ZooModel, build
from .variants import grouped

FEW_HEADS = "2 key/value heads"
SINGLE_HEAD = "1 key/value head"
ON_THE_CLOCK = 10
"""The limit of a run on the clock, relative to that of its CPU time."""


@dataclass(frozen=True)
class Task:
    """One type, and what to do with it."""

    family: str
    type: str
    tps: tuple[int, ...]
    grouped_tps: tuple[int, ...] = ()
    """Sizes for the variant with fewer key/value heads than ranks."""
    single_tps: tuple[int, ...] = ()
    """Sizes for the variant with one key/value head."""
    generate: bool = False
    seconds: int = 300
    """Limit of CPU time for each variant and size."""


def run(task: Task) -> dict[str, Any]:
    """The row of one task, with all its runs; an error of one variant does not stop the others."""
    started = time.process_time()
    runs = [asdict(result) for result in _results(task)]
    return {"family": task.family, "type": task.type, "runs": runs, "seconds": time.process_time() - started}


def _results(task: Task) -> Iterator[Result]:
    variants: Sequence[tuple[str, tuple[int, ...], Callable[[], ZooModel | None]]] = (
        ("", task.tps, lambda: build(task.family, task.type)),
        (FEW_HEADS, task.grouped_tps, lambda: grouped(task.family, task.type)),
        (SINGLE_HEAD, task.single_tps, lambda: grouped(task.family, task.type, 1)),
    )
    for variant, tps, make in variants:
        if not tps:
            continue
        about = {"family": task.family, "type": task.type, "variant": variant}
        try:
            model = make()
        except Exception as error:
            yield Result(**about, tp=0, status="not built", message=f"{type(error).__name__}: {error}"[:300])
            continue
        if model is None or (variant and not runs(model)):
            continue
        for tp in tps:
            yield _limited(task.seconds, about | {"tp": tp}, model, variant)
    if task.generate:
        yield from _generation(task)


def runs(model: ZooModel) -> bool:
    """Whether the unsharded model takes such a config: not every type lets its heads be grouped."""
    try:
        solve_plan(specification(model), SolveOptions(1))
    except Exception:
        return False
    return True


def specification(model: ZooModel) -> ModelSpec:
    """What the converter is told of a model."""
    return ModelSpec(name=model.type, config=model.config, model_class=model.model_class, dtype="float32")


def _limited(seconds: int, about: dict[str, Any], model: ZooModel, variant: str) -> Result:
    try:
        with _limit(seconds):
            return measure(model, about["tp"], variant)
    except _OutOfTimeError:
        return Result(**about, status="refused", message=f"took more than {seconds} s")


class _OutOfTimeError(BaseException):
    """The limit of a run. Not an Exception: code that tries something and goes on must not catch it."""


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Stop after seconds of CPU time: other processes may share the cores, or pause this one.

    Threads that wait for each other use none, so that there is also a limit on the clock.
    """

    def stop(*_: Any) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, ON_THE_CLOCK * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _generation(task: Task) -> Iterator[Result]:
    tp, seconds = task.tps[0], 2 * task.seconds
    about = {"family": task.family, "type": task.type, "tp": tp}
    try:
        with _limit(seconds):
            model = build(task.family, task.type)
            plan = solve_plan(specification(model), SolveOptions(tp))
            for cache in CACHES:
                start = time.process_time()
                status, _, message = generates(plan, model, cache).partition(": ")
                result = Result(**about, variant=f"generate, {cache} cache", status=status, message=message)
                yield replace(result, seconds=time.process_time() - start)
    except _OutOfTimeError:
        yield Result(**about, variant="generate", status="refused", message=f"took more than {seconds} s")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:300]
        yield Result(**about, variant="generate", status="unsupported", message=message)
