"""For each operator of the rules, functions and operands of random shapes and arguments.

Sizes of 1, sizes that nothing divides, negative dims, broadcasting: a generator draws what the operators of
its family allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from rule_cases import f
from torch import Tensor

T = TypeVar("T")
Drawn = tuple[Callable[..., Any], tuple[Tensor, ...]]
SIZES = (1, 2, 3, 4, 5, 6, 8)
MAX_NUMEL = 300


class Draw:
    """Random choices; ``integer(low, high)`` makes them, both ends included."""

    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self.integer = integer

    def choice(self, items: Sequence[T]) -> T:
        """One of these; the first is the simplest."""
        return items[self.integer(0, len(items) - 1)]

    def flag(self) -> bool:
        """Yes or no."""
        return bool(self.integer(0, 1))

    def size(self) -> int:
        """Of a dim."""
        return self.choice(SIZES)

    def shape(self, low: int, high: int) -> tuple[int, ...]:
        """So many dims, of not too many elements."""
        sizes: list[int] = []
        for _ in range(self.integer(low, high)):
            sizes.append(self.choice([n for n in SIZES if n * math.prod(sizes) <= MAX_NUMEL]))
        return tuple(sizes)

    def dim(self, rank: int) -> int:
        """A dim, from the front or the back."""
        return self.integer(-rank, rank - 1)

    def dims(self, rank: int) -> list[int]:
        """One or more different dims."""
        chosen = [d for d in range(rank) if self.flag()] or [self.integer(0, rank - 1)]
        return [d - rank if self.flag() else d for d in chosen]

    def order(self, rank: int) -> list[int]:
        """A permutation."""
        rest = list(range(rank))
        return [rest.pop(self.integer(0, len(rest) - 1)) for _ in range(rank)]

    def smaller(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        kept = shape[self.integer(0, len(shape)) :]
        return tuple(1 if self.integer(0, 3) == 0 else n for n in kept)

    def together(self, *shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The first as it is, the others broadcast to it; in any order."""
        return [shapes[i] for i in self.order(len(shapes))]

    def parts(self, size: int) -> list[int]:
        """Sizes that sum to this one."""
        out = []
        while size:
            out.append(self.integer(1, size))
            size -= out[-1]
        return out

    def factors(self, numel: int) -> tuple[int, ...]:
        """Sizes whose product is this one."""
        out = []
        while numel > 1 and len(out) < 4:
            out.append(self.choice([d for d in range(1, numel + 1) if numel % d == 0]))
            numel //= out[-1]
        return (*out, numel)

    def ids(self, count: int, *shape: int) -> Tensor:
        """Ids below ``count``."""
        values = [self.integer(0, count - 1) for _ in range(math.prod(shape))]
        return torch.tensor(values, dtype=torch.long).reshape(shape)


# Pointwise -------------------------------------------------------------------------------------------


def unary(d: Draw) -> Drawn:
    function = d.choice(
        [
            lambda x: -x,
            lambda x: x * 0.5,
            lambda x: 3 * x,
            lambda x: x / 4,
            lambda x: x + 0,
            lambda x: 1 - x,
            lambda x: x - 2.5,
            lambda x: 1 / (x * x + 1),
            F.silu,
            F.gelu,
            torch.tanh,
            torch.abs,
            lambda x: x.pow(2),
            lambda x: x.clamp(-1, 0.5),
            lambda x: x.float(),
            lambda x: (x * 10).long(),
            lambda x: (x > 0).double(),
            lambda x: x.bool(),
            lambda x: (x > 0).to(torch.float64),
            lambda x: x.clone(),
            lambda x: x.detach(),
            lambda x: x.contiguous(),
            lambda x: F.dropout(x, 0.3, training=False),
            lambda x: x.nan_to_num(),
            lambda x: x // 0.3,
            lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
            lambda x: +x,
            lambda x: torch.positive(x) * x,
        ]
    )
    return function, (f(*d.shape(1, 4)),)


def binary(d: Draw) -> Drawn:
    function = d.choice(
        [
            lambda x, y: x + y,
            lambda x, y: torch.sub(x, y, alpha=3),
            lambda x, y: torch.add(x, y, alpha=-2),
            lambda x, y: x * y,
            lambda x, y: x / (y * y + 1),
            lambda x, y: (x * 2) / (y.abs() + 1),
            lambda x, y: x * y + x,
            lambda x, y: x * (x + y),
            torch.maximum,
            torch.max,
            torch.min,
            lambda x, y: x < y,
            lambda x, y: torch.atan2(x, y),
            lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor"),
            lambda x, y: x // (y.abs() + 1),
        ]
    )
    shape = d.shape(1, 4)
    return function, tuple(f(*s) for s in d.together(shape, d.smaller(shape)))


