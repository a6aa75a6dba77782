"""Ahead-of-time tensor parallelism for transformers models.

>>> import shardconv
>>> shardconv.convert("my-model/", "out/", tp=2)
"""

from __future__ import annotations

from shardconv_runtime.versions import __version__

# These modules import torch and transformers only when they are called, so that the command line
# answers at once. The function ``convert`` shadows the submodule of its name, which is intended.
from .convert import convert, plan
from .converted.adapt import adapt
from .converted.merge import merge
from .converted.replan import replan, reshard
from .converted.verify import verify
from .engines.export_dcp import export
from .engines.export_vllm import export_vllm
from .publishing.push import push

__all__ = [
    "__version__",
    "adapt",
    "convert",
    "export",
    "export_vllm",
    "merge",
    "plan",
    "push",
    "replan",
    "reshard",
    "verify",
]
