"""Hooks that others put on modules of a loaded model: they get full tensors, or are refused.

Between its modules a rank holds parts: a part of the sequence, a term of a sum, a share of the heads. Code
that a trainer hangs there (noise on embeddings, a loss of the last norm's result) expects full tensors. The
plan says which inputs and outputs of which modules are full, terms of a sum, or sharded over the sequence
(``Plan.hooks``). A hook on any other module is refused when it is registered. An input embedding, which users
also call by itself, completes its rows (``embeddings.py``).

The gradient of a full tensor may be a term of a sum. A hook's own loss gives it the full gradient, so the
gradient is made full for the hook and a term again for the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm.collectives import Communicator
from ..comm.steps import Gather, GradDivide, GradReduce, KeepOnFirst, Reduce, Slice, unchanged
from ..errors import PlanError
from ..format.dims import Leaf
from ..format.plan import HookPlan, HookPort, Plan, by_name
from .boundary import Outermost, changed_inputs, positional_names

_KNOWING = ("shardconv_runtime", "shardconv", "torch", "peft")
"""Packages whose hooks know that a rank has parts, or read no values."""

_READ_NOTHING = ("transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules whose hooks collect hidden states, which are compared when they are returned, or let a tensor
require a gradient (``enable_input_require_grads``)."""

_OF_WEIGHTS = "torch.nn.utils."
"""Hooks that make a module's weights of other tensors: weight and spectral norms, pruning."""

PLACED = "_shardconv_placed"
"""Attribute of an input embedding: an object with ``is_full``, whether a forward pass gets full rows of it,
``full``, which returns all of a result (None if it is full, or sharded over the sequence), and ``part``, the
inverse."""

Part = Callable[[Tensor], Tensor]
"""Converts a full tensor to this rank's part of it, or the other way around."""


def watch_hooks(model: nn.Module, plan: Plan, comm: Communicator, *, training: bool) -> None:
    """Wrap or refuse hooks that are registered on modules inside of a model from now on."""
    hooks = by_name("hooks", plan.hooks)
    for name, module in model.named_modules():
        if module is model:
            continue
        entry = hooks.get(name, HookPlan(()))
        watch = _Watch(module, name, entry, changed_inputs(module), comm, training, plan.stages is not None)
        for kind in ("forward", "forward_pre", "backward", "full_backward", "full_backward_pre"):
            module.__dict__[f"register_{kind}_hook"] = partial(watch.register, f"register_{kind}_hook")


def hooks_with_messages(model: nn.Module) -> str:
    """Return the modules with hooks whose tensors or gradients are communicated: all ranks need them."""
    return ", ".join(
        name
        for name, module in model.named_modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if isinstance(hook, _Hook) and hook.has_messages
    )


def hook_of_user(model: nn.Module) -> str | None:
    """Return a module on which somebody has registered a hook since the model was loaded; None without."""
    libraries = (*_KNOWING, "transformers")
    for name, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            for hook in vars(module)[kind].values():
                if isinstance(hook, _Hook) or _origin(hook).partition(".")[0] not in libraries:
                    return name or type(model).__name__
    return None


