"""Operators that take parts of tensors or lay them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..tracing.tape import Mark, Ref
from . import dim_trees
from .dim_trees import Node
from .operator_traits import traits
from .pointwise_rules import broadcast

if TYPE_CHECKING:
    from ..tracing.tape import Op
    from .rule_builder import Arguments, Builder

_OF_EACH_VALUE = frozenset(
    f"aten.{name}" for name in ("alias", "bitwise_not", "clone", "contiguous", "detach", "logical_not", "to")
)
"""Operators that make a mask of each value of another one, in its shape."""


def cat(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze tensors that are laid end to end along one dim; all others are the same."""
    tids = [t for t in args.tensors("tensors") if b.shape(t) != (0,)]
    target = op.outputs[0]
    if not tids:
        b.set(target, b.blocked(*b.shape(target)))
        return
    rank = len(b.shape(target))
    dim = args["dim"] % rank
    dims = list(b.tensor(tids[0]))
    for tid in tids[1:]:
        for index, other in enumerate(b.tensor(tid)):
            if index != dim:
                dim_trees.unify(dims[index], other)
    dims[dim] = dim_trees.concatenation([b.tensor(t)[dim] for t in tids])
    b.set(target, dims, b.same_partial(*(b.partial(t) for t in tids)))


def stack(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``stack``: a new dim, replicated, counts the tensors."""
    tids = args.tensors("tensors")
    target = op.outputs[0]
    dims = broadcast(b, tids, len(b.shape(tids[0])))
    position = args["dim"] % (len(dims) + 1)
    dims.insert(position, dim_trees.leaf(len(tids), True))
    b.set(target, dims, b.same_partial(*(b.partial(t) for t in tids)))


def split(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``split``, ``chunk``, ``split_with_sizes`` and ``tensor_split``: consecutive segments of a
    dim."""
    source = op.inputs[0]
    dims = list(b.tensor(source))
    dim = args["dim"] % len(dims)
    parts = b.cut(dims[dim], [b.shape(t)[dim] for t in op.outputs])
    for tid, part in zip(op.outputs, parts, strict=True):
        b.set(tid, [*dims[:dim], part, *dims[dim + 1 :]], b.partial(source))


def gated(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``glu``: the first half of a dim times the sigmoid of the second; both are sharded alike."""
    source = op.inputs[0]
    b.never_partial(source)
    dims = list(b.tensor(source))
    dim = args["dim"] % len(dims)
    half = dims[dim].size // 2
    first, second = b.cut(dims[dim], [half, half])
    dim_trees.unify(first, second)
    dims[dim] = first
    b.set(op.outputs[0], dims)


def slice_(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``slice``: a segment, or every n-th position."""
    source = op.inputs[0]
    dims = list(b.tensor(source))
    dim = args["dim"] % len(dims)
    start, stop, step = slice(args["start"], args["end"], args["step"]).indices(dims[dim].size)
    dims[dim] = _segment(b, dims[dim], start, max(start, stop), step)
    b.set(op.outputs[0], dims, b.partial(source))


def _segment(b: Builder, dim: Node, start: int, stop: int, step: int) -> Node:
    size = dim.size
    if (start, stop, step) == (0, size, 1):
        return dim
    if stop == start:
        return dim_trees.leaf(0, True)
    if step == 1:
        sizes = [n for n in (start, stop - start, size - stop) if n]
        return b.cut(dim, sizes)[1 if start else 0]
    if size % step == 0 and start < step and stop > size - step + start:
        outer, inner = b.split(dim, step)
        b.block_dim(inner)
        return outer
    b.block_dim(dim)
    return dim_trees.leaf(len(range(start, stop, step)), True)


def narrow(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``narrow``."""
    source = op.inputs[0]
    dims = list(b.tensor(source))
    dim = args["dim"] % len(dims)
    start = args["start"]
    if isinstance(start, Ref):
        b.block_dim(dims[dim])
        dims[dim] = dim_trees.leaf(args["length"], True)
    else:
        start %= max(dims[dim].size, 1)
        dims[dim] = _segment(b, dims[dim], start, start + args["length"], 1)
    b.set(op.outputs[0], dims, b.partial(source))


@traits(picks=True)
def select(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze one position of a dim, which must be replicated."""
    source = op.inputs[0]
    dims = list(b.tensor(source))
    b.block_dim(dims.pop(args["dim"]))
    b.set(op.outputs[0], dims, b.partial(source))
    if args["dim"] == 0:
        b.take_from_stack(source, op.outputs[0])


@traits(picks=True)
def unbind(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze every position of a dim, which must be replicated."""
    source = op.inputs[0]
    dims = list(b.tensor(source))
    b.block_dim(dims.pop(args["dim"]))
    for tid in op.outputs:
        b.set(tid, dims, b.partial(source))


def embedding(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze rows of a table, which may be sharded if the ids enter this module at a mark."""
    table, ids = op.inputs[0], op.inputs[1]
    rows, width = b.tensor(table)
    target = op.outputs[0]
    b.never_partial(ids)
    dims = [*b.tensor(ids), width]
    mark = b.mark_of.get(ids)
    enters = mark is not None and mark.call == op.call and not mark.is_output and op.call in b.lookup_calls
    # Out-of-shard ids look up row 0, and would count where the gradient of a row is divided by its frequency.
    counts = bool(args["scale_grad_by_freq"])
    if mark is None or not enters or not b.is_parameter(table) or counts:
        b.block_dim(rows)
        b.set(target, dims, b.partial(table))
        return
    b.set(target, dims, b.contract([rows], table))
    b.lookup(mark, table, target)


@traits(picks=True)
def index_select(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze positions of a dim, which must be replicated, by ids."""
    source = op.inputs[0]
    dims = list(b.tensor(source))
    dim = args["dim"] % len(dims)
    b.never_partial(op.inputs[1])
    b.block_dim(dims[dim])
    dims[dim] = b.tensor(op.inputs[1])[0] if b.tensor(op.inputs[1]) else dim_trees.leaf(1)
    b.set(op.outputs[0], dims, b.partial(source))


@traits(picks=True)
def index(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``x[i, :, j]``: indexed dims must be replicated, and the others stay."""
    source, target = op.inputs[0], op.outputs[0]
    dims = list(b.tensor(source))
    indices: Sequence[Any] = args["indices"]
    tids = [i.tid for i in indices if isinstance(i, Ref)]
    b.never_partial(*tids)
    if any(b.tape.tensors[t].dtype.is_floating_point is False and _is_mask(b, t) for t in tids):
        b.block(source, *tids)
        b.set(target, _full_rows(b, source, indices, target) or b.blocked(*b.shape(target)))
        return
    picked = [p for p, i in enumerate(indices) if isinstance(i, Ref)]
    for p in picked:
        b.block_dim(dims[p])
    common = broadcast(b, tids, max(len(b.shape(t)) for t in tids))
    adjacent = picked == list(range(picked[0], picked[-1] + 1))
    position = picked[0] if adjacent else 0
    remaining = [d for p, d in enumerate(dims) if p not in picked]
    b.set(target, [*remaining[:position], *common, *remaining[position:]], b.partial(source))
    if picked == [0]:
        b.take_from_stack(source, target)


def _full_rows(b: Builder, source: int, indices: Sequence[Any], picked: int) -> list[Node]:
    """Return the dim of the rows that a mask picks, if it picks only full rows; otherwise an empty list.

    The mask has one value for each row, expanded to the shape of the tensor from which it picks.
    """
    if len(indices) != 1 or not isinstance(indices[0], Ref) or not _is_mask(b, indices[0].tid):
        return []
    mask, shape, width = indices[0].tid, b.shape(picked), b.shape(source)[-1] if b.shape(source) else 0
    if b.shape(mask) != b.shape(source) or len(shape) != 1 or not width or shape[0] % width:
        return []
    if not _is_same_in_rows(b, mask):
        return []
    dim_trees.unify(b.tensor(mask)[-1], b.tensor(source)[-1])
    return [dim_trees.product([dim_trees.leaf(shape[0] // width, True), b.tensor(source)[-1]])]


def _is_same_in_rows(b: Builder, tid: int) -> bool:
    """Return whether a mask is one value all along its last dim: one for each row was expanded."""
    while (event := b.made_by.get(tid)) is not None:
        if isinstance(event, Mark):
            tid = event.source
        elif event.name.startswith("aten.expand"):
            return b.shape(event.inputs[0])[-1:] == (1,)
        elif event.base in _OF_EACH_VALUE:
            tid = event.inputs[0]
        else:
            return False
    return False


def _is_mask(b: Builder, tid: int) -> bool:
    return b.tape.tensors[tid].dtype in (torch.bool, torch.uint8)


def gather(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``gather`` along one dim by ids; the others are the same if sizes agree."""
    source, target = op.inputs[0], op.outputs[0]
    ids = args.tensor("index")
    assert ids is not None
    dims, positions = list(b.tensor(source)), list(b.tensor(ids))
    b.never_partial(ids)
    for i, (x, y) in enumerate(zip(dims, positions, strict=True)):
        if i == args["dim"] % len(dims):
            b.block_dim(x)
        elif x.size != y.size:
            b.block_dim(x)
            b.block_dim(y)
        else:
            dim_trees.unify(x, y)
    b.set(target, positions, b.partial(source))


def scatter(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``scatter``, ``scatter_add`` and ``scatter_reduce``: writes along one dim by ids."""
    source, target = op.inputs[0], op.outputs[0]
    dims = list(b.tensor(source))
    tensors = [t for t in (args.tensor("index"), args.tensor("src")) if t is not None]
    b.never_partial(*op.inputs)
    for tid in tensors:
        for i, (x, y) in enumerate(zip(dims, b.tensor(tid), strict=True)):
            if i == args["dim"] % len(dims) or x.size != y.size:
                b.block_dim(x)
                b.block_dim(y)
            else:
                dim_trees.unify(x, y)
    b.block_dim(dims[args["dim"]])
    b.set(target, dims)


def index_add(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``index_add``: rows are added at ids; it is linear in both."""
    source, target = op.inputs[0], op.outputs[0]
    ids, added = args.tensor("index"), args.tensor("source")
    assert ids is not None
    assert added is not None
    b.block(ids)
    dims = list(b.tensor(source))
    dim = args["dim"] % len(dims)
    for i, (x, y) in enumerate(zip(dims, b.tensor(added), strict=True)):
        if i == dim:
            b.block_dim(x)
            b.block_dim(y)
        else:
            dim_trees.unify(x, y)
    b.set(target, dims, b.same_partial(b.partial(source), b.partial(added)))


def index_put(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``x[i] = v``: indexed dims must be replicated, and so must the values."""
    source, target = op.inputs[0], op.outputs[0]
    dims = b.tensor(source)
    b.never_partial(*op.inputs)
    for tid in op.inputs[1:]:
        b.block(tid)
    indices = args["indices"]
    for p, dim in enumerate(dims):
        if p >= len(indices) or indices[p] is not None or len(op.inputs) > 2:
            b.block_dim(dim)
    for tid in op.inputs[2:]:
        if rows := _full_rows(b, op.inputs[0], indices, tid):
            dim_trees.unify(rows[0], b.tensor(tid)[0])
    b.set(target, dims)


def masked_scatter(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``masked_scatter``: values in the places of a mask in turn; all dims must be replicated.

    If the mask has one value for each row, the values are full rows, as wide as the target's rows.
    """
    source, mask, values = op.inputs
    target = op.outputs[0]
    b.block(*op.inputs)
    if b.shape(source) != b.shape(target):
        b.set(target, b.blocked(*b.shape(target)))
        return
    dims = b.tensor(source)
    is_in_rows = b.shape(mask)[-1:] == (1,) or _is_same_in_rows(b, mask)
    if dims and is_in_rows and b.shape(values)[-1:] == b.shape(source)[-1:]:
        dim_trees.unify(dims[-1], b.tensor(values)[-1])
    b.set(target, dims)


RULES = {
    **dict.fromkeys(("aten.cat", "aten.concat", "aten.concatenate"), cat),
    "aten.stack": stack,
    **dict.fromkeys(("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.tensor_split"), split),
    "aten.glu": gated,
    "aten.slice": slice_,
    "aten.narrow": narrow,
    "aten.select": select,
    "aten.unbind": unbind,
    "aten.embedding": embedding,
    "aten.index_select": index_select,
    "aten.index": index,
    "aten.gather": gather,
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), scatter),
    "aten.index_add": index_add,
    "aten.index_put": index_put,
    "aten.masked_scatter": masked_scatter,
}
