"""Dims of a plan, written for the smaller model.

The dim of a plan is laid along the tree of the tensor's dim, part by part, and each part takes its smaller
size. So a dim that says something wrong says the same wrong thing in the smaller model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, size

from ...dim_analysis.dim_trees import LEAF, PRODUCT, SUM, Node, find
from .small_shapes import SmallShapes


class Misfit(Exception):
    """A dim does not fit along the tree; it cannot be said of the smaller model."""


def resized(dim: Dim, node: Node, shapes: SmallShapes) -> Dim:
    """A dim of a plan with the sizes of the smaller model.

    Args:
        dim: what the plan says.
        node: the dim of the traced tensor that this is about.
        shapes: of the smaller model.

    Raises:
        Misfit: it has another size, or a part that shrinks does not correspond to parts of it.
    """
    return _along(dim, _part(node, shapes))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a traced dim."""

    full: int
    small: int
    shrinks: bool
    kind: int = LEAF
    children: tuple[_Part, ...] = ()


def _part(node: Node, shapes: SmallShapes) -> _Part:
    node = find(node)
    children = tuple(_part(child, shapes) for child in node.children) if node.kind != LEAF else ()
    shrinks = any(c.shrinks for c in children) if children else shapes.changed(node)
    return _Part(node.size, shapes.size(node), shrinks, node.kind, children)


def _along(dim: Dim, part: _Part) -> Dim:
    if not part.shrinks:
        return dim
    if size(dim) != part.full:
        raise Misfit
    if isinstance(dim, Leaf):
        return Leaf(part.small, dim.axes)
    if isinstance(dim, Sum):
        pieces = _taken(_segments(part), [size(s) for s in dim.segments], SUM)
        return Sum(tuple(map(_along, dim.segments, pieces)))
    pieces = _taken(_factors(part)[::-1], [size(f) for f in dim.factors[::-1]], PRODUCT)[::-1]
    return Product(tuple(map(_along, dim.factors, pieces)))


def _taken(parts: list[_Part], sizes: Sequence[int], kind: int) -> list[_Part]:
    """Neighboring parts joined, so that they have these sizes.

    Raises:
        Misfit: a part that shrinks would have to be divided.
    """
    pending, out = list(parts), []
    for wanted in sizes:
        taken: list[_Part] = []
        have = 1 if kind == PRODUCT else 0
        while have != wanted:
            if not pending:
                raise Misfit
            part = pending.pop(0)
            rest = wanted // have if kind == PRODUCT else wanted - have
            if part.full > rest:
                beyond = part.full // rest if kind == PRODUCT else part.full - rest
                if part.shrinks or (kind == PRODUCT and part.full % rest):
                    raise Misfit
                part = _Part(rest, rest, False)
                pending.insert(0, _Part(beyond, beyond, False))
            taken.append(part)
            have = have * part.full if kind == PRODUCT else have + part.full
            if have > wanted or (kind == PRODUCT and wanted % have):
                raise Misfit
        out.append(_joined(taken, kind))
    return out


def _joined(parts: Sequence[_Part], kind: int) -> _Part:
    if len(parts) == 1:
        return parts[0]
    combine = math.prod if kind == PRODUCT else sum
    children = tuple(parts[::-1]) if kind == PRODUCT else tuple(parts)
    full, small = combine(p.full for p in parts), combine(p.small for p in parts)
    return _Part(full, small, any(p.shrinks for p in parts), kind, children)


def _factors(part: _Part) -> list[_Part]:
    """Outer to inner, without those of size 1."""
    if part.kind == PRODUCT:
        return [f for child in part.children for f in _factors(child)]
    return [] if part.full == 1 else [part]


def _segments(part: _Part) -> list[_Part]:
    if part.kind == SUM:
        return [s for child in part.children for s in _segments(child)]
    if part.kind == PRODUCT:
        outer, *inner = _factors(part)
        if outer.kind == SUM:
            return [_joined([*inner[::-1], s], PRODUCT) for s in _segments(outer)]
    return [part]
