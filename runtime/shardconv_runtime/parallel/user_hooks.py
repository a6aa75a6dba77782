"""Hooks that others put on modules of a loaded model: they get full tensors, or are refused.

Between its modules a rank holds parts: a part of the sequence, a term of a sum, a share of the heads. Code
that a trainer hangs there (noise on embeddings, a loss of the last norm's result) expects full tensors. So
each hook is wrapped when it is registered. A tensor that is sharded over the sequence is gathered for it, an
embedding's terms of a sum are summed, and the hook's result is sharded again. All other tensors have to be
the same on all ranks. They are compared, and if they differ, an error names the module.

If all ranks have a full tensor, the model's code gives it the full gradient or a term of a sum, depending on
the plan. A hook's own loss gives it the full gradient. The first backward pass finds out which of the two the
model has, and the other one is converted to match.

A hook that some ranks lack cannot be given full tensors. A rank leaves a note when it registers one, and
looks for the notes of other ranks before the first message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# Private, but nothing public leaves a note for other ranks without waiting for them.
from torch.distributed.distributed_c10d import _get_default_store

# private as well, but nothing public keeps these comparisons out of the counts of CommDebugMode and its kin
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from ..comm.collectives import Communicator
from ..comm.steps import Gather, Slice
from ..errors import InputsDifferError, PlanError
from ..format.dims import Leaf
from .refusals import are_alike, digest

NOTE_TIMEOUT_S = 20
"""How long a rank waits for the others to register a hook that it has: they do so at about the same time."""

_KNOWING = ("shardconv_runtime", "shardconv", "torch", "peft")
"""Packages whose hooks know that a rank has parts, or read no values."""

_READ_NOTHING = ("transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules whose hooks collect hidden states, which are compared when they are returned, or let a tensor
require a gradient (``enable_input_require_grads``). Nothing is gathered for them."""

_OF_WEIGHTS = "torch.nn.utils."
"""Hooks that make a module's weights of other tensors: weight and spectral norms, pruning."""

PLACED = "_shardconv_placed"
"""Attribute of an embedding that leaves less than full rows in a forward pass: an ``EmbeddingOutput``."""

_models = itertools.count()
"""Numbers of models, the same on all ranks, which load them in the same order."""

Part = Callable[[Tensor], Tensor]
"""Converts a hook's result for a full tensor to this rank's part."""


class EmbeddingOutput(Protocol):
    """The result of an embedding in a forward pass."""

    def full(self, x: Tensor) -> Tensor | None:
        """Return all of it; None if it is full, or sharded over the sequence."""

    def part(self, x: Tensor) -> Tensor:
        """Return the inverse."""


def watch_hooks(model: nn.Module, comm: Communicator, ranks: Sequence[int], *, has_stages: bool) -> None:
    """Wrap hooks that are registered on modules inside of a model from now on."""
    number = next(_models)
    for name, module in model.named_modules():
        if module is not model:
            watch = _Watch(module, name, comm, f"shardconv/hooks/{number}/{name}", ranks, has_stages)
            for method in (
                watch.register_forward_hook,
                watch.register_forward_pre_hook,
                watch.register_backward_hook,
                watch.register_full_backward_hook,
                watch.register_full_backward_pre_hook,
            ):
                module.__dict__[method.__name__] = method


