"""Packed parameters: weights that are stored as the tensors of a quantized format.

A packed parameter is planned as the weight that it stands for: its dims and dtype in the plan are those of the
dequantized weight. Its stored tensors run along dims of this weight, in coarser steps where they are
packed or shared by a group, so that a rank's part of the weight says its part of each of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedDim:
    """A dim of a stored tensor."""

    of: int | None
    """The dim of the weight along which it runs; None: it is whole on each rank."""
    step: int
    """Positions of the weight's dim for one of this dim, the last one perhaps fewer; without ``of``, the size."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A stored tensor of a packed parameter."""

    name: str
    """In the module that owns the parameter; ``*`` stands for the parameter's own name: ``qweight``,
    ``*_scale_inv``, ``*.absmax``."""
    dtype: str
    dims: tuple[PackedDim, ...]
    checkpoint_shape: tuple[int, ...] = ()
    """Its global shape in an ordinary checkpoint, where that is not the one of ``dims`` (flat tensors); the
    elements are in the same order."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a parameter is stored."""

    method: str
    """The format: ``fp8``, ``gptq``, ``awq``, ``bnb_4bit`` ..., a file of ``shardconv_runtime.packed``."""
    tensors: tuple[PackedTensor, ...]
    settings: tuple[tuple[str, int], ...] = ()
    """What the format needs to know beside its tensors, such as ``bits``."""
