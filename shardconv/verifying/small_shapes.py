"""Choose the shapes of a smaller model of the same code.

The groups with the most elements shrink first, until ``ENOUGH`` elements are left. A small model stays as it
is, and experts shrink last. Equal sizes stay equal, also to sums and products of others (the halves of a
head), because sizes that are not linked may still mean the same, such as the vocabularies of the embedding
and of the head. If too much is left, equal sizes may differ, and become equal again only if that fails:
the width of a model may happen to be eight times the width of its heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import LEAF, PRODUCT, SUM, Node, find, leaves
from ..dim_analysis.rules import traits_of
from ..tracing.tape import Op
from .leaf_groups import LeafGroup

ENOUGH = 1 << 20
"""Elements at which nothing more shrinks. All ranks compute each of them several times, in float64."""
_COUNTED = 1 << 16
"""Smallest activation that counts, in elements."""
_LEAST = 17
"""Smallest size of a leaf. In smaller ones, mistakes may cancel each other."""
_LEAST_EXPERTS = 16
"""Smallest number of experts. Fewer would all be chosen, and the choice would not be tested."""
_LEAST_FACTOR = 4
"""Smallest size of a leaf that is always a factor of a larger dim."""
_RESHAPING = frozenset(f"aten.{name}" for name in ("reshape", "view", "_unsafe_view"))
_LEAST_ROWS = 256
"""Smallest number of rows of a table of tokens, so that all tokens of a call can be different."""


class SmallShapes:
    """The ``Shapes`` of a smaller model; there are no ranks."""

    def __init__(self, analysis: Analysis, sizes: Mapping[Node, int]) -> None:
        self.analysis = analysis
        self.sizes = sizes
        """Leaf -> its smaller size."""
        self._known: dict[Node, int] = {}

    @classmethod
    def of(cls, analysis: Analysis, sizes: Mapping[LeafGroup, int]) -> SmallShapes:
        """Return the shapes in which groups have smaller sizes."""
        return cls(analysis, {leaf: n for group, n in sizes.items() for leaf in group.leaves})

    @property
    def divisors(self) -> Sequence[int]:
        """Return nothing, since sizes are looked up."""
        return ()

    def size(self, node: Node) -> int:
        """Return the smaller size of a dim."""
        node = find(node)
        size = self._known.get(node)
        if size is None:
            if node.kind == LEAF:
                size = self.sizes.get(node, node.size)
            else:
                parts = [self.size(child) for child in node.children]
                size = math.prod(parts) if node.kind == PRODUCT else sum(parts)
            self._known[node] = size
        return size

    def local_shape(self, tid: int, rank: int = 0) -> tuple[int, ...]:
        """Return the shape of a tensor in the smaller model. Tensors inside of norms keep their shapes."""
        nodes = self.analysis.dims.get(tid)
        if nodes is None:
            return self.analysis.tape.tensors[tid].shape
        return tuple(map(self.size, nodes))

    def held(self, node: Node) -> list[int]:
        """Return the positions of a dim that are kept: the first ones of each leaf."""
        node = find(node)
        if node.kind == LEAF:
            return list(range(self.size(node)))
        places = [0] if node.kind == PRODUCT else []
        before = 0
        for child in map(find, node.children):
            if node.kind == PRODUCT:
                places = [i * child.size + j for i in places for j in self.held(child)]
            else:
                places += [before + j for j in self.held(child)]
                before += child.size
        return places

    def local_sizes(self, tid: int, value: int, rank: int) -> Iterator[int]:
        """Yield smaller sizes of dims of a tensor, and of their parts, that have this size."""
        for dim in self.analysis.dims[tid]:
            for node in _parts(dim):
                if node.size == value:
                    yield self.size(node)

    def local_multiples(self, tid: int, value: int, rank: int) -> Iterator[int]:
        """Yield the value in proportion to leaves of a tensor that shrink and divide it."""
        for leaf in (x for dim in self.analysis.dims[tid] for x in leaves(dim)):
            if self.changed(leaf) and value % leaf.size == 0:
                yield value // leaf.size * self.size(leaf)

    def is_changed(self, tid: int) -> bool:
        """Return whether a tensor has another shape in the smaller model."""
        return any(self.changed(x) for dim in self.analysis.dims.get(tid, ()) for x in leaves(dim))

    def changed(self, leaf: Node) -> bool:
        """Return whether a leaf shrinks."""
        return find(leaf) in self.sizes

    def position(self, tid: int, dim: int, position: int, rank: int) -> int | None:
        """Return the position that corresponds to one along a dim of a tensor; None if there is none."""
        return self._position(find(self.analysis.dims[tid][dim]), position)

    def _position(self, node: Node, position: int) -> int | None:
        if position in (0, node.size):
            return self.size(node) if position else 0
        if node.kind == LEAF:
            return None if node in self.sizes else position
        if node.kind == PRODUCT:
            outer, *inner = map(find, node.children)
            each = math.prod(x.size for x in inner)
            count = None if position % each else self._position(outer, position // each)
            return None if count is None else count * math.prod(map(self.size, inner))
        before = 0
        for child in map(find, node.children):
            if position <= child.size:
                inside = self._position(child, position)
                return None if inside is None else before + inside
            position -= child.size
            before += self.size(child)
        return None


def _parts(node: Node) -> Iterator[Node]:
    """Yield a dim, its parts, and products of neighboring parts."""
    node = find(node)
    yield node
    if node.kind != LEAF:
        for child in node.children:
            yield from _parts(child)


def choose_sizes(
    analysis: Analysis,
    groups: Collection[LeafGroup],
    tp: int,
    copies: Mapping[int, int],
    *,
    kept: Collection[LeafGroup] = (),
    equal: Collection[int] | None = None,
) -> dict[LeafGroup, int]:
    """Choose which groups shrink until the model is small: groups with most elements first, experts last.

    A size keeps its remainder modulo the number of ranks, so that uneven shares stay uneven. Equal sizes stay
    equal, also to sums and products of others. Different sizes stay different, and new sizes differ from the
    sizes that are kept if possible.
    """
    return _Choice(analysis, [group for group in groups if group not in kept], tp, copies, equal).sizes()


class _Choice:
    """A choice of sizes, made one after the other."""

    def __init__(
        self,
        analysis: Analysis,
        groups: Collection[LeafGroup],
        tp: int,
        copies: Mapping[int, int],
        equal: Collection[int] | None,
    ) -> None:
        self.analysis = analysis
        self.equal = {group.size for group in groups} if equal is None else equal
        self.whole_kinds = {SUM} if equal is None else {SUM, PRODUCT}
        """Kinds of dims whose parts shrink before other groups of the same size."""
        self.tp = tp
        self.groups = groups
        self.by_leaf = {leaf: group for group in groups for leaf in group.leaves}
        # Dims, numbers of elements and copies of stored tensors, outputs, and large activations.
        tensors = analysis.tape.tensors
        outputs = set(analysis.tape.outputs)
        self.tensors = []
        for tid, dims in analysis.dims.items():
            numel = math.prod(tensors[tid].shape)
            if numel > _COUNTED or tid in outputs or tensors[tid].kind in ("parameter", "buffer"):
                self.tensors.append((dims, numel, copies.get(tid, 1)))
        infos = analysis.tape.tensors
        self.taken = {n for i in infos if i.kind in ("parameter", "buffer", "input") for n in i.shape}
        self.smaller: dict[tuple[int, bool], int] = {}
        """(size, whether it counts experts) -> the size to which all such groups shrink."""
        self.out: dict[LeafGroup, int] = {}
        self.small_leaves: dict[Node, int] = {}
        """Leaf -> its smaller size, for the groups in ``out``."""
        self.tensors_with: dict[LeafGroup, list[int]] = {}
        self.left: list[int] = []
        """Elements of each tensor with the groups that have shrunk."""
        self.made_of: dict[tuple[int, bool], Node] = {}
        """(size of a group, whether it counts experts) -> a dim of this size that consists of others."""
        sizes = {group.size for group in groups}
        for part in (p for dims in analysis.dims.values() for dim in dims for p in _parts(dim)):
            if part.kind != LEAF and part.size in sizes:
                key = part.size, any(g.experts for g in self._groups([part]))
                first = self.made_of.setdefault(key, part)
                if part.kind == SUM != first.kind:  # sums (halves of a head) are rarely equal by chance
                    self.made_of[key] = part
        # Size of a last dim into which a reshape joins rows of another one -> number of rows, and their dim.
        self.multiples: dict[int, tuple[int, Node]] = {}
        for op in (e for e in analysis.tape.events if isinstance(e, Op)):
            if op.base in _RESHAPING:
                row, joined = (analysis.dims.get(t) for t in (op.inputs[0], op.outputs[0]))
                if row and joined and row[-1].size and find(joined[-1]).kind == LEAF:
                    count, rest = divmod(joined[-1].size, row[-1].size)
                    if count > 1 and not rest:
                        self.multiples.setdefault(joined[-1].size, (count, row[-1]))
        tables = [self.made_of.get((g.size, g.experts)) for g in groups if g.rows]
        self.rows = {g for g in groups if g.rows} | self._groups(dim for dim in tables if dim is not None)
        """Groups that are tokens or a part of them: groups with rows of tables, groups with logits."""

    def sizes(self) -> dict[LeafGroup, int]:
        """Return the groups that shrink, and their sizes."""
        inside: dict[LeafGroup, int] = {}
        left = 0
        for index, (dims, numel, count) in enumerate(self.tensors):
            self.left.append(numel * count)
            left += numel * count
            for group in self._groups(dims):
                inside[group] = inside.get(group, 0) + numel * count
                self.tensors_with.setdefault(group, []).append(index)
        for group in sorted(inside, key=lambda g: (g.experts, -inside[g], g.size)):
            if left <= ENOUGH:
                break
            before = len(self.out)
            self._shrink(group)
            shapes = self._shapes()
            new = list(self.out)[before:]
            for index in {index for each in new for index in self.tensors_with.get(each, ())}:
                dims, _, count = self.tensors[index]
                now = math.prod(map(shapes.size, dims)) * count
                left -= self.left[index] - now
                self.left[index] = now
        for group in self.groups:  # rows that shrink make smaller dims
            _, row = self.multiples.get(group.size, (0, None))
            if (
                row is not None
                and group not in self.out
                and not self.out.keys().isdisjoint(self._groups([row]))
            ):
                self._shrink(group)
        for group in self.groups:  # equal sizes that are not in large tensors, such as scores of experts
            if (group.experts or group.size in self.equal) and (group.size, group.experts) in self.smaller:
                self._set(group, self.smaller[group.size, group.experts])
        return self.out

    def _shapes(self) -> SmallShapes:
        """Return the shapes with the groups that have shrunk so far."""
        return SmallShapes(self.analysis, self.small_leaves)

    def _set(self, group: LeafGroup, small: int) -> None:
        self.out[group] = small
        self.small_leaves |= dict.fromkeys(group.leaves, small)

    def _groups(self, dims: Iterable[Node]) -> set[LeafGroup]:
        return {self.by_leaf[x] for dim in dims for x in leaves(dim) if x in self.by_leaf}

    def _shrink(self, group: LeafGroup) -> None:
        if not (group.size in self.equal or group.experts or group.rows):
            # The group may differ from others of its size, but not from the same group of other layers.
            alike = next((small for other, small in self.out.items() if other.is_alike(group)), 0)
            small = alike or self._multiple(group) or self._own_size(group)
            if small <= group.size // 2:
                self._set(group, small)
            return
        key = group.size, group.experts
        small = self.smaller.get(key) or self._size(group)
        if small <= group.size // 2:
            self.smaller[key] = small
            self._set(group, small)

    def _size(self, group: LeafGroup) -> int:
        whole = self.made_of.get((group.size, group.experts))
        if whole is None:
            return self._multiple(group) or self._own_size(group)
        if whole.kind in self.whole_kinds or group.experts:  # sums such as the halves of a head
            for part in sorted(self._groups([whole]), key=lambda g: -g.size)[: 1 if group.experts else None]:
                if part not in self.out:
                    self._shrink(part)
        small = self._shapes().size(whole)
        is_settled = small < whole.size or group.experts or whole.kind in self.whole_kinds
        return small if is_settled else self._own_size(group)

    def _multiple(self, group: LeafGroup) -> int:
        """Return the size of a dim that joins several rows of another one; 0 if no reshape makes such a
        dim."""
        count, row = self.multiples.get(group.size, (0, None))
        if row is None or group in self._groups([row]):
            return 0
        for part in self._groups([row]):
            if part not in self.out:
                self._shrink(part)
        return count * self._shapes().size(row)

    def _own_size(self, group: LeafGroup) -> int:
        taken = {n * g.times for g, n in self.out.items()}
        if group.experts:  # a small number of experts matters more than a unique size
            taken = set()
        elif group.times == 1:
            taken |= self.taken
        rows = group in self.rows
        tp = self.tp
        if group.hashed is not None:
            value = group.hashed.value
            return (-(-_LEAST_ROWS // tp) * tp + value % tp) * (group.size // value)
        least = _LEAST_ROWS if rows else _LEAST_EXPERTS if group.experts else _LEAST
        least = least if rows else max(least // group.times, _LEAST_FACTOR)
        first = -(-least // tp) * tp + group.size % tp
        sizes = range(first, group.size // 2 + 1, tp)
        return next((size for size in sizes if size * group.times not in taken), first)


def stored_elements(analysis: Analysis, sizes: Mapping[LeafGroup, int], copies: Mapping[int, int]) -> int:
    """Return the elements of all parameters and buffers of a smaller model."""
    shapes = SmallShapes.of(analysis, sizes)
    return sum(
        math.prod(map(shapes.size, dims)) * copies.get(tid, 1)
        for tid, dims in analysis.dims.items()
        if analysis.tape.tensors[tid].kind in ("parameter", "buffer")
    )


def activation_elements(shapes: SmallShapes) -> int:
    """Return the elements of everything that a forward pass computes, with the scores of attention."""
    tape = shapes.analysis.tape
    total = 0
    for op in (e for e in tape.events if isinstance(e, Op)):
        total += sum(math.prod(shapes.local_shape(t)) for t in op.outputs)
        if traits_of(op.name).is_attention:
            query, key = map(shapes.local_shape, op.inputs[:2])
            total += math.prod(query[:-1]) * key[-2]
    return total