@dataclass(eq=False)
class _Watch:
    """Registers the hooks of one module."""

    module: nn.Module
    name: str
    entry: HookPlan
    changed: frozenset[str]
    """Ports of inputs that the plan's steps change."""
    comm: Communicator
    training: bool
    has_stages: bool

    def register(self, method: str, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the method of this name of ``nn.Module``; the hook runs outside of the plan's steps."""
        register = partial(getattr(type(self.module), method), self.module)
        is_before = method == "register_forward_pre_hook"
        origin = _origin(hook)
        if is_before and origin.startswith(_OF_WEIGHTS):
            raise PlanError(
                f"{self.name}: a {type(hook).__name__} makes its weights of norms or sizes of elements, and "
                "a rank has a part of them; do it to the unsharded model, save it, and convert it again"
            )
        if origin.partition(".")[0] in _KNOWING or origin in _READ_NOTHING:
            return register(hook, *args, **options)
        self._require_full(method)
        if "_backward" in method:
            return register(hook, *args, **options)
        wrapped = _Hook(self, hook, is_before, options.pop("with_kwargs", False))
        handle: RemovableHandle = register(wrapped, *args, with_kwargs=True, **options)
        table: Any = self.module._forward_pre_hooks if is_before else self.module._forward_hooks
        outer = [number for number, other in table.items() if isinstance(other, Outermost)]
        of_plan = [n for n, other in table.items() if not isinstance(other, _Hook) and n not in outer]
        for number in of_plan if is_before else reversed(of_plan):
            table.move_to_end(number, last=is_before)
        for number in outer:
            table.move_to_end(number, last=not is_before)
        return handle

    def _require_full(self, method: str) -> None:
        """Check that ranks have, or can gather, the tensors that a hook is given."""
        if self.has_stages:
            raise PlanError(
                f"{self.name}: a hook was registered on a module of a model with stages, each of which has "
                "other modules; register it on the model itself, or convert without --pp"
            )
        inputs, outputs = self.entry.inputs, self.entry.outputs
        if method == "register_forward_pre_hook":
            is_full = bool(inputs) and not any(port.is_written for port in inputs)
        elif method == "register_forward_hook":
            # An embedding without inputs in the plan is called by users only, and returns full rows.
            embedding = self.module.__dict__.get(PLACED)
            is_full = bool(outputs) and not any(port.is_written for port in outputs)
            is_full = is_full or (embedding is not None and not (embedding.is_full and inputs))
        else:  # the gradients of the module's own code, which are between the plan's steps
            is_full = bool(inputs and outputs) and not self.changed
            is_full = is_full and all(port.is_full for port in (*inputs, *outputs))
        if not is_full:
            raise PlanError(
                f"a hook on {self.name} would be given a part of a tensor: each rank has another one there; "
                "put it on a module around this one, or on the model. For this rank's part as it is, call "
                f"torch.nn.Module.{method}(module, hook)"
            )


class _Hook:
    """A user's forward hook or pre-hook, which is given full tensors.

    A forward hook is given those inputs of its module that are full, and that no step changes.
    """

    def __init__(self, watch: _Watch, hook: Callable[..., Any], is_before: bool, with_kwargs: bool) -> None:
        self._watch = watch
        self._hook = hook
        self._is_before = is_before
        self._with_kwargs = with_kwargs
        self._names = dict(enumerate(positional_names(watch.module)))
        self._ports = {p.port: p for p in (watch.entry.inputs if is_before else watch.entry.outputs)}
        full = {p.port for p in watch.entry.inputs if p.is_full}
        self._readable = full - watch.changed

    @property
    def has_messages(self) -> bool:
        """Return whether the ranks communicate when the hook is called, or in its backward pass."""
        training, ports = self._watch.training, self._ports.values()
        return not ports or any(
            port.sequence_axes or port.partial_axes or (port.grad_axes and training) for port in ports
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        parts: dict[str, Part] = {}

        def full(x: Tensor, port: str) -> Tensor:
            whole, parts[port] = self._full(x, port)
            return whole

        def readable(x: Tensor, port: str) -> Any:
            if port not in self._readable:
                return _Withheld(f"a hook on {self._watch.name} reads {port}")
            return self._without_padding(x)

        if self._is_before:
            shown: Any = map_arguments(full, self._names, args, kwargs)
            args, kwargs = shown
        else:
            shown = map_tensors(output[0], full, "output")
            args, kwargs = map_arguments(readable, self._names, args, kwargs)
        shown_outputs = () if self._is_before else (shown,)
        result = self._hook(module, args, *((kwargs,) if self._with_kwargs else ()), *shown_outputs)
        if result is None:
            result = shown
        elif self._is_before and not self._with_kwargs:
            result = (result if isinstance(result, tuple) else (result,)), kwargs
        return self._own(result, parts)

    def _full(self, x: Tensor, port: str) -> tuple[Tensor, Part]:
        """Return all of a local tensor, and a function that makes it this rank's part again."""
        entry, comm = self._ports.get(port), self._watch.comm
        embedding = None if self._is_before else self._watch.module.__dict__.get(PLACED)
        whole, part = x, cast(Part, unchanged)
        if embedding is not None and (rows := embedding.full(x)) is not None:
            whole, part = rows, embedding.part
        elif entry is None or (embedding is not None and entry.partial_axes):
            if embedding is None and x.is_floating_point() and x.dim():
                raise PlanError(
                    f"a hook on {self._watch.name} would be given a tensor {tuple(x.shape)} at {port}, where "
                    "the plan knows of none: it may be a part of one; put the hook on another module"
                )
        else:
            whole = to_full(entry, comm, self._watch.training)(x)
            part = to_part(entry, comm, self._watch.training)
            if entry.grad_axes and self._watch.training:
                whole = whole.clone()  # a hook may write to its tensor, and autograd forbids it for views
        shown = self._without_padding(whole, is_sequence=entry is not None and bool(entry.sequence_axes))
        if shown is not whole:
            padding = whole[:, shown.shape[1] :]
            part = _chained(lambda y: torch.cat((y, padding), 1), part)
        return shown, part

    def _without_padding(self, x: Tensor, *, is_sequence: bool = False) -> Tensor:
        """Return a tensor without padding, if its second dim has tokens, or two or three dims suggest so."""
        length, padded = self._watch.comm.sequence or (0, 0)
        has_tokens = is_sequence or x.dim() in (2, 3)
        return x[:, :length] if length < padded and has_tokens and x.shape[1] == padded else x

    def _own(self, result: Any, parts: Mapping[str, Part]) -> Any:
        """Return this rank's parts of a hook's result."""
        ports: list[str] = []

        def own(x: Tensor, port: str) -> Tensor:
            ports.append(port)
            convert = parts.get(port, unchanged)
            # The model's code may write to its tensor, which autograd forbids for views.
            return x if convert is unchanged else convert(x).clone()

        own_result = (
            map_arguments(own, self._names, *result)
            if self._is_before
            else map_tensors(result, own, "output")
        )
        if set(ports) != set(parts):
            raise PlanError(
                f"a hook on {self._watch.name} was given the tensors {', '.join(parts)} and gave back "
                f"{', '.join(ports)}: it is unknown which of them the ranks have parts of; give the same back"
            )
        return own_result


class _Withheld:
    """In place of an input that a forward hook is not given."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise PlanError(f"{self._what}, of which a rank has a part; read it in a forward pre-hook")


def to_full(port: HookPort, comm: Communicator, training: bool) -> Part:
    """Return the conversion of a rank's tensor at a port to the full tensor, with its full gradient."""
    full: Part = unchanged
    if port.grad_axes and training:
        full = GradDivide(comm, port.grad_axes)
    if port.partial_axes:
        full = _chained(full, Reduce(comm, port.partial_axes, () if training else None))
    if port.sequence_axes:
        full = _chained(full, Gather(comm, 1, Leaf(0, port.sequence_axes), ()).plain)
    return full


def to_part(port: HookPort, comm: Communicator, training: bool) -> Part:
    """Return the inverse of ``to_full``."""
    part: Part = unchanged
    if port.grad_axes and training:
        part = GradReduce(comm, port.grad_axes)
    if port.partial_axes:
        part = _chained(KeepOnFirst(comm, port.partial_axes, training), part)
    if port.sequence_axes:
        part = _chained(Slice(comm, 1, Leaf(0, port.sequence_axes), ()).plain, part)
    return part


def _chained(first: Part, second: Part) -> Part:
    return second if first is unchanged else first if second is unchanged else lambda x: second(first(x))


def map_arguments(
    function: Callable[[Tensor, str], Any], names: Mapping[int, str], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a module with other tensors; ``names`` are those of arguments by position."""
    named = [(names.get(i, i), value) for i, value in enumerate(args)]
    return (
        tuple(map_tensors(value, function, f"input.{name}") for name, value in named),
        {name: map_tensors(value, function, f"input.{name}") for name, value in kwargs.items()},
    )


def map_tensors(value: Any, function: Callable[[Tensor, str], Any], port: str) -> Any:
    """Return a copy of arguments or results with other tensors, in containers of the same kind.

    Objects that are not containers, such as caches, stay as they are.
    """
    if isinstance(value, Tensor):
        return function(value, port)
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function, f"{port}.{i}") for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        by_key = {key: map_tensors(item, function, f"{port}.{key}") for key, item in value.items()}
        return by_key if type(value) is dict else type(value)(**by_key)
    return value


def _origin(hook: Any) -> str:
    """Return the name of the Python module of a hook's code."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
