"""Draws weights as rectangles, divided where their dims are sharded and colored by rank."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product

from shardconv_runtime.format.dims import Dim, Sum, axes_of, size
from shardconv_runtime.format.plan import ParameterPlan, Plan, global_shape
from shardconv_runtime.format.slices import Mesh, num_ranges, ranges

from .summary import TensorLine
from .svg import RANK_COLORS, Row, element, moved, rect, text

LONGEST, SHORTEST = 92.0, 16.0
"""Length in the picture of the longest dim in a block, and of the shortest that is drawn."""

THIN, APART, SHIFT = 8.0, 4.0, 6.0
"""Width of the vectors next to a matrix, their distance, and how far the sheets of a stack are apart."""

SMALL_DIM = 16
"""Dims up to this size are not drawn of a tensor with more than two dims."""

MAX_STRETCHES = 8
"""More stretches of a dim, or of a segment of it, are drawn as the first three, a gap and the last."""

MAX_FUSED = 64
"""Most stretches of all segments of a dim; the rest is a gap."""

Ranks = tuple[int, ...]
Stretch = tuple[float, float, Ranks]
"""Start and stop from 0 to 1, and the ranks that hold these positions; none: a gap."""


@lru_cache(maxsize=4096)
def stretches(dim: Dim, mesh: Mesh) -> tuple[Stretch, ...]:
    """Return the neighboring positions of a dim that the same ranks hold; few of many, not to scale."""
    if isinstance(dim, Sum) and axes_of(dim):
        inner = [(size(segment), stretches(segment, mesh)) for segment in dim.segments]
        start, fused = 0, []
        for extent, segment in inner:
            fused += [(start + a * extent, start + b * extent, ranks) for a, b, ranks in segment]
            start += extent
        if len(fused) > MAX_FUSED:
            fused = [*fused[:MAX_FUSED], (fused[MAX_FUSED][0], float(start), ())]
        return tuple((a / (start or 1), b / (start or 1), ranks) for a, b, ranks in fused)
    if num_ranges(dim) > 4096:
        return ((0.0, 1.0, ()),)
    whole = ((0, size(dim)),)
    spans = [ranges(dim, mesh, rank) if axes_of(dim) else whole for rank in range(math.prod(mesh))]
    edges = sorted({edge for spans_of_rank in spans for span in spans_of_rank for edge in span})
    holders: list[list[int]] = [[] for _ in edges]
    for rank, spans_of_rank in enumerate(spans):
        for start, stop in spans_of_rank:
            for index in range(bisect_left(edges, start), bisect_left(edges, stop)):
                holders[index].append(rank)
    parts = [(a, b, tuple(ranks)) for (a, b), ranks in zip(pairwise(edges), holders, strict=False)]
    if len(parts) > MAX_STRETCHES:
        first = [(n / 6, (n + 1) / 6, ranks) for n, (_, _, ranks) in enumerate(parts[:3])]
        return (*first, (0.5, 5 / 6, ()), (5 / 6, 1.0, parts[-1][2]))
    total = size(dim) or 1
    return tuple((a / total, b / total, ranks) for a, b, ranks in parts)


@dataclass(slots=True)
class Paint:
    """The colors of ranks, and the patterns in use so far."""

    plan: Plan
    patterns: dict[str, str] = field(default_factory=dict)
    """Id -> markup, in the order of first use."""

    def rank(self, rank: int) -> str:
        """Return the color of a rank; of many, the first three and the last differ from the rest."""
        if self.plan.tp <= len(RANK_COLORS) or rank < 3:
            return RANK_COLORS[rank]
        return RANK_COLORS[-1] if rank == self.plan.tp - 1 else RANK_COLORS[3 + rank % 4]

    def ranks(self, ranks: Ranks) -> str:
        """Return the fill for these ranks: the color of one, or stripes of the first and the last."""
        if len(ranks) == 1:
            return self.rank(ranks[0])
        first, last = self.rank(ranks[0]), self.rank(ranks[-1])
        stripe = rect(0, 0, 12, 12, fill=first) + rect(0, 0, 6, 12, fill=last)
        return self._pattern(f"sc-{first[1:]}-{last[1:]}", 12, stripe)

    def hatch(self) -> str:
        """Return the overlay of partial parameters, which are zero on all ranks but some."""
        return self._pattern("sc-hatch", 6, element("line", x1=0, y1=0, x2=0, y2=6, class_="hatch"))

    def _pattern(self, key: str, side: int, content: str) -> str:
        turned = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
        self.patterns[key] = element("pattern", content, id=key, width=side, height=side, **turned)
        return f"url(#{key})"


@dataclass(frozen=True, slots=True)
class Drawn(Row):
    """Markup at (0, 0), and its size."""

    width: float


def longest_dim(entries: Sequence[ParameterPlan]) -> int:
    """Return the largest size of a dim that is drawn of a matrix."""
    matrices = [entry for entry in entries if len(entry.dims) >= 2]
    return max((size(entry.dims[i]) for entry in matrices for i in faces(entry)[-2:]), default=1)


def faces(entry: ParameterPlan) -> tuple[int, ...]:
    """Return the indices of the dims that are drawn: height and width, after the sheets if there are any."""
    shape, shown = global_shape(entry), list(range(len(entry.dims)))
    for index in sorted(shown, key=lambda i: (i == 0 and shape[i] > 1, shape[i], -i)):
        is_stack = index == 0 and shape[0] > 1 and all(shape[i] > SMALL_DIM for i in shown[1:])
        is_small = shape[index] <= SMALL_DIM and not is_stack
        if len(shown) > 2 and not axes_of(entry.dims[index]) and (is_small or len(shown) > 3):
            shown.remove(index)
    return tuple(shown[-3:])


def draw(tensors: Sequence[TensorLine], paint: Paint, longest: int) -> Drawn:
    """Draw a matrix and the vectors along its sides, or vectors below one another."""
    matrix, *vectors = (tensor.plan for tensor in tensors)
    if len(matrix.dims) < 2:
        bars = [_vector(v, LONGEST, 13.0, paint, is_row=False) for v in (matrix, *vectors[:3])]
        markup = "".join(moved(0, index * (13.0 + APART), bar) for index, bar in enumerate(bars))
        return Drawn(markup, len(bars) * (13.0 + APART) - APART, LONGEST)
    *sheets, rows, columns = faces(matrix)
    lengths = [LONGEST * (max(size(matrix.dims[i]), 1) / max(longest, 1)) ** 0.38 for i in (rows, columns)]
    height, width = (min(max(SHORTEST, length), LONGEST) for length in lengths)
    around: list[Ranks] = [()]
    if sheets:
        dim = matrix.dims[sheets[0]]
        around = [ranks for _, _, ranks in stretches(dim, paint.plan.mesh)][:5]
        around = around if axes_of(dim) else [()] * min(3, size(dim))
    markup = ""
    for depth in reversed(range(len(around))):
        sheet = "".join(_matrix(matrix, (rows, columns), (width, height), around[depth], paint, depth == 0))
        markup += moved(depth * SHIFT, (len(around) - 1 - depth) * SHIFT, sheet)
    behind = (len(around) - 1) * SHIFT
    total_width, total_height = width + behind, height + behind
    for vector in vectors:  # right of the rows, or below the columns
        is_row = bool(vector.dims) and size(vector.dims[0]) == size(matrix.dims[rows])
        if is_row:
            strip = _vector(vector, THIN, height, paint, is_row=True)
            markup += moved(total_width + APART, behind, strip)
            total_width += APART + THIN
        else:
            markup += moved(0, total_height + APART, _vector(vector, width, THIN, paint, is_row=False))
            total_height += APART + THIN
    return Drawn(markup, total_height, total_width)


def _matrix(
    entry: ParameterPlan,
    faces: tuple[int, int],
    lengths: tuple[float, float],
    sheet: Ranks,
    paint: Paint,
    is_front: bool,
) -> Iterator[str]:
    (width, height), mesh = lengths, paint.plan.mesh
    down, across = (stretches(entry.dims[index], mesh) for index in faces)
    for (top, bottom, in_rows), (left, right, in_columns) in product(down, across):
        frame = (left * width, top * height, (right - left) * width, (bottom - top) * height)
        ranks = set(in_rows) & set(in_columns) & set(sheet or in_rows)
        yield _shard(entry, tuple(sorted(ranks)), frame, paint, is_labeled=is_front)
    yield rect(0, 0, width, height, class_="edge")


def _vector(entry: ParameterPlan, width: float, height: float, paint: Paint, *, is_row: bool) -> str:
    markup = ""
    every_rank = ((0.0, 1.0, tuple(range(paint.plan.tp))),)
    for start, stop, ranks in stretches(entry.dims[0], paint.plan.mesh) if entry.dims else every_rank:
        frame = (start * width, 0.0, (stop - start) * width, height)
        if is_row:
            frame = (0.0, start * height, width, (stop - start) * height)
        markup += _shard(entry, ranks, frame, paint)
    return markup + rect(0, 0, width, height, class_="edge")


def _shard(
    entry: ParameterPlan,
    ranks: Ranks,
    frame: tuple[float, float, float, float],
    paint: Paint,
    *,
    is_labeled: bool = True,
) -> str:
    """Draw a part of a tensor that some ranks hold; none: a gap for parts that are left out."""
    x, y, width, height = frame
    if not ranks:
        return rect(*frame, class_="gap") + text(
            x + width / 2, y + height / 2 + 3, "…", 9, text_anchor="middle", class_="muted"
        )
    if entry.partial:
        return rect(*frame, fill=paint.ranks(ranks[:1])) + rect(*frame, fill=paint.hatch())
    if len(ranks) == paint.plan.tp:
        return rect(*frame, class_="replicated")
    shape = rect(*frame, fill=paint.ranks(ranks), class_="shard" if min(width, height) > 3 else "thin")
    between = "-" if ranks[-1] - ranks[0] + 1 == len(ranks) else "…"
    label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}{between}{ranks[-1]}"
    if not is_labeled or height < 9.5 or width < 5.2 * len(label) + 3:
        return shape
    return shape + text(x + width / 2, y + height / 2 + 2.9, label, 8.2, text_anchor="middle", class_="on")
