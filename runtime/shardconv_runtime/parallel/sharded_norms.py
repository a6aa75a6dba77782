"""Norms over a sharded dim: their statistic is reduced, and the tensor stays sharded."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..comm.collectives import Communicator
from ..comm.steps import Reduce
from ..errors import PlanError, RefusedCallError
from ..format.plan import NormInfo
from .boundary import forward_signature

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class ShardedNorm(nn.Module):
    """RMS, L2 or layer norm over the last dim, or over groups of it, sharded over ranks.

    RMS and L2 norms reduce one number for each token, the sum of squares; a layer norm two, one after the
    other (the sum, then the sum of squared deviations from the true mean, which loses no digits if
    the mean is large). A gate, if there is one, multiplies before or after.

    Args:
        info: the formula of the norm that this one replaces.
        replaced: the replaced norm; its weight and bias keep their names.
        comm: the ranks.
        training: give it a backward. The gradient of the statistic is a Partial, since all ranks use the
            statistic: it is all-reduced as well.

    Shapes: ``x``, gate and output: local ``[..., D/n]``, the dtype of ``x``.

    Raises:
        PlanError: the norm lacks a parameter that the plan names.
    """

    def __init__(
        self, info: NormInfo, replaced: nn.Module, comm: Communicator, training: bool = False
    ) -> None:
        nn.Module.__init__(self)  # not of the replaced norm's class, which may come next
        self.info = info
        self.groups = info.groups[0] if len(info.groups) == 1 else info.groups[comm.rank]
        self.reduce = Reduce(comm, info.axes, info.axes if training else None)
        self.names = tuple(forward_signature(replaced).parameters)
        for name in (info.weight, info.bias):
            if name:
                parameter = replaced._parameters.get(name)
                if parameter is None:
                    raise PlanError(f"a {type(replaced).__name__} has no parameter {name!r}")
                self.register_parameter(name, parameter)
        for name in vars(replaced):
            if not hasattr(self, name):
                setattr(self, name, _Withheld(name))
        self.train(replaced.training)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a new value of an attribute of the replaced norm, which would have no effect."""
        if isinstance(vars(self).get(name), _Withheld) and not name.startswith("_"):
            raise RefusedCallError(
                f"{name} of a norm whose statistic the ranks share was set to {value!r}: the plan has the "
                "value with which the model was converted; set it in the unsharded model, or in its config, "
                "and convert that"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return kind, global size and eps."""
        return f"{self.info.kind}, size={self.info.size}, eps={self.info.eps}"

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the local output; the arguments are the replaced norm's, local ``[..., D/n]``."""
        info, gate = self.info, None
        if info.gate:
            arguments: dict[str, Any] = dict(zip(self.names, args, strict=False)) | kwargs
            gate = arguments.get(info.gate)
            if gate is None:
                raise RefusedCallError(f"a gated norm was called without {info.gate!r}")
            x = arguments[info.input]
        else:
            (x,) = (*args, *kwargs.values())
        if info.compute_dtype != "input":
            dtype: torch.dtype = getattr(torch, info.compute_dtype)
        else:  # torch's layer_norm accepts low precision as input, and still computes in float32
            dtype = torch.float32 if info.kind == "layer" and x.dtype in _LOW_PRECISION else x.dtype
        wide = x.to(dtype)
        if gate is not None and info.gate_first:
            wide = wide * self._activated(gate, dtype)
        y = self._scale(self._normalized(wide), x.dtype)
        if gate is None or info.gate_first:
            return y
        return (y * self._activated(gate, dtype)).to(x.dtype)

    def _activated(self, gate: Tensor, dtype: torch.dtype) -> Tensor:
        name, gate = self.info.gate_activation, gate.to(dtype)
        activated: Tensor = gate if name == "identity" else getattr(functional, name)(gate)
        return activated

    def _normalized(self, x: Tensor) -> Tensor:
        shape, eps = x.shape, self.info.eps
        if self.groups != 1:
            x = x.reshape(*shape[:-1], self.groups, -1)
        if self.info.kind == "layer":
            x = x - self._mean(x)
        mean = self._mean(x.square())
        y = x * torch.rsqrt((mean * self.info.size if self.info.kind == "l2" else mean) + eps)
        return y if self.groups == 1 else y.reshape(shape)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean of local ``[..., D/n]`` over the global dim, ``[..., 1]``, in float32 or wider."""
        wide = torch.float32 if x.dtype in _LOW_PRECISION else x.dtype
        return (self.reduce(x.sum(-1, keepdim=True, dtype=wide)) / self.info.size).to(x.dtype)

    def _scale(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        native_layer_norm = self.info.kind == "layer" and self.info.compute_dtype == "input"
        early = self.info.weight_before_cast or native_layer_norm
        if not early:
            y = y.to(dtype)
        if self.info.weight:
            weight = getattr(self, self.info.weight)
            weight = weight.to(y.dtype) if early else weight
            y = y * (weight + self.info.weight_offset if self.info.weight_offset else weight)
        if self.info.bias:
            bias = getattr(self, self.info.bias)
            y = y + (bias.to(y.dtype) if early else bias)
        return y.to(dtype) if early else y


@cache
def sharded_class(kind: type[nn.Module]) -> type[ShardedNorm]:
    """Return the class of the sharded norms that replace norms of a class, which it is a subclass of.

    Other code asks for the class of a norm, for example to leave its weight out of weight decay.
    """
    # Libraries of kernels put their own forward in place of that of a class with a name of a kernel, and it
    # would take the norm of a rank's part.
    attributes = {"kernel_layer_name": None} if hasattr(kind, "kernel_layer_name") else {}
    return types.new_class(
        f"Sharded{kind.__name__}",
        (ShardedNorm, kind),
        exec_body=lambda namespace: namespace.update(attributes),
    )


class _Withheld:
    """Replaces an attribute of the replaced norm: other code may pass it on, but not use it.

    Code that computes the norm by itself, in a fused kernel, would compute the norm of the rank's part.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: object) -> Any:
        raise RefusedCallError(
            f"{self._name} of a norm whose statistic the ranks share was used from outside: code that was "
            "not traced computes this norm itself (for example a fused kernel for training without a cache); "
            "call the model with use_cache=True and without activation checkpointing, or without that kernel"
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse: an operator was given this object."""
        for each in (*args, *(kwargs or {}).values()):
            if isinstance(each, cls):
                each._refuse()
        cls("an attribute")._refuse()