def ternary(d: Draw) -> Drawn:
    function = d.choice(
        [
            torch.lerp,
            torch.addcmul,
            lambda x, y, z: torch.where(x > 0, y, z),
            lambda x, y, z: torch.where(x > 0, y * 2, 0.0) + z,
            lambda x, y, z: torch.where(x > 0, 1.0, y) * z,
            lambda x, y, z: (x + y) * z,
            lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1),
        ]
    )
    shape = d.shape(1, 3)
    return function, tuple(f(*s) for s in d.together(shape, d.smaller(shape), d.smaller(shape)))


def masked(d: Draw) -> Drawn:
    shape, value = d.shape(1, 4), d.choice([0.0, -1e3, 0])
    mask = d.smaller(shape)
    if d.flag():
        return lambda x, y: x.clone().masked_fill_(y > 0, value), (f(*shape), f(*mask))
    return lambda x, y: x.masked_fill(y > 0, value), tuple(f(*s) for s in (shape, mask))


def in_place(d: Draw) -> Drawn:
    function = d.choice(
        [
            lambda x, y: x.clone().add_(y),
            lambda x, y: x.clone().mul_(y),
            lambda x, y: x.clone().sub_(y, alpha=2),
            lambda x, y: x.clone().copy_(y),
            lambda x, y: x.clone().zero_() + y,
            lambda x, y: x.clone().fill_(2.0) * y,
            lambda x, y: x.clone().fill_(y.sum()),
            lambda x, y: x.clone().div_(y.abs() + 1),
            lambda x, y: F.relu(x.clone(), inplace=True) + y,
            lambda x, y: x.long().copy_(y * 10),
        ]
    )
    shape = d.shape(1, 3)
    return function, (f(*shape), f(*d.smaller(shape)))


