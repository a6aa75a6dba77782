"""Operators that rename, regroup, move or repeat dims without touching values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import dim_trees
from .dim_trees import Node
from .operator_traits import traits

if TYPE_CHECKING:
    from ..tracing.tape import Op
    from .rule_builder import Arguments, Builder


def view(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``view``, ``reshape``, ``flatten``…: runs of dims with equal products are regrouped."""
    source, target = op.inputs[0], op.outputs[0]
    if op.name == "aten.view.dtype":
        b.block(source)
        b.set(target, b.blocked(*b.shape(target)))
        return
    b.set(target, regroup(b, list(b.tensor(source)), b.shape(target)), b.partial(source))


def view_like(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``view_as`` and ``reshape_as``: the sizes come from another tensor, locally on each rank."""
    view(b, op, args)
    _same_sizes(b, op)


def _same_sizes(b: Builder, op: Op) -> None:
    """Give the result the dims of the second tensor."""
    for made, other in zip(b.tensor(op.outputs[0]), b.tensor(op.inputs[-1]), strict=True):
        dim_trees.unify(made, other)


def regroup(b: Builder, dims: list[Node], shape: tuple[int, ...]) -> list[Node]:
    """Return the dims of a tensor viewed in another shape."""
    if 0 in shape:
        return b.blocked(*shape)
    out: list[Node] = []
    i = j = 0
    while i < len(dims) or j < len(shape):
        group, sizes = dims[i : i + 1], list(shape[j : j + 1])
        have, want = (group[0].size if group else 1), (sizes[0] if sizes else 1)
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                group.append(dims[i])
                have, i = have * dims[i].size, i + 1
            else:
                sizes.append(shape[j])
                want, j = want * shape[j], j + 1
        out += _ungroup(b, group, sizes)
    return out


def _ungroup(b: Builder, group: list[Node], sizes: list[int]) -> list[Node]:
    """Return the dims of ``sizes`` that a run of dims makes, outer to inner."""
    if len(group) == 1 and len(sizes) == 1:
        return group
    rest = dim_trees.product(group)
    out: list[Node] = []
    for size in reversed(sizes):
        rest, inner = b.split(rest, size)
        out.append(inner)
    return out[::-1]


@traits(passes=True)
def permute(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``permute``."""
    dims = b.tensor(op.inputs[0])
    b.set(op.outputs[0], [dims[d] for d in args["dims"]], b.partial(op.inputs[0]))


@traits(passes=True)
def transpose(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``transpose`` and ``swapaxes``."""
    dims = list(b.tensor(op.inputs[0]))
    names = ("axis0", "axis1") if args["dim0"] is None else ("dim0", "dim1")
    first, second = args[names[0]], args[names[1]]
    dims[first], dims[second] = dims[second], dims[first]
    b.set(op.outputs[0], dims, b.partial(op.inputs[0]))


def reverse(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``t`` and ``numpy_T``, which reverse all dims."""
    b.set(op.outputs[0], b.tensor(op.inputs[0])[::-1], b.partial(op.inputs[0]))


def unsqueeze(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``unsqueeze``, which adds a dim of size 1."""
    dims = list(b.tensor(op.inputs[0]))
    position = args["dim"] % (len(dims) + 1)
    b.set(op.outputs[0], [*dims[:position], dim_trees.leaf(1), *dims[position:]], b.partial(op.inputs[0]))


def squeeze(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``squeeze``, which removes dims of size 1."""
    view(b, op, args)


def expand(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze a dim of size 1 that is repeated: the copies are alike, so the new dim may be sharded at
    will."""
    source, target = op.inputs[0], op.outputs[0]
    shape = b.shape(target)
    dims = b.tensor(source)
    padded = [dim_trees.leaf(1)] * (len(shape) - len(dims)) + list(dims)
    out = [d if d.size == n else dim_trees.leaf(n) for d, n in zip(padded, shape, strict=True)]
    b.set(target, out, b.partial(source))


def expand_like(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``expand_as``, to the sizes of another tensor, on each rank its own."""
    expand(b, op, args)
    _same_sizes(b, op)


def repeat(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``repeat``, whose copies are the outer factor."""
    source, target = op.inputs[0], op.outputs[0]
    shape = b.shape(target)
    dims = b.tensor(source)
    padded = [dim_trees.leaf(1)] * (len(shape) - len(dims)) + list(dims)
    out = [
        d if d.size == n else dim_trees.product([dim_trees.leaf(n // d.size), d])
        for d, n in zip(padded, shape, strict=True)
    ]
    b.set(target, out, b.partial(source))


def repeat_interleave(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze positions that are each repeated: the copies are the inner factor."""
    source, target = op.inputs[0], op.outputs[0]
    dim = args["dim"]
    dims = list(b.tensor(source))
    if not isinstance(args["repeats"], int) or dim is None:
        b.block(*op.inputs)
        b.set(target, b.blocked(*b.shape(target)))
        return
    dims[dim] = dim_trees.product([dims[dim], dim_trees.leaf(args["repeats"])])
    b.set(target, dims, b.partial(source))


def movedim(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``movedim`` with ints or lists."""
    dims = b.tensor(op.inputs[0])
    rank = len(dims)
    arguments = (args["source"], args["destination"])
    source, destination = ([x] if isinstance(x, int) else x for x in arguments)
    moved = {d % rank: s % rank for s, d in zip(source, destination, strict=True)}
    rest = iter(i for i in range(rank) if i not in moved.values())
    b.set(
        op.outputs[0],
        [dims[moved[i] if i in moved else next(rest)] for i in range(rank)],
        b.partial(op.inputs[0]),
    )


def moved_along(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``flip`` and ``roll``: values move along dims, which must be replicated."""
    dims = list(b.tensor(op.inputs[0]))
    moved = args["dims"]
    for d in moved if isinstance(moved, (list, tuple)) and moved else range(len(dims)):
        b.block_dim(dims[d])
    b.set(op.outputs[0], dims, b.partial(op.inputs[0]))


def pad(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``constant_pad_nd``, whose padded dims must be replicated."""
    source, target = op.inputs[0], op.outputs[0]
    dims = list(b.tensor(source))
    amounts = args["pad"]
    for index, size in enumerate(b.shape(target)):
        from_end = 2 * (len(dims) - 1 - index)
        if any(amounts[from_end : from_end + 2]):
            b.block_dim(dims[index])
            dims[index] = dim_trees.leaf(size, True)
    if args["value"]:
        b.never_partial(source)
    b.set(target, dims, b.partial(source))


def unfold(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``unfold``: windows of a dim, which must be replicated."""
    source, target = op.inputs[0], op.outputs[0]
    dims = list(b.tensor(source))
    position = args["dimension"] % len(dims)
    b.block_dim(dims[position])
    *outer, window = b.shape(target)
    dims[position] = dim_trees.leaf(outer[position], True)
    b.set(target, [*dims, dim_trees.leaf(window, True)], b.partial(source))


def as_complex(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``view_as_complex``: the last dim, of 2, becomes the parts of one number."""
    dims = b.tensor(op.inputs[0])
    b.block_dim(dims[-1])
    b.set(op.outputs[0], dims[:-1], b.partial(op.inputs[0]))


def as_real(b: Builder, op: Op, args: Arguments) -> None:
    """Analyze ``view_as_real``: the last dim, of 2, is replicated."""
    b.set(op.outputs[0], [*b.tensor(op.inputs[0]), *b.blocked(2)], b.partial(op.inputs[0]))


RULES = {
    "aten.view_as_complex": as_complex,
    "aten.view_as_real": as_real,
    **dict.fromkeys(
        (
            "aten.view",
            "aten.reshape",
            "aten._unsafe_view",
            "aten.flatten",
            "aten.unflatten",
            "aten._reshape_alias",
            "aten.ravel",
        ),
        view,
    ),
    **dict.fromkeys(("aten.view_as", "aten.reshape_as"), view_like),
    "aten.permute": permute,
    **dict.fromkeys(("aten.transpose", "aten.swapaxes", "aten.swapdims"), transpose),
    **dict.fromkeys(("aten.t", "aten.numpy_T"), reverse),
    "aten.unsqueeze": unsqueeze,
    "aten.squeeze": squeeze,
    **dict.fromkeys(("aten.expand", "aten.broadcast_to"), expand),
    "aten.expand_as": expand_like,
    "aten.repeat": repeat,
    "aten.repeat_interleave": repeat_interleave,
    "aten.movedim": movedim,
    **dict.fromkeys(("aten.flip", "aten.roll"), moved_along),
    **dict.fromkeys(("aten.constant_pad_nd",), pad),
    "aten.unfold": unfold,
}
