"""One small function for each operator of the rules, in the forms that models use and some that they do not.

Each case: a name, the function, its operands, and the dims of what it returns where that is worth saying
(``!`` marks what the rules must block; numbers without it must stay free).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A function and what it is called with; ``dims``: of its first output."""

    name: str
    function: Callable[..., Any]
    operands: tuple[Tensor, ...]
    dims: str | None = None


def f(*shape: int) -> Tensor:
    """A float operand of this shape."""
    return torch.empty(shape, dtype=torch.float64)


def ints(*values: int) -> Tensor:
    """Ids."""
    return torch.tensor(values)


def _flags(x: Tensor) -> Tensor:
    return x > 0


def _scattered(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    return x.masked_scatter(_flags(y).expand(-1, x.shape[1]), rows)


def _rows_by_mask(x: Tensor, i: Tensor) -> Tensor:
    mask = _flags(i)[:, None].expand(-1, x.shape[1])
    out = torch.zeros_like(x)
    out[mask] = x[mask].view(-1, x.shape[1]).flatten() * 2.0
    return out


def _ids(x: Tensor, count: int) -> Tensor:
    return (x.abs() * 10).long() % count


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.mul_(y)
    x.add_(y, alpha=2)
    return x


def _full_like(x: Tensor) -> Tensor:
    return torch.full_like(x, 2.0) + torch.zeros_like(x) + x


def _fresh(x: Tensor) -> Tensor:
    return x + torch.zeros(4, 6, device=x.device, dtype=x.dtype) + x.new_full((4, 6), 0.5)


def _batch_norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var.abs() + 0.1, w, b)


