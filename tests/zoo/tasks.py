"""What a coverage run does with one type, in a process of its own: every variant at every tp size."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardconv_runtime.checkpoint.resolve import ModelSpec

from shardconv.arguments import SolveOptions
from shardconv.pipeline.stages import solve_plan

from .generation import CACHES, generates
from .measure import Result, measure
from .models import ZooModel, build
from .variants import grouped

FEW_HEADS = "2 key/value heads"
SINGLE_HEAD = "1 key/value head"


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
    """Limit for each variant and size."""


def run(task: Task) -> dict[str, Any]:
    """The row of one task, with all its runs; an error of one variant does not stop the others."""
    started = time.perf_counter()
    runs = [asdict(result) for result in _results(task)]
    return {"family": task.family, "type": task.type, "runs": runs, "seconds": time.perf_counter() - started}


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
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(seconds)
    try:
        return measure(model, about["tp"], variant)
    except TimeoutError:
        return Result(**about, status="refused", message=f"took more than {seconds} s")
    finally:
        signal.alarm(0)


def _stop(*_: Any) -> None:
    raise TimeoutError


def _generation(task: Task) -> Iterator[Result]:
    tp = task.tps[0]
    about = {"family": task.family, "type": task.type, "tp": tp}
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(2 * task.seconds)
    try:
        model = build(task.family, task.type)
        plan = solve_plan(specification(model), SolveOptions(tp))
        for cache in CACHES:
            start = time.perf_counter()
            status, _, message = generates(plan, model, cache).partition(": ")
            result = Result(**about, variant=f"generate, {cache} cache", status=status, message=message)
            yield replace(result, seconds=time.perf_counter() - start)
    except (Exception, TimeoutError) as error:
        message = f"{type(error).__name__}: {error}"[:300]
        yield Result(**about, variant="generate", status="unsupported", message=message)
    finally:
        signal.alarm(0)
