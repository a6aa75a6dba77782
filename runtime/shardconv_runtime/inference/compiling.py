"""``load(..., compile=True)``: one graph for each forward pass, and decoding from a cache of fixed size.

The runtime's own code breaks no graph: collectives are functional, steps are plain Python over constants.
Each kind of call gets the compilation that suits it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import PlanError

RECOMPILE_LIMIT = 64
"""Most graphs of one model, for calls with other arguments, a batch of one, other types. Torch's own limit is
low, and past it a call that must be one graph is an error."""


def compile_model(model: nn.Module, *, cuda_graphs: bool) -> None:
    """Compile every later call of ``model``, in place; ``generate`` then uses a static cache.

    - A call without a cache, or with one that grows, is one graph; lengths become symbolic when a
      second one comes.
    - A call that continues a cache of fixed size (a decoding step) is another one, the same for every
      step, and replayed as a CUDA graph if ``cuda_graphs``.
    - The call that allocates a cache of fixed size, the first one of ``generate``, runs uncompiled: the
      cache's memory must not belong to a graph.

    Args:
        model: its class, methods and parameters stay; a deep copy of it is not compiled.
        cuda_graphs: the device can record graphs, including collectives.
    """
    call: Callable[..., Any] = model._call_impl

    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        """A function of ours around torch's: Dynamo skips torch's own first function, and the hooks in it."""
        return call(*args, **kwargs)

    options = {"fullgraph": True, **_own_limit()}
    general = torch.compile(with_hooks, **options)
    step = torch.compile(with_hooks, mode="reduce-overhead", **options) if cuda_graphs else general

    def compiled(*args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if getattr(value, "is_compileable", False)]
        if caches and not all(_is_allocated(cache) for cache in caches):
            return call(*args, **kwargs)
        try:
            return (step if caches else general)(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as error:  # on all ranks, before anything is computed
            raise PlanError(
                "compile=True makes one graph of the forward pass, and the model's code cannot be captured "
                f"as one: {_first_line(error)}; load without compile=True, and torch.compile(model) if "
                "several graphs will do"
            ) from error

    model._compiled_call_impl = compiled
    _decode_from_static_cache(model)


def _own_limit() -> dict[str, Any]:
    """Options of ``torch.compile``: other models that share Python code do not count toward the limit."""
    options = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    if options.keys() <= inspect.signature(torch.compile).parameters.keys():
        return options
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    return {}  # this version of torch has one limit for all


def _is_allocated(cache: Any) -> bool:
    """Whether a cache has its memory; the cache of an encoder and a decoder consists of two."""
    parts = [part for part in vars(cache).values() if hasattr(part, "is_compileable")]
    return all(map(_is_allocated, parts)) if parts else bool(cache.is_initialized)


def _decode_from_static_cache(model: nn.Module) -> None:
    """Let ``generate`` use the calls above, with a cache of fixed size where the model supports one."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    config.disable_compile = True  # generate would compile the call once more
    if config.cache_implementation is None and getattr(model, "_can_compile_fullgraph", False):
        config.cache_implementation = "static"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
