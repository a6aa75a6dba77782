"""The stages of a plan, said of the smaller model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardconv_runtime.format.dims import Dim
from shardconv_runtime.format.pipeline_stages import CacheCall, StagedModule, StagesPlan, StandInItem
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.staged_names import staged_modules

ResultDim = Callable[[str, str, int, Dim], Dim]
"""(module, slot of its output, index of a dim, the dim) -> the dim in the smaller model."""


def small_stages(plan: Plan, dim_of: ResultDim) -> StagesPlan:
    """The same stages, with an entry for each module; bypassed layers pass on what they are given."""
    assert plan.stages is not None
    modules = tuple(
        _of_name(entry, position, name, dim_of) for name, (entry, position) in staged_modules(plan).items()
    )
    return replace(plan.stages, modules=modules)


def _of_name(entry: StagedModule, position: int, name: str, dim_of: ResultDim) -> StagedModule:
    slots = ["output" if entry.returns == "tensor" else f"output.{i}" for i in range(len(entry.items))]
    items = tuple(_item(item, name, slot, dim_of) for item, slot in zip(entry.items, slots, strict=True))
    cache = tuple(_of_position(call, position) for call in entry.cache)
    return replace(entry, names=(name,), items=items, cache=cache)


def _item(item: StandInItem, name: str, slot: str, dim_of: ResultDim) -> StandInItem:
    if item.tensor is None:
        return item
    dims = tuple(
        dim if dim.size is None else replace(dim, size=dim_of(name, slot, index, dim.size))
        for index, dim in enumerate(item.tensor.dims)
    )
    return replace(item, tensor=replace(item.tensor, dims=dims))


def _of_position(call: CacheCall, position: int) -> CacheCall:
    arguments = tuple(
        replace(a, numbers=a.numbers and (a.numbers[position % len(a.numbers)],)) for a in call.arguments
    )
    return replace(call, arguments=arguments)
