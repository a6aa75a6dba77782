"""The model of one stage of a pipeline: stand-ins in the place of the modules of other stages.

A stand-in has no parameters. It returns tensors of the right shape and dtype, which nobody needs, or what the
stage of the module has sent. It keeps the caches of its layers as long as the others, with one head of one
element, since code asks the first layer of a cache for its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..comm.stage_link import Crossing, StageLink
from ..errors import PlanError, ShardconvError
from ..format.pipeline_stages import CacheCall, StagedModule, StandInDim, StandInTensor
from ..format.plan import Plan
from ..format.slices import Mesh, local_size
from ..format.staged_names import staged_modules
from .boundary import forward_signature
from .build import submodule
from .stage_guards import attach_stage_guards

Shape = Callable[[Mapping[str, Any]], tuple[int, ...]]


ArgumentNames = Mapping[str, Sequence[str]]
"""FQN -> the names of a module's arguments, in order."""


def argument_names(model: nn.Module, plan: Plan) -> ArgumentNames:
    """Of the modules that have stand-ins on some stage: what replaces a module may call arguments otherwise.

    Args:
        model: unsharded, before ``parallelize``.
        plan: with stages.
    """
    return {fqn: list(forward_signature(submodule(model, fqn)).parameters) for fqn in staged_modules(plan)}


def keep_stage(
    model: nn.Module,
    plan: Plan,
    link: StageLink,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    names: ArgumentNames,
) -> StageModel:
    """Replace the modules of other stages, in place, and have the others send and receive.

    Args:
        model: of one rank, as ``parallelize`` makes it; on meta.
        plan: with stages.
        link: to the other stages.
        rank: among those of the stage.
        device: on which the rank computes.
        dtype: of the model's parameters, when it is called.
        names: of the unsharded model.

    Returns:
        What was done. The parameters of the model are those of this stage.

    Raises:
        PlanError: the plan does not fit the model.
    """
    forms: dict[str, _Forms] = {}
    for fqn, (entry, position) in staged_modules(plan).items():
        module = submodule(model, fqn)
        forms[fqn] = _Forms(fqn, entry, position, names[fqn], plan.mesh, rank, dtype)
        if link.stage in entry.stages:
            if entry.sent:
                sender = _Sender(link, forms[fqn])
                module.register_forward_hook(sender, with_kwargs=True)
                if forms[fqn].has_parts:
                    module.register_forward_pre_hook(sender.before, prepend=True, with_kwargs=True)
            continue
        parent, _, attribute = fqn.rpartition(".")
        submodule(model, parent)._modules[attribute] = _made(module, forms[fqn], link, device)
    _let_go(model, device, dtype)
    attach_stage_guards(model, plan, link)
    model.register_forward_hook(_Sharer(link, _handed_on(plan, link.stage)), with_kwargs=True)
    return StageModel(link, device, forms)


@dataclass(frozen=True)
class StageModel:
    """The model of a stage of a pipeline: its link to the others, and the forms of what modules return."""

    link: StageLink
    device: torch.device
    _forms: Mapping[str, _Forms]

    def crossings(self) -> dict[Crossing, tuple[int, int]]:
        """All values that stages hand on: from which stage, and the last one that needs them; in the order of
        the plan."""
        return {
            (fqn, value.item): (forms.entry.stages[0], max(value.to))
            for fqn, forms in self._forms.items()
            for value in forms.entry.sent
        }

    @contextmanager
    def without_units(self, model: nn.Module) -> Iterator[None]:
        """Put stand-ins in the place of this stage's modules too, while a call runs that sends nothing."""
        kept: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for fqn, forms in self._forms.items():
                if self.link.stage not in forms.entry.stages or not forms.entry.items:
                    continue  # it is one already, or nothing can stand in for it
                path, _, attribute = fqn.rpartition(".")
                parent = submodule(model, path)
                module = submodule(parent, attribute)
                kept.append((parent, attribute, module))
                parent._modules[attribute] = _made(module, forms, self.link, self.device)
            yield
        finally:
            for parent, attribute, module in reversed(kept):
                parent._modules[attribute] = module


def _handed_on(plan: Plan, stage: int) -> frozenset[Crossing]:
    """What a stage sends or receives in each call of the model."""
    return frozenset(
        (fqn, value.item)
        for fqn, (entry, _) in staged_modules(plan).items()
        for value in entry.sent
        if value.each_call and (stage in value.to or stage in entry.stages)
    )


