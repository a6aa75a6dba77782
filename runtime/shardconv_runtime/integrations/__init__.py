"""Sharded models in other libraries: the trainers of transformers and TRL, and lm-eval.

Each module needs its library, and is imported when a name of it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import ShardedTrainer
    from .trl import ShardedDPOTrainer, ShardedGRPOTrainer, ShardedRewardTrainer, ShardedSFTTrainer

__all__ = [
    "ShardedDPOTrainer",
    "ShardedGRPOTrainer",
    "ShardedRewardTrainer",
    "ShardedSFTTrainer",
    "ShardedTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "trainer" if name == "ShardedTrainer" else "trl"
    return getattr(import_module(f".{module}", __name__), name)
