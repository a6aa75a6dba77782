"""Operators that make tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import dim_trees

if TYPE_CHECKING:
    from ..tracing.tape import Op
    from .rule_builder import Arguments, Builder


def like_zeros(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``zeros_like``, or ``new_zeros`` of the same shape: any part of zeros is zeros."""
    _constant(b, op, zero=True)


def constant(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a tensor of one value: any dim may be sharded."""
    value = args["fill_value"]
    _constant(b, op, zero=value == 0 and value is not None)


def _constant(b: Builder, op: Op, zero: bool) -> None:
    target = op.outputs[0]
    shape = b.shape(target)
    like = op.base.endswith("_like") and op.inputs
    dims = b.tensor(op.inputs[0]) if like else [dim_trees.leaf(n) for n in shape]
    b.set(target, dims, b.free_partial() if zero else None)


def sequence(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``arange``, random numbers, ``eye`` and the like, whose values depend on the position."""
    b.never_partial(*op.inputs)
    for tid in op.outputs:
        b.set(tid, b.blocked(*b.shape(tid)))


def needs_all(b: Builder, op: Op, args: Arguments) -> None:
    """Require that every dim of the operands is replicated.

    Counts, sorted positions, data-dependent sizes; ``question``, where Python code asks for values;
    ``opaque``, a module that could not be traced.
    """
    b.block(*op.inputs)
    sequence(b, op, args)


RULES = {
    **dict.fromkeys(
        (
            "aten.histc",
            "aten.bincount",
            "aten._is_all_true",
            "aten._is_any_true",
            "aten.index_copy",
            "aten.nonzero",
            "aten.one_hot",
            "aten.searchsorted",
            "aten.bucketize",
            "aten._unique2",
            "aten.unique_dim",
            "aten.unique_consecutive",
            "aten.multinomial",
            "aten.where.default",
            "aten.masked_select",
            "aten.equal",
            "question",
            "opaque",
        ),
        needs_all,
    ),
    **dict.fromkeys(("aten.zeros", "aten.zeros_like", "aten.new_zeros"), like_zeros),
    **dict.fromkeys(
        (
            "aten.ones",
            "aten.ones_like",
            "aten.new_ones",
            "aten.full",
            "aten.full_like",
            "aten.new_full",
            "aten.empty",
            "aten.empty_like",
            "aten.new_empty",
            "aten.scalar_tensor",
            "aten.empty_strided",
            "aten.new_empty_strided",
        ),
        constant,
    ),
    **dict.fromkeys(
        ("aten.arange", "aten.linspace", "aten.eye", "aten.rand", "aten.randn", "aten.randint"), sequence
    ),
}