class _Watch:
    """Registers the hooks of one module. Its methods replace the module's and take the same arguments."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        comm: Communicator,
        key: str,
        ranks: Sequence[int],
        has_stages: bool,
    ) -> None:
        self.module = module
        self.name = name
        self.comm = comm
        self._key = key
        self._ranks = ranks
        self._has_stages = has_stages
        self._num_hooks = 0

    def register_forward_hook(
        self,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """See ``nn.Module``; behind the steps of the plan, even if it is prepended."""
        register = type(self.module).register_forward_hook
        if _knows_parts(hook):
            return register(
                self.module, hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
            )
        wrapped = _AfterForward(hook, with_kwargs, self._views())
        handle = register(self.module, wrapped, prepend=prepend, with_kwargs=True, always_call=always_call)
        _put_own(self.module._forward_hooks, first=True)
        return handle

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """See ``nn.Module``; in front of the steps of the plan, even if it is not prepended."""
        register = type(self.module).register_forward_pre_hook
        if _origin(hook).startswith(_OF_WEIGHTS):
            raise PlanError(
                f"{self.name}: a {type(hook).__name__} makes its weights of norms or sizes of elements, and "
                "a rank has a part of them; do it to the unsharded model, save it, and convert it again"
            )
        if _knows_parts(hook):
            return register(self.module, hook, prepend=prepend, with_kwargs=with_kwargs)
        wrapped = _BeforeForward(hook, with_kwargs, self._views())
        handle = register(self.module, wrapped, prepend=prepend, with_kwargs=True)
        _put_own(self.module._forward_pre_hooks, first=False)
        return handle

    def register_backward_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """See ``nn.Module``."""
        return type(self.module).register_backward_hook(self.module, self._checked(hook))

    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """See ``nn.Module``."""
        register = type(self.module).register_full_backward_hook
        return register(self.module, self._checked(hook), prepend)

    def register_full_backward_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """See ``nn.Module``."""
        register = type(self.module).register_full_backward_pre_hook
        return register(self.module, self._checked(hook), prepend)

    def _checked(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward hook that is called with gradients that all ranks have."""
        if _knows_parts(hook):
            return hook
        views = self._views()

        def checked(module: nn.Module, *gradients: Any) -> Any:
            for gradient in gradients:
                for x in _tensors(gradient):
                    views.require_alike(x)
            return hook(module, *gradients)

        return checked

    def _views(self) -> _Views:
        if self._has_stages:
            raise PlanError(
                f"{self.name}: a hook was registered on a module of a model with stages, each of which has "
                "other modules; register it on the model itself, or convert without --pp"
            )
        self._num_hooks += 1
        key = f"{self._key}/{self._num_hooks}"
        _get_default_store().set(f"{key}/{dist.get_rank()}", "1")
        return _Views(self, [f"{key}/{rank}" for rank in self._ranks])


class _Views:
    """The tensors that one hook sees, and their way back."""

    def __init__(self, watch: _Watch, notes: Sequence[str]) -> None:
        self._watch = watch
        self._notes = notes
        self._is_on_all: bool | None = None
        self._num_compared: dict[int, int] = {}
        self.partial_axes: dict[int, tuple[int, ...]] = {}
        """Mesh axes along which the gradient of a tensor is a term of a sum, by its place among the tensors
        that the hook is given."""
        self._place = 0

    @property
    def name(self) -> str:
        """Return the name of the module."""
        return self._watch.name

    def begin(self) -> None:
        """Note that the hook is called."""
        self._place = 0

    def full(self, x: Tensor, *, placed: bool = False, goes_back: bool = True) -> tuple[Tensor, Part]:
        """Return all of a tensor that the module is given or returns, and a function that makes it this
        rank's part again.

        Args:
            x: local.
        """
        comm, place = self._watch.comm, self._place
        self._place += 1
        axes = comm.real(range(len(comm.mesh)))
        length, padded = comm.sequence or (0, 0)
        has_tokens = bool(padded) and x.dim() in (2, 3)
        state: EmbeddingOutput | None = self._watch.module.__dict__.get(PLACED) if placed else None
        if state is not None and (rows := state.full(x)) is not None:
            self._require_on_all()
            shown, part = rows, state.part
        elif has_tokens and x.shape[1] * comm.num_ranks(axes) == padded:
            self._require_on_all()
            layout = Leaf(0, axes)
            shown, part = Gather(comm, 1, layout, ()).plain(x), Slice(comm, 1, layout, ()).plain
        else:
            self.require_alike(x, place)
            shown, part = x, lambda x: x
            if torch.is_grad_enabled() and x.requires_grad:
                gradient = _Gradient(self, comm, axes, place)
                shown, part = gradient.enter(x) if goes_back else gradient.refused(x), gradient.leave
        if not has_tokens or shown.shape[1] != padded or padded == length:
            return shown, part
        return shown[:, :length], lambda y: part(torch.cat((y, shown[:, length:]), 1))

    def require_alike(self, x: Tensor, place: int = -1) -> None:
        """Check that all ranks have a tensor, in the calls 1, 2, 4, 8 ..."""
        if not x.is_floating_point() or not x.dim() or not x.numel():
            return
        if torch.compiler.is_compiling():
            if not self._num_compared:
                raise self._not_seen()
            return
        count = self._num_compared[place] = self._num_compared.get(place, 0) + 1
        if count & (count - 1) or not self.is_on_all():
            return
        if self.axes_of_parts(x):
            raise PlanError(
                f"a hook on {self._watch.name} would be given a part of a tensor {tuple(x.shape)}: each rank "
                "has another one there; put it on a module around this one, or on the model. For this rank's "
                "part as it is, call torch.nn.Module.register_forward_hook(module, hook)"
            )

    def _not_seen(self) -> PlanError:
        return PlanError(
            f"{self._watch.name} has a hook, and is compiled: it has to be seen once what the ranks have "
            "there; call the model once before it is compiled"
        )

    def axes_of_parts(self, x: Tensor) -> tuple[int, ...]:
        """Return the mesh axes along which ranks have other values of a tensor, which takes a message."""
        with _disable_current_modes():
            return self._axes_of_parts(x.detach())

    def _axes_of_parts(self, x: Tensor) -> tuple[int, ...]:
        comm = self._watch.comm
        axes = comm.real(range(len(comm.mesh)))
        local_digest = digest(x)
        sizes = torch.tensor(
            [float(size) for size in x.shape[-8:]], dtype=torch.float64, device=local_digest.device
        )
        sizes = F.pad(sizes, (0, 8 - len(sizes)))
        ranks = comm.concatenate(torch.cat((local_digest, sizes))[None], axes)
        ranks = ranks.reshape(*(comm.mesh[a] for a in axes), -1)
        differing_axes = []
        for dim, axis in enumerate(axes):
            along = ranks.movedim(dim, 0).reshape(comm.mesh[axis], -1, ranks.shape[-1])
            has_sizes = bool((along[..., -8:] == along[0, :, -8:]).all())
            if not (has_sizes and are_alike(along[..., :-8])):
                differing_axes.append(axis)
        return tuple(differing_axes)

    def is_on_all(self) -> bool:
        """Return whether all ranks have registered the hook."""
        if self._is_on_all is None:
            try:
                _get_default_store().wait(list(self._notes), timedelta(seconds=NOTE_TIMEOUT_S))
                self._is_on_all = True
            except (RuntimeError, dist.DistError):
                self._is_on_all = False
        return self._is_on_all

    def _require_on_all(self) -> None:
        if torch.compiler.is_compiling() and self._is_on_all is None:
            raise self._not_seen()
        if not self.is_on_all():
            raise InputsDifferError(
                f"a hook on {self._watch.name} is not on all ranks of the model, and each rank has only a "
                "part of the tensor; register it on all ranks, and use its result on one"
            )