POINTWISE = [
    Case("add", lambda x, y: x + y, (f(4, 6), f(4, 6)), "4 6"),
    Case("add broadcast", lambda x, y: x + y, (f(2, 4, 6), f(4, 1)), "2 4 6"),
    Case("add number", lambda x: x + 1.0, (f(4, 6),), "4 6"),
    Case("add zero", lambda x: x + 0, (f(4, 6),), "4 6"),
    Case("sub alpha", lambda x, y: torch.sub(x, y, alpha=3), (f(4, 6), f(6)), "4 6"),
    Case("rsub", lambda x: 1 - x, (f(4, 6),), "4 6"),
    Case("mul", lambda x, y: x * y, (f(4, 6), f(4, 6)), "4 6"),
    Case("mul outer", lambda x, y: x[:, None] * y, (f(4), f(6)), "4 6"),
    Case("mul self", lambda x: x * x, (f(4, 6),), "4 6"),
    Case("mul, then add", lambda x, y: x * y + (x + y), (f(4, 6), f(4, 6)), "4 6"),
    Case("mul number", lambda x: x * 0.5, (f(4, 6),), "4 6"),
    Case("div", lambda x, y: x / (y * y + 1), (f(4, 6), f(6)), "4 6"),
    Case("div number", lambda x: x / 3, (f(4, 6),), "4 6"),
    Case("div rounding", lambda x: torch.div(x, 0.3, rounding_mode="floor"), (f(4, 6),), "4 6"),
    Case("reciprocal", lambda x: 1 / (x * x + 1), (f(4, 6),), "4 6"),
    Case("silu", lambda x: F.silu(x), (f(4, 6),), "4 6"),
    Case("hardswish", lambda x: F.hardswish(x), (f(4, 6),), "4 6"),
    Case("gelu", lambda x: F.gelu(x, approximate="tanh"), (f(4, 6),), "4 6"),
    Case("relu squared", lambda x: F.relu(x).pow(2), (f(4, 6),), "4 6"),
    Case("neg", lambda x: -x, (f(4, 6),), "4 6"),
    Case("to float32", lambda x: x.to(torch.float32), (f(4, 6),), "4 6"),
    Case("to int", lambda x: (x * 10).long(), (f(4, 6),), "4 6"),
    Case("to bool", lambda x: x.bool(), (f(4, 6),), "4 6"),
    Case("from bool", lambda x: _flags(x).to(torch.float64), (f(4, 6),), "4 6"),
    Case("compare", lambda x, y: x < y, (f(4, 6), f(4, 6)), "4 6"),
    Case("maximum", lambda x, y: torch.maximum(x, y), (f(4, 6), f(4, 6)), "4 6"),
    Case("max of two", lambda x, y: torch.max(x, y), (f(4, 6), f(6)), "4 6"),
    Case("min of two", lambda x, y: torch.min(x, y), (f(4, 6), f(4, 6)), "4 6"),
    Case("clamp", lambda x: x.clamp(-1, 1), (f(4, 6),), "4 6"),
    Case("lerp", lambda x, y, z: torch.lerp(x, y, z), (f(4, 6), f(4, 6), f(6)), "4 6"),
    Case("addcmul", lambda x, y, z: torch.addcmul(x, y, z), (f(4, 6), f(4, 6), f(6)), "4 6"),
    Case("masked_fill", lambda x, y: x.masked_fill(_flags(y), 0.0), (f(4, 6), f(4, 6)), "4 6"),
    Case("masked_fill inf", lambda x, y: x.masked_fill(_flags(y), -1e3), (f(2, 4, 6), f(4, 1)), "2 4 6"),
    Case("where", lambda x, y, z: torch.where(_flags(x), y, z), (f(6), f(4, 6), f(4, 6)), "4 6"),
    Case("where number", lambda x, y: torch.where(_flags(x), y, 0.0), (f(4, 6), f(4, 6)), "4 6"),
    Case("in place", _in_place, (f(4, 6), f(6)), "4 6"),
    Case("copy_", lambda x, y: x.clone().copy_(y), (f(4, 6), f(6)), "4 6"),
    Case("zero_", lambda x, y: x.clone().zero_() + y, (f(4, 6), f(4, 6)), "4 6"),
    Case("fill_", lambda x, y: x.clone().fill_(2.0) + y, (f(4, 6), f(4, 6)), "4 6"),
    Case("like", _full_like, (f(4, 6),), "4 6"),
    Case("fresh", _fresh, (f(4, 6),), "4 6"),
    Case("arange", lambda x: x + torch.arange(6, device=x.device), (f(4, 6),), "4 6!"),
    Case("dropout off", lambda x: F.dropout(x, 0.5, training=False), (f(4, 6),), "4 6"),
    Case("nan_to_num", lambda x: x.nan_to_num(), (f(4, 6),), "4 6"),
    Case("floor_divide", lambda x: x // 0.3, (f(4, 6),), "4 6"),
]

CONTRACTION = [
    Case("linear", lambda x, w: F.linear(x, w), (f(2, 3, 4), f(6, 4)), "2 3 6"),
    Case("linear bias", lambda x, w, b: F.linear(x, w, b), (f(3, 4), f(6, 4), f(6)), "3 6"),
    Case("linear of a vector", lambda x, w, b: F.linear(x, w, b), (f(4), f(6, 4), f(6)), "6"),
    Case("linear, weight a vector", lambda x, w: F.linear(x, w), (f(3, 4), f(4)), "3"),
    Case(
        "view_as_complex",
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 2j),
        (f(3, 4, 2),),
        "3 4 2!",
    ),
    Case("polar", lambda x, y: torch.view_as_real(torch.polar(x, y)), (f(3, 4), f(3, 4)), "3 4 2!"),
    Case("complex", lambda x, y: torch.view_as_real(torch.complex(x, y)), (f(3, 4), f(3, 4)), "3 4 2!"),
    Case(
        "solve_triangular",
        lambda a, x: torch.linalg.solve_triangular(a + 3 * torch.eye(4, dtype=a.dtype), x, upper=False),
        (f(3, 4, 4), f(3, 4, 5)),
        "3 4! 5!",
    ),
    Case("conv1d", lambda x, w, b: F.conv1d(x, w, b), (f(2, 4, 9), f(6, 4, 3), f(6)), "2 6 7!"),
    Case(
        "conv1d depthwise",
        lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :9],
        (f(2, 6, 9), f(6, 1, 4), f(6)),
    ),
    Case(
        "conv1d in groups",
        lambda x, w: F.conv1d(x, w, groups=3, stride=2),
        (f(2, 12, 9), f(18, 4, 3)),
        "2 (3*6) 4!",
    ),
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (f(2, 4, 6),), "2 4 3!"),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), (f(2, 4, 6, 6),), "2 4 3! 3!"),
    Case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), (f(2, 4, 6),), "2 4 2!"),
    Case("unfold of images", lambda x: F.unfold(x, 2, stride=2), (f(2, 4, 6, 6),), "2 (4*4!) 9!"),
    Case(
        "interpolate antialiased",
        lambda x: F.interpolate(x, size=(3, 2), mode="bilinear", antialias=True),
        (f(2, 4, 6, 6),),
        "2 4 3! 2!",
    ),
    Case("max_pool2d", lambda x: F.max_pool2d(x, 2), (f(2, 4, 6, 6),), "2 4 3! 3!"),
    Case(
        "interpolate", lambda x: F.interpolate(x, size=(5, 4), mode="bilinear"), (f(2, 4, 3, 3),), "2 4 5! 4!"
    ),
    Case("conv2d", lambda x, w: F.conv2d(x, w, padding=1), (f(2, 4, 5, 5), f(6, 4, 3, 3)), "2 6 5! 5!"),
    Case("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b), (f(2, 4, 5), f(4, 6, 3), f(6))),
    Case(
        "conv_transpose1d in groups",
        lambda x, w: F.conv_transpose1d(x, w, groups=3),
        (f(2, 12, 5), f(12, 6, 3)),
    ),
    Case("linear twice", lambda x, w, v: F.linear(F.linear(x, w), v), (f(3, 4), f(6, 4), f(5, 6)), "3 5"),
    Case("matmul", lambda x, y: x @ y, (f(3, 4), f(4, 6)), "3 6"),
    Case("matmul batch", lambda x, y: x @ y, (f(2, 5, 3, 4), f(5, 4, 6)), "2 5 3 6"),
    Case("matmul broadcast", lambda x, y: x @ y, (f(2, 1, 3, 4), f(5, 4, 6)), "2 5 3 6"),
    Case("matmul vector", lambda x, y: x @ y, (f(5, 3, 4), f(4)), "5 3"),
    Case("vector matmul", lambda x, y: x @ y, (f(4), f(5, 4, 6)), "5 6"),
    Case("dot", lambda x, y: x @ y, (f(4), f(4)), ""),
    Case("matmul self", lambda x: x @ x.transpose(-1, -2), (f(2, 4, 6),), "2 4 4"),
    Case("matmul, then add", lambda x, y: x @ y + (x + y), (f(4, 4), f(4, 4)), "4 4"),
    Case("mm", lambda x, y: torch.mm(x, y), (f(3, 4), f(4, 6)), "3 6"),
    Case("bmm", lambda x, y: torch.bmm(x, y), (f(2, 3, 4), f(2, 4, 6)), "2 3 6"),
    Case("mv", lambda x, y: torch.mv(x, y), (f(3, 4), f(4)), "3"),
    Case("addmm", lambda b, x, y: torch.addmm(b, x, y), (f(6), f(3, 4), f(4, 6)), "3 6"),
    Case(
        "addmm alpha",
        lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3),
        (f(3, 6), f(3, 4), f(4, 6)),
        "3 6",
    ),
    Case("addmm beta 0", lambda b, x, y: torch.addmm(b, x, y, beta=0), (f(3, 6), f(3, 4), f(4, 6)), "3 6"),
    Case("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y), (f(2, 1, 6), f(2, 3, 4), f(2, 4, 6)), "2 3 6"),
    Case("outer", lambda x, y: torch.outer(x, y), (f(4), f(6)), "4 6"),
    Case("einsum matmul", lambda x, y: torch.einsum("bij,jk->bik", x, y), (f(2, 3, 4), f(4, 6)), "2 3 6"),
    Case(
        "einsum two sums", lambda x, y: torch.einsum("bij,ijk -> bk", x, y), (f(2, 3, 4), f(3, 4, 6)), "2 6"
    ),
    Case("einsum permute", lambda x: torch.einsum("abc->cab", x), (f(2, 3, 4),), "4 2 3"),
    Case("einsum sum", lambda x: torch.einsum("abc->b", x), (f(2, 3, 4),), "3"),
    Case("einsum outer", lambda x, y: torch.einsum("a,b->ba", x, y), (f(4), f(6)), "6 4"),
    Case("einsum of one size", lambda x, y: torch.einsum("ab,ab->a", x, y), (f(4, 1), f(4, 6)), "4"),
    Case("einsum self", lambda x: torch.einsum("ab,cb->ac", x, x), (f(4, 6),), "4 4"),
    Case("einsum diagonal", lambda x: torch.einsum("aa->a", x), (f(4, 4),), "4!"),
    Case("einsum dots", lambda x, y: torch.einsum("...i,ij->...j", x, y), (f(2, 3, 4), f(4, 6)), None),
    Case("einsum implicit", lambda x, y: torch.einsum("ij,jk", x, y), (f(3, 4), f(4, 6)), None),
    Case(
        "einsum three",
        lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z),
        (f(3, 4), f(4, 6), f(6, 2)),
        None,
    ),
]

