"""What stands in for the modules of other stages of a pipeline.

A stand-in has no parameters. It returns tensors of the right shape and dtype, which nobody needs, or what the
stage of the module has sent. It keeps the caches of its layers as long as the others, with one head of one
element, since code asks the first layer of a cache for its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.stage_link import StageLink
from ..errors import PlanError, ShardconvError
from ..format.pipeline_stages import CacheCall, StagedModule, StandInDim, StandInTensor
from ..format.slices import Mesh, local_size
from .row_ids import IdCheck, is_recorded

Shape = Callable[[Mapping[str, Any]], tuple[int, ...]]

STAND_IN = "_shardconv_stand_in"
"""Attribute of a module, not a submodule: what is called instead in passes of other stages."""


class StandInForms:
    """What one stand-in returns, and how it finds the shapes among its arguments.

    Args:
        fqn: of the module.
        entry: of the module.
        position: of the module among those of the entry.
        names: of its arguments.
        mesh: of the plan.
        rank: this one.
        dtype: of activations.
        tables: names of arguments that are ids of a table of the module -> the rows of the table.
    """

    def __init__(
        self,
        fqn: str,
        entry: StagedModule,
        position: int,
        names: Sequence[str],
        mesh: Mesh,
        rank: int,
        dtype: torch.dtype,
        tables: Mapping[str, int],
    ) -> None:
        self.fqn = fqn
        self.entry = entry
        self._names = names
        self._mesh = mesh
        self._rank = rank
        self._dtype = dtype
        self._checks = [(name, IdCheck(rows, fqn)) for name, rows in tables.items()]
        self.shapes = [None if i.tensor is None else self._shape(i.tensor) for i in entry.items]
        self.cache = [self._cache_call(call, position) for call in entry.cache]
        self.received = {value.item: value.to for value in entry.sent}
        self.has_parts = any(
            d.times != d.over for i in entry.items if i.tensor is not None for d in i.tensor.dims
        )

    def check_ids(self, given: Mapping[str, Any]) -> None:
        """Refuse the ids that the module refuses on its stage, for which this one would wait forever.

        Raises:
            OutOfRangeError: see ``IdCheck``.
        """
        for name, check in self._checks:
            ids = given.get(name)
            if isinstance(ids, Tensor) and not is_recorded(ids):
                check(ids)

    def shape(self, index: int, given: Mapping[str, Any]) -> tuple[int, ...]:
        """The local shape of an item that is a tensor."""
        find = self.shapes[index]
        assert find is not None, "it is a tensor"
        return find(given)

    def dtype(self, tensor: StandInTensor | None) -> torch.dtype:
        """The dtype of an item."""
        if tensor is None or not tensor.dtype:
            return self._dtype
        # An empty tensor has the dtype that code gets which asks for this one, as in a simulation.
        return torch.empty(0, dtype=getattr(torch, tensor.dtype)).dtype

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; further positional ones by number."""
        names = [*self._names, *map(str, range(len(self._names), len(args)))]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _shape(self, tensor: StandInTensor) -> Shape:
        dims = [self._dim(dim) for dim in tensor.dims]
        return lambda given: tuple(dim(given) for dim in dims)

    def _dim(self, dim: StandInDim) -> Callable[[Mapping[str, Any]], int]:
        size = 1 if dim.size is None else local_size(dim.size, self._mesh, self._rank)
        if not dim.of:
            return lambda given: size
        paths = [(each.slot.split(".")[1:], each.dim) for each in dim.of]
        times, over, at_most = dim.times, dim.over, dim.at_most

        def product(given: Mapping[str, Any]) -> int:
            found = size
            for path, d in paths:  # Dynamo knows no math.prod of symbolic sizes
                found = found * self._required(given, path).shape[d]
            found = found if times == over else found * times // over
            return min(found, at_most) if at_most else found

        return product

    def _required(self, given: Mapping[str, Any], path: Sequence[str]) -> Tensor:
        value = _found(given, path)
        if value is None:
            raise PlanError(f"{self.fqn}, of another stage, is called without {'.'.join(path)}")
        return value

    def _cache_call(self, call: CacheCall, position: int) -> Callable[[Mapping[str, Any], Any], None]:
        """Makes one call of a cache among the arguments, if the module is given one and what it would write
        is made of."""
        arguments = []
        paths = [
            e.slot.split(".")[1:] for a in call.arguments if a.tensor for d in a.tensor.dims for e in d.of
        ]
        for argument in call.arguments:
            number = argument.numbers[position % len(argument.numbers)] if argument.numbers else 0
            shape = None if argument.tensor is None else self._shape(argument.tensor)
            arguments.append((argument.name, argument.tensor, shape, number))

        def run(given: Mapping[str, Any], empty: Callable[[StandInTensor, tuple[int, ...]], Tensor]) -> None:
            cache = given.get(call.argument)
            # One cache comes in place of several where there is nothing to attend to beside the tokens.
            cache = getattr(cache, call.attribute, cache) if call.attribute else cache
            if cache is None or any(_found(given, path) is None for path in paths):
                return
            values = [
                (name, empty(tensor, shape(given)) if tensor is not None and shape is not None else number)
                for name, tensor, shape, number in arguments
            ]
            getattr(cache, call.method)(*(v for n, v in values if not n), **{n: v for n, v in values if n})

        return run