def made(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    value = d.choice([0.0, 1.5])
    function = d.choice(
        [
            lambda x: x + torch.zeros_like(x),
            lambda x: x * torch.ones_like(x),
            lambda x: x + torch.full_like(x, value),
            lambda x: torch.full_like(x, value) * 2 + x,
            lambda x: x + x.new_zeros(shape),
            lambda x: x * x.new_full(shape, value),
            lambda x: x + torch.zeros(shape, dtype=x.dtype, device=x.device),
            lambda x: x + torch.full(shape, value, dtype=x.dtype, device=x.device),
            lambda x: x * torch.arange(shape[-1], device=x.device),
            lambda x: x + torch.eye(shape[-1], dtype=x.dtype, device=x.device)[0],
            lambda x: x * torch.linspace(0, 1, shape[-1], dtype=x.dtype, device=x.device),
        ]
    )
    return function, (f(*shape),)


# Products --------------------------------------------------------------------------------------------


def linear(d: Draw) -> Drawn:
    lead, inner, outer = d.shape(0, 3), d.size(), d.size()
    operands = [f(*lead, inner), f(outer, inner)]
    if d.flag():
        operands.append(f(outer))
    if d.integer(0, 4) == 0:
        return F.linear, (f(*lead, inner), f(inner))
    return F.linear, tuple(operands)


def matmul(d: Draw) -> Drawn:
    m, k, n = d.size(), d.size(), d.size()
    batch = d.shape(0, 2)
    left = [(*batch, m, k), (*d.smaller(batch), m, k), (m, k), (k,)]
    right = [(*batch, k, n), (k, n), (*d.smaller(batch), k, n), (k,)]
    return torch.matmul, (f(*d.choice(left)), f(*d.choice(right)))


def products(d: Draw) -> Drawn:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    return d.choice(
        [
            (torch.mm, (f(m, k), f(k, n))),
            (torch.bmm, (f(b, m, k), f(b, k, n))),
            (torch.mv, (f(m, k), f(k))),
            (torch.dot, (f(k), f(k))),
            (torch.outer, (f(m), f(n))),
            (lambda x: x @ x.mT, (f(b, m, k),)),
        ]
    )


def addmm(d: Draw) -> Drawn:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    beta, alpha = d.choice([(1, 1), (2, 3), (0, 1), (1, 0.5)])
    if d.flag():
        operands = f(*d.smaller((b, m, n))), f(b, m, k), f(b, k, n)
        return lambda z, x, y: torch.baddbmm(z, x, y, beta=beta, alpha=alpha), operands
    operands = f(*d.smaller((m, n))), f(m, k), f(k, n)
    return lambda z, x, y: torch.addmm(z, x, y, beta=beta, alpha=alpha), operands


def einsum(d: Draw) -> Drawn:
    sizes = {letter: d.size() for letter in "abcde"}
    while math.prod(sizes.values()) > 4 * MAX_NUMEL:
        sizes[max(sizes, key=lambda s: sizes[s])] = 2
    terms = []
    for _ in range(d.integer(1, 2)):
        order = d.order(5)
        terms.append("".join("abcde"[i] for i in order[: d.integer(1, 4)]))
    known = sorted(set("".join(terms)))
    output = "".join(known[i] for i in d.order(len(known))[: d.integer(0, len(known))])
    used = [f(*(1 if d.integer(0, 5) == 0 else sizes[s] for s in term)) for term in terms]
    return lambda *x: torch.einsum(",".join(terms) + "->" + output, *x), tuple(used)


def convolution(d: Draw) -> Drawn:
    spatial = d.integer(1, 2)
    groups, inner, outer = d.choice([1, 1, 2, 3, 4, 6]), d.integer(1, 3), d.integer(1, 3)
    kernel, options = d.integer(1, 3), {}
    options["stride"], options["padding"] = d.integer(1, 2), d.integer(0, 2)
    options["dilation"] = d.integer(1, 2)
    batch = (d.integer(1, 3),) if d.flag() else ()
    length = (d.integer(5, 7),) * spatial
    transposed = d.flag()
    kinds = (F.conv1d, F.conv2d) if not transposed else (F.conv_transpose1d, F.conv_transpose2d)
    shape = (groups * (inner if transposed else outer), outer if transposed else inner, *(kernel,) * spatial)
    operands = [f(*batch, groups * inner, *length), f(*shape)]
    if d.flag():
        operands.append(f(groups * outer))
    return lambda *x: kinds[spatial - 1](*x, groups=groups, **options), tuple(operands)


def pooled(d: Draw) -> Drawn:
    batch, channels, length = d.integer(1, 3), d.integer(1, 6), d.integer(4, 7)
    size, out = d.integer(1, 3), d.integer(1, 9)
    line, image = f(batch, channels, length), f(batch, channels, length, length)
    return d.choice(
        [
            (lambda x: F.avg_pool1d(x, size, stride=2), (line,)),
            (lambda x: F.avg_pool2d(x, size), (image,)),
            (lambda x: F.avg_pool3d(x, size), (f(batch, channels, 4, length, 5),)),
            (lambda x: F.adaptive_avg_pool1d(x, out), (line,)),
            (lambda x: F.adaptive_avg_pool2d(x, out), (image,)),
            (lambda x: F.max_pool1d(x, size), (line,)),
            (lambda x: F.max_pool2d(x, size), (image,)),
            (lambda x: F.interpolate(x, size=out, mode="nearest"), (line,)),
            (lambda x: F.interpolate(x, size=out, mode="linear"), (line,)),
            (lambda x: F.interpolate(x, size=out, mode="nearest"), (image,)),
            (lambda x: F.interpolate(x, size=out, mode="bilinear"), (image,)),
            (lambda x: F.interpolate(x, size=out, mode="bicubic"), (image,)),
            (lambda x: F.interpolate(x, size=out, mode="bilinear", antialias=True), (image,)),
            (lambda x: F.interpolate(x, size=out, mode="bicubic", antialias=True), (image,)),
            (lambda x: F.unfold(x, size), (image,)),
        ]
    )


def triangular(d: Draw) -> Drawn:
    batch, n, k = d.shape(0, 2), d.integer(1, 4), d.integer(1, 4)
    upper = d.flag()

    def function(a: Tensor, x: Tensor) -> Tensor:
        eye = torch.eye(n, dtype=a.dtype, device=a.device)
        return torch.linalg.solve_triangular(a + 5 * eye, x, upper=upper)

    return function, (f(*batch, n, n), f(*batch, n, k))


# Views -----------------------------------------------------------------------------------------------


def regrouped(d: Draw) -> Drawn:
    shape = d.shape(1, 4)
    first, second = d.factors(math.prod(shape)), d.factors(math.prod(shape))
    return d.choice(
        [
            (lambda x: x.view(first), (f(*shape),)),
            (lambda x: x.reshape(first).reshape(second), (f(*shape),)),
            (lambda x: x.transpose(0, -1).reshape(first), (f(*shape),)),
            (lambda x, y: x.view_as(y) * y, (f(*shape), f(*first))),
            (lambda x: x.reshape_as(x.new_zeros(first)), (f(*shape),)),
            (lambda x: x.ravel(), (f(*shape),)),
            (lambda x: x.view(-1), (f(*shape),)),
            (lambda x: x.reshape(first) + x.reshape(first), (f(*shape),)),
        ]
    )


def flattened(d: Draw) -> Drawn:
    shape = d.shape(1, 4)
    start, stop = sorted((d.integer(0, len(shape) - 1), d.integer(0, len(shape) - 1)))
    dim = d.dim(len(shape))
    sizes = d.factors(shape[dim])
    return d.choice(
        [
            (lambda x: x.flatten(start, stop), (f(*shape),)),
            (lambda x: x.unflatten(dim, sizes), (f(*shape),)),
            (lambda x: x.unflatten(dim, sizes).flatten(), (f(*shape),)),
        ]
    )


def moved(d: Draw) -> Drawn:
    shape = d.shape(2, 4)
    rank = len(shape)
    order, a, b = d.order(rank), d.dim(rank), d.dim(rank)
    few = d.integer(1, rank)
    source, target = d.order(rank)[:few], d.order(rank)[:few]
    function = d.choice(
        [
            lambda x: x.permute(order),
            lambda x: x.permute([i - rank for i in order]),
            lambda x: x.transpose(a, b),
            lambda x: x.swapaxes(a, b),
            lambda x: x.swapdims(a, b),
            lambda x: x.movedim(a, b),
            lambda x: x.movedim(source, [t - rank for t in target]),
            lambda x: x.mT,
            lambda x: x.flatten(1).t(),
            lambda x: x.flatten(1).T,
        ]
    )
    return function, (f(*shape),)


def ones(d: Draw) -> Drawn:
    shape = d.shape(1, 4)
    new, dim = d.integer(-len(shape) - 1, len(shape)), d.dim(len(shape))
    function = d.choice(
        [
            lambda x: x.unsqueeze(new),
            lambda x: x.squeeze(),
            lambda x: x.squeeze(dim),
            lambda x: x.unsqueeze(new).squeeze(new),
            lambda x: x[None, ..., None] * 2,
        ]
    )
    return function, (f(*shape),)


def repeated(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    dim, times = d.dim(len(shape)), d.integer(1, 3)
    lead = [d.integer(1, 3) for _ in range(d.integer(0, 1))]
    counts = [*lead, *(d.integer(1, 2) for _ in shape)]
    source = tuple(1 if d.flag() else n for n in shape)
    wide = [*lead, *(-1 if n == m and d.flag() else n for n, m in zip(shape, source, strict=True))]
    return d.choice(
        [
            (lambda x: x.expand(wide), (f(*source),)),
            (lambda x, y: x.expand_as(y) + y, (f(*source), f(*shape))),
            (lambda x: x.broadcast_to((*lead, *shape)), (f(*source),)),
            (lambda x: x.repeat(counts), (f(*shape),)),
            (lambda x: x.tile(counts[-1:]), (f(*shape),)),
            (lambda x: x.repeat_interleave(times, dim), (f(*shape),)),
            (lambda x: x.repeat_interleave(times), (f(*shape),)),
            (lambda x: x.repeat_interleave(times, dim=dim).unflatten(dim, (-1, times)), (f(*shape),)),
        ]
    )


def shifted(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    rank = len(shape)
    dims, dim = d.dims(rank), d.dim(rank)
    amounts = [d.integer(0, 2) for _ in range(2 * d.integer(1, rank))]
    window = d.integer(1, shape[dim])
    value = d.choice([0.0, 1.0])
    function = d.choice(
        [
            lambda x: x.flip(dims),
            lambda x: x.roll(tuple(range(len(dims))), tuple(dims)),
            lambda x: x.roll(2),
            lambda x: x.roll(-1, dim),
            lambda x: F.pad(x, amounts, value=value),
            lambda x: x.unfold(dim, window, 1 + len(dims)),
        ]
    )
    return function, (f(*shape),)


def complex_numbers(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    other = d.smaller(shape)
    return d.choice(
        [
            (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2j), (f(*shape, 2),)),
            (lambda x, y: torch.view_as_real(torch.polar(x.abs(), y)), (f(*shape), f(*shape))),
            (lambda x, y: torch.view_as_real(torch.complex(x, y)), (f(*shape), f(*shape))),
            (
                lambda x, y: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y)),
                (f(*shape, 2), f(*other, 2)),
            ),
        ]
    )


# Parts -----------------------------------------------------------------------------------------------


def joined(d: Draw) -> Drawn:
    shape = list(d.shape(1, 3))
    dim = d.dim(len(shape))
    sizes = [d.integer(0 if i else 1, 4) for i in range(d.integer(1, 3))]
    parts = [f(*(n if i != dim % len(shape) else m for i, n in enumerate(shape))) for m in sizes]
    new = d.integer(-len(shape) - 1, len(shape))
    return d.choice(
        [
            (lambda *x: torch.cat(x, dim), tuple(parts)),
            (lambda *x: torch.cat([x[0], *x, x[0]], dim), tuple(parts)),
            (lambda *x: torch.cat([x[0], x[0]], dim).sum(dim), tuple(parts[:1])),
            (lambda x, y: torch.stack([x, y, x], new), (f(*shape), f(*shape))),
            (lambda x: torch.stack([x, -x], new).flatten(), (f(*shape),)),
        ]
    )


def cut(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    dim, size = d.dim(len(shape)), d.integer(1, 4)
    parts = d.parts(shape[dim])
    count = d.integer(1, 3)
    function = d.choice(
        [
            lambda x: x.split(size, dim),
            lambda x: x.split(parts, dim),
            lambda x: x.split([0, *parts], dim)[1:],
            lambda x: x.chunk(count, dim),
            lambda x: x.tensor_split(count, dim),
            lambda x: x.unbind(dim),
            lambda x: [F.silu(p) for p in x.split(parts, dim)],
            lambda x: torch.cat(x.split(parts, dim)[::-1], dim),
        ]
    )
    return function, (f(*shape),)


def sliced(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    rank = len(shape)
    dim = d.integer(0, rank - 1)
    n = shape[dim]
    start, stop = d.choice([None, *range(-n, n + 1)]), d.choice([None, *range(-n, n + 2)])
    step = d.choice([1, 1, 2, 3, n])
    where = (slice(None),) * dim
    at = d.integer(-n, n - 1)
    length = d.integer(1, n)
    begin = d.integer(0, n - length)
    function = d.choice(
        [
            lambda x: x[(*where, slice(start, stop, step))],
            lambda x: x[(*where, slice(start, stop))],
            lambda x: x[(*where, slice(at % step, None, step))],
            lambda x: x[(*where, at)],
            lambda x: x.select(dim - rank, at),
            lambda x: x.narrow(dim, begin, length),
            lambda x: x.narrow(dim - rank, begin - n, length) if begin else x,
            lambda x: x[(*where, slice(begin, begin + length))][(*where, slice(None, None, step))],
        ]
    )
    return function, (f(*shape),)


def looked_up(d: Draw) -> Drawn:
    shape = d.shape(1, 4)
    rank = len(shape)
    dim = d.integer(0, rank - 1)
    lead = (slice(None),) * dim
    row = d.ids(shape[dim], d.integer(1, 4))
    ids = d.ids(shape[dim], *d.shape(1, 2))
    last = d.ids(shape[-1], row.shape[0])
    return d.choice(
        [
            (lambda x, i: x.index_select(dim - rank, i), (f(*shape), row)),
            (lambda x, i: x[(*lead, i)], (f(*shape), ids)),
            (lambda x, i: x[(*lead, i[:, None], i)], (f(*shape[:dim], shape[dim], *shape[dim:]), row)),
            (lambda x, i: x[(*lead, slice(1, None), i)], (f(*shape[:dim], 3, *shape[dim:]), row)),
            (lambda x, i, j: x[i, ..., j], (f(max(shape), *shape), d.ids(max(shape), *row.shape), last)),
            (lambda x, i: x[(*lead, i, None)], (f(*shape), ids)),
        ]
    )


def gathered(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    rank = len(shape)
    dim = d.dim(rank)
    places = [n if d.integer(0, 2) else d.integer(1, n) for n in shape]
    places[dim] = d.integer(1, 4)
    ids = d.ids(shape[dim], *places)
    exact = [*shape]
    exact[dim] = places[dim]
    all_ids = d.ids(shape[dim], *exact)
    unique = torch.arange(min(shape[dim], places[dim])).reshape(
        [-1 if i == dim % rank else 1 for i in range(rank)]
    )
    few = [*shape]
    few[dim] = unique.numel()
    rows = d.ids(shape[dim], places[dim])
    added = [*shape]
    added[dim] = places[dim]
    return d.choice(
        [
            (lambda x, i: x.gather(dim, i), (f(*shape), ids)),
            (lambda x, i: x.gather(dim, i), (f(*shape), all_ids)),
            (lambda x, i: x.take_along_dim(i, dim), (f(*shape), all_ids)),
            (lambda x, i: x.scatter(dim, i, 2.0), (f(*shape), ids)),
            (lambda x, i, y: x.scatter(dim, i.expand(few), y), (f(*shape), unique, f(*few))),
            (lambda x, i, y: x.scatter_reduce(dim, i.expand(few), y, "amin"), (f(*shape), unique, f(*few))),
            (lambda x, i, y: x.index_add(dim, i, y), (f(*shape), rows, f(*added))),
            (lambda x, i, y: x.clone().index_add_(dim, i, y), (f(*shape), rows, f(*added))),
            (lambda x, i: x.index_put((i,), x.new_zeros(())), (f(*shape), d.ids(shape[0], 2))),
            (lambda x, y: x.masked_scatter((y > 0)[..., :1], y), (f(*shape), f(*shape))),
            (lambda x, y: x.masked_scatter((y > 0)[..., :1].expand_as(x), y), (f(*shape), f(*shape))),
        ]
    )


def embedding(d: Draw) -> Drawn:
    rows, width, ids = d.integer(2, 9), d.size(), d.shape(1, 2)
    found = d.ids(rows, *ids)
    return d.choice(
        [
            (lambda w, i: F.embedding(i, w), (f(rows, width), found)),
            (lambda w, i: F.embedding(i, w) * 0.3, (f(rows, width), found)),
            (lambda w, i, b: F.embedding(i, w) + b, (f(rows, width), found, f(width))),
            (lambda w, i: F.embedding((i + 1) % rows, w), (f(rows, width), found)),
            (lambda w, i: F.embedding(i, w.t()), (f(width, rows), found)),
        ]
    )


# Reductions ------------------------------------------------------------------------------------------


def summed(d: Draw) -> Drawn:
    shape = d.shape(1, 4)
    dims, dim, keep = d.dims(len(shape)), d.dim(len(shape)), d.flag()
    function = d.choice(
        [
            lambda x: x.sum(),
            lambda x: x.sum(dims, keepdim=keep),
            lambda x: x.mean(),
            lambda x: x.mean(dims, keepdim=keep),
            lambda x: x.cumsum(dim),
            lambda x: x.tril() if x.dim() > 1 else x.sum(0),
            lambda x: x.triu(-1) if x.dim() > 1 else x.mean(0),
            lambda x: x.sum(dim) * x.sum(dim),
            lambda x: x - x.mean(dims, keepdim=True),
        ]
    )
    return function, (f(*shape),)


def reduced(d: Draw) -> Drawn:
    shape = d.shape(1, 4)
    dims, dim, keep = d.dims(len(shape)), d.dim(len(shape)), d.flag()
    function = d.choice(
        [
            lambda x: x.max(dim, keepdim=keep),
            lambda x: x.min(dim)[0],
            lambda x: x.max(),
            lambda x: x.amax(dims, keepdim=keep),
            lambda x: x.amin(dims, keepdim=keep),
            lambda x: x.argmax(dim, keepdim=keep),
            lambda x: x.argmin(dim),
            lambda x: x.var(dims, correction=0, keepdim=keep),
            lambda x: x.std(dims, correction=0),
            lambda x: torch.var_mean(x, dims, correction=0, keepdim=keep),
            lambda x: x.prod(dim, keepdim=keep),
            lambda x: (x > 0).any(dim, keepdim=keep),
            lambda x: (x > 0).all(),
            lambda x: x.logsumexp(dims, keepdim=keep),
            lambda x: x.norm(dim=dims[:2], keepdim=keep),
            lambda x: torch.linalg.vector_norm(x, dim=dims, keepdim=keep),
            lambda x: F.normalize(x, dim=dim),
        ]
    )
    return function, (f(*shape),)


def along(d: Draw) -> Drawn:
    shape = d.shape(1, 3)
    dim = d.dim(len(shape))
    k = d.integer(1, shape[dim])
    function = d.choice(
        [
            lambda x: x.softmax(dim),
            lambda x: F.log_softmax(x, dim),
            lambda x: x.sort(dim),
            lambda x: x.argsort(dim, descending=True),
            lambda x: x.cumprod(dim),
            lambda x: x.cummax(dim),
            lambda x: x.cummin(dim)[0],
            lambda x: x.logcumsumexp(dim),
            lambda x: x.topk(k, dim),
            lambda x: F.glu(torch.cat([x, x], dim), dim),
        ]
    )
    return function, (f(*shape),)


def normalized(d: Draw) -> Drawn:
    lead, last = d.shape(1, 2), d.shape(1, 2)
    groups = d.integer(1, 3)
    shape = (*lead, *last)
    image = (d.integer(1, 3), groups * d.integer(1, 2), d.integer(2, 4))
    return d.choice(
        [
            (lambda x: F.layer_norm(x, last), (f(*shape),)),
            (lambda x, w: F.layer_norm(x, last, w), (f(*shape), f(*last))),
            (lambda x, w, b: F.layer_norm(x, last, w, b), (f(*shape), f(*last), f(*last))),
            (lambda x: F.rms_norm(x, last), (f(*shape),)),
            (lambda x, w: F.rms_norm(x, last, w), (f(*shape), f(*last))),
            (lambda x: F.group_norm(x, groups), (f(*image),)),
            (lambda x, m, v: F.batch_norm(x, m, v.abs()), (f(*image), f(image[1]), f(image[1]))),
            (lambda x: F.batch_norm(x, None, None, training=True), (f(*image),)),
            (lambda v, g: torch._weight_norm(v, g, 1), (f(*image), f(1, image[1], 1))),
            (lambda x, w, b: F.group_norm(x, groups, w, b), (f(*image), f(image[1]), f(image[1]))),
        ]
    )


def counted(d: Draw) -> Drawn:
    ids = d.ids(4, *d.shape(1, 2))
    return d.choice(
        [
            (lambda x, i: F.one_hot(i, 4) * x, (f(4), ids)),
            (lambda x: F.one_hot((x.abs() * 10).long() % 3, 3), (f(*d.shape(1, 2)),)),
            (lambda x: torch.histc(x, bins=3, min=-1, max=1), (f(*d.shape(1, 2)),)),
            (lambda x, i: torch.bincount(i.flatten(), minlength=4) * x, (f(4), ids)),
        ]
    )


def attention(d: Draw) -> Drawn:
    batch, heads, length, others = d.integer(1, 2), d.integer(1, 3), d.integer(1, 4), d.integer(1, 4)
    width, value_width, group = d.integer(1, 4), d.integer(1, 4), d.choice([1, 2, 3])
    options: dict[str, Any] = d.choice([{}, {"scale": 0.5}, {"is_causal": True}])
    query = f(batch, heads * group, length, width)
    key, value = f(batch, heads, others, width), f(batch, heads, others, value_width)
    if group > 1 or d.flag():
        options["enable_gqa"] = True
    mask: tuple[Tensor, ...] = ()
    if "is_causal" not in options and d.flag():
        mask = (f(*d.smaller((batch, heads * group, length, others))),)
        if mask[0].dim() < 2:
            mask = (f(length, others),)
    return lambda q, k, v, *m: F.scaled_dot_product_attention(q, k, v, *m, **options), (
        query,
        key,
        value,
        *mask,
    )


GENERATORS: dict[str, Callable[[Draw], Drawn]] = {
    g.__name__: g
    for g in (
        unary,
        binary,
        ternary,
        masked,
        in_place,
        made,
        linear,
        matmul,
        products,
        addmm,
        einsum,
        convolution,
        pooled,
        triangular,
        regrouped,
        flattened,
        moved,
        ones,
        repeated,
        shifted,
        complex_numbers,
        joined,
        cut,
        sliced,
        looked_up,
        gathered,
        embedding,
        summed,
        reduced,
        along,
        normalized,
        counted,
        attention,
    )
}