VIEWS = [
    Case("split heads", lambda x: x.view(3, 4, 2), (f(3, 8),), "3 4 2"),
    Case("merge heads", lambda x: x.reshape(3, 8), (f(3, 4, 2),), "3 (4*2)"),
    Case("regroup", lambda x: x.view(3, 4, 6), (f(3, 6, 4),), None),
    Case("regroup across", lambda x: x.view(6, 4), (f(4, 6),), None),
    Case("split and merge", lambda x: x.view(3, 4, 2).view(3, 2, 2, 2).view(3, 8), (f(3, 8),), "3 (2*2*2)"),
    Case("view of ones", lambda x: x.view(1, 3, 1, 8, 1).view(3, 8), (f(3, 8),), "3 8"),
    Case("flatten", lambda x: x.flatten(1), (f(2, 3, 4),), "2 (3*4)"),
    Case("ravel", lambda x: x.ravel(), (f(3, 4),), "(3*4)"),
    Case("unflatten", lambda x: x.unflatten(-1, (4, -1)), (f(3, 8),), "3 4 2"),
    Case("view_as", lambda x, y: x.view_as(y), (f(3, 8), f(3, 4, 2)), "3 4 2"),
    Case("view as int", lambda x: x.view(torch.int64), (f(3, 8),), "3! 8!"),
    Case("permute", lambda x: x.permute(2, -3, 1), (f(2, 3, 4),), "4 2 3"),
    Case("transpose", lambda x: x.transpose(1, -1), (f(2, 3, 4),), "2 4 3"),
    Case("swapaxes", lambda x: x.swapaxes(0, -1), (f(2, 3, 4),), "4 3 2"),
    Case("swapdims", lambda x: x.swapdims(0, -1), (f(2, 3, 4),), "4 3 2"),
    Case("t", lambda x: x.t(), (f(3, 4),), "4 3"),
    Case("T", lambda x: x.T, (f(3, 4),), "4 3"),
    Case("mT", lambda x: x.mT, (f(2, 3, 4),), "2 4 3"),
    Case("movedim", lambda x: x.movedim((0, 1), (-1, 0)), (f(2, 3, 4),), "3 4 2"),
    Case("movedim int", lambda x: x.movedim(0, -1), (f(2, 3, 4),), "3 4 2"),
    Case("unsqueeze", lambda x: x.unsqueeze(-1).unsqueeze(0), (f(3, 4),), "1! 3 4 1!"),
    Case("squeeze", lambda x: x.squeeze(1), (f(3, 1, 4),), "3 4"),
    Case("squeeze all", lambda x: x.squeeze(), (f(1, 3, 1, 4),), "3 4"),
    Case("squeeze nothing", lambda x: x.squeeze(0), (f(3, 4),), "3 4"),
    Case("expand", lambda x: x.expand(5, -1, 6), (f(4, 1),), "5 4 6"),
    Case("expand_as", lambda x, y: x.expand_as(y) * y, (f(4, 1), f(4, 6)), "4 6"),
    Case(
        "repeat_kv", lambda x: x[:, :, None].expand(2, 3, 2, 4).reshape(2, 6, 4), (f(2, 3, 4),), "2 (3*2) 4"
    ),
    Case("repeat", lambda x: x.repeat(2, 1, 3), (f(4, 6),), "2 4 (3*6)"),
    Case("tile", lambda x: x.tile(2), (f(4, 6),), "4 (2*6)"),
    Case("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1), (f(4, 6),), "4 (6*3)"),
    Case("repeat_interleave -1", lambda x: x.repeat_interleave(2, -1), (f(4, 6),), "4 (6*2)"),
    Case("repeat_interleave flat", lambda x: x.repeat_interleave(2), (f(4, 6),), "48!"),
    Case("flip", lambda x: x.flip(-1), (f(4, 6),), "4 6!"),
    Case("roll", lambda x: x.roll(1, 0), (f(4, 6),), "4! 6"),
    Case("roll flat", lambda x: x.roll(1), (f(4, 6),), "4! 6!"),
    Case("pad", lambda x: F.pad(x, (1, 2)), (f(4, 6),), "4 9!"),
    Case("pad value", lambda x: F.pad(x, (0, 0, 1, 0), value=1.0), (f(4, 6),), "5! 6"),
    Case("pad shift", lambda x: F.pad(x, (1, -1)), (f(4, 6),), "4 6!"),
    Case("pad nothing", lambda x: F.pad(x, (0, 0, 1, 1)), (f(4, 6),), "6! 6"),
    Case("unfold", lambda x: x.unfold(1, 3, 1), (f(4, 6),), "4 4! 3!"),
    Case("contiguous", lambda x: x.transpose(0, 1).contiguous().view(12), (f(3, 4),), "(4*3)"),
]

SELECTION = [
    Case("cat", lambda x, y: torch.cat([x, y], -1), (f(4, 6), f(4, 2)), "4 [6|2]"),
    Case("cat self", lambda x: torch.cat([x, x], -1), (f(4, 6),), "4 [6|6]"),
    Case("cat with nothing", lambda x, y: torch.cat([x, y], 0), (f(4, 6), f(0, 6)), "4 6"),
    Case("cat, then add", lambda x, y, z: torch.cat([x, y], 0) + z, (f(2, 6), f(4, 6), f(6, 6)), "[2|4] 6"),
    Case("stack", lambda x, y: torch.stack([x, y], -1), (f(4, 6), f(4, 6)), "4 6 2!"),
    Case("split", lambda x: x.split(3, -1), (f(4, 8),), "4 3"),
    Case("split sizes", lambda x: x.split([2, 5, 1], 0), (f(8, 3),), "2 3"),
    Case("split with nothing", lambda x: x.split([0, 8], 0)[1], (f(8, 3),), None),
    Case("chunk", lambda x: x.chunk(3, -1), (f(4, 8),), "4 3"),
    Case("tensor_split", lambda x: x.tensor_split(3, 1), (f(4, 8),), "4 3"),
    Case("gate and up", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (f(4, 8),), "4 4"),
    Case("rotate half", _rotate_half, (f(4, 6),), "4 [3|3]"),
    Case("rotary", lambda x, c: x * c + _rotate_half(x) * c, (f(4, 6), f(6)), "4 [3|3]"),
    Case("slice", lambda x: x[1:4], (f(6, 3),), "3 3"),
    Case("slice negative", lambda x: x[:, -2:], (f(4, 6),), "4 2"),
    Case("slice empty", lambda x: x[:, 3:3], (f(4, 6),), "4 0!"),
    Case("slice backwards", lambda x: x[:, 5:2], (f(4, 6),), "4 0!"),
    Case("slice whole", lambda x: x[:, :100], (f(4, 6),), "4 6"),
    Case("slice step", lambda x: x[:, 1::2], (f(4, 6),), "4 3"),
    Case("slice steps", lambda x: x[:, ::2] * x[:, 1::2], (f(4, 6),), "4 3"),
    Case("slice step short", lambda x: x[:, 1:5:2], (f(4, 6),), "4 2!"),
    Case("slice step uneven", lambda x: x[:, ::4], (f(4, 6),), "4 2!"),
    Case("slice of heads", lambda x: x.view(4, 3, 4)[..., 1:3].reshape(4, 6), (f(4, 12),), "4 (3*2)"),
    Case("narrow", lambda x: x.narrow(-1, -4, 3), (f(4, 6),), "4 3"),
    Case("select", lambda x: x[:, 2], (f(4, 6),), "4"),
    Case("select negative", lambda x: x[..., -1], (f(4, 6),), "4"),
    Case("unbind", lambda x: x.unbind(-1), (f(4, 3),), "4"),
    Case("index_select", lambda x, i: x.index_select(-1, i), (f(4, 6), ints(3, 0, 3)), "4 3"),
    Case("index", lambda x, i: x[i], (f(6, 4), ints(3, 0, 3)), "3 4"),
    Case("index middle", lambda x, i: x[:, i], (f(4, 6, 5), ints(3, 0)), "4 2 5"),
    Case("index adjacent", lambda x, i: x[:, i, i[:, None]], (f(4, 6, 5), ints(3, 0)), "4 2 2"),
    Case("index apart", lambda x, i: x[i, :, i], (f(4, 5, 4), ints(3, 0, 1)), "3 5"),
    Case("index by computed", lambda x, y: x[_ids(y, 6)], (f(6, 4), f(3)), "3 4"),
    Case("take_along", lambda x, y: x.take_along_dim(_ids(y, 6), 1), (f(4, 6), f(4, 3)), "4 3"),
    Case("gather", lambda x, y: x.gather(-1, _ids(y, 6)), (f(4, 6), f(4, 3)), "4 3"),
    Case("gather fewer", lambda x, y: x.gather(-1, _ids(y, 6)), (f(5, 6), f(4, 3)), "4! 3"),
    Case("scatter", lambda x, y, i: x.scatter(1, i.expand(4, 2), y), (f(4, 6), f(4, 2), ints(0, 3)), "4 6!"),
    Case("scatter value", lambda x, y: x.scatter(1, _ids(y, 6), 1.0), (f(4, 6), f(4, 2)), "4 6!"),
    Case("glu", lambda x: F.glu(x, -1), (f(4, 6),), "4 3"),
    Case("scatter_", lambda x, y: x.clone().scatter_(-1, _ids(y, 6), 1.0), (f(4, 6), f(3, 2)), None),
    Case(
        "scatter_reduce",
        lambda x, y, i: x.scatter_reduce(1, i.expand(4, 3), y, "amax"),
        (f(4, 6), f(4, 3), ints(0, 3, 3)),
        "4 6!",
    ),
    Case("index_add", lambda x, i, y: x.index_add(0, i, y), (f(5, 6), ints(1, 0, 1), f(3, 6)), "5! 6"),
    Case(
        "index_add_", lambda x, i, y: x.clone().index_add_(-1, i, y), (f(6, 5), ints(1, 0), f(6, 2)), "6 5!"
    ),
    Case("index_put", lambda x, i, y: x.index_put((i,), y), (f(5, 6), ints(1, 0), f(2, 6)), None),
    Case("masked_scatter", _scattered, (f(5, 6), f(5, 1), f(5, 6)), None),
    Case("rows by mask", _rows_by_mask, (f(5, 6), ints(1, 0, 3, 0, 2)), None),
    Case("embedding", lambda w, i: F.embedding(i, w), (f(8, 6), ints(1, 7, 4)), "3 6"),
    Case("embedding scaled", lambda w, i: F.embedding(i, w) * 3.0, (f(8, 6), ints(1, 7, 4)), "3 6"),
    Case("embedding plus", lambda w, i, b: F.embedding(i, w) + b, (f(8, 6), ints(1, 7, 4), f(6)), "3 6"),
    Case("embedding computed", lambda w, i: F.embedding((i + 1) % 8, w), (f(8, 6), ints(1, 7, 4)), "3 6"),
]

REDUCTION = [
    Case("sum", lambda x: x.sum(), (f(4, 6),), ""),
    Case("sum dim", lambda x: x.sum(-1), (f(4, 6),), "4"),
    Case("sum keepdim", lambda x: x.sum((0, -1), keepdim=True), (f(4, 6, 3),), "1! 6 1!"),
    Case("sum of heads", lambda x: x.view(3, 4, 2).sum(1), (f(3, 8),), "3 2"),
    Case("sum of a cat", lambda x, y: torch.cat([x, y], -1).sum(-1), (f(4, 6), f(4, 2)), "4"),
    Case("sum of both", lambda x: x.sum(0) + x.sum(1), (f(4, 4),), "4"),
    Case("mean", lambda x: x.mean(-1, keepdim=True), (f(4, 6),), "4 1!"),
    Case("mean all", lambda x: x.mean(), (f(4, 6),), ""),
    Case("max", lambda x: x.max(-1), (f(4, 6),), "4"),
    Case("max all", lambda x: x.max(), (f(4, 6),), ""),
    Case("amin", lambda x: x.amin((0,), keepdim=True), (f(4, 6),), "1! 6"),
    Case("argmax", lambda x: x.argmax(-1), (f(4, 6),), "4"),
    Case("var", lambda x: x.var(-1, correction=0), (f(4, 6),), "4"),
    Case("std", lambda x: x.std(0), (f(4, 6),), "6"),
    Case("var_mean", lambda x: torch.var_mean(x, -1, keepdim=True), (f(4, 6),), "4 1!"),
    Case("prod", lambda x: x.prod(0), (f(4, 6),), "6"),
    Case("any", lambda x: _flags(x).any(-1), (f(4, 6),), "4"),
    Case("all", lambda x: _flags(x).all(), (f(4, 6),), ""),
    Case("logsumexp", lambda x: x.logsumexp(-1), (f(4, 6),), "4"),
    Case("norm", lambda x: x.norm(dim=-1, keepdim=True), (f(4, 6),), "4 1!"),
    Case("vector_norm", lambda x: torch.linalg.vector_norm(x, dim=0), (f(4, 6),), "6"),
    Case("softmax", lambda x: x.softmax(-1), (f(4, 6),), "4 6!"),
    Case("log_softmax", lambda x: F.log_softmax(x, 0), (f(4, 6),), "4! 6"),
    Case("sort", lambda x: x.sort(-1), (f(4, 6),), "4 6!"),
    Case("argsort", lambda x: x.argsort(0, descending=True), (f(4, 6),), "4! 6"),
    Case("cumsum", lambda x: x.cumsum(-1), (f(4, 6),), "4 6!"),
    Case("cumprod", lambda x: x.cumprod(0), (f(4, 6),), "4! 6"),
    Case("cummax", lambda x: x.cummax(1), (f(4, 6),), "4 6!"),
    Case("topk", lambda x: x.topk(2, -1), (f(4, 6),), "4 2!"),
    Case("topk first", lambda x: x.topk(2, 0)[1], (f(4, 6),), "2! 6"),
    Case("tril", lambda x: x.tril(), (f(3, 4, 6),), "3 4! 6!"),
    Case("triu", lambda x: x.triu(1), (f(3, 4, 6),), "3 4! 6!"),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (f(4, 6), f(6), f(6)), "4 6!"),
    Case("layer_norm bare", lambda x: F.layer_norm(x, (5, 6)), (f(4, 5, 6),), "4 5! 6!"),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (f(4, 6), f(6)), "4 6!"),
    Case("head norm", lambda x, w: F.rms_norm(x.view(3, 4, 2), (2,), w), (f(3, 8), f(2)), "3 4 2!"),
    Case("batch_norm", _batch_norm, (f(2, 4, 5), f(4), f(4), f(4), f(4)), "2 4 5"),
    Case("batch_norm bare", lambda x, m, v: F.batch_norm(x, m, v.abs()), (f(3, 4), f(4), f(4)), "3 4"),
    Case(
        "batch_norm of itself",
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
        (f(3, 4, 5), f(4)),
        "3! 4 5!",
    ),
    Case("weight_norm", lambda v, g: torch._weight_norm(v, g, 2), (f(4, 3, 5), f(1, 1, 5)), "4! 3! 5"),
    Case("weight_norm first", lambda v, g: torch._weight_norm(v, g, 0), (f(4, 3), f(4, 1)), "4 3!"),
    Case("weight_norm of all", lambda v, g: torch._weight_norm(v, g, -1), (f(4, 3), f()), "4! 3!"),
    Case("group_norm", lambda x: F.group_norm(x, 2), (f(3, 4, 5),), "3! 4! 5!"),
    Case("nonzero", lambda x: F.one_hot(_ids(x, 3), 3), (f(4, 6),), None),
]


