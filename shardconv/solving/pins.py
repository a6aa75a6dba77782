"""Pin the layouts of parameters to another plan, and let related parameters follow.

An adapter is solved with the plan of its model, whose shards stay as they are. A dim of an adapter's
parameter gets the axes of the nearest linked dim of the model (the inputs or outputs of a layer), so that
products of the adapter's parameters have the layout of the weight that they are added to. Dims that the model
does not have, such as the rank of a low-rank product, stay replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import Dim, Leaf, Product, axes_of, size
from shardconv_runtime.format.plan import ParameterPlan
from shardconv_runtime.format.slices import Mesh

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import LEAF, Conflict, Node, cut, factors, find, leaves, split

Pins = Mapping[Node, tuple[int, ...]]
"""Leaf -> indices of the prime factors of tp that shard it; empty if it stays replicated."""


@dataclass(frozen=True)
class Given:
    """The layouts of another plan."""

    mesh: Mesh
    parameters: Mapping[str, ParameterPlan]
    """Plans of parameters by FQN in the traced model."""
    unread: frozenset[str] = frozenset()
    """Parameters of modules that the traced call does not run, since it runs copies of them."""


def pins_of(analysis: Analysis, given: Given) -> Pins:
    """Return the pinned leaves: all leaves of parameters.

    Dims are refined to the layouts of the other plan.

    Raises:
        SolveError: if the code of the model with adapters does not allow such a layout.
    """
    # For each axis of a mesh, the indices of its prime factors among the prime factors of tp.
    counts = [len(prime_factors(extent)) for extent in given.mesh]
    primes = [tuple(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(given.mesh))]
    pinned: dict[Node, tuple[int, ...]] = {}
    others: list[Node] = []
    parameters = [
        (info.name, tid)
        for tid, info in enumerate(analysis.tape.tensors)
        if info.kind in ("parameter", "buffer") and tid in analysis.dims
    ]
    for refine in (True, False):  # refining one dim may refine another
        for name, tid in parameters:
            entry = given.parameters.get(name)
            if entry is None:
                others += () if refine else (x for dim in analysis.dims[tid] for x in leaves(dim))
                continue
            for node, dim in zip(analysis.dims[tid], entry.dims, strict=True):
                try:
                    chosen = dict(_chosen(node, dim))
                except Conflict:
                    raise SolveError(
                        f"{name}: with the adapter, its dim of {node.size} cannot be laid out as it is in "
                        "the model; leave that layer out of the adapter's target modules"
                    ) from None
                if not refine:
                    pinned |= {x: tuple(f for a in axes for f in primes[a]) for x, axes in chosen.items()}
    for leaf in others:
        pinned[find(leaf)] = _nearest(leaf, pinned)
    return pinned


def prime_factors(n: int) -> tuple[int, ...]:
    """Return the prime factors in ascending order; () for 1."""
    out = []
    factor = 2
    while n > 1:
        while n % factor == 0:
            out.append(factor)
            n //= factor
        factor += 1
    return tuple(out)


def _chosen(node: Node, dim: Dim) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Yield the leaves of a dim with the axes that a layout gives them.

    Raises:
        Conflict: if the dim cannot be refined to the layout.
    """
    node = find(node)
    if not axes_of(dim):
        yield from ((x, ()) for x in leaves(node))
    elif isinstance(dim, Leaf):
        parts = [find(x) for x in factors(node)]
        if not parts or parts[0].kind != LEAF:
            raise Conflict
        yield parts[0], dim.axes
        yield from ((x, ()) for part in parts[1:] for x in leaves(part))
    elif isinstance(dim, Product):
        rest = node
        for factor in dim.factors[:-1]:
            outer, rest = split(rest, rest.size // size(factor))
            yield from _chosen(outer, factor)
        yield from _chosen(rest, dim.factors[-1])
    else:
        parts = cut(node, [size(segment) for segment in dim.segments])
        for part, segment in zip(parts, dim.segments, strict=True):
            yield from _chosen(part, segment)


def _nearest(leaf: Node, pinned: Pins) -> tuple[int, ...]:
    """Return the choice of the nearest pinned leaf that is linked to a leaf; () if there is none."""
    seen = {find(leaf)}
    level: Iterable[Node] = tuple(seen)
    while level:
        for x in level:
            with suppress(KeyError):
                return pinned[x]
        found = dict.fromkeys(find(y) for x in level for y in x.links)
        level = [y for y in found if y not in seen]
        seen.update(level)
    return ()
