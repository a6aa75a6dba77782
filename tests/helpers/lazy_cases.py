"""Random lazy tensors over real files, each beside the torch tensor that it is to be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from hypothesis import strategies as st
from shardconv_runtime.checkpoint import lazy_tensor
from shardconv_runtime.checkpoint.lazy_tensor import FileLeaf, LazyTensor
from shardconv_runtime.format.slices import Range
from torch import Tensor

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "bool", "int64")

Pair = tuple[LazyTensor, Tensor]
"""What is tested, and what it is to be."""

Draw = Callable[[st.SearchStrategy], object]


def name_of(tensor: Tensor) -> str:
    """Name of a tensor's dtype, as in a plan."""
    return str(tensor.dtype).removeprefix("torch.")


def random_tensor(dtype: str, shape: Sequence[int], seed: int) -> Tensor:
    """Values that every dtype holds, most of them different: casts of others depend on the machine."""
    values = (
        torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 20
    )
    return (values > 0) if dtype == "bool" else values.to(getattr(torch, dtype))


def bits(tensor: Tensor) -> bytes:
    """All bytes, row-major."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().tobytes()


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal to the bit, in shape and dtype."""
    return (found.dtype, found.shape, bits(found)) == (expected.dtype, expected.shape, bits(expected))


class Files:
    """Leaves in files, which have other bytes before and between them."""

    def __init__(self, directory: Path, count: int = 2) -> None:
        self.paths = [directory / f"{index}.weights" for index in range(count)]
        self._sizes = [0] * count
        self._random = random.Random(0)
        for path in self.paths:
            path.write_bytes(b"")

    def add(self, tensor: Tensor) -> LazyTensor:
        """Append a tensor to one of the files."""
        index = self._random.randrange(len(self.paths))
        gap = self._random.randbytes(self._random.randrange(12))
        data = bits(tensor)
        with self.paths[index].open("ab") as file:
            file.write(gap + data)
        offset = self._sizes[index] + len(gap)
        self._sizes[index] = offset + len(data)
        leaf = FileLeaf(self.paths[index], offset, name_of(tensor), tensor.numel())
        return lazy_tensor.from_leaf(leaf, tuple(tensor.shape))


def shapes(max_dims: int = 4, max_elements: int = 400) -> st.SearchStrategy[tuple[int, ...]]:
    """Small shapes, with sizes 0 and 1 among them."""
    sizes = st.sampled_from((0, 1, 1, 2, 2, 3, 4, 5, 6, 8))
    found = st.lists(sizes, max_size=max_dims).map(tuple)
    return found.filter(lambda shape: math.prod(shape) <= max_elements)


@st.composite
def spans(draw: Draw, size: int) -> tuple[Range, ...]:
    """Ascending disjoint stretches of a dim, empty ones and none among them."""
    count = draw(st.integers(0, 3))
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2 * count, max_size=2 * count)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=True))


def take_torch(tensor: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """What ``lazy_tensor.take`` is to give."""
    index = [position for start, stop in ranges for position in range(start, stop)]
    return tensor.index_select(dim, torch.tensor(index, dtype=torch.int64))


@st.composite
def pairs(draw: Draw, files: Files, steps: int = 6, casts: bool = True) -> Pair:
    """A random expression over new leaves of ``files``."""
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20))
    pair = leaf(files, dtype, draw(shapes()), seed)
    chosen = [step for step in STEPS if casts or step is not cast]
    for step in draw(st.lists(st.sampled_from(chosen), max_size=steps)):
        pair = step(draw, files, pair)
        if pair[1].numel() > 2000 or pair[1].dim() > 6:
            break
    return pair


def leaf(files: Files, dtype: str, shape: Sequence[int], seed: int) -> Pair:
    """A new tensor in a file, or zeros."""
    if seed % 10 == 0:
        return lazy_tensor.zeros(dtype, shape), torch.zeros(tuple(shape), dtype=getattr(torch, dtype))
    tensor = random_tensor(dtype, shape, seed)
    return files.add(tensor), tensor


