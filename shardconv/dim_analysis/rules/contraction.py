"""Matrix products and everything that is one: each is an einsum over labelled dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import dim_trees
from ..dim_trees import Node

if TYPE_CHECKING:
    from ...tracing.tape import Op
    from ..analysis import Partial
    from ..rule_builder import Arguments, Builder


def einsum_dims(
    b: Builder, operands: Sequence[tuple[int, Sequence[str]]], output: Sequence[str]
) -> tuple[list[Node], Partial]:
    """Dims and state of a product of one or two operands whose dims carry labels.

    Equal labels are the same dim (a size of 1 broadcasts); labels that are not in ``output`` are
    contracted.
    """
    by_label: dict[str, Node] = {}
    for tid, labels in operands:
        for label, dim in zip(labels, b.tensor(tid), strict=True):
            known = by_label.get(label)
            if known is None or known.size == 1:
                by_label[label] = dim
            elif dim.size != 1:
                dim_trees.unify(known, dim)
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


def linear(b: Builder, op: Op, args: Arguments) -> None:
    """``x [..., I] @ weight [O, I].T + bias [O]``."""
    x, weight = op.inputs[0], op.inputs[1]
    lead = [f"b{i}" for i in range(len(b.shape(x)) - 1)]
    out = ["o"] * (len(b.shape(weight)) - 1)
    dims, state = einsum_dims(b, [(x, [*lead, "i"]), (weight, [*out, "i"])], [*lead, *out])
    b.set(op.outputs[0], dims, _add_bias(b, dims, state, args.tensor("bias")))


def matmul(b: Builder, op: Op, args: Arguments) -> None:
    """``torch.matmul`` and ``mm``/``bmm``/``mv``/``dot``, batch dims broadcast."""
    dims, state = _matmul(b, op.inputs[0], op.inputs[1])
    b.set(op.outputs[0], dims, state)


def _matmul(b: Builder, x: int, y: int) -> tuple[list[Node], Partial]:
    nx, ny = len(b.shape(x)), len(b.shape(y))
    lead = [f"b{i}" for i in range(max(nx, ny, 2) - 2)]
    left = [*lead[len(lead) - max(nx - 2, 0) :], "m", "k"] if nx > 1 else ["k"]
    right = [*lead[len(lead) - max(ny - 2, 0) :], "k", "n"] if ny > 1 else ["k"]
    out = lead + (["m"] if nx > 1 else []) + (["n"] if ny > 1 else [])
    return einsum_dims(b, [(x, left), (y, right)], out)


def addmm(b: Builder, op: Op, args: Arguments) -> None:
    """``bias + x @ y`` (``addmm``, ``baddbmm``)."""
    bias, x, y = op.inputs[:3]
    dims, state = _matmul(b, x, y)
    b.set(op.outputs[0], dims, _add_bias(b, dims, state, bias))


def einsum(b: Builder, op: Op, args: Arguments) -> None:
    """``torch.einsum`` of one or two operands, without repeated labels in an operand."""
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


def outer(b: Builder, op: Op, args: Arguments) -> None:
    """``outer(x, y)``."""
    dims, state = einsum_dims(b, [(op.inputs[0], ["m"]), (op.inputs[1], ["n"])], ["m", "n"])
    b.set(op.outputs[0], dims, state)


ALIGNED = 8
"""Elements of a row that grouped kernels read at a time, 16 bytes of two-byte numbers. A model may be loaded
in another dtype than it is traced in."""


def _keep_aligned(b: Builder, weight: int) -> None:
    """Shares of a stack of matrices come in units that grouped kernels read; with others these raise.

    Whether a loop over the matrices runs, or a kernel, is decided when the model is loaded: the plan must be
    right for both.
    """
    for dim in b.tensor(weight)[-2:]:
        unit = math.gcd(dim.size, ALIGNED)
        if unit > 1:
            _, inner = b.split(dim, unit)
            b.block_dim(inner)


def grouped_mm(b: Builder, op: Op, args: Arguments) -> None:
    """Rows ``x [S, I]``, sorted by group, times their group's matrix of ``weight [E, I, O]``."""
    x, weight = op.inputs[0], op.inputs[1]
    b.block_dim(b.tensor(x)[0])
    b.block_dim(b.tensor(weight)[0])
    b.never_partial(*op.inputs[2:])
    for tid in op.inputs[2:]:
        b.block(tid)
    _keep_aligned(b, weight)
    dims, state = einsum_dims(b, [(x, ["s", "i"]), (weight, ["s1", "i", "o"])], ["s", "o", "s1"])
    b.set(op.outputs[0], dims[:2], state)


RULES = {
    "aten.linear": linear,
    **dict.fromkeys(("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot"), matmul),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm"), addmm),
    "aten.einsum": einsum,
    "aten.outer": outer,
    **dict.fromkeys(("aten._grouped_mm", "transformers.grouped_mm_fallback"), grouped_mm),
}