def _let_go(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Code asks weights for their device and dtype: those of stand-ins become one number in their shape, and
    parts of the model that have none left show one."""
    kept = set(model.modules())
    one = nn.Parameter(torch.zeros((), dtype=dtype, device=device), requires_grad=False)
    for module in kept - {model}:
        if isinstance(module, _StandIn) or next(module.parameters(), None) is not None:
            continue
        if any(isinstance(inner, _StandIn) for inner in module.modules()):
            module.parameters = functools.partial(_shown, one)  # type: ignore[method-assign]
    for module in kept:
        if isinstance(module, _StandIn):
            for owner in set(module._module.modules()) - kept:
                for name, tensor in owner._parameters.items():
                    if tensor is not None:
                        own = dtype if tensor.is_floating_point() else tensor.dtype
                        shown = torch.zeros((), dtype=own, device=device).expand(tensor.shape)
                        owner._parameters[name] = nn.Parameter(shown, requires_grad=False)


def _shown(parameter: nn.Parameter, recurse: bool = True) -> Iterator[nn.Parameter]:
    """In place of ``parameters``: a number that is not among the named ones, and so not trained or saved."""
    return iter((parameter,))


class _Sender:
    """A hook that sends results of a module to the stages that need them.

    Stand-ins expect them in the form that was traced. A call in which the module returns another form is an
    error here, where the form is known.
    """

    def __init__(self, link: StageLink, forms: _Forms) -> None:
        self._link = link
        self._forms = forms
        self._given: dict[str, Any] | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Keep what the caller gives, before the steps of the plan make parts of it."""
        self._given = self._forms.bound(args, kwargs)

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Send, in the order of the plan.

        Raises:
            ShardconvError: the results have another form than the plan says.
        """
        forms = self._forms
        items = [output] if isinstance(output, Tensor) else output
        given = forms.bound(args, kwargs) if self._given is None else self._given
        self._given = None
        planned = [item.tensor is not None for item in forms.entry.items]
        if [isinstance(item, Tensor) for item in items] != planned:
            raise _other_form(forms.fqn, "other results")
        for value in forms.entry.sent:
            item, tensor = items[value.item], forms.entry.items[value.item].tensor
            shape, dtype = forms.shape(value.item, given), forms.dtype(tensor)
            if tuple(item.shape) != shape or item.dtype != dtype:
                found = f"{item.dtype} {list(item.shape)}, where {dtype} {list(shape)} was expected"
                raise _other_form(forms.fqn, found)
            self._link.pass_on((forms.fqn, value.item), item, value.to)


def _other_form(fqn: str, what: str) -> ShardconvError:
    return ShardconvError(
        f"in this call {fqn} returns {what}: another stage cannot receive it; call the model "
        "as it was traced, or convert without --pp"
    )


class _Sharer:
    """A hook that gives every stage what the model returns on the last one, but for caches.

    Args:
        link: to the other stages.
        expected: what this stage sends or receives in each call.
    """

    def __init__(self, link: StageLink, expected: frozenset[Crossing]) -> None:
        self.link = link
        self._expected = expected

    def __call__(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Fill the results of the model.

        Raises:
            ShardconvError: a module was not called whose results are for another stage.
        """
        if missing := self._expected - self.link.handed_on:
            raise ShardconvError(
                f"{min(missing)[0]} was not called, whose results another stage needs: this call leaves it "
                "out; convert with other --stages"
            )
        if self.link.shares_results:
            self.link.share(returned_tensors(model, output))


def returned_tensors(model: nn.Module, output: Any) -> list[Tensor]:
    """The tensors that a model returns, but for those that are handed back to it, as caches are."""
    if isinstance(output, Mapping):
        arguments = forward_signature(model).parameters
        output = [value for name, value in output.items() if name not in arguments]
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]


class _Forms:
    """What one stand-in returns, and how it finds the shapes among its arguments."""

    def __init__(
        self,
        fqn: str,
        entry: StagedModule,
        position: int,
        names: Sequence[str],
        mesh: Mesh,
        rank: int,
        dtype: torch.dtype,
    ) -> None:
        self.fqn = fqn
        self.entry = entry
        self._names = names
        self._mesh = mesh
        self._rank = rank
        self._dtype = dtype
        self.shapes = [None if i.tensor is None else self._shape(i.tensor) for i in entry.items]
        self.cache = [self._cache_call(call, position) for call in entry.cache]
        self.received = {value.item: value.to for value in entry.sent}
        self.has_parts = any(
            d.times != d.over for i in entry.items if i.tensor is not None for d in i.tensor.dims
        )

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


def _made(module: nn.Module, forms: _Forms, link: StageLink, device: torch.device) -> nn.Module:
    """A stand-in of the module's class, since models look for modules by their class."""

    @functools.wraps(type(module).forward)  # code may ask for the names of its arguments
    def forward(self: _StandIn, *args: Any, **kwargs: Any) -> Any:
        return self.results(*args, **kwargs)

    kind = type(type(module).__name__, (_StandIn, type(module)), {"forward": forward})
    made: _StandIn = object.__new__(kind)
    made.stand_in(module, forms, link, device)
    return made


class _StandIn(nn.Module):
    """Stands in for a module: its attributes and its signature, none of its parameters."""

    def stand_in(self, module: nn.Module, forms: _Forms, link: StageLink, device: torch.device) -> None:
        """Set up, in place of the constructor."""
        nn.Module.__init__(self)
        self.__dict__.update(_module=module, _forms=forms, _link=link, _device=device)
        self.train(module.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_module"], name)

    def results(self, *args: Any, **kwargs: Any) -> Any:
        """What the module would return, in shape; in value only what its stage has sent."""
        forms: _Forms = self._forms
        if not self._link.depth:
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
        if index in forms.received and link.takes(forms.received[index]):
            return link.take((forms.fqn, index), shape, dtype, self._device, forms.entry.stages[0])
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _empty(self, tensor: StandInTensor, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self._forms.dtype(tensor), device=self._device)