def _found(given: Mapping[str, Any], path: Sequence[str]) -> Tensor | None:
    """The tensor at a slot of the arguments; None if there is none."""
    value: Any = given.get(path[0])
    for step in path[1:]:
        if value is not None:
            value = value[int(step)] if isinstance(value, tuple | list) else value.get(step)
    return value if isinstance(value, Tensor) else None


def stand_in_for(module: nn.Module, forms: StandInForms, link: StageLink, device: torch.device) -> StandIn:
    """A stand-in of the module's class, since models look for modules by their class."""

    @functools.wraps(type(module).forward)  # code may ask for the names of its arguments
    def forward(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        return self.results(*args, **kwargs)

    kind = type(type(module).__name__, (StandIn, type(module)), {"forward": forward})
    made: StandIn = object.__new__(kind)
    made.stand_in(module, forms, link, device)
    return made


class StandIn(nn.Module):
    """Stands in for a module: its attributes and its signature, none of its parameters."""

    def stand_in(self, module: nn.Module, forms: StandInForms, link: StageLink, device: torch.device) -> None:
        """Set up, in place of the constructor."""
        nn.Module.__init__(self)
        self.__dict__.update(_module=module, _forms=forms, _link=link, _device=device)
        self.train(module.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_module"], name)

    @property
    def stages(self) -> Sequence[int]:
        """Which have the module."""
        stages: Sequence[int] = self._forms.entry.stages
        return stages

    def is_wanted(self) -> bool:
        """Whether a pass is running of a stage that does not have the module."""
        return self._link.is_called and self._link.stage not in self.stages

    def results(self, *args: Any, **kwargs: Any) -> Any:
        """What the module would return, in shape; in value only what its stage has sent."""
        forms: StandInForms = self._forms
        if not self._link.is_called:
            raise ShardconvError(
                f"this {type(self._module).__name__} is on another stage; call the model itself, whose "
                "results every stage gets"
            )
        given = forms.bound(args, kwargs)
        if not forms.entry.takes_cache and any(hasattr(value, "get_seq_length") for value in given.values()):
            raise ShardconvError(
                f"{forms.fqn} is given a cache, and was traced without one: this call cannot be staged; pass "
                "use_cache=False"
            )
        forms.check_ids(given)
        for update in forms.cache:
            update(given, self._empty)
        items = [self._item(index, given) for index in range(len(forms.entry.items))]
        if forms.entry.returns == "tensor":
            return items[0]
        return tuple(items) if forms.entry.returns == "tuple" else items

    def _item(self, index: int, given: Mapping[str, Any]) -> Any:
        forms, link = self._forms, self._link
        item = forms.entry.items[index]
        if item.tensor is None:
            return given.get(item.argument) if item.argument else None
        shape, dtype = forms.shape(index, given), forms.dtype(item.tensor)
        if index in forms.received and link.needs(forms.received[index]):
            return link.receive((forms.fqn, index), shape, dtype, self._device, forms.entry.stages[0])
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _empty(self, tensor: StandInTensor, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self._forms.dtype(tensor), device=self._device)


def give_way(module: nn.Module, stand_in: StandIn) -> None:
    """Have a module give way to its stand-in in passes of other stages, in place.

    All else about the module stays: its parameters and buffers, its hooks, its class for those who ask.

    Raises:
        PlanError: by another of its names it is on other stages, or its class cannot be changed.
    """
    other: StandIn | None = module.__dict__.get(STAND_IN)
    if other is not None:
        if other.stages != stand_in.stages:
            raise PlanError(
                f"a {type(module).__name__} has two names, and runs on stages {list(other.stages)} by one "
                f"and on {list(stand_in.stages)} by the other; load one stage in each process"
            )
        return
    module.__dict__[STAND_IN] = stand_in
    kind = type(module)
    if kind not in _GIVING_WAY:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _GIVING_WAY[kind] = type(kind.__name__, (_GivingWay, kind), names)
    try:
        module.__class__ = _GIVING_WAY[kind]
    except TypeError as error:  # its class is laid out in another way, as that of compiled code
        raise PlanError(
            f"a {kind.__name__} cannot give way to passes of other stages ({error}); load one stage in each "
            "process"
        ) from error


def is_elsewhere(module: nn.Module) -> bool:
    """Whether a pass is running of a stage that does not have the module, though this process has it."""
    stand_in: StandIn | None = vars(module).get(STAND_IN)
    return stand_in is not None and stand_in.is_wanted()


_GIVING_WAY: dict[type[nn.Module], type[nn.Module]] = {}
"""By class that of modules that give way; layers of one class stay of one class."""


class _GivingWay(nn.Module):
    """A module of a process with several stages. Its call is replaced with its hooks, among them those of
    FSDP2, which would gather its parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stand_in: StandIn = self.__dict__[STAND_IN]
        if not stand_in.is_wanted():
            return super().__call__(*args, **kwargs)
        stand_in.training = self.training
        return stand_in(*args, **kwargs)
