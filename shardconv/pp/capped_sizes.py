"""Sizes that grow with a sequence up to a constant, such as the number of keys that an indexer picks for a
query.

The tape of one call cannot tell such a size from the sequence length or from a constant. Results that are
integers and that other stages need are therefore measured in short and long calls on meta.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import size
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.pipeline_stages import (
    PlaceholderDim,
    PlaceholderItem,
    PortDim,
    StagedModule,
    StagesPlan,
)
from shardconv_runtime.parallel.boundary import forward_signature
from torch import Tensor, nn

from ..inputs.trace_inputs import TraceInputs
from ..simulation.live_memory import LiveMemory, OperatorMemo
from ..simulation.memory_run import Calls, Size

_LEAST_LENGTH = 4096
"""Shortest long call. It must exceed every constant of the config except numbers that count ids."""

_MOST_OPERATORS = 1_000_000
"""Most operators of a long call."""


def with_capped_sizes(stages: StagesPlan, model: nn.Module, inputs: TraceInputs) -> StagesPlan:
    """Return the stages with upper limits for the sizes of integers, if any integers are sent.

    All modules that return integers are measured, since a sent tensor may depend on another module's result.
    """
    if not any(_is_integer(entry.items[sent.item]) for entry in stages.modules for sent in entry.sent):
        return stages
    asked = {expand_all(entry.names)[0] for entry in stages.modules if any(map(_is_integer, entry.items))}
    calls = _calls(model, inputs, asked)
    return replace(stages, modules=tuple(_fitted(entry, calls) for entry in stages.modules))


@dataclass(frozen=True)
class _Call:
    """The shapes of the inputs and results of one module."""

    given: Mapping[str, tuple[int, ...]]
    """Port -> shape."""
    returned: tuple[tuple[int, ...] | None, ...]
    """Shape of each item, None if it is not a tensor."""


def _is_integer(item: PlaceholderItem) -> bool:
    if item.tensor is None or not item.tensor.dtype:
        return False
    dtype: torch.dtype = getattr(torch, item.tensor.dtype)
    return not dtype.is_floating_point and not dtype.is_complex


def _calls(model: nn.Module, inputs: TraceInputs, modules: Collection[str]) -> list[dict[str, _Call]]:
    """Return the shapes in a short call, in one that continues it, and in two long ones."""
    # A long call has to exceed the constants of the config. Numbers as large as the vocabulary are ids, or
    # count them; they would make the calls longer than necessary.
    config = getattr(model, "config", None)
    numbers = [v for v in vars(config).values() if type(v) is int] if config is not None else []
    vocab = max((len(p) for p in model.parameters() if p.dim()), default=0)
    length = max([_LEAST_LENGTH, *(2 * n for n in numbers if n < min(vocab, 2**16))])
    runs: list[dict[str, _Call]] = []
    calls = Calls(model, inputs, with_all=False)
    before, memo = [*model.parameters(), *model.buffers()], OperatorMemo()

    def call(arguments: Mapping[str, Any]) -> Any:
        runs.append({})
        with LiveMemory(_MOST_OPERATORS, str, before, memo):
            return model(**arguments)

    with ExitStack() as stack, torch.no_grad():
        for fqn in modules:
            module = model.get_submodule(fqn)
            note = partial(_note, runs, fqn, list(forward_signature(module).parameters))
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        try:
            short = Size(2, 3, 3)
            cache = calls.handed_back(call(calls.prompt(short)))
            if cache:
                call(calls.next_token(short, cache))
            for each in (length, 2 * length):
                call(calls.prompt(Size(1, each, each)))
        except Exception as error:
            raise SolveError(
                f"the model cannot be cut into stages: the calls that count the integers of {min(modules)} "
                f"fail: {error}"
            ) from error
    return runs


def _note(
    found: list[dict[str, _Call]],
    fqn: str,
    names: Sequence[str],
    module: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    output: Any,
) -> None:
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    shapes = {f"input.{n}": tuple(v.shape) for n, v in arguments.items() if isinstance(v, Tensor)}
    items = [output] if isinstance(output, Tensor) else output
    found[-1][fqn] = _Call(shapes, tuple(tuple(i.shape) if isinstance(i, Tensor) else None for i in items))


def _fitted(entry: StagedModule, calls: Sequence[Mapping[str, _Call]]) -> StagedModule:
    """Return the entry with the sizes that its first module returned."""
    name = expand_all(entry.names)[0]
    seen = [call[name] for call in calls if name in call]
    items = list(entry.items)
    for item, tensor in enumerate(each.tensor for each in entry.items):
        if tensor is None or not _is_integer(items[item]):
            continue
        dims = tuple(_fitted_dim(name, dim, item, d, seen) for d, dim in enumerate(tensor.dims))
        items[item] = replace(items[item], tensor=replace(tensor, dims=dims))
    return replace(entry, items=tuple(items))


def _fitted_dim(
    fqn: str, dim: PlaceholderDim, item: int, index: int, calls: Sequence[_Call]
) -> PlaceholderDim:
    """Return the dim of an item with its upper limit, checked against all calls."""
    sizes = [shape[index] for call in calls if (shape := call.returned[item]) is not None]
    most = max(sizes, default=0)
    ports = [(port, d) for port, shape in calls[0].given.items() for d in range(len(shape))] if calls else []
    tried = [dim.of] if dim.of else [(PortDim(port, d),) for port, d in ports]
    if not dim.of and set(sizes) <= {dim.size and size(dim.size)}:
        return dim
    for of in tried:
        products = [_product(call, of) for call in calls]
        if products == sizes:
            return replace(dim, of=of, size=None)
        if [product and min(product, most) for product in products] == sizes:
            return replace(dim, of=of, size=None, at_most=most)
    raise SolveError(
        f"the model cannot be cut into stages: {fqn} returns integers whose dim {index} depends neither on "
        f"its inputs nor on a constant: {sizes} in {len(sizes)} calls"
    )


def _product(call: _Call, of: Sequence[PortDim]) -> int | None:
    """Multiply dims of a module's inputs; None if the module was not given one of them."""
    if any(each.port not in call.given for each in of):
        return None
    return math.prod(call.given[each.port][each.dim] for each in of)
