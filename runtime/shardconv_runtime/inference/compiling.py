"""``load(..., compile=True)``: one graph for each forward pass, and one for each token that is decoded.

The runtime's own code breaks no graph: collectives are functional, steps are plain Python over constants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..parallel.fused_products import refresh_fused
from .decoding import NOT_ONE_GRAPH, Decoder
from .generation import DECODER

RECOMPILE_LIMIT = 64
"""Most graphs of one model, for calls with other arguments, a batch of one, other types. Torch's own limit is
low, and past it a call that must be one graph is an error."""


def compile_model(model: nn.Module, *, cuda_graphs: bool, same_bits: bool = False) -> None:
    """Compile every later call of ``model``, in place; ``generate`` decodes with one graph for a token.

    - A call without a cache, or with one that grows, is one graph; lengths become symbolic when a
      second one comes.
    - A call that continues a cache of fixed size is another one, the same for every step.
    - The call that allocates a cache of fixed size, the first one of ``generate``, runs uncompiled.
    - Greedy decoding and sampling run as ``decoding.py`` describes.

    No call returns memory that a CUDA graph owns, so results that a caller keeps do not change.

    Args:
        model: its class, methods and parameters stay; a deep copy of it is not compiled.
        cuda_graphs: the device can record graphs, including collectives.
        same_bits: get equal bits on all ranks. Otherwise each rank's compiler measures which kernel is
            fastest, and sums in its own order. Replicated values would differ by rounding, which is harmless
            until experts are chosen.
    """
    call: Callable[..., Any] = model._call_impl

    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        """Wrap torch's function: Dynamo skips torch's own first function, and the hooks in it."""
        return call(*args, **kwargs)

    compile = partial(as_one_graph, same_bits=same_bits)
    general = compile(with_hooks)
    decoder: Decoder | None = None
    if hasattr(model, "generate") and getattr(model, "_can_compile_fullgraph", False):
        decoder = Decoder(model, with_hooks, compile, records=cuda_graphs)
        vars(model)[DECODER] = decoder  # where `generate` looks for it

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if decoder is not None and decoder.runs_plain:
            return call(*args, **kwargs)
        refresh_fused(model)
        caches = [value for value in (*args, *kwargs.values()) if getattr(value, "is_compileable", False)]
        if caches and not all(is_allocated(cache) for cache in caches):
            return call(*args, **kwargs)
        try:
            return general(*args, **kwargs)
        except NOT_ONE_GRAPH as error:  # on all ranks, before anything is computed
            raise PlanError(
                "compile=True makes one graph of the forward pass, and the model's code cannot be captured "
                f"as one: {first_line(error)}; load without compile=True, and torch.compile(model) if "
                "several graphs will do"
            ) from error

    model._compiled_call_impl = compiled
    decode_from_static_cache(model)


def warm_up_decoding(model: nn.Module, sizes: Iterable[tuple[int, int]]) -> None:
    """Compile and record decoding for these sizes, on all ranks: ``(batch, length in tokens)``.

    Raises:
        PlanError: the model does not decode with one graph for each token.
    """
    decoder = vars(model).get(DECODER)
    for batch, length in sizes:
        if batch < 1 or length < 2:
            raise PlanError(f"warm_up: ({batch}, {length}) should be a batch size and a length in tokens")
        if decoder is None or not decoder.warm_up(batch, length):
            raise PlanError("warm_up: this model has no decoding with one graph for each token; leave it out")


def as_one_graph(function: Callable[..., Any], *, same_bits: bool) -> Callable[..., Any]:
    options: dict[str, Any] | None = {"deterministic": True} if same_bits else None
    return torch.compile(function, fullgraph=True, options=options, **_own_limit())


def _own_limit() -> dict[str, Any]:
    """Return options of ``torch.compile`` so that other models with the same code do not count."""
    options = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    if options.keys() <= inspect.signature(torch.compile).parameters.keys():
        return options
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    return {}  # this version of torch has one limit for all


def is_allocated(cache: Any) -> bool:
    """Return whether a cache has its memory; the cache of an encoder and a decoder consists of two."""
    parts = [part for part in vars(cache).values() if hasattr(part, "is_compileable")]
    return all(map(is_allocated, parts)) if parts else bool(cache.is_initialized)


def decode_from_static_cache(model: nn.Module) -> None:
    """Let ``generate`` use the calls above, with a cache of fixed size if the model supports one."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    config.disable_compile = True  # generate would compile the call once more
    if config.cache_implementation is None and getattr(model, "_can_compile_fullgraph", False):
        config.cache_implementation = "static"


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
