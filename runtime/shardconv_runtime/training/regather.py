"""Sequence parallelism that keeps parts: gathered activations are gathered again in the backward pass.

The sequence is gathered in front of each parallel block, and the gradients of the block's weights need the
gathered tensor. While the model runs, hooks see the tensors that autograd saves, and keep only this rank's
part of a gathered tensor or a view of it. In the backward pass the part is gathered once for all users.
(Megatron-LM, arXiv 2205.05198, on sequence parallelism.)

All ranks issue collectives in one order: a gather begins again in the backward of the collective that
followed it in the forward pass (the reduce_scatter at the end of the block, otherwise the next gather), and
runs during the backward pass of the block. The last one of a pass, which nothing follows, is needed at once
and stays.

If other hooks see saved tensors, as in a layer that is recomputed, and in compiled code, the full
tensor is saved. Hooks around the model (that offload to the CPU, for example) get the part, and all other
tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..comm.collectives import Communicator
from ..comm.steps import Gather, Map, ReduceScatter, Resharding, apply

MIN_BYTES = 2**20
"""Least size of a gathered tensor of which only a part is kept by default. Smaller ones take at most 200 MB
in a hundred layers, and a collective of so few bytes takes hardly less time than one of none."""

_MARK = "_shardconv_gathered"
"""Attribute of a gathered tensor: its record."""


def attach_regather(model: nn.Module, comm: Communicator, min_bytes: int) -> None:
    """Keep parts of activations that a sequence-parallel model gathers, if it runs with gradients."""
    forward: Callable[..., Any] = type(model).forward

    @wraps(forward)
    def regathering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        around = comm.regathering
        comm.regathering = forward_pass = _Pass(min_bytes)
        try:
            with saved_tensors_hooks(forward_pass.pack, forward_pass.unpack):
                output = forward(self, *args, **kwargs)
            forward_pass.end()
        finally:
            comm.regathering = around
        return output

    model.__dict__["forward"] = MethodType(regathering, model)


class _Pass:
    """One forward pass of a model: its collectives along the sequence, and its hooks on saved tensors."""

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        # The hooks that would see the tensors that autograd saves.
        # Torch has no public way to ask for them; only this line knows of it.
        outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        self._around = (
            _Hooks(*outer_hooks[:2]) if outer_hooks is not None else _Hooks(_with_version, _of_same_version)
        )
        self._latest: _Reference = _nothing

    def end(self) -> None:
        """Keep the tensor that was gathered last."""
        if (latest := self._latest()) is not None and latest.is_saved:
            latest.keep()

    def pack(self, x: Tensor) -> Any:
        """Return the object that autograd keeps in place of a tensor."""
        gathered: _Gathered | None = getattr(x if x._base is None else x._base, _MARK, None)
        if gathered is None or not gathered.save(x):
            return self._around.pack(x)
        return _View(gathered, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor again."""
        return packed.tensor() if isinstance(packed, _View) else self._around.unpack(packed)

    def reshard(self, step: Resharding, x: Tensor) -> Tensor:
        """Return ``step`` on ``x``; its backward begins the gather that came before."""
        if x.requires_grad and isinstance(step, Gather):
            num_bytes = x.nbytes * step.comm.num_ranks(step.axes)
            return self._gather(step, x) if num_bytes >= self._min_bytes else step.plain(x)
        if x.requires_grad and isinstance(step, ReduceScatter):
            return apply(x, step.forward, _then_begin(step.backward, self._freed()))
        return step.plain(x)

    def _gather(self, step: Gather, x: Tensor) -> Tensor:
        before, gathered = self._freed(), _Gathered(step, x, self._around)
        self._latest = this = weakref.ref(gathered)

        def backward(gradient: Tensor) -> Tensor:
            if (target := this()) is not None:
                target.release()
            return _then_begin(step.backward, before)(gradient)

        full = apply(x, step.forward, backward)
        gathered.hold(full)
        setattr(full, _MARK, gathered)
        return full

    def _freed(self) -> _Reference:
        """Return the last gather, which is freed now if it was saved; it then has to begin again."""
        latest = self._latest()
        return self._latest if latest is not None and latest.is_saved and latest.free() else _nothing


class _Gathered:
    """The record of a gathered tensor: its kept part, and the tensor itself while it is needed.

    It lives as long as the tensor, or something that autograd saved of it; other references to it are weak.
    """

    def __init__(self, step: Gather, part: Tensor, hooks: _Hooks) -> None:
        self._step = step
        self._hooks = hooks
        self._part: Tensor | None = part.detach()
        self._dtype = part.dtype
        self._versions = (part._version, 0)
        """The versions of the part and of the tensor."""
        self._full: Tensor | None = None
        self._kept: Any = None
        """The part or the tensor, packed, once it is known which."""
        self._is_part = False
        self._pending: Callable[[], Tensor] | None = None
        self._num_saved = self._num_taken = 0

    @property
    def is_saved(self) -> bool:
        """Return whether autograd needs the tensor, or a view of it."""
        return self._num_saved > 0

    def hold(self, full: Tensor) -> None:
        """Hold the tensor until its kept part is known."""
        self._full, self._versions = full.detach(), (self._versions[0], full._version)

    def save(self, x: Tensor) -> bool:
        """Return whether ``x`` is as it was gathered: code may have changed the tensor or a view of it."""
        if x._version != self._versions[1] or x.dtype != self._dtype:
            return False
        self._num_saved += 1
        return True

    def free(self) -> bool:
        """Keep only the part; False if it has changed, or the kept part is known already."""
        if self._part is None or self._part._version != self._versions[0]:
            return False
        self._kept, self._is_part = self._hooks.pack(self._part), True
        self._part = self._full = None
        return True

    def keep(self) -> None:
        """Keep the tensor, unless it was freed."""
        if self._part is not None and self._full is not None:
            self._kept = self._hooks.pack(self._full)
            self._part = self._full = None

    def begin(self) -> None:
        """Gather again, if that is necessary."""
        if self._full is None and self._pending is None:
            activation = self._hooks.unpack(self._kept)
            if self._is_part:
                self._pending = self._step.begin_gathering(activation)
            else:
                self._full = activation

    def take(self) -> Tensor:
        """Return the tensor, for one of those that saved it; the last of them frees it again."""
        self.begin()
        if self._pending is not None:
            self._full, self._pending = self._pending(), None
        full = self._full
        assert full is not None
        self._num_taken += 1
        if self._num_taken == self._num_saved:
            self.release()
        return full

    def release(self) -> None:
        """Free the tensor that was gathered again: in this backward pass nothing needs it any more."""
        self._num_taken = 0
        if self._kept is not None:
            self._full = self._pending = None


@dataclass(frozen=True)
class _View:
    """The object that autograd saves in place of a gathered tensor or a view of it."""

    gathered: _Gathered
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor again."""
        return self.gathered.take().as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Hooks:
    """The kept part of a saved tensor, and how it becomes the tensor again."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


def _with_version(x: Tensor) -> tuple[Tensor, int]:
    """Return the objects that autograd itself keeps; it leaves versions to hooks if there are any."""
    return x.detach(), x._version


def _of_same_version(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead"
        )
    return x


_Reference = Callable[[], _Gathered | None]
"""A weak reference."""


def _nothing() -> None:
    """Return None, like a reference to a dead object."""


def _then_begin(backward: Map, gathered: _Reference) -> Map:
    """Return ``backward``, after which a gather begins again."""

    def run(gradient: Tensor) -> Tensor:
        gradients = backward(gradient)
        if (needed := gathered()) is not None:
            needed.begin()
        return gradients

    return run