def take(draw: Draw, files: Files, pair: Pair) -> Pair:
    """Stretches of a dim."""
    if not pair[1].dim():
        return pair
    dim = draw(st.integers(0, pair[1].dim() - 1))
    chosen = draw(spans(pair[1].shape[dim]))
    return lazy_tensor.take(pair[0], dim, chosen), take_torch(pair[1], dim, chosen)


def permute(draw: Draw, files: Files, pair: Pair) -> Pair:
    """Dims in another order."""
    order = draw(st.permutations(range(pair[1].dim())))
    return lazy_tensor.permute(pair[0], order), pair[1].permute(tuple(order))


def concatenate(draw: Draw, files: Files, pair: Pair) -> Pair:
    """With another leaf, or with a part of itself."""
    if not pair[1].dim():
        return pair
    dim = draw(st.integers(0, pair[1].dim() - 1))
    if draw(st.booleans()):
        shape = list(pair[1].shape)
        shape[dim] = draw(st.integers(0, 3))
        other = leaf(files, name_of(pair[1]), shape, draw(st.integers(0, 2**20)))
    else:
        chosen = draw(spans(pair[1].shape[dim]))
        other = lazy_tensor.take(pair[0], dim, chosen), take_torch(pair[1], dim, chosen)
    both = (pair, other) if draw(st.booleans()) else (other, pair)
    return lazy_tensor.concatenate([p[0] for p in both], dim), torch.cat([p[1] for p in both], dim)


def unsqueeze(draw: Draw, files: Files, pair: Pair) -> Pair:
    """A dim of size 1 more."""
    dim = draw(st.integers(0, pair[1].dim()))
    return lazy_tensor.unsqueeze(pair[0], dim), pair[1].unsqueeze(dim)


def squeeze(draw: Draw, files: Files, pair: Pair) -> Pair:
    """A dim of size 1 less."""
    ones = [dim for dim, size in enumerate(pair[1].shape) if size == 1]
    if not ones:
        return pair
    dim = draw(st.sampled_from(ones))
    return lazy_tensor.squeeze(pair[0], dim), pair[1].squeeze(dim)


def factorise(draw: Draw, number: int) -> tuple[int, ...]:
    """A shape of so many elements."""
    shape = []
    while number > 1:
        size = draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))
        shape.append(size)
        number //= size
        if len(shape) > 4:
            return (*shape, number)
    return tuple(shape) if number else (0, *shape)


def reshape(draw: Draw, files: Files, pair: Pair) -> Pair:
    """Another shape, where boxes stay boxes."""
    shape = factorise(draw, pair[1].numel())
    found = lazy_tensor.reshape(pair[0], shape)
    return pair if found is None else (found, pair[1].reshape(shape))


def cast(draw: Draw, files: Files, pair: Pair) -> Pair:
    """Another dtype, once."""
    dtype = draw(st.sampled_from([d for d in DTYPES if d.startswith(("float", "bfloat"))]))
    found = lazy_tensor.cast(pair[0], dtype)
    return pair if found is None else (found, pair[1].to(getattr(torch, dtype)))


def assemble(draw: Draw, files: Files, pair: Pair) -> Pair:
    """Taken apart into a grid of parts, whose places may be in several stretches, and put together."""
    tensor = pair[0]
    grid: list[tuple[LazyTensor, list[tuple[Range, ...]]]] = [(tensor, [])]
    for dim, size in enumerate(tensor.shape):
        runs = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=4))
        owners = [owner for owner, length in (*runs, (0, size)) for _ in range(length)][:size]
        places = [tuple(_stretches([i for i, o in enumerate(owners) if o == owner])) for owner in range(3)]
        grid = [(lazy_tensor.take(part, dim, p), [*where, p]) for part, where in grid for p in places]
    order = draw(st.permutations(range(len(grid)))) if len(grid) < 30 else range(len(grid))
    return lazy_tensor.assemble(tensor.dtype, tensor.shape, [grid[index] for index in order]), pair[1]


STEPS = (take, permute, concatenate, unsqueeze, squeeze, reshape, cast, assemble)


def _stretches(positions: Sequence[int]) -> list[Range]:
    found: list[Range] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