class _Gradient:
    """The gradient of a tensor that all ranks have, while it passes a hook."""

    def __init__(self, views: _Views, comm: Communicator, axes: tuple[int, ...], place: int) -> None:
        self._views = views
        self._comm = comm
        self._axes = axes
        self._place = place
        self._left: tuple[Tensor, int] | None = None
        """The tensor that the model's code got, and its number of writes."""
        self._of_the_model: Tensor | None = None
        """The full gradient of the model's code."""

    def enter(self, x: Tensor) -> Tensor:
        """Return a tensor for the hook; the gradient that comes back is the sum over all ranks."""
        return _Passing.apply(x, self._as_planned)  # type: ignore[no-untyped-call, no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """Return a tensor for the model's code, whose gradient comes back."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        left: Tensor = _Passing.apply(x, self._full)  # type: ignore[no-untyped-call]
        self._left = left.detach(), left._version
        return left

    def refused(self, x: Tensor) -> Tensor:
        """Return a tensor for a hook that must not pass a gradient back."""
        return _Passing.apply(x, self._refuse)  # type: ignore[no-untyped-call, no-any-return]

    def _full(self, gradient: Tensor) -> Tensor:
        self._of_the_model = self._summed(gradient)
        return self._of_the_model

    def _summed(self, gradient: Tensor) -> Tensor:
        axes_by_place = self._views.partial_axes
        if self._place not in axes_by_place and not torch.compiler.is_compiling() and self._views.is_on_all():
            partial_axes = self._views.axes_of_parts(gradient)
            if not partial_axes and not bool(gradient.any()):
                return gradient  # zeros say nothing of other gradients
            axes_by_place[self._place] = partial_axes
        if not axes_by_place.get(self._place):
            return gradient
        # There may be no process group for only these axes.
        times = self._comm.num_ranks(set(self._axes).difference(axes_by_place[self._place]))
        return self._comm.all_reduce(gradient, self._axes) / times

    def _as_planned(self, gradient: Tensor) -> Tensor:
        axes_by_place = self._views.partial_axes
        if self._place not in axes_by_place and self._views.is_on_all() and bool(gradient.any()):
            raise PlanError(
                f"a hook on {self._views.name} gives its own loss, and no other loss needs the results of "
                "the module, so it is unknown how its gradients are sharded; use the model's outputs, or "
                "add the model's own loss in the first step"
            )
        is_written_to = self._left is not None and self._left[0]._version > self._left[1]
        if is_written_to and not (
            self._of_the_model is not None and torch.equal(gradient, self._of_the_model)
        ):
            raise PlanError(
                f"a hook on {self._views.name} made a loss of a tensor to which the model writes later, but "
                "the hook has the earlier value; put it on a module behind this one"
            )
        return gradient / self._comm.num_ranks(axes_by_place.get(self._place, ()))

    def _refuse(self, gradient: Tensor) -> Tensor:
        raise PlanError(
            f"a forward hook on {self._views.name} made a loss of the inputs of the module; put a hook on "
            "the module that returns it, or a forward pre-hook on this one"
        )