def _assign(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 2] = y
    return x


def _attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


ATTENTION = [
    Case("attention", _attention(), (f(2, 4, 3, 5), f(2, 4, 6, 5), f(2, 4, 6, 7)), "2 4 3! 7"),
    Case("attention causal", _attention(is_causal=True), (f(4, 3, 5), f(4, 3, 5), f(4, 3, 5)), "4 3! 5"),
    Case(
        "attention grouped",
        _attention(enable_gqa=True),
        (f(2, 6, 3, 5), f(2, 3, 4, 5), f(2, 3, 4, 5)),
        "2 (3*2) 3! 5",
    ),
    Case(
        "attention one head",
        _attention(enable_gqa=True),
        (f(2, 6, 3, 5), f(2, 1, 4, 5), f(2, 1, 4, 5)),
        "2 6 3! 5",
    ),
    Case("attention broadcast", _attention(), (f(2, 6, 3, 5), f(2, 1, 4, 5), f(2, 1, 4, 5)), "2 6 3! 5"),
    Case("attention broadcast q", _attention(), (f(1, 6, 3, 5), f(2, 6, 4, 5), f(2, 6, 4, 5)), None),
    Case(
        "attention mask",
        _attention(),
        (f(2, 4, 3, 5), f(2, 4, 6, 5), f(2, 4, 6, 5), f(2, 1, 3, 6)),
        "2 4 3! 5",
    ),
    Case(
        "attention bias",
        _attention(scale=0.3),
        (f(2, 4, 3, 5), f(2, 4, 6, 5), f(2, 4, 6, 5), f(4, 3, 6)),
        "2 4 3! 5",
    ),
]

CASES = [*POINTWISE, *CONTRACTION, *VIEWS, *SELECTION, *REDUCTION, *ATTENTION]
