"""Convolutions: grouped products over channels, with positions that must be replicated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import dim_trees

if TYPE_CHECKING:
    from ...tracing.tape import Op
    from ..rule_builder import Arguments, Builder


def convolution(b: Builder, op: Op, args: Arguments) -> None:
    """``input [N, G*I, ...]``, ``weight [G*O, I, ...]`` (transposed: ``[G*I, O, ...]``) to ``[N, G*O, ...]``.

    The group count is an argument of the call: sharding G means that an attribute shrinks.
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


RULES = {"aten.convolution": convolution}
