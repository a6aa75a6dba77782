"""A tensor's dim as a tree that says how it is put together, and how it is sharded.

- a **leaf** of some size, sharded over zero or more mesh axes,
- a **product** of dims, outer to inner (``heads * head_dim``),
- a **sum** of segments, laid end to end (``q + k + v``).

Written as text, a leaf is its size and, after ``@``, the mesh axes that shard it: ``32@0*128``
is 32 heads sharded over mesh axis 0, each 128 wide; ``32@0*128 + 8@0*128 + 8@0*128`` a fused
query/key/value dim. ``4@0.1`` is sharded over axes 0 and 1, axis 0 being the outer.

This module needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType

from ..errors import PlanError

MAX_DEPTH = 32
"""Deepest nesting of a dim; a plan is untrusted input, and recursion must be bounded."""

MAX_SIZE = 2**48
"""Largest global size of a dim."""

MAX_LEAVES = 4096
"""Most leaves of a dim."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """``size`` positions, sharded over mesh ``axes`` (outer first); no axes: replicated.

    Size 0 is an **open** leaf, written ``?``: a size that only the input decides (batch times length).
    """

    size: int
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Product:
    """Mixed-radix positions; ``factors`` outer to inner."""

    factors: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """``segments`` laid end to end."""

    segments: tuple[Dim, ...]


Dim = Leaf | Product | Sum


def size(dim: Dim) -> int:
    """Return the global size of the dim."""
    if isinstance(dim, Leaf):
        return dim.size
    if isinstance(dim, Product):
        return math.prod(size(f) for f in dim.factors)
    return sum(size(s) for s in dim.segments)


def axes_of(dim: Dim) -> frozenset[int]:
    """Return all mesh axes over which some leaf of the dim is sharded."""
    return frozenset(a for leaf in leaves(dim) for a in leaf.axes)


def leaves(dim: Dim) -> Iterator[Leaf]:
    """Yield the leaves, in order."""
    if isinstance(dim, Leaf):
        yield dim
    else:
        for child in dim.factors if isinstance(dim, Product) else dim.segments:
            yield from leaves(child)


def segments(dim: Dim) -> list[Dim]:
    """Return the dims that are laid end to end; ``(a + b)*c`` is ``a*c + b*c``."""
    if isinstance(dim, Sum):
        return [part for segment in dim.segments for part in segments(segment)]
    if isinstance(dim, Product):
        outer, *inner = dim.factors
        return [Product((part, *inner)) for part in segments(outer)] if inner else segments(outer)
    return [dim]


def is_partially_sharded(dim: Dim) -> bool:
    """Return whether some positions of the dim are sharded over other mesh axes than others."""
    if isinstance(dim, Leaf):
        return False
    if isinstance(dim, Product):
        return any(map(is_partially_sharded, dim.factors))
    kinds = {frozenset(axes_of(segment)) for segment in dim.segments}
    return len(kinds) > 1 or any(map(is_partially_sharded, dim.segments))


def to_text(dim: Dim) -> str:
    """Return the dim as text; ``parse`` reads it back (a product or sum of one part as that part)."""
    dim = _unwrap(dim)
    if isinstance(dim, Leaf):
        return (str(dim.size) if dim.size else "?") + ("@" + ".".join(map(str, dim.axes)) if dim.axes else "")
    if isinstance(dim, Product):
        return "*".join(_nested(f, Product | Sum) for f in dim.factors)
    return " + ".join(_nested(s, Sum) for s in dim.segments)


def shown(dim: Dim) -> str:
    """Return the dim as text of bounded length, for errors."""
    return _shortened(to_text(dim))


def _unwrap(dim: Dim) -> Dim:
    while not isinstance(dim, Leaf):
        children = dim.factors if isinstance(dim, Product) else dim.segments
        if len(children) != 1:
            return dim
        dim = children[0]
    return dim


def _nested(dim: Dim, kinds: type | UnionType) -> str:
    return f"({to_text(dim)})" if isinstance(_unwrap(dim), kinds) else to_text(dim)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


_TOKEN = re.compile(
    r" *(?:(?P<leaf>(\?|0|[1-9][0-9]{0,17})(?:@[0-9]{1,4}(?:\.[0-9]{1,4})*)?)|(?P<sign>[()*+])) *"
)


def open_parts(dim: Dim) -> tuple[Dim, Dim] | None:
    """Return the known parts (outer, inner) around the one open factor of a product, if it has one.

    Raises:
        PlanError: an open leaf anywhere else.
    """
    factors = dim.factors if isinstance(dim, Product) else (dim,)
    if isinstance(dim, Leaf) and not dim.size and dim.axes:
        return None
    positions = [i for i, factor in enumerate(factors) if factor == Leaf(0)]
    known_factors = [factor for factor in factors if factor != Leaf(0)]
    if len(positions) > 1 or any(leaf.size == 0 for factor in known_factors for leaf in leaves(factor)):
        raise PlanError(f"dim {shown(dim)}: only one factor of a product may be open")
    if not positions:
        return None
    outer, inner = factors[: positions[0]], factors[positions[0] + 1 :]
    return Product((Leaf(1), *outer)), Product((Leaf(1), *inner))


def parse(text: str) -> Dim:
    """Read a dim from text.

    The grammar: ``sum := product ('+' product)*``, ``product := atom ('*' atom)*``,
    ``atom := INT ['@' INT ('.' INT)*] | '?' | '(' sum ')'``; spaces around ``+ * ( )`` do not matter.

    Raises:
        PlanError: the text is not a dim.
    """
    reader = _TextReader(text)
    dim = reader.read_sum(0)
    if reader.tokens[reader.position] != _END:
        raise reader.error()
    return dim


_END = ""


class _TextReader:
    """A recursive descent over the tokens of a dim's text, ``position`` being the next one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.tokens: list[str] = []
        self.tokens = [*self._tokens_of(text), _END]
        if len(self.tokens) > 2 * MAX_LEAVES:
            raise PlanError(f"a dim has more than {MAX_LEAVES} leaves: {_shortened(text)}")

    def _tokens_of(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.error()
            yield match["leaf"] or match["sign"]
            at = match.end()

    def error(self) -> PlanError:
        return PlanError(f'not a dim: {_shortened(self.text)!r} (a dim reads like "32@0*128 + 8@0*128")')

    def accept(self, token: str) -> bool:
        is_next = self.tokens[self.position] == token
        self.position += is_next
        return is_next

    def read_sum(self, depth: int) -> Dim:
        if depth > MAX_DEPTH:
            raise PlanError(f"a dim is nested deeper than {MAX_DEPTH} levels")
        segments = [self.read_product(depth)]
        while self.accept("+"):
            segments.append(self.read_product(depth))
        return segments[0] if len(segments) == 1 else Sum(tuple(segments))

    def read_product(self, depth: int) -> Dim:
        factors = [self.read_atom(depth)]
        while self.accept("*"):
            factors.append(self.read_atom(depth))
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def read_atom(self, depth: int) -> Dim:
        if self.accept("("):
            dim = self.read_sum(depth + 1)
            if not self.accept(")"):
                raise self.error()
            return dim
        token = self.tokens[self.position]
        if not token[:1].isdigit() and token[:1] != "?":
            raise self.error()
        self.position += 1
        size_text, _, axes_text = token.partition("@")
        return Leaf(
            0 if size_text == "?" else int(size_text),
            tuple(map(int, axes_text.split("."))) if axes_text else (),
        )
