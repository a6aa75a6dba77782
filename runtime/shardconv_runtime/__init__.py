"""Loads what shardconv converted, on the ranks of a torchrun job, and saves it.

    model = shardconv_runtime.load("out/")
    shardconv_runtime.save(model, "trained/")

Importing this package imports nothing heavy: ``load`` brings torch and transformers when it is used.
"""

from __future__ import annotations

from importlib import import_module
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
    from .checkpointing import checkpoint_activations
    from .clipping import clip_grad_norm, grad_norm
    from .fsdp import data_parallel
    from .loading import load
    from .optimizer_state import load_optimizer, save_optimizer
    from .saving import save

__all__ = [
    "CheckpointError",
    "CodeMismatchError",
    "LaunchError",
    "PlanError",
    "ShardconvError",
    "SolveError",
    "SourceError",
    "checkpoint_activations",
    "clip_grad_norm",
    "data_parallel",
    "from_rank_0",
    "grad_norm",
    "load",
    "load_optimizer",
    "save",
    "save_optimizer",
]


_MODULES = {
    "checkpoint_activations": "checkpointing",
    "clip_grad_norm": "clipping",
    "data_parallel": "fsdp",
    "from_rank_0": "agreement",
    "grad_norm": "clipping",
    "load": "loading",
    "load_optimizer": "optimizer_state",
    "save": "saving",
    "save_optimizer": "optimizer_state",
}
"""Where each function is that needs torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