class _Passing(torch.autograd.Function):
    """A copy of a tensor, which hooks may write to, and a map of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the copy."""
        ctx.backward_map = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the mapped gradient."""
        return ctx.backward_map(gradients[0]), None


class _AfterForward:
    """A forward hook, given full tensors."""

    def __init__(self, hook: Callable[..., Any], with_kwargs: bool, views: _Views) -> None:
        self._hook = hook
        self._with_kwargs = with_kwargs
        self._views = views

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        self._views.begin()
        parts: list[Part] = []

        def seen(x: Tensor) -> Tensor:
            full, part = self._views.full(x, placed=True)
            parts.append(part)
            return full

        shown = _mapped(output, seen)
        look = partial(self._views.full, goes_back=False)
        args, kwargs = _mapped((args, kwargs), lambda x: look(x)[0])
        replacement = self._hook(module, args, *((kwargs,) if self._with_kwargs else ()), shown)
        return _in_parts(shown if replacement is None else replacement, parts, self._views.name)


class _BeforeForward:
    """A forward pre-hook, given full tensors."""

    def __init__(self, hook: Callable[..., Any], with_kwargs: bool, views: _Views) -> None:
        self._hook = hook
        self._with_kwargs = with_kwargs
        self._views = views

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._views.begin()
        parts: list[Part] = []

        def seen(x: Tensor) -> Tensor:
            full, part = self._views.full(x)
            parts.append(part)
            return full

        shown = _mapped((args, kwargs), seen)
        if self._with_kwargs:
            replacement = self._hook(module, *shown)
        else:
            replacement = self._hook(module, shown[0])
            if replacement is not None:
                replacement = (replacement if isinstance(replacement, tuple) else (replacement,)), shown[1]
        return _in_parts(shown if replacement is None else replacement, parts, self._views.name)


def _in_parts(value: Any, parts: Sequence[Part], name: str) -> Any:
    """Return this rank's parts of a hook's result."""
    if len(_tensors(value)) != len(parts):
        raise PlanError(
            f"a hook on {name} was given {len(parts)} tensors and gave back {len(_tensors(value))}: it is "
            "not known which of them the ranks have parts of; give back as many, in their order"
        )
    remaining = iter(parts)
    return _mapped(value, lambda x: _writable(next(remaining)(x)))


def _writable(x: Tensor) -> Tensor:
    """Return a tensor that the model's code may write to; autograd forbids it for views."""
    return x.clone() if x.requires_grad and x._is_view() else x


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of arguments or results with other tensors, in containers of the same kind.

    Objects that are not containers, such as caches, stay as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [_mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        items_by_name = {name: _mapped(item, function) for name, item in value.items()}
        return items_by_name if type(value) is dict else type(value)(**items_by_name)
    return value


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of which ``_mapped`` makes others, in order."""
    tensors: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    _mapped(value, keep)
    return tensors


def _knows_parts(hook: Any) -> bool:
    """Return whether a hook is of code that knows of ranks."""
    origin = _origin(hook)
    return origin.partition(".")[0] in _KNOWING or origin in _READ_NOTHING


def _origin(hook: Any) -> str:
    """Return the name of the Python module of a hook's code."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _put_own(hooks: Any, *, first: bool) -> None:
    """Move the hooks of this package to the beginning or to the end of a table of torch, in their order."""
    numbers = [
        number for number, hook in hooks.items() if not isinstance(hook, _AfterForward | _BeforeForward)
    ]
    for number in reversed(numbers) if first else numbers:
        hooks.move_to_end(number, last=not first)
