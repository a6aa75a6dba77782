"""The dims of a traced model: the values that the rules fill and the solver reads.

For each tensor: the trees of its dims, and a *partial state* that says whether it is
replicated or a term of a sum over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tracing.tape import Tape
from .dim_trees import Node
from .expert_sites import ExpertSite
from .norm_sites import NormSite


class Partial:
    """Union-find node for the partial state of tensors that share it; ``zero``: never partial."""

    __slots__ = ("count", "parent", "zero")

    def __init__(self, zero: bool = False) -> None:
        self.parent: Partial | None = None
        self.zero = zero
        self.count = 0


def find_partial(state: Partial) -> Partial:
    """The state that stands for this one."""
    root = state
    while root.parent is not None:
        root = root.parent
    while state.parent is not None:
        state.parent, state = root, state.parent
    return root


@dataclass(frozen=True, slots=True)
class Contraction:
    """``output`` is partial exactly where the contracted dims are sharded or an input is partial."""

    output: Partial
    dims: tuple[Node, ...]
    inputs: tuple[Partial, ...]
    has_weight: bool = False
    """Whether a factor is computed from parameters alone."""


@dataclass(frozen=True, slots=True)
class Work:
    """A product of ``size`` multiplications, which sharding any leaf of these dims divides."""

    dims: tuple[Node, ...]
    size: int


@dataclass(frozen=True, slots=True)
class TableLookup:
    """Rows of ``table`` are looked up by ids that enter module call ``call`` at ``slot``, and returned."""

    call: int
    slot: str
    output_slot: str
    table: int
    output: int


@dataclass(frozen=True, slots=True)
class NormUse:
    """A norm that is one operator, and the factors of its last dim."""

    site: NormSite
    groups: Node
    normalized: Node
    """The positions that share one statistic: sharding them costs a reduction of it."""


@dataclass(slots=True)
class Analysis:
    """The results of the rules; ``Builder`` fills it."""

    tape: Tape
    dims: dict[int, tuple[Node, ...]] = field(default_factory=dict)
    """Tensor -> the trees of its dims; their sizes are its global shape."""
    partial: dict[int, Partial] = field(default_factory=dict)
    """Tensor -> its partial state; ``find_partial`` gives the one that it shares."""
    returned: set[int] = field(default_factory=set)
    """Results of modules that return their input: one that is replicated may become a term of a sum there."""
    contractions: list[Contraction] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    norms: list[NormUse] = field(default_factory=list)
    lookups: list[TableLookup] = field(default_factory=list)
    experts: list[tuple[ExpertSite, Node]] = field(default_factory=list)
    """Modules of experts that are one operator, with the dim that counts the experts."""
    frozen: list[Node] = field(default_factory=list)
    """Dims of the model's inputs (batch, sequence). They, and dims linked to them, are never sharded."""
    repeats: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of tensors at one slot of a module, in its first call and in another: it has one set of
    boundary steps for all of its calls."""
    handed_back: list[tuple[int, int]] = field(default_factory=list)
    """(tensor that the code made, what the call returns of it): the next call reads the second in place of
    the first, so that both have one layout."""
    handed_out: list[int] = field(default_factory=list)
    """What the model's encoder returns, and outputs of its base model that it does not read itself. A caller
    may ask for them, and hand some in again, so they are replicated."""
    parametric: set[int] = field(default_factory=set)
    """Tensors computed from parameters alone."""
    from_stack: set[int] = field(default_factory=set)
    """Matrices that were taken out of a stack of weights ``[E, I, O]``, one or several."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Operator without a rule -> FQN of a module that uses it."""
