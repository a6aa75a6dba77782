"""The results of units of other pipeline stages on this one.

Placeholders replace them. They return the values that the unit's stage has sent, or zeros of the right shape
and dtype if nobody needs the values. They keep the caches of their layers as long as the others, with one
head of one element, since code asks the first layer of a cache for its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RefusedCallError
from ..format.pipeline_stages import CacheCall, PlaceholderDim, PlaceholderTensor, StagedModule
from ..format.slices import Mesh, local_size
from ..parallel.row_ids import IdCheck, is_recorded
from .stage_link import StageLink

Shape = Callable[[Mapping[str, Any]], tuple[int, ...]]


@dataclass(frozen=True)
class StageRank:
    """A rank of a stage, or of several."""

    link: StageLink
    """The link to the other stages."""
    mesh: Mesh
    """The mesh of the ranks of a stage."""
    rank: int
    """The rank in this mesh."""
    device: torch.device
    """The device on which the rank computes."""
    dtype: torch.dtype
    """The dtype of activations."""


class StagedUnit:
    """A unit on one rank: the forms of its results, and these results in passes of other stages."""

    def __init__(
        self,
        on: StageRank,
        fqn: str,
        entry: StagedModule,
        position: int,
        names: Sequence[str],
        tables: Mapping[str, int],
    ) -> None:
        self.fqn = fqn
        self.entry = entry
        self._on = on
        self._link = on.link
        self._names = names
        self._checks = [(name, IdCheck(rows, fqn)) for name, rows in tables.items()]
        self._shapes = [None if i.tensor is None else self._shape(i.tensor) for i in entry.items]
        self._cache_calls = [self._cache_call(call, position) for call in entry.cache]
        self._receivers = {value.item: value.to for value in entry.sent}
        self.has_parts = any(
            d.times != d.over for i in entry.items if i.tensor is not None for d in i.tensor.dims
        )
        """Whether results are parts of the dims that callers give, or these are parts of dims of results."""

    # State of the running pass

    def is_absent(self) -> bool:
        """Return whether a pass is running that does not call the unit: of another stage, or of none."""
        link = self._link
        return link.is_called and (link.stage not in self.entry.stages or link.is_measuring)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return results of the unit's shapes; only results that its stage has sent have the true values."""
        if not self._link.is_called:
            raise RefusedCallError(
                f"{self.fqn} is on another stage; call the model itself, whose results every stage gets"
            )
        arguments = self.bound(args, kwargs)
        if not self.entry.takes_cache and any(
            hasattr(value, "get_seq_length") for value in arguments.values()
        ):
            raise RefusedCallError(
                f"{self.fqn} is given a cache, and was traced without one: this call cannot be staged; pass "
                "use_cache=False"
            )
        for name, check in self._checks:
            ids = arguments.get(name)
            if isinstance(ids, Tensor) and not is_recorded(ids):
                check(ids)
        for update in self._cache_calls:
            update(arguments)
        items = [self._item(index, arguments) for index in range(len(self.entry.items))]
        if self.entry.returns == "tensor":
            return items[0]
        return tuple(items) if self.entry.returns == "tuple" else items

    def _item(self, index: int, given: Mapping[str, Any]) -> Any:
        item = self.entry.items[index]
        if item.tensor is None:
            return given.get(item.argument) if item.argument else None
        shape, dtype = self.shape(index, given), self.dtype(item.tensor)
        if index in self._receivers and self._link.needs(self._receivers[index]):
            return self._link.receive((self.fqn, index), shape, dtype, self.entry.stages[0])
        return torch.zeros(shape, dtype=dtype, device=self._on.device)

    # Forms of results

    def shape(self, index: int, given: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the local shape of an item that is a tensor."""
        find = self._shapes[index]
        assert find is not None, "it is a tensor"
        return find(given)

    def dtype(self, tensor: PlaceholderTensor | None) -> torch.dtype:
        """Return the dtype of an item."""
        if tensor is None or not tensor.dtype:
            return self._on.dtype
        # An empty tensor has the dtype that code gets which asks for this one, as in a simulation.
        return torch.empty(0, dtype=getattr(torch, tensor.dtype)).dtype

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; further positional ones by number."""
        names = [*self._names, *map(str, range(len(self._names), len(args)))]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _shape(self, tensor: PlaceholderTensor) -> Shape:
        dims = [self._dim(dim) for dim in tensor.dims]
        return lambda given: tuple(dim(given) for dim in dims)

    def _dim(self, dim: PlaceholderDim) -> Callable[[Mapping[str, Any]], int]:
        size = 1 if dim.size is None else local_size(dim.size, self._on.mesh, self._on.rank)
        if not dim.of:
            return lambda given: size
        paths = [(each.port.split(".")[1:], each.dim) for each in dim.of]
        times, over, at_most = dim.times, dim.over, dim.at_most

        def product(given: Mapping[str, Any]) -> int:
            total = size
            for path, d in paths:  # Dynamo knows no math.prod of symbolic sizes
                value = _found(given, path)
                if value is None:
                    raise RefusedCallError(
                        f"{self.fqn}, of another stage, is called without {'.'.join(path)}"
                    )
                total = total * value.shape[d]
            total = total if times == over else total * times // over
            return min(total, at_most) if at_most else total

        return product

    def _cache_call(self, call: CacheCall, position: int) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that makes one call of a cache, if the module is given one and its inputs."""
        arguments = []
        paths = [
            e.port.split(".")[1:] for a in call.arguments if a.tensor for d in a.tensor.dims for e in d.of
        ]
        for argument in call.arguments:
            number = argument.numbers[position % len(argument.numbers)] if argument.numbers else 0
            shape = None if argument.tensor is None else self._shape(argument.tensor)
            arguments.append((argument.name, argument.tensor, shape, number))

        def zeros(tensor: PlaceholderTensor, shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype(tensor), device=self._on.device)

        def run(given: Mapping[str, Any]) -> None:
            cache = given.get(call.argument)
            # A model with several caches is given one of them if there are only tokens to attend to.
            cache = getattr(cache, call.attribute, cache) if call.attribute else cache
            # The loop of continuous batching knows how long each request is. Since transformers 5.24 layers
            # get its cache under the name of other caches.
            is_paged = hasattr(cache, "free_blocks")
            if cache is None or is_paged or any(_found(given, path) is None for path in paths):
                return
            values = [
                (name, zeros(tensor, shape(given)) if tensor is not None and shape is not None else number)
                for name, tensor, shape, number in arguments
            ]
            getattr(cache, call.method)(*(v for n, v in values if not n), **{n: v for n, v in values if n})

        return run


def _found(given: Mapping[str, Any], path: Sequence[str]) -> Tensor | None:
    """Return the tensor at a port of the arguments; None if there is none."""
    value: Any = given.get(path[0])
    for step in path[1:]:
        if value is not None:
            value = value[int(step)] if isinstance(value, tuple | list) else value.get(step)
    return value if isinstance(value, Tensor) else None


# Modules of a process with several stages.
#
# Such a process has the modules of all of its stages, and each pass calls the modules of one stage. A pass of
# another stage skips the hooks of a module, too: hooks of FSDP2 would gather its parameters.

_UNIT = "_shardconv_unit"
"""Attribute of a module that gives way: its unit."""


def give_way(module: nn.Module, unit: StagedUnit) -> None:
    """Call a module only in passes of its own stages, in place.

    In passes of other stages the unit is called instead. The module keeps its parameters and buffers, its
    hooks, and its class as far as other code can see.
    """
    other: StagedUnit | None = vars(module).get(_UNIT)
    if other is not None:
        first, second = list(other.entry.stages), list(unit.entry.stages)
        if first != second:
            raise RefusedCallError(
                f"a {type(module).__name__} has two names, and runs on stages {first} by one and on {second} "
                "by the other; load one stage in each process"
            )
        return
    vars(module)[_UNIT] = unit
    try:
        module.__class__ = _class_giving_way(type(module))  # type: ignore[arg-type]
    except TypeError as error:  # its class has another memory layout, such as the class of compiled code
        raise RefusedCallError(
            f"a {type(module).__name__} cannot give way to passes of other stages ({error}); load one stage "
            "in each process"
        ) from error


def gives_way(module: nn.Module) -> bool:
    """Return whether a module is called in some passes of this process, and not in others."""
    return _UNIT in vars(module)


def is_elsewhere(module: nn.Module) -> bool:
    """Return whether the running pass is of a stage without this module of the process."""
    unit: StagedUnit | None = vars(module).get(_UNIT)
    return unit is not None and unit.is_absent()


@functools.cache
def _class_giving_way(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules that give way; layers of one class still have one class."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_GivingWay, kind), names)


class _GivingWay(nn.Module):
    """A module that gives way."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit: StagedUnit = vars(self)[_UNIT]
        return unit(*args, **kwargs) if unit.is_absent() else super().__call__(*args, **kwargs)
