"""A sweep over the zoo: tasks in a pool of processes, whose rows are appended to a file of JSON lines."""

from __future__ import annotations

import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
import transformers

from .kept_rows import Row

Task = TypeVar("Task")


def stamped(row: Mapping[str, Any]) -> Row:
    """A row with the versions and the date."""
    return {
        **row,
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "date": datetime.now(UTC).date().isoformat(),
    }


def append(results: Path, row: Mapping[str, Any]) -> None:
    """Append a row with the versions and the date, in one write, which other processes' cannot break."""
    with results.open("ab", buffering=0) as file:
        file.write((json.dumps(stamped(row)) + "\n").encode())


def sweep(
    tasks: Sequence[Task],
    run: Callable[[Task], Row | None],
    tell: Callable[[Row], str],
    jobs: int,
    results: Path,
    alone: Sequence[Task] = (),
) -> None:
    """Run all tasks.

    Args:
        tasks: of the pool.
        run: gives the row of one, or None if there is none; a function of a module.
        tell: a row as text.
        jobs: processes.
        results: a file, to which rows are appended as they come.
        alone: tasks that start processes of their own, which a pool's may not; they run here.
    """
    began = time.perf_counter()
    quiet()
    with multiprocessing.get_context("fork").Pool(jobs, quiet, maxtasksperchild=20) as pool:
        for number, row in enumerate(chain(pool.imap_unordered(run, tasks), map(run, alone)), 1):
            if row is not None:
                append(results, row)
                click.echo(tell(row))
            seconds = time.perf_counter() - began
            click.echo(f"[{number}/{len(tasks) + len(alone)}, {seconds:.0f} s]", err=True)


def quiet() -> None:
    """No warnings of libraries, and one thread."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
