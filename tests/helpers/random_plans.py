"""Random tensors, and random plans that lay them out, of classes that need not exist."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum
from shardconv_runtime.format.plan import CodeInfo, ModelInfo, ParameterPlan, Plan
from shardconv_runtime.format.slices import Mesh
from torch import Tensor

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")
MESHES: tuple[Mesh, ...] = ((1,), (2,), (3,), (4,), (5,), (2, 2), (3, 2), (2, 3), (2, 1, 2), (2, 2, 2))


@dataclass(frozen=True)
class Declared:
    """A tensor, as all plans of one model have it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def declared() -> st.SearchStrategy[list[Declared]]:
    """The tensors of a model."""
    sizes = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 12, 16))
    kinds = st.tuples(st.sampled_from(DTYPES), st.lists(sizes, max_size=3).map(tuple))
    return st.lists(kinds, min_size=1, max_size=4).map(
        lambda found: [Declared(f"layers.{i}.w", *kind) for i, kind in enumerate(found)]
    )


def random_bytes(tensor: Declared, seed: int) -> Tensor:
    """A tensor of any bytes, those of NaNs among them."""
    dtype = getattr(torch, tensor.dtype)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(
        256, (math.prod(tensor.shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).reshape(tensor.shape)


@st.composite
def plans(draw: st.DrawFn, tensors: Sequence[Declared]) -> Plan:
    """A plan of the tensors for some mesh."""
    mesh = draw(st.sampled_from(MESHES))
    return Plan(
        tp=math.prod(mesh),
        mesh=mesh,
        model=ModelInfo("no.module:Model", "float32", 0),
        code=CodeInfo("0", "0", (), "0" * 64),
        parameters=tuple(_parameter(draw, tensor, len(mesh)) for tensor in tensors),
        modules=(),
    )


def _parameter(draw: st.DrawFn, tensor: Declared, num_axes: int) -> ParameterPlan:
    """Each mesh axis splits one dim, or makes the tensor Partial, or leaves it as it is."""
    uses: Mapping[int, int] = {axis: draw(st.integers(-2, len(tensor.shape) - 1)) for axis in range(num_axes)}
    dims = tuple(
        _dim(draw, size, [axis for axis, use in uses.items() if use == dim], 2)
        for dim, size in enumerate(tensor.shape)
    )
    partial = tuple(axis for axis, use in uses.items() if use == -2)
    return ParameterPlan((tensor.name,), dims, tensor.dtype, partial)


def _dim(draw: st.DrawFn, size: int, axes: Collection[int], depth: int) -> Dim:
    """A tree of ``size`` positions; segments may share axes, factors may not."""
    kind = draw(st.sampled_from(("leaf", "product", "sum"))) if depth else "leaf"
    if kind == "product":
        outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        mine = [axis for axis in axes if draw(st.booleans())]
        rest = [axis for axis in axes if axis not in mine]
        return Product((_dim(draw, outer, mine, depth - 1), _dim(draw, size // outer, rest, depth - 1)))
    if kind == "sum" and size > 1:
        cuts = draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=2))
        return Sum(tuple(_dim(draw, b - a, axes, depth - 1) for a, b in pairwise([0, *sorted(cuts), size])))
    return Leaf(size, tuple(draw(st.permutations([axis for axis in axes if draw(st.booleans())]))))
