"""The dims of a traced model, which the rules fill in and the solver reads.

Each tensor has the trees of its dims, and a *partial state*: whether it is replicated, or a term of a sum
over ranks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..tracing.tape import Mark, Tape, reads_and_writes, starred
from . import dim_trees
from .composite_modules import ExpertSite
from .dim_trees import LEAF, PRODUCT, SUM, Node, find
from .norm_sites import NormSite


class Partial:
    """Union-find node of the partial state that tensors share. ``zero`` means never partial."""

    __slots__ = ("count", "parent", "zero")

    def __init__(self, zero: bool = False) -> None:
        self.parent: Partial | None = None
        self.zero = zero
        self.count = 0


def find_partial(state: Partial) -> Partial:
    """Return the representative of this state."""
    root = state
    while root.parent is not None:
        root = root.parent
    while state.parent is not None:
        state.parent, state = root, state.parent
    return root


@dataclass(frozen=True, slots=True)
class Contraction:
    """``output`` is partial if and only if a contracted dim is sharded or an input is partial."""

    output: Partial
    dims: tuple[Node, ...]
    inputs: tuple[Partial, ...]
    has_weight: bool = False
    """Whether a factor is computed only from parameters."""


@dataclass(frozen=True, slots=True)
class Work:
    """A product of ``size`` multiplications, which sharding any leaf of these dims divides."""

    dims: tuple[Node, ...]
    size: int


@dataclass(frozen=True, slots=True)
class TableLookup:
    """Rows of ``table`` are looked up by ids that enter module call ``call`` at ``port``, and returned."""

    call: int
    port: str
    output_port: str
    table: int
    output: int


@dataclass(frozen=True, slots=True)
class NormUse:
    """A norm that is one operator, and the factors of its last dim."""

    site: NormSite
    groups: Node
    normalized: Node
    """The positions that share one statistic, which must be reduced if they are sharded."""


class Reader(Enum):
    """Code that reads a tensor and is not on the tape."""

    CALLER = "a caller asks for it, and may pass it in again"
    LOSS = "a loss, of which the trace shows nothing, since it has no labels"
    TRAINING = "code that runs in training mode only"

    @property
    def sends_gradients(self) -> bool:
        """Return whether its gradients are full, since it runs alike on all ranks."""
        return self is not Reader.CALLER


@dataclass(slots=True)
class Analysis:
    """The results of the rules; ``Builder`` fills it."""

    tape: Tape
    dims: dict[int, tuple[Node, ...]] = field(default_factory=dict)
    """Tensor -> the trees of its dims; their sizes are its global shape."""
    partial: dict[int, Partial] = field(default_factory=dict)
    """Tensor -> its partial state; ``find_partial`` returns the shared one."""
    returned: set[int] = field(default_factory=set)
    """Results of modules that return their input. A replicated one may become partial there."""
    contractions: list[Contraction] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    norms: list[NormUse] = field(default_factory=list)
    lookups: list[TableLookup] = field(default_factory=list)
    experts: list[tuple[ExpertSite, Node]] = field(default_factory=list)
    """Modules of experts that are one operator, with the dim that counts the experts."""
    frozen: list[Node] = field(default_factory=list)
    """Dims of the model's inputs (batch, sequence). They, and dims linked to them, are never sharded."""
    repeats: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of tensors at one port of a module, in its first call and in another. All calls have the same
    boundary steps."""
    handed_back: list[tuple[int, int]] = field(default_factory=list)
    """(tensor that the code made, tensor that the call returns for it). The next call reads the second
    instead of the first, so both have one layout."""
    read_elsewhere: Mapping[int, Reader] = field(default_factory=dict)
    """Tensors that must be replicated for a reader that is not on the tape."""
    parametric: set[int] = field(default_factory=set)
    """Tensors computed only from parameters."""
    from_stack: set[int] = field(default_factory=set)
    """Matrices that were taken out of a stack of weights ``[E, I, O]``, one or several."""
    stacks: set[int] = field(default_factory=set)
    """Operands of products that are stacks of matrices, one for each position of a dim of the product."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Operator without a rule -> FQN of a module that uses it."""


