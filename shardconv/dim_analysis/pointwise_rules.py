"""Operators that compute each position from the same position of their operands (with broadcasting)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import dim_trees
from .dim_trees import Node
from .operator_traits import traits
from .rule_builder import NotCovered

if TYPE_CHECKING:
    from ..tracing.tape import Op
    from .rule_builder import Arguments, Builder


def broadcast(b: Builder, tids: list[int], rank: int) -> list[Node]:
    """Return the dims of a broadcast result: equal sizes are the same dim, and a 1 gives way."""
    out: list[Node | None] = [None] * rank
    for tid in tids:
        dims = b.tensor(tid)
        for index, dim in enumerate(dims, start=rank - len(dims)):
            current = out[index]
            if current is None or (current.size == 1 and dim.size != 1):
                out[index] = dim
            elif dim.size != 1:
                dim_trees.unify(current, dim)
    return [d if d is not None else dim_trees.leaf(1) for d in out]


def _set_all(b: Builder, op: Op, partial: object = None) -> None:
    for tid in op.outputs:
        dims = broadcast(b, list(op.inputs), len(b.shape(tid)))
        b.set(tid, _expanded(b, dims, tid), partial)  # type: ignore[arg-type]


def _expanded(b: Builder, dims: list[Node], tid: int) -> list[Node]:
    return [d if d.size == n else dim_trees.leaf(n) for d, n in zip(dims, b.shape(tid), strict=True)]


def nonlinear(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze any other function of each position, of which no operand may be partial."""
    b.never_partial(*op.inputs)
    _set_all(b, op)


@traits(passes=True)
def linear(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``f(x)`` with ``f`` linear."""
    _set_all(b, op, b.partial(op.inputs[0]))


def additive(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a sum: all terms are partial or none is; a number is never partial."""
    if len(op.inputs) == 1 and (args["other"] != 0):
        b.never_partial(*op.inputs)
    _set_all(b, op, b.same_partial(*(b.partial(t) for t in op.inputs)))


def multiplicative(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a product with a number or with another tensor."""
    if len(op.inputs) == 1:
        linear(b, op, args)
        return
    for tid in op.inputs:
        b.tensor(tid)
    _set_all(b, op, b.bilinear_partial(op.inputs[0], op.inputs[1]))


@traits(passes=True)
def cast(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze another dtype, which is linear unless it drops fractions."""
    (linear if _keeps_fractions(b, op.inputs[0], op.outputs[0]) else nonlinear)(b, op, args)


def _keeps_fractions(b: Builder, source: int, target: int) -> bool:
    before, after = b.tape.tensors[source].dtype, b.tape.tensors[target].dtype
    return after.is_floating_point or after.is_complex or after == before


def divisive(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a division, which is linear in the dividend, and only if it does not round."""
    if not op.inputs:
        raise NotCovered  # a quotient of two numbers, in the form for tensors
    b.never_partial(*op.inputs[1:])
    if args.tensor("self") is None or args["rounding_mode"]:
        b.never_partial(*op.inputs)
    _set_all(b, op, b.partial(op.inputs[0]))


def masked_fill(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``masked_fill``, which is linear if positions are filled with zero."""
    b.never_partial(*op.inputs[1:])
    if args["value"] != 0:
        b.never_partial(op.inputs[0])
    _set_all(b, op, b.partial(op.inputs[0]))


def where(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``where``: a choice between two tensors, both partial or neither. With only a condition, it
    returns positions."""
    condition = args.tensor("condition")
    if op.name == "aten.where.default":
        b.block(*op.inputs)
        for tid in op.outputs:
            b.set(tid, b.blocked(*b.shape(tid)))
        return
    if condition is None or args.tensor("self") is None or args.tensor("other") is None:
        nonlinear(b, op, args)
        return
    b.never_partial(condition)
    _set_all(b, op, b.same_partial(*(b.partial(t) for t in op.inputs if t != condition)))


def copy(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``self.copy_(src)``, the value of ``src`` in the shape of ``self``, and ``set_`` of one
    shape."""
    if op.name.startswith("aten.set_") and [b.shape(t) for t in op.inputs] != [b.shape(op.outputs[0])] * 2:
        raise NotCovered
    target, source = op.inputs[0], op.inputs[1]
    dims = broadcast(b, [target, source], len(b.shape(target)))
    if not _keeps_fractions(b, source, op.outputs[0]):
        b.never_partial(source)
    b.set(op.outputs[0], dims, b.partial(source))


def alias_write(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a tensor whose memory was written through another, and which keeps its dims.

    It may be partial only if all of it was written."""
    old, written = op.inputs
    overwrites_all = op.args[0]
    if overwrites_all and b.shape(old) == b.shape(written):
        b.set(op.outputs[0], b.tensor(old), b.partial(written))
        return
    b.never_partial(old, written)
    b.set(op.outputs[0], b.tensor(old))


def zero_fill(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze zeros that are written in place."""
    b.set(op.outputs[0], b.tensor(op.inputs[0]), b.free_partial())


RULES = {
    **dict.fromkeys(
        (
            "aten.alias",
            "aten.detach",
            "aten.clone",
            "aten.contiguous",
            "aten.neg",
            "aten.positive",
            "aten.lift_fresh",
            "aten.lift_fresh_copy",
            "aten.real",
            "aten.conj",
            "aten.resolve_conj",
            "aten.dropout",
            "aten.fill.Tensor",
        ),
        linear,
    ),
    **dict.fromkeys(("aten.to", "aten._to_copy"), cast),
    "aten.add": additive,
    "aten.sub": additive,
    "aten.mul": multiplicative,
    "aten.div": divisive,
    "aten.masked_fill": masked_fill,
    "aten.where": where,
    **dict.fromkeys(("aten.copy_", "aten.set_"), copy),
    "aten.zero_": zero_fill,
    "alias_write": alias_write,
    **dict.fromkeys(
        (
            "aten.fill",
            "aten.silu",
            "aten.log_sigmoid",
            "aten.hardswish",
            "aten.gelu",
            "aten.bernoulli",
            "aten.nan_to_num",
            "aten.floor_divide",
            "aten.polar",
            "aten.complex",
        ),
        nonlinear,
    ),
}
