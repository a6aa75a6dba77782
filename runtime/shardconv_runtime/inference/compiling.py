"""``load(..., compile=True)``: one graph for each forward pass, and one for each token that is decoded.

The runtime's own code breaks no graph: collectives are functional, steps are plain Python over constants. On
a stage of a pipeline, the graph of a forward pass lies between receives and sends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..comm.agreement import agree
from ..comm.mesh import Launch
from ..errors import OptionError, PlanError, RefusedCallError
from ..parallel.fused_products import refresh_fused
from ..pp.stage_link import Crossing, StageLink, Transport
from ..pp.stage_processes import AsyncTransport, ProcessTransport, Traffic
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
            raise RefusedCallError(
                "compile=True makes one graph of the forward pass, and the model's code cannot be captured "
                f"as one: {first_line(error)}; load without compile=True, and torch.compile(model) if "
                "several graphs will do"
            ) from error

    model._compiled_call_impl = compiled
    decode_from_static_cache(model)


def warm_up_decoding(model: nn.Module, sizes: Iterable[tuple[int, int]]) -> None:
    """Compile and record decoding for these sizes, on all ranks: ``(batch, length in tokens)``."""
    decoder = vars(model).get(DECODER)
    for batch, length in sizes:
        if batch < 1 or length < 2:
            raise OptionError(f"warm_up: ({batch}, {length}) should be a batch size and a length in tokens")
        if decoder is None or not decoder.warm_up(batch, length):
            raise OptionError(
                "warm_up: this model has no decoding with one graph for each token; leave it out"
            )


def as_one_graph(function: Callable[..., Any], *, same_bits: bool) -> Callable[..., Any]:
    options: dict[str, Any] | None = {"deterministic": True} if same_bits else None
    # Other models with the same code do not count to the limit of recompiling this one.
    limit: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    if not limit.keys() <= inspect.signature(torch.compile).parameters.keys():
        limit = {}  # this version of torch has one limit for all
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(function, fullgraph=True, options=options, **limit)


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


# ``load(compile=True)`` on a stage of a pipeline: one graph of its forward pass, between receives and
# sends.
#
# A graph holds no messages between stages. They are received before it runs, and sent afterwards. Which
# messages a call has is seen in the first call of its shapes, which runs uncompiled.


COMPILE_TIMEOUT_S = 3600
"""How long a stage waits for the others to have compiled theirs."""


class HeldTransport(Transport):
    """Returns values that were received before the call, and holds those to be sent after it."""

    def __init__(self, received: list[Tensor]) -> None:
        self._received = received
        self.held: list[tuple[Crossing, Tensor, tuple[int, ...]]] = []
        """Values to be sent: each value, its tensor, and the stages to which it goes."""

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Hold a value."""
        self.held.append((crossing, x, tuple(stages)))

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return the next tensor."""
        return self._received.pop(0)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: a hook of the model, outside of the graph, shares the results."""
        raise AssertionError("no result is shared within a graph")


def compile_stage(model: nn.Module, start: Launch, link: StageLink, *, same_bits: bool) -> None:
    """Compile every later call of a stage's model, in place, except the calls of continuous batching.

    Hooks of the model itself, which look after calls and share results, run uncompiled. A call that
    allocates a cache of fixed size runs uncompiled too.
    """
    call: Callable[..., Any] = model._call_impl
    plain: Callable[..., Any] = model.forward
    staged = _StagedForward(plain, start, link, same_bits)

    @functools.wraps(plain)  # code may ask for the names of its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        return staged(*args, **kwargs)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        refresh_fused(model)
        model.forward = forward  # type: ignore[method-assign]
        try:
            return call(*args, **kwargs)
        finally:
            del model.forward

    model._compiled_call_impl = compiled
    decode_from_static_cache(model)


class _StagedForward:
    """The forward pass of a stage, without the hooks of its model."""

    def __init__(self, plain: Callable[..., Any], start: Launch, link: StageLink, same_bits: bool) -> None:
        assert isinstance(link.transport, ProcessTransport), "compiled models run on processes"
        self._plain, self._start, self._link, self._processes = plain, start, link, link.transport
        self._known: dict[Any, Traffic] = {}
        self._compiled: set[Any] = set()

        def between(received: list[Tensor], *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
            """Compute the values between the messages, and return those to be sent."""
            transport = HeldTransport(received)
            with link.through(transport):
                output = plain(*args, **kwargs)
            return output, transport.held

        self._between = as_one_graph(between, same_bits=same_bits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if getattr(value, "is_compileable", False)]
        if not all(map(is_allocated, caches)):
            return self._plain(*args, **kwargs)
        # The messages of a call depend on these, which are the same on all stages.
        leaves, _ = pytree.tree_flatten((args, sorted(kwargs.items())), is_leaf=_is_cache)
        shapes = tuple(map(_shape, leaves))
        if shapes not in self._known:
            # An uncompiled call: its messages, and its result.
            transport = AsyncTransport(self._processes)
            with self._link.through(transport):
                output = self._plain(*args, **kwargs)
            transport.wait()
            self._known[shapes] = transport.traffic
            return output
        if shapes in self._compiled:
            return self._graph(self._known[shapes], args, kwargs)
        output = self._first_graph(self._known[shapes], args, kwargs)
        self._compiled.add(shapes)
        return output

    def _graph(self, traffic: Traffic, args: Any, kwargs: Any) -> Any:
        processes = self._processes
        received = [processes.receive(m.crossing, m.shape, m.dtype, m.stage) for m in traffic.received]
        output, state = self._between(received, *args, **kwargs)
        for crossing, x, stages in state:
            processes.send(crossing, x, stages)
        return output

    def _first_graph(self, traffic: Traffic, args: Any, kwargs: Any) -> Any:
        """Return the first call that runs as a graph: an error of one stage is raised on all."""
        output, error = None, None
        try:
            output = self._graph(traffic, args, kwargs)
        except NOT_ONE_GRAPH as failure:
            error = PlanError(
                "compile=True makes one graph of what a stage computes, and the model's code cannot be "
                f"captured as one: {first_line(failure)}; load without compile=True"
            )
            error.__cause__ = failure
            for m in traffic.sent:  # the others wait for something
                nothing = torch.zeros(m.shape, dtype=m.dtype, device=self._start.device)
                self._processes.send(m.crossing, nothing, [m.stage])
        agree(self._start, error, COMPILE_TIMEOUT_S)
        return output


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if _is_cache(value):  # one of fixed size is as long in every call
        return type(value), None if getattr(value, "is_compileable", False) else int(value.get_seq_length())
    return value if isinstance(value, bool | int | str | None) else type(value)