def multiplying_pairs(dims: Sequence[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of leaves of a tensor that multiply: in different dims, or in different factors of one
    dim."""
    seen: list[list[Node]] = []
    for dim in dims:
        yield from _pairs_within(dim)
        here = dim_trees.leaves(dim)
        for before in seen:
            yield from ((x, y) for x in before for y in here)
        seen.append(here)


def _pairs_within(node: Node) -> Iterator[tuple[Node, Node]]:
    node = find(node)
    if node.kind == LEAF:
        return
    if node.kind == PRODUCT:
        yield from multiplying_pairs(node.children)
        return
    for child in node.children:
        yield from _pairs_within(child)


def corresponding_leaves(a: Node, b: Node) -> list[tuple[Node, Node]] | None:
    """Return pairs of leaves of two trees with the same structure; None if the structures differ."""
    a, b = find(a), find(b)
    if a.kind == LEAF and b.kind == LEAF:
        return [(a, b)] if a.size == b.size and a.size > 1 else ([] if a.size == b.size else None)
    parts_a, parts_b = (dim_trees.segments(x) if x.kind == SUM else dim_trees.factors(x) for x in (a, b))
    if a.kind != b.kind or len(parts_a) != len(parts_b):
        return None
    out: list[tuple[Node, Node]] = []
    for x, y in zip(parts_a, parts_b, strict=True):
        pairs = corresponding_leaves(x, y)
        if pairs is None:
            return None
        out += pairs
    return out


def width(tape: Tape) -> int:
    """Return the hidden size: the last size of marked tensors that most elements of matrices have as a dim.

    Nearly every matrix reads or writes the hidden states, even if layers also pass on other tensors (states,
    router logits), and however many layers the folded tape has.
    """
    marked = Counter(shape[-1] for shape in _marked(tape))
    elements: Counter[int] = Counter()
    for info in tape.tensors:
        if info.kind == "parameter" and len(info.shape) > 1:
            elements.update(dict.fromkeys(info.shape, math.prod(info.shape)))
    return max(marked, key=lambda size: (elements[size], marked[size]), default=1)


def num_tokens(tape: Tape) -> int:
    """Return the number of rows of hidden size in marked tensors: batch times sequence length.

    Numbers are weighted by rows, so that many experts with a few tokens each do not outvote the rest.
    """
    wide = width(tape)
    rows: Counter[int] = Counter()
    for shape in _marked(tape):
        if shape[-1] == wide:
            rows[math.prod(shape[:-1])] += math.prod(shape[:-1])
    return max(1, rows.most_common(1)[0][0]) if rows else 1


def _marked(tape: Tape) -> Iterator[tuple[int, ...]]:
    """Return the shapes of floating point tensors that cross a module's boundary.

    Each counts once, however often its module is called, and once for all numbered parts of a layer, so that
    a loop over experts does not outvote the rest.
    """
    shapes = {}
    for mark in (event for event in tape.events if isinstance(event, Mark)):
        fqn = tape.calls[mark.call].fqn
        if match := re.match(r"(.*?\b\d+\.)(.*)", fqn):  # stars for all numbers behind the layer's
            fqn = match[1] + starred(match[2])
        info = tape.tensors[mark.source]
        shapes[fqn, mark.ports, info.shape] = info.dtype
    return (shape for (_, _, shape), dtype in shapes.items() if shape and dtype.is_floating_point)


def frozen_leaves(analysis: Analysis) -> set[Node]:
    """Return the leaves of the inputs' dims, and all leaves that marks link to them."""
    return linked_leaves(analysis, analysis.frozen)


def linked_leaves(analysis: Analysis, dims: Sequence[Node]) -> set[Node]:
    """Return the leaves of some dims, and all leaves that marks link to them."""
    return _reached(_neighbors(analysis), (x for dim in dims for x in dim_trees.leaves(dim)))


def weighted_leaves(analysis: Analysis) -> set[Node]:
    """Return the leaves of parameters and experts, and all leaves that marks link to leaves of products and
    tables.

    Other leaves are positions of activations, and sharding them divides no parameter. A parameter that is
    added at each position may be sharded there, but not the activations behind the next mark. Modules may get
    parameters, or parts of them, as arguments: for example one expert's matrix.
    """
    summed = {find(x) for c in analysis.contractions for dim in c.dims for x in dim_trees.leaves(dim)}
    tables = {lookup.table for lookup in analysis.lookups}
    start = {find(x) for _, count in analysis.experts for x in dim_trees.leaves(count)}
    leaves_of_parameters: set[Node] = set()
    # Parameters, and tensors computed only from parameters and single numbers, such as the number of an
    # expert.
    tensors = analysis.tape.tensors
    parts = {tid for tid, info in enumerate(tensors) if info.kind == "parameter"}
    for event in analysis.tape.events:
        read, written = reads_and_writes(event)
        if not parts.isdisjoint(read) and all(t in parts or not tensors[t].shape for t in read):
            parts.update(written)
    for tid in parts & analysis.dims.keys():
        leaves = {find(x) for dim in analysis.dims[tid] for x in dim_trees.leaves(dim)}
        leaves_of_parameters |= leaves
        if tid in tables or not summed.isdisjoint(leaves):
            start.update(x for x in leaves if not x.blocked)
    return leaves_of_parameters | _reached(_neighbors(analysis), start)


def _neighbors(analysis: Analysis) -> dict[Node, list[Node]]:
    """Map each leaf to the leaves that marks link to it."""
    neighbors: dict[Node, list[Node]] = {}
    for event in analysis.tape.events:
        if isinstance(event, Mark):
            for before, after in zip(analysis.dims[event.source], analysis.dims[event.target], strict=True):
                for x, y in corresponding_leaves(before, after) or ():
                    neighbors.setdefault(x, []).append(y)
                    neighbors.setdefault(y, []).append(x)
    return neighbors


def _reached(neighbors: Mapping[Node, Sequence[Node]], start: Iterable[Node]) -> set[Node]:
    todo = list(start)
    reached: set[Node] = set()
    while todo:
        leaf = find(todo.pop())
        if leaf not in reached:
            reached.add(leaf)
            todo += neighbors.get(leaf, ())
    return reached


def differentiable(analysis: Analysis) -> set[int]:
    """Return the tensors that depend on a parameter and may have a gradient."""
    tape = analysis.tape
    tids = {t for t, i in enumerate(tape.tensors) if i.kind == "parameter" and i.dtype.is_floating_point}
    for event in tape.events:
        if isinstance(event, Mark):
            if event.source in tids:
                tids.add(event.target)
        elif not tids.isdisjoint(event.inputs):
            dtypes = ((t, tape.tensors[t].dtype) for t in event.outputs)
            tids.update(t for t, dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return tids
