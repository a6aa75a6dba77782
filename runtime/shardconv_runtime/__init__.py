"""Loads converted models on the ranks of a torchrun job, trains them, and saves them.

    model = shardconv_runtime.load("out/")
    shardconv_runtime.save(model, "trained/")

Importing this package imports neither torch nor transformers; its functions do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AccessError,
    CheckpointError,
    CodeMismatchError,
    DamagedError,
    DamagedModelError,
    InputsDifferError,
    LaunchError,
    MissingFileError,
    MissingModelError,
    MissingPackageError,
    NetworkError,
    NotConvertedError,
    OptionError,
    OutputExistsError,
    PlanError,
    RanksTimeoutError,
    RefusedCallError,
    ShardconvError,
    SolveError,
    SourceError,
    UnknownOptionError,
    UnsupportedError,
)
from .hub_options import Hub
from .keywords import unknown_attribute
from .option_values import Communication, Compiling, Planning, Training

if TYPE_CHECKING:
    from .comm.rank_0 import from_rank_0
    from .loaded import LoadedModel
    from .loading.load import load, parallelize
    from .loading.loaded_adapters import add_adapter
    from .pp.stage_schedules import Pipeline
    from .saving.optimizer_state import load_optimizer, save_optimizer
    from .saving.save import save
    from .training.checkpointing import checkpoint_activations
    from .training.clipping import clip_grad_norm, grad_norm
    from .training.fsdp import DataParallel, data_parallel
    from .versions import __version__

__all__ = [
    "AccessError",
    "CheckpointError",
    "CodeMismatchError",
    "Communication",
    "Compiling",
    "DamagedError",
    "DamagedModelError",
    "DataParallel",
    "Hub",
    "InputsDifferError",
    "LaunchError",
    "LoadedModel",
    "MissingFileError",
    "MissingModelError",
    "MissingPackageError",
    "NetworkError",
    "NotConvertedError",
    "OptionError",
    "OutputExistsError",
    "Pipeline",
    "PlanError",
    "Planning",
    "RanksTimeoutError",
    "RefusedCallError",
    "ShardconvError",
    "SolveError",
    "SourceError",
    "Training",
    "UnknownOptionError",
    "UnsupportedError",
    "__version__",
    "add_adapter",
    "checkpoint_activations",
    "clip_grad_norm",
    "data_parallel",
    "from_rank_0",
    "grad_norm",
    "load",
    "load_optimizer",
    "parallelize",
    "save",
    "save_optimizer",
]


_MODULES = {
    "__version__": "versions",
    "add_adapter": "loading.loaded_adapters",
    "DataParallel": "training.fsdp",
    "Pipeline": "pp.stage_schedules",
    "checkpoint_activations": "training.checkpointing",
    "clip_grad_norm": "training.clipping",
    "data_parallel": "training.fsdp",
    "from_rank_0": "comm.rank_0",
    "grad_norm": "training.clipping",
    "LoadedModel": "loaded",
    "load": "loading.load",
    "parallelize": "loading.load",
    "load_optimizer": "saving.optimizer_state",
    "save": "saving.save",
    "save_optimizer": "saving.optimizer_state",
}
"""The modules of the functions and values that need torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise unknown_attribute(__name__, name, __all__)
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
