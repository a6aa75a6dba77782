"""Matrix products and other contractions: convolutions, attention, and the sum over experts.

Most are an einsum over labelled dims. A convolution is a grouped product over channels, whose positions must
be replicated. Attention is one operator, whose heads may be sharded. A module of experts is one operator, a
sum over the experts, whose dim may be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import dim_trees
from .composite_modules import EXPERTS
from .dim_trees import Node
from .operator_traits import traits

if TYPE_CHECKING:
    from ..tracing.tape import Op
    from .analysis import Partial
    from .composite_modules import ExpertSite
    from .rule_builder import Arguments, Builder


def einsum_dims(
    b: Builder, operands: Sequence[tuple[int, Sequence[str]]], output: Sequence[str]
) -> tuple[list[Node], Partial]:
    """Return dims and state of a product of one or two operands whose dims carry labels.

    Equal labels are the same dim (a size of 1 broadcasts); labels that are not in ``output`` are
    contracted.
    """
    by_label: dict[str, Node] = {}
    for tid, labels in operands:
        for label, dim in zip(labels, b.tensor(tid), strict=True):
            merged = by_label.get(label)
            if merged is None or merged.size == 1:
                by_label[label] = dim
            elif dim.size != 1:
                dim_trees.unify(merged, dim)
    shared = set.intersection(*(set(labels) for _, labels in operands)) if len(operands) == 2 else set()
    if any(by_label[label].size > 1 for label in shared.intersection(output)):
        b.result.stacks.update(tid for tid, _ in operands)
    for tid, labels in operands:
        if tid in b.from_stack and len(labels) > 1:
            _keep_aligned(b, tid)
    contracted = [dim for label, dim in by_label.items() if label not in output]
    for tid, _ in operands:
        if tid in b.parametric:
            b.never_partial(tid)
    if len(operands) == 2 and b.partial(operands[0][0]) is b.partial(operands[1][0]):
        b.never_partial(operands[0][0])
    state = b.contract(contracted, *(tid for tid, _ in operands))
    b.work(list(by_label.values()))
    return [by_label[label] for label in output], state


def _add_bias(b: Builder, dims: Sequence[Node], state: Partial, bias: int | None) -> Partial:
    if bias is None:
        return state
    terms = b.tensor(bias)
    for dim, term in zip(dims[len(dims) - len(terms) :], terms, strict=True):
        if term.size != 1:
            dim_trees.unify(dim, term)
    return b.same_partial(state, b.partial(bias))


@traits(is_product=True)
def linear(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``x [..., I] @ weight [O, I].T + bias [O]``."""
    x, weight = op.inputs[0], op.inputs[1]
    lead = [f"b{i}" for i in range(len(b.shape(x)) - 1)]
    out = ["o"] * (len(b.shape(weight)) - 1)
    dims, state = einsum_dims(b, [(x, [*lead, "i"]), (weight, [*out, "i"])], [*lead, *out])
    b.set(op.outputs[0], dims, _add_bias(b, dims, state, args.tensor("bias")))


