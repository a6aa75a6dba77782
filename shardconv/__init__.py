"""Ahead-of-time tensor parallelism for transformers models.

>>> import shardconv
>>> shardconv.convert("my-model/", "out/", tp=2)
"""

from __future__ import annotations

# These modules import torch and transformers only when they are called, so that the command line
# answers at once. The functions shadow the submodules of the same name, which is intended.
from .convert import convert, plan
from .replan import replan

__all__ = ["convert", "plan", "replan"]
