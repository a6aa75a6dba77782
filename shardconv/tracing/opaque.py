"""Run a module that cannot be traced on numbers, to learn the shapes and dtypes of its results.

Its code may use numpy, control flow that depends on data, or an operator without a meta function. A copy of
the module gets random parameters and runs on the CPU, with the true inputs where they are known, and
plausible ones otherwise. The module is recorded as one operator that reads its inputs and all of its
parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .identities import META, TensorKey, tensor_key
from .recorder import Recorder
from .tape import Op, Ref
from .values import MAX_STAND_IN, fixed_seed

OPAQUE = "opaque"
"""Name of the operator that represents a module."""
MAX_ELEMENTS = 1 << 30
"""Modules with more parameter elements would take too long on a CPU."""
_DRAWN = 65_537
"""Random numbers that are drawn, and repeated in larger parameters. A prime, so that rows differ."""


class TooLarge(Exception):
    """The module has too many parameters to run here."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """A call of a module that becomes one operator.

    Attributes:
        recorder: rewound to the point where the module was entered.
        copied: makes a deep copy of a module, without hooks of the tracer.
        read: tensors from outside of the module that its code read until it failed.
    """

    recorder: Recorder
    copied: Callable[[nn.Module], nn.Module]
    read: tuple[int, ...]

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module on numbers, record it as an operator, and return its results on meta."""
        tensors = [*module.parameters(), *module.buffers()]
        if sum(t.numel() for t in tensors) > MAX_ELEMENTS:
            raise TooLarge
        arguments = {tensor_key(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with torch._C.DisableTorchFunction(), _disable_current_modes(), fixed_seed():
            real = {key: self._plausible(t) for key, t in arguments.items()}
            before = {key: t.clone() for key, t in real.items()}
            runnable = self.copied(module)
            buffers = _fill(runnable)
            result = runnable.forward(*_mapped(args, real), **_mapped(dict(kwargs), real))
            written = [arguments[k] for k, t in real.items() if not _same(t, before[k])]
            written += [b for b, r, old in zip(module.buffers(), *buffers, strict=True) if not _same(r, old)]
        with torch._C.DisableTorchFunction():
            return self._recorded(list(arguments.values()) + tensors, written, result, real, arguments)

    def _plausible(self, tensor: Tensor) -> Tensor:
        """Return a real tensor with the same strides, and with the true value if there is one."""
        recorder = self.recorder
        tid = recorder.identities.tid(tensor)
        info = recorder.tape.tensors[tid]
        value = recorder.values.value(tid)
        if value is None:
            is_small = not info.dtype.is_floating_point or tid in recorder.values.guessed
            value = recorder.values.guess(tid) if is_small else recorder.values.stand_in(tid)
        out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=info.dtype)
        return out.copy_(value) if tensor.numel() else out

    def _recorded(
        self,
        reads: list[Tensor],
        written: list[Tensor],
        result: Any,
        real: Mapping[TensorKey, Tensor],
        given: Mapping[TensorKey, Tensor],
    ) -> Any:
        recorder = self.recorder
        inputs = tuple(dict.fromkeys((*(recorder.identities.tid(t) for t in reads), *self.read)))
        passed = {tensor_key(real[key]): tensor for key, tensor in given.items()}
        made: dict[TensorKey, tuple[Tensor, Tensor]] = {}

        def on_meta(tensor: Tensor) -> Tensor:
            key = tensor_key(tensor)
            if key in passed:
                return passed[key]
            if key not in made:
                made[key] = tensor, torch.empty_like(tensor, device=META)
            return made[key][1]

        with _disable_current_modes():
            outputs = pytree.tree_map_only(Tensor, on_meta, result)
        tids = [recorder.identities.rewrite(t) for t in written]
        tids += [recorder.identities.new(meta) for _, meta in made.values()]
        op = Op(OPAQUE, tuple(map(Ref, inputs)), {}, inputs, tuple(tids), recorder.call())
        recorder.emit(op)
        for tid, (value, _) in zip(tids[len(written) :], made.values(), strict=True):
            values = recorder.values
            (values.guessed if values.is_unknown(tid) else values.known)[tid] = value
        return outputs


def _mapped(value: Any, real: Mapping[TensorKey, Tensor]) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: real[tensor_key(t)], value)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _fill(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Set random parameters, and zeros for buffers without values. Return the buffers, and copies of them."""
    done: dict[TensorKey, Tensor] = {}
    numbers = _Numbers()

    def real(tensor: Tensor) -> Tensor:
        key = tensor_key(tensor)
        if tensor.device == META and key not in done:
            is_parameter = isinstance(tensor, nn.Parameter)
            value = numbers.like(tensor)
            done[key] = nn.Parameter(value, requires_grad=False) if is_parameter else value.clone()
        return done.get(key, tensor)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = real(parameter)  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = real(buffer)
    buffers = list(module.buffers())
    return buffers, [b.clone() for b in buffers]


class _Numbers:
    """Random numbers that keep activations in range. Tensors with equal rows share memory."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[int, torch.dtype], Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return numbers of the shape and dtype of a tensor, which must not be written to."""
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.numel() > MAX_STAND_IN:
            return torch.full((), 1e-3, dtype=tensor.dtype).expand(tensor.shape)
        if tensor.dim() < 2:
            return (torch.rand(tensor.shape) + 0.5).to(tensor.dtype)
        key = tensor.shape[-1], tensor.dtype
        numbers = self._drawn.get(key)
        if numbers is None or len(numbers) < tensor.numel():
            drawn = (
                torch.randn(min(_DRAWN, tensor.numel())).div_(math.sqrt(tensor.shape[-1])).to(tensor.dtype)
            )
            numbers = self._drawn[key] = drawn.repeat(-(-tensor.numel() // _DRAWN))[: tensor.numel()]
        return numbers[: tensor.numel()].view(tensor.shape)


def pristine_copy(module: nn.Module, keep: Mapping[int, Any], forwards: Mapping[str, Any]) -> nn.Module:
    """Deep copy a traced module as it was before it was wrapped."""
    memo = dict(keep)
    copied = copy.deepcopy(module, memo)
    for path, part in copied.named_modules(remove_duplicate=False):
        part.__dict__.pop("forward", None)
        if forwards.get(path) is not None:
            part.__dict__["forward"] = copy.deepcopy(forwards[path], memo)
    return copied