@traits(is_product=True)
def matmul(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``torch.matmul`` and ``mm``/``bmm``/``mv``/``dot``, whose batch dims broadcast."""
    dims, state = _matmul(b, op.inputs[0], op.inputs[1])
    b.set(op.outputs[0], dims, state)


def _matmul(b: Builder, x: int, y: int) -> tuple[list[Node], Partial]:
    nx, ny = len(b.shape(x)), len(b.shape(y))
    lead = [f"b{i}" for i in range(max(nx, ny, 2) - 2)]
    left = [*lead[len(lead) - max(nx - 2, 0) :], "m", "k"] if nx > 1 else ["k"]
    right = [*lead[len(lead) - max(ny - 2, 0) :], "k", "n"] if ny > 1 else ["k"]
    out = lead + (["m"] if nx > 1 else []) + (["n"] if ny > 1 else [])
    return einsum_dims(b, [(x, left), (y, right)], out)


@traits(is_product=True)
def addmm(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``bias + x @ y`` (``addmm``, ``baddbmm``)."""
    bias, x, y = op.inputs[:3]
    dims, state = _matmul(b, x, y)
    b.set(op.outputs[0], dims, _add_bias(b, dims, state, bias))


@traits(is_product=True)
def einsum(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``torch.einsum`` of one or two operands, without repeated labels in an operand."""
    equation = args["equation"].replace(" ", "")
    left, _, output = equation.partition("->")
    terms = left.split(",")
    simple = "->" in equation and len(terms) <= 2 and all(len(set(t)) == len(t) for t in terms)
    if not simple or "." in equation:
        b.block(*op.inputs)
        b.set(op.outputs[0], b.blocked(*b.shape(op.outputs[0])))
        return
    dims, state = einsum_dims(b, list(zip(op.inputs, terms, strict=True)), list(output))
    b.set(op.outputs[0], dims, state)


@traits(is_product=True)
def outer(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``outer(x, y)``."""
    dims, state = einsum_dims(b, [(op.inputs[0], ["m"]), (op.inputs[1], ["n"])], ["m", "n"])
    b.set(op.outputs[0], dims, state)


ALIGNED = 8
"""Elements of a row that grouped kernels read at a time, 16 bytes of two-byte numbers. A model may be loaded
in another dtype than it is traced in."""


def _keep_aligned(b: Builder, weight: int) -> None:
    """Keep shares of a stack of matrices in units that grouped kernels read; with others these raise.

    Whether a loop over the matrices runs, or a kernel, is decided when the model is loaded: the plan must be
    right for both.
    """
    for dim in b.tensor(weight)[-2:]:
        unit = math.gcd(dim.size, ALIGNED)
        if unit > 1:
            _, inner = b.split(dim, unit)
            b.block_dim(inner)


@traits(is_product=True, is_grouped=True, picks=True)
def grouped_mm(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze rows ``x [S, I]``, sorted by group, times their group's matrix of ``weight [E, I, O]``."""
    x, weight = op.inputs[0], op.inputs[1]
    b.block_dim(b.tensor(x)[0])
    b.block_dim(b.tensor(weight)[0])
    b.never_partial(*op.inputs[2:])
    for tid in op.inputs[2:]:
        b.block(tid)
    _keep_aligned(b, weight)
    b.result.stacks.add(weight)
    dims, state = einsum_dims(b, [(x, ["s", "i"]), (weight, ["s1", "i", "o"])], ["s", "o", "s1"])
    b.set(op.outputs[0], dims[:2], state)


def convolution(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a product of ``input [N, G*I, ...]`` and ``weight [G*O, I, ...]`` to ``[N, G*O, ...]``.

    A transposed weight is ``[G*I, O, ...]``. The group count is an argument of the call: sharding G means
    that an attribute shrinks.
    """
    source, weight, target = op.inputs[0], op.inputs[1], op.outputs[0]
    groups, shape = args["groups"], b.shape(weight)
    batched = len(b.shape(source)) == len(shape)
    channel = 1 if batched else 0
    dims, kernel = b.tensor(source), b.tensor(weight)
    for dim in (*dims[channel + 1 :], *kernel[2:]):
        b.block_dim(dim)
    outer, inner = b.split(dims[channel], b.shape(source)[channel] // groups)
    outer_weight, rest = b.split(kernel[0], shape[0] // groups)
    dim_trees.unify(outer, outer_weight)
    summed, made = (rest, kernel[1]) if args["transposed"] else (kernel[1], rest)
    dim_trees.unify(inner, summed)
    b.never_partial(weight)
    state = b.contract([inner], source)
    output = dim_trees.product([outer, made])
    bias = args.tensor("bias")
    if bias is not None:
        dim_trees.unify(b.tensor(bias)[0], output)
        state = b.same_partial(state, b.partial(bias))
    b.work([dims[0] if batched else dim_trees.leaf(1), outer, inner, made])
    lead = [dims[0]] if batched else []
    b.set(target, [*lead, output, *b.blocked(*b.shape(target)[channel + 1 :])], state)


def experts(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``sum over k of weights[..., k] * expert[ids[..., k]](x)``.

    Only the dim that counts experts may be sharded.
    """
    site: ExpertSite = op.kwargs["site"]
    b.block(*site.where.inputs)
    count = dim_trees.leaf(site.sharding.num_experts)
    for tid in site.where.parameters:
        first, *rest = b.tensor(tid)
        outer, inner = b.split(first, first.size // count.size)
        dim_trees.unify(count, outer)
        for dim in (inner, *rest):
            b.block_dim(dim)
        b.never_partial(tid)
    b.work([count])
    target = op.outputs[0]
    b.set(target, b.blocked(*b.shape(target)), b.contract([count]))
    b.result.experts.append((site, count))


@traits(is_attention=True)
def attention(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``scaled_dot_product_attention``: query [.., H, L, E], key [.., G, S, E], value [.., G, S, V].

    With grouped heads, H is G times the group, G being the outer factor.
    """
    query, key, value = op.inputs[:3]
    mask = args.tensor("attn_mask")
    b.never_partial(*op.inputs)
    q, k, v = (b.tensor(t) for t in (query, key, value))
    for dim in (*q[-2:], *k[-2:], v[-2]):
        b.block_dim(dim)
    dim_trees.unify(k[-2], v[-2])
    dim_trees.unify(q[-1], k[-1])
    for x, y in zip(k[:-2], v[:-2], strict=True):
        dim_trees.unify(x, y)
    for index, (x, y) in enumerate(zip(q[:-2], k[:-2], strict=True)):
        if x.size == y.size or y.size == 1:
            dim_trees.unify(x, y)
        elif index == len(q) - 3 and args["enable_gqa"]:
            outer, _ = b.split(x, x.size // y.size)
            dim_trees.unify(outer, y)
        else:
            b.block_dim(x)
            b.block_dim(y)
    if mask is not None:
        scores, masked = [*q[:-1], k[-2]], b.tensor(mask)
        for dim, score in zip(masked, scores[len(scores) - len(masked) :], strict=True):
            if dim.size == score.size:
                dim_trees.unify(dim, score)
            else:
                b.block_dim(dim)
    lead = [x if x.size >= y.size else y for x, y in zip(q[:-2], k[:-2], strict=True)]
    b.work([*q, k[-2]])
    b.set(op.outputs[0], [*lead, q[-2], v[-1]])


RULES = {
    "aten.linear": linear,
    **dict.fromkeys(("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot"), matmul),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm"), addmm),
    "aten.einsum": einsum,
    "aten.outer": outer,
    **dict.fromkeys(("aten._grouped_mm", "transformers.grouped_mm_fallback"), grouped_mm),
    "aten.convolution": convolution,
    "aten.scaled_dot_product_attention": attention,
    EXPERTS: experts,
}
