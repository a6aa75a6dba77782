"""Loads what shardconv converted, on the ranks of a torchrun job.

    model = shardconv_runtime.load("out/")

Importing this package imports nothing heavy: ``load`` brings torch and transformers when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointError,
    CodeMismatchError,
    LaunchError,
    PlanError,
    ShardconvError,
    SolveError,
    SourceError,
)

if TYPE_CHECKING:
    from .agreement import from_rank_0
    from .loading import load

__all__ = [
    "CheckpointError",
    "CodeMismatchError",
    "LaunchError",
    "PlanError",
    "ShardconvError",
    "SolveError",
    "SourceError",
    "from_rank_0",
    "load",
]


def __getattr__(name: str) -> Any:
    if name == "load":
        from .loading import load

        return load
    if name == "from_rank_0":
        from .agreement import from_rank_0

        return from_rank_0
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
