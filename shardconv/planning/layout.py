"""Turn trees and an assignment into the dims of the plan, and into local shapes of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from shardconv_runtime.format import slices
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, axes_of, size
from shardconv_runtime.format.dims import leaves as dim_leaves

from ..dim_analysis.analysis import Analysis, frozen_leaves, num_tokens
from ..dim_analysis.dim_trees import LEAF, PRODUCT, Node, find
from .gradients import sequence_leaves
from .solve import Assignment


class Shapes(Protocol):
    """Shapes of the tensors of a tape: of a rank, or of a smaller model."""

    @property
    def analysis(self) -> Analysis:
        """Dims of the tape."""

    @property
    def divisors(self) -> Sequence[int]:
        """The divisors by which an int attribute may have to be divided, largest first."""

    def local_shape(self, tid: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor on a rank."""

    def local_sizes(self, tid: int, value: int, rank: int) -> Iterator[int]:
        """Yield the local sizes of dims of a tensor, and of their leaves, that have this global size."""

    def local_multiples(self, tid: int, value: int, rank: int) -> Iterator[int]:
        """Yield the local sizes of multiples of changed leaves of a tensor that have this global size."""

    def is_changed(self, tid: int) -> bool:
        """Return whether a tensor gets another shape."""

    def changed(self, leaf: Node) -> bool:
        """Return whether a leaf gets another size."""

    def position(self, tid: int, dim: int, position: int, rank: int) -> int | None:
        """Return the local position for a position along a dim of a tensor; None if there is none."""


class Layouts:
    """The layouts of every tensor's dims under an assignment, and the ``Shapes`` of the ranks."""

    def __init__(self, analysis: Analysis, assignment: Assignment) -> None:
        self.analysis = analysis
        self.assignment = assignment
        self.mesh = assignment.mesh
        self._dims: dict[Node, Dim] = {}
        self._sizes: dict[tuple[Node, int], int] = {}
        self._open = frozen_leaves(analysis) | sequence_leaves(analysis)
        self.num_tokens = num_tokens(analysis.tape)

    def dim(self, node: Node) -> Dim:
        """Return the layout of one dim."""
        node = find(node)
        layout = self._dims.get(node)
        if layout is None:
            layout = self._dims[node] = _simplified(self._tree(node, open_leaves=frozenset()))
        return layout

    def _tree(self, node: Node, open_leaves: Collection[Node]) -> Dim:
        """Return the tree of a dim, in which ``open_leaves`` have no size."""
        node = find(node)
        if node.kind == LEAF:
            size = 0 if node in open_leaves else node.size
            return Leaf(size, self.assignment.axes(node))
        children = tuple(self._tree(c, open_leaves) for c in node.children)
        return Product(children) if node.kind == PRODUCT else Sum(children)

    def open_dim(self, node: Node) -> Dim:
        """Return the layout of an activation's dim. Parts that depend on the input's size are open."""
        return _simplified(self._tree(node, open_leaves=self._open))

    def dims(self, tid: int) -> tuple[Dim, ...]:
        """Return the layouts of a tensor's dims."""
        return tuple(self.dim(node) for node in self.analysis.dims[tid])

    def local_shape(self, tid: int, rank: int) -> tuple[int, ...]:
        """Return the local shape of a tensor on a rank. Tensors inside of norm modules count as
        replicated."""
        nodes = self.analysis.dims.get(tid)
        if nodes is None:
            return self.analysis.tape.tensors[tid].shape
        return tuple(self._local_size(node, rank) for node in nodes)

    def _local_size(self, node: Node, rank: int) -> int:
        node = find(node)
        key = (node, rank)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = slices.local_size(self.dim(node), self.mesh, rank)
        return size

    def is_sharded(self, tid: int) -> bool:
        """Return whether ranks hold different shards of a tensor."""
        return any(axes_of(d) for d in self.dims(tid))

    # Shapes -------------------------------------------------------------------------------------

    @property
    def divisors(self) -> list[int]:
        """Return products of some of the mesh axes, largest first."""
        out = {1}
        for extent in self.mesh:
            out |= {p * extent for p in out}
        return sorted(out - {1}, reverse=True)

    def local_sizes(self, tid: int, value: int, rank: int) -> Iterator[int]:
        """Yield local sizes of the dims of a tensor, and of their leaves, that have this global size."""
        for dim, layout in zip(self.analysis.dims[tid], self.dims(tid), strict=True):
            if dim.size == value:
                yield slices.local_size(layout, self.mesh, rank)
            for leaf in dim_leaves(layout):
                if leaf.size == value:
                    yield slices.local_size(leaf, self.mesh, rank)

    def local_multiples(self, tid: int, value: int, rank: int) -> Iterator[int]:
        """Yield the value in proportion to sharded leaves of a tensor, or to pairs in a product, that divide
        it."""
        for layout in self.dims(tid):
            sharded: list[Dim] = [leaf for leaf in dim_leaves(layout) if leaf.axes and leaf.size]
            if isinstance(layout, Product):
                sharded += [Product(pair) for pair in itertools.pairwise(sharded)]
            for part in sharded:
                if value % size(part) == 0:
                    yield value // size(part) * slices.local_size(part, self.mesh, rank)

    def is_changed(self, tid: int) -> bool:
        """Return whether a tensor is sharded."""
        return self.is_sharded(tid)

    def changed(self, leaf: Node) -> bool:
        """Return whether a leaf is sharded."""
        return bool(self.assignment.axes(leaf))

    def position(self, tid: int, dim: int, position: int, rank: int) -> int:
        """Return the number of positions below a global one that the rank holds."""
        spans = slices.ranges(self.dims(tid)[dim], self.mesh, rank)
        return sum(max(0, min(stop, position) - start) for start, stop in spans)

    def ranks_differ(self) -> bool:
        """Return whether some size is uneven, so that local shapes depend on the rank."""
        for dims in self.analysis.dims.values():
            for node in dims:
                for leaf in dim_leaves(self.dim(node)):
                    if leaf.size % math.prod(self.mesh[axis] for axis in leaf.axes):
                        return True
        return False


def _simplified(dim: Dim) -> Dim:
    """Return the same positions with as few parts as possible."""
    if isinstance(dim, Leaf):
        return dim
    children = dim.factors if isinstance(dim, Product) else dim.segments
    parts: list[Dim] = []
    for child in map(_simplified, children):  # a product in a product, or a sum in a sum, is spliced in
        if isinstance(child, Product) and isinstance(dim, Product):
            parts += child.factors
        elif isinstance(child, Sum) and isinstance(dim, Sum):
            parts += child.segments
        else:
            parts.append(child)
    if isinstance(dim, Product):
        parts = [p for p in parts if p != Leaf(1)] or [Leaf(1)]
    merged: list[Dim] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Leaf) and isinstance(last, Leaf) and not part.axes and not last.axes:
            size = last.size * part.size if isinstance(dim, Product) else last.size + part.size
            merged[-1] = Leaf(size)
        else:
            merged.append(part)
    if len(merged) == 1:
        return merged[0]
    return Product(tuple(merged)) if isinstance(dim, Product) else Sum(tuple(merged))
