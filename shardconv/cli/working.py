"""Shared by commands: progress, quiet libraries, printed plans."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


@contextmanager
def working(quiet: bool, verbose: bool) -> Iterator[Any]:
    """Progress on standard error, and silence from the libraries unless ``verbose``."""
    gc.set_threshold(100_000, 50, 50)  # the libraries create many objects that stay: a quarter of the start
    from shardconv_runtime.hub.library_logging import without_library_logging

    from ..reporting.progress import for_terminal

    progress = for_terminal(quiet=quiet)
    if verbose:
        yield progress
        return
    with without_library_logging():
        yield progress


def print_plan(solved: Any, as_json: bool, tokens: int) -> None:
    """Print a plan as JSON, or as a report on a forward pass of ``tokens`` tokens."""
    from shardconv_runtime.format import plan_json as codec

    from ..reporting.report import report

    click.echo(codec.dumps(solved) if as_json else printable(report(solved, num_tokens=tokens)), nl=False)


def printable(text: str) -> str:
    """Text with control characters escaped, since it may quote the content of files."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
