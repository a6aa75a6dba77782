"""The steps of a plan on the inputs and outputs of modules.

A module that the runtime does not replace keeps its class and its code; the plan's steps run in
forward hooks of that one instance, so that other instances are untouched and a deep copy takes
the steps along. Dynamo traces hooks like any code.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm.collectives import Communicator
from ..comm.steps import (
    Gather,
    GradDivide,
    GradReduce,
    Inner,
    KeepOnFirst,
    Reduce,
    ReduceScatter,
    Resharding,
    Slice,
)
from ..errors import PlanError
from ..format.dims import open_parts
from ..format.module_steps import (
    AllGatherStep,
    AllReduceStep,
    GradAllReduceStep,
    GradDivideStep,
    KeepOnFirstStep,
    LocalRowsOrEndStep,
    LocalRowsStep,
    ModuleStep,
    ReduceScatterStep,
    ReshardingStep,
    SliceStep,
    ZeroOutOfShardStep,
)
from ..format.plan import ModulePlan
from .row_ids import RowIds, zero_out_of_shard

# The steps of a plan as operations of a rank.

TensorStep = Callable[[Tensor], Tensor]
"""A step on a local tensor; the classes of ``comm`` say the shapes and the backward of each."""

GRADIENT_STEPS = (GradAllReduceStep, GradDivideStep)
"""Steps that change only the gradient."""

_RESHARDING: Mapping[type[ReshardingStep], type[Resharding]] = {
    AllGatherStep: Gather,
    SliceStep: Slice,
    ReduceScatterStep: ReduceScatter,
}


def step(boundary: ModuleStep, comm: Communicator, training: bool = False) -> TensorStep:
    """Return the operation of a step that needs only the tensor."""
    match boundary:
        case AllReduceStep():
            return Reduce(comm, boundary.axes, boundary.grad_axes if training else None)
        case KeepOnFirstStep():
            return KeepOnFirst(comm, boundary.axes, training)
        case GradAllReduceStep() | GradDivideStep():
            kind = GradReduce if isinstance(boundary, GradAllReduceStep) else GradDivide
            return kind(comm, boundary.axes)
        case AllGatherStep() | SliceStep():
            grad_axes = boundary.grad_axes if training else None
            return _resharding(boundary, comm, grad_axes, boundary.local_grad_axes)
        case ReduceScatterStep():
            return _resharding(boundary, comm, () if training else None, ())
        case _:
            raise PlanError(f"{boundary.port}: the step {boundary.op!r} is not allowed here")


def _resharding(
    boundary: ReshardingStep,
    comm: Communicator,
    grad_axes: tuple[int, ...] | None,
    local_grad_axes: tuple[int, ...],
) -> TensorStep:
    kind = _RESHARDING[type(boundary)]
    parts = open_parts(boundary.layout)
    if parts is not None:
        return Inner(kind, comm, boundary.dim, *parts, grad_axes, local_grad_axes)
    return kind(comm, boundary.dim, boundary.layout, grad_axes, local_grad_axes)


def in_use(steps: Iterable[ModuleStep], training: bool) -> list[ModuleStep]:
    """Return the steps to run: without training, steps that change only the gradient are left out."""
    return [b for b in steps if training or not isinstance(b, GRADIENT_STEPS)]


_Path = tuple[str, ...]

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
"""Prefixes of the attributes of a module that hold its forward hooks."""


def attach(
    module: nn.Module,
    entry: ModulePlan,
    comm: Communicator,
    signature: inspect.Signature,
    training: bool = False,
    *,
    name: str = "",
) -> None:
    """Run the plan's steps around ``module``."""
    mask = _Mask()
    inputs, outputs = (in_use(steps, training) for steps in (entry.inputs, entry.outputs))
    if inputs:
        # Ids of experts are the model's own choice among them, and some code means no expert by one more.
        weighs_inputs = any(isinstance(b, ZeroOutOfShardStep) for b in inputs)
        table = None if weighs_inputs else name
        before = _Before([_input_action(b, comm, signature, mask, training, table) for b in inputs])
        renumber(module, module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    if outputs:
        after = _After([(_output_path(b.port), _tensor_step(b, comm, mask, training)) for b in outputs])
        renumber(module, module.register_forward_hook(after, prepend=True))


def changed_inputs(module: nn.Module) -> frozenset[str]:
    """Return the ports whose tensors change before the code of a module and its forward hooks get them."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Before)]
    return frozenset(action.port for hook in hooks for action in hook.actions)


def renumber(module: nn.Module, handle: RemovableHandle) -> RemovableHandle:
    """Give a forward hook of ``module`` a number that is the same in all layers; ``handle`` follows.

    Torch numbers the hooks of all modules in one sequence, and notes by number how each is called. Dynamo
    guards on these notes: with torch's numbers, no layer could reuse code compiled for another one.
    """
    tables = _hook_tables(module)
    number = min((0, *(key for table in tables for key in table))) - 1  # torch's are not negative
    for table in tables:
        if handle.id in table:
            _rewrite(table, {handle.id: number})
    handle.id = number
    return handle


def settle_hooks(model: nn.Module) -> None:
    """Write the hooks of all modules down in the order in which they are called.

    Hooks that were registered with ``prepend=True`` were moved to the front of an ordered dict. dynamo of
    torch 2.11 does not see that: it confuses them with other hooks, and fails.
    """
    for module in model.modules():
        for table in _hook_tables(module):
            if len(table) > 1:
                _rewrite(table, {})


def _hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Number of a hook -> torch's note of it. Torch has no public way to change these tables."""
    return [table for name, table in vars(module).items() if name.startswith(_HOOK_TABLES)]


def _rewrite(table: dict[int, Any], numbers: Mapping[int, int]) -> None:
    """Write a table of hooks again in its order, some of them with other numbers, in place."""
    entries = [(numbers.get(key, key), value) for key, value in table.items()]
    table.clear()
    table.update(entries)


class Outermost:
    """A forward hook of a module that runs outside of all others: before them, or after them."""


OutputHook = Callable[[nn.Module, tuple[Any, ...], Any], Any]
"""A forward hook, which returns a changed output, or None."""


def output_hook(port: str, function: TensorStep) -> OutputHook:
    """Return a forward hook that runs a step on the output of a module at a port."""
    return _After([(_output_path(port), function)])


def attach_output(module: nn.Module, port: str, function: TensorStep) -> None:
    """Run one more step on the output of a module at a port."""
    renumber(module, module.register_forward_hook(output_hook(port, function)))


CACHE_ARGUMENTS = ("past_key_values", "cache_params", "cache")
"""Names of the argument with the cache of earlier calls; since 5.24 transformers has only the last one."""


def given_cache(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the argument by which a call is given a cache; None if it is given none."""
    return next((name for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's forward method, without ``self``."""
    forward = module.forward
    method = getattr(forward, "__func__", None)
    return inspect.signature(forward) if method is None else _signature_of_method(method)


@cache
def _signature_of_method(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method of a class, of which a model may have thousands of objects."""
    return inspect.signature(MethodType(method, method))


def positional_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward method that may be passed by position."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in forward_signature(module).parameters.values() if p.kind in named]


def replace_at(value: Any, path: _Path, function: TensorStep, port: str) -> Any:
    """Return a copy of ``value`` in which ``function`` was applied to the tensor at ``path``.

    Containers on the way are rebuilt, since others may hold them too. An absent (None) tensor stays so.
    """
    if value is None:
        return None
    if not path:
        if not isinstance(value, Tensor):
            raise PlanError(f"port {port}: expected a tensor, got a {type(value).__name__}")
        return function(value)
    key = _key(value, path[0], port)
    inner = value[key] if isinstance(value, (tuple, list, Mapping)) else getattr(value, key)
    new = replace_at(inner, path[1:], function, port)
    if isinstance(value, (tuple, list)):
        items = [*value[:key], new, *value[key + 1 :]]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        entries = {**value, key: new}
        if type(value) is dict:
            return entries
        if dataclasses.is_dataclass(value):
            return type(value)(**entries)
        out: Any = copy.copy(value)
        out[key] = new
        return out
    return dataclasses.replace(value, **{key: new})


class _Mask:
    """The mask of out-of-shard ids, kept from one input of a module for another one or for its output."""

    def __init__(self) -> None:
        self.out_of_shard: Tensor | None = None


class _LocalRows:
    def __init__(self, rows: RowIds, mask: _Mask) -> None:
        self._rows = rows
        self._mask = mask

    def __call__(self, ids: Tensor) -> Tensor:
        local, self._mask.out_of_shard = self._rows(ids)
        return local


class _ZeroOutOfShard:
    def __init__(self, mask: _Mask) -> None:
        self._mask = mask

    def __call__(self, x: Tensor) -> Tensor:
        out_of_shard, self._mask.out_of_shard = self._mask.out_of_shard, None
        assert out_of_shard is not None, "zero_out_of_shard runs after the local_rows of the same call"
        return zero_out_of_shard(x, out_of_shard)


@dataclasses.dataclass
class _InputAction:
    """One step on one argument, which is passed by position or by name."""

    port: str
    position: int | None
    name: str
    path: _Path
    step: TensorStep


class _Before:
    """Forward pre-hook: rewrites arguments."""

    def __init__(self, actions: list[_InputAction]) -> None:
        self.actions = actions

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for action in self.actions:
            if action.name in kwargs:
                value = replace_at(kwargs[action.name], action.path, action.step, action.port)
                kwargs = {**kwargs, action.name: value}
            elif action.position is not None and action.position < len(args):
                value = replace_at(args[action.position], action.path, action.step, action.port)
                args = (*args[: action.position], value, *args[action.position + 1 :])
        return args, kwargs


class _After:
    """Forward hook: rewrites the output."""

    def __init__(self, actions: list[tuple[_Path, TensorStep]]) -> None:
        self._actions = actions

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for path, function in self._actions:
            output = replace_at(output, path, function, ".".join(("output", *path)))
        return output


def _input_action(
    boundary: ModuleStep,
    comm: Communicator,
    signature: inspect.Signature,
    mask: _Mask,
    training: bool,
    table: str | None,
) -> _InputAction:
    _, name, *path = boundary.port.split(".")
    if isinstance(boundary, LocalRowsStep | LocalRowsOrEndStep):
        past_end = isinstance(boundary, LocalRowsOrEndStep)
        rows = RowIds(comm, boundary.layout, past_end=past_end, table=table)
        if not rows.num_rows:
            raise PlanError(f"{boundary.port}: rank {comm.rank} would hold none of the table's rows")
        function: TensorStep = _LocalRows(rows, mask)
    else:
        function = _tensor_step(boundary, comm, mask, training)
    return _InputAction(boundary.port, _position(signature, name, boundary.port), name, tuple(path), function)


def _tensor_step(boundary: ModuleStep, comm: Communicator, mask: _Mask, training: bool) -> TensorStep:
    if isinstance(boundary, ZeroOutOfShardStep):
        return _ZeroOutOfShard(mask)
    return step(boundary, comm, training)


def _output_path(port: str) -> _Path:
    return tuple(port.split(".")[1:])


def _position(signature: inspect.Signature, name: str, port: str) -> int | None:
    """Return the index of an argument that may be passed by position."""
    if name.isdigit():
        return int(name)
    kinds = {p.name: p.kind for p in signature.parameters.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds.values()
    if name not in kinds and not takes_any_name:
        raise PlanError(f"port {port}: forward{signature} has no parameter {name!r}")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return list(kinds).index(name) if kinds.get(name) in positional else None


def _key(value: Any, component: str, port: str) -> Any:
    """Return the component of a port as the key of this container."""
    if isinstance(value, (tuple, list)):
        if component.isdigit() and int(component) < len(value):
            return int(component)
        if component in getattr(value, "_fields", ()):
            return value._fields.index(component)  # type: ignore[union-attr]  # a named tuple
    elif isinstance(value, Mapping):
        if component in value:
            return component
        if component.isdigit() and int(component) < len(value):
            return int(component) if int(component) in value else list(value)[int(component)]
    elif dataclasses.is_dataclass(value) and hasattr(value, component):
        return component
    raise PlanError(
        f"port {port}: a {type(value).__name__} has no {component!r}; the module was called in a way that "
        "was not traced (for example with return_dict=False)"
    )
