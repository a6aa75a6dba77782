"""The stages of a pipeline in a plan: which modules run where, and the placeholders of the others.

On a stage, the model's own forward pass runs. Modules of other stages are placeholders without parameters:
they return tensors of the right shape, or values that another stage has sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dims import Dim
from .field_checks import MAX_TENSOR_DIMS, check_dtype, fail, one_of
from .measured import MemoryPlan

MAX_ITEMS = 256
"""Most items that a module returns, arguments of a call of a cache, or calls of one."""

RETURNS = ("tensor", "tuple", "list")


@dataclass(frozen=True, slots=True)
class PortDim:
    """A dim of an argument of a module, as its caller gives it."""

    port: str
    """``input.hidden_states``."""
    dim: int


@dataclass(frozen=True, slots=True)
class PlaceholderDim:
    """A dim of a tensor that a placeholder makes: the product of these."""

    of: tuple[PortDim, ...] = ()
    size: Dim | None = None
    """A layout, of which each rank has its local size."""
    times: int = 1
    """Number of parts of the dim of which the argument is one, in the sequence-parallel form."""
    over: int = 1
    """Number of parts of the argument of which the dim is one, in the sequence-parallel form."""
    at_most: int = 0
    """The largest product of the arguments' dims; 0 for no limit."""

    def __post_init__(self) -> None:
        if min(self.times, self.over) < 1:
            fail("", "a part of a dim should be 1 or more")
        if self.at_most < 0:
            fail("at_most", f"a dim of at most {self.at_most}")


@dataclass(frozen=True, slots=True)
class PlaceholderTensor:
    """A tensor that a placeholder makes."""

    dims: tuple[PlaceholderDim, ...]
    dtype: str = ""
    """Empty for the dtype of the model's parameters."""

    def __post_init__(self) -> None:
        if len(self.dims) > MAX_TENSOR_DIMS:
            fail("dims", f"more than {MAX_TENSOR_DIMS} dims")
        if self.dtype:
            check_dtype("dtype", self.dtype)


@dataclass(frozen=True, slots=True)
class PlaceholderItem:
    """An item that a placeholder returns: a tensor, one of its arguments, or None."""

    tensor: PlaceholderTensor | None = None
    argument: str = ""


@dataclass(frozen=True, slots=True)
class CacheArgument:
    """An argument of a method of a cache: a tensor, or a number."""

    name: str = ""
    """Empty: it is positional."""
    tensor: PlaceholderTensor | None = None
    numbers: tuple[int, ...] = ()
    """One for all names of the module, or one for each."""


@dataclass(frozen=True, slots=True)
class CacheCall:
    """A call by which a placeholder keeps its layer of a cache as long as the others."""

    method: str
    argument: str
    """The argument of the module, which is the cache."""
    attribute: str = ""
    """The attribute of that argument, if the cache consists of caches."""
    arguments: tuple[CacheArgument, ...] = ()

    def __post_init__(self) -> None:
        if not self.method.startswith("update") or not self.method.isidentifier():
            fail("method", f"{self.method!r} is not a method that updates a cache")
        if len(self.arguments) > MAX_ITEMS:
            fail("arguments", f"more than {MAX_ITEMS}")


@dataclass(frozen=True, slots=True)
class SentValue:
    """A result of a module that other stages receive."""

    item: int
    """Index of the value among the items that the module returns."""
    to: tuple[int, ...]
    """Stages, ascending."""
    per_token: int = 0
    """Elements of the (global) tensor for each token; for reports."""
    each_call: bool = False
    """It is made in every call of the model, not only in calls that run an encoder."""


@dataclass(frozen=True, slots=True)
class StagedModule:
    """Modules that run on some stages, and have placeholders on the others."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    """Ascending; more than one if it is called on several."""
    returns: str
    """``tensor``: its one item; ``tuple`` or ``list`` of its items."""
    items: tuple[PlaceholderItem, ...]
    takes_cache: bool = False
    """It is given a cache; one that is not was not traced with any."""
    cache: tuple[CacheCall, ...] = ()
    sent: tuple[SentValue, ...] = ()

    def __post_init__(self) -> None:
        if self.returns not in RETURNS:
            fail("returns", one_of(self.returns, RETURNS))
        if self.returns == "tensor" and len(self.items) != 1:
            fail("items", "a module that returns a tensor has one item")
        if max(len(self.items), len(self.cache)) > MAX_ITEMS:
            fail("", f"more than {MAX_ITEMS} items, or calls of a cache")
        for sent in self.sent:
            if not 0 <= sent.item < len(self.items) or self.items[sent.item].tensor is None:
                fail("sent", f"item {sent.item} is not a tensor")


@dataclass(frozen=True, slots=True)
class StagesPlan:
    """The stages of a pipeline."""

    count: int
    layers: tuple[tuple[int, int], ...]
    """First and last layer of each stage; layers are counted in the order in which they run. A stage without
    layers has a last one before its first."""
    modules: tuple[StagedModule, ...]
    """The outermost modules with parameters that lie in one stage; all others run on each stage."""
    own: int | None = None
    """The stage whose tensors are in the directory of the plan; None: all stages."""
    computed_again: tuple[str, ...] = ()
    """Modules without parameters that each stage runs; for reports."""
    memory: tuple[MemoryPlan, ...] = ()
    """The memory of each stage, if it was measured; for reports."""

    def __post_init__(self) -> None:
        if self.count < 2:
            fail("count", f"must be 2 or more, got {self.count}")
        if self.own is not None and not 0 <= self.own < self.count:
            fail("own", f"{self.own} is not one of {self.count} stages")
        if len(self.layers) != self.count:
            fail("layers", f"expected one pair for each of {self.count} stages")
        if len(self.memory) not in (0, self.count):
            fail("memory", f"expected one for each of {self.count} stages")
