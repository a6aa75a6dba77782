"""Ahead-of-time tensor parallelism for transformers models.

>>> import shardconv
>>> shardconv.convert("my-model/", "out/", tp=2)
"""

from __future__ import annotations

# These modules import torch and transformers only when they are called, so that the command line
# answers at once. The functions shadow the submodules of the same name, which is intended.
from .convert import convert, plan
from .export_dcp import export
from .merge import merge
from .replan import replan
from .reshard import reshard
from .verify import verify

__all__ = ["convert", "export", "merge", "plan", "replan", "reshard", "verify"]
