"""Ahead-of-time tensor parallelism for transformers models.

>>> import shardconv
>>> shardconv.convert("my-model/", "out/", tp=2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from shardconv_runtime.hub_options import Hub
from shardconv_runtime.keywords import unknown_attribute
from shardconv_runtime.versions import __version__

# These modules import torch and transformers only when they are called, so that the command line
# answers at once. The function ``convert`` shadows the submodule of its name, which is intended.
from .arguments import OnCluster, Quantizing, RandomInit, Writing
from .convert import convert, plan
from .converted.adapt import adapt
from .converted.replan import replan, reshard
from .converted.verify import verify
from .exports.export import export
from .exports.export_vllm import export_vllm
from .exports.merge import merge as _merge
from .hub.push import push
from .old_names import renamed

merge = renamed(_merge, "shardconv.export(SRC, DST, format='hf')")

__all__ = [
    "Hub",
    "OnCluster",
    "Quantizing",
    "RandomInit",
    "Writing",
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

if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> NoReturn:
        raise unknown_attribute(__name__, name, __all__)
