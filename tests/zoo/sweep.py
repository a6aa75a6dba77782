"""A sweep over the zoo: tasks in a pool of processes, whose rows are appended to a file of JSON lines."""

from __future__ import annotations

import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
import transformers

Task = TypeVar("Task")
Row = dict[str, Any]


def rows_in(results: Path) -> list[Row]:
    """The rows of an earlier run, which an interrupted one goes on from."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def sweep(
    tasks: Sequence[Task],
    run: Callable[[Task], Iterable[Row]],
    tell: Callable[[Row], str],
    jobs: int,
    results: Path | None,
    alone: Sequence[Task] = (),
) -> list[Row]:
    """Run all tasks.

    Args:
        tasks: of the pool.
        run: gives the rows of one; a function of a module.
        tell: a row as a line.
        jobs: processes.
        results: a file, to which rows are appended as they come; None: they are only printed.
        alone: tasks that start processes of their own, which a pool's may not; they run here.
    """
    began = time.perf_counter()
    found: list[Row] = []
    quiet()
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(jobs, quiet, maxtasksperchild=20) as pool:
        for number, rows in enumerate(chain(pool.imap_unordered(run, tasks), map(run, alone)), 1):
            rows = list(rows)
            found += rows
            if results is not None:
                with results.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            for row in rows:
                click.echo(tell(row))
            seconds = time.perf_counter() - began
            click.echo(f"[{number}/{len(tasks) + len(alone)}, {seconds:.0f} s]", err=True)
    return found


def quiet() -> None:
    """No warnings of libraries, and one thread."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
