"""The parts of a tensor that ranks may hold, by the layouts and the steps of a plan.

Where the plan has a step, it fixes the parts of the ranks. Elsewhere a rank may hold all of a tensor, the
positions of dims that some layout of the plan assigns to it, or a term of a sum over mesh axes, so every
explanation is tried. A tensor differs if the shapes allow some explanations, and the numbers agree with none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product

import torch
from shardconv_runtime.format.dims import Dim, Leaf, axes_of, is_partially_sharded, leaves, size
from shardconv_runtime.format.module_steps import (
    AllGatherStep,
    AllReduceStep,
    GradAllReduceStep,
    GradDivideStep,
    KeepOnFirstStep,
    ModuleStep,
    ReduceScatterStep,
    SliceStep,
    layout_of,
)
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.slices import Range, group_of, local_segments, ranges
from torch import Tensor

from .model_runs import largest_difference


@dataclass(frozen=True, slots=True)
class Placement:
    """Knowledge about the ranks' parts of a tensor."""

    dims: Mapping[int, Dim | None] = field(default_factory=dict)
    """Dims whose layout is known; None if all ranks have all positions."""
    summed: frozenset[int] = frozenset()
    """Mesh axes over which it is a term of a sum."""
    complete: frozenset[int] = frozenset()
    """Mesh axes over which it is no term of a sum."""

    def then(self, other: Placement) -> Placement:
        """Return the knowledge about the tensor after another step."""
        return Placement(
            {**self.dims, **other.dims},
            (self.summed - other.complete) | other.summed,
            (self.complete - other.summed) | other.complete,
        )


UNKNOWN = Placement()


def _sum_over(summed: Iterable[int], axes: Iterable[int], dims: Mapping[int, Dim | None]) -> Placement:
    return Placement(dims, frozenset(summed), frozenset(axes).difference(summed))


def around_step(step: ModuleStep) -> tuple[Placement, Placement, Placement]:
    """Return the knowledge about a tensor after a step, and about its gradient before and after it."""
    match step:
        case AllReduceStep(axes=axes):
            complete = _sum_over((), axes, {})
            return complete, complete, _sum_over(step.grad_axes, axes, {})
        case KeepOnFirstStep(axes=axes):
            complete = _sum_over((), axes, {})
            return _sum_over(axes, axes, {}), complete, complete
        case GradAllReduceStep(axes=axes):
            return UNKNOWN, _sum_over((), axes, {}), _sum_over(axes, axes, {})
        case GradDivideStep(axes=axes):
            return UNKNOWN, _sum_over(axes, axes, {}), _sum_over((), axes, {})
        case AllGatherStep(dim=dim, layout=layout) | SliceStep(dim=dim, layout=layout):
            # The gradient of a part is a term of a sum where positions are not sharded.
            moved = axes_of(layout)
            part = UNKNOWN if is_partially_sharded(layout) else Placement({dim: layout})
            whole = _sum_over(step.grad_axes, moved, {dim: None})
            if isinstance(step, AllGatherStep):
                return _sum_over((), moved, {dim: None}), part, whole
            return _sum_over((), moved, {dim: layout}), whole, part
        case ReduceScatterStep(dim=dim, layout=layout):
            moved = axes_of(layout)
            return (
                _sum_over((), moved, {dim: layout}),
                _sum_over((), moved, {dim: None}),
                Placement({dim: layout}),
            )
    return UNKNOWN, UNKNOWN, UNKNOWN


@dataclass(frozen=True, slots=True)
class _Layout:
    """A layout of a dim, and the positions that each rank holds."""

    axes: frozenset[int]
    positions: tuple[Tensor, ...]
    segments: tuple[tuple[tuple[Range, frozenset[int]], ...], ...] = ()
    """Local positions of each rank, with the axes that shard them, if some are not sharded over all axes."""

    def fits(self, sizes: Sequence[int]) -> bool:
        """Return whether the ranks hold so many positions."""
        return [len(each) for each in self.positions] == list(sizes)


class Explanations:
    """Compare tensors of ranks with the unsharded model's by the layouts of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._mesh = plan.mesh
        steps = (step for entry in plan.modules for step in (*entry.inputs, *entry.outputs))
        of_parameters = (dim for entry in plan.parameters for dim in entry.dims)
        sharded: dict[Dim, None] = {}
        for dim in chain(of_parameters, map(layout_of, steps)):
            if dim is not None:
                sharded |= {part: None for part in (dim, *leaves(dim)) if axes_of(part)}
        self._open = [dim for dim in sharded if isinstance(dim, Leaf) and not dim.size]
        self._known: dict[int, list[Dim]] = {}
        for dim in sharded:
            if _is_known(dim):
                self._known.setdefault(size(dim), []).append(dim)
        self._made: dict[tuple[Dim, int], _Layout] = {}

    def difference(
        self, want: Tensor, ranks: Sequence[Tensor], placed: Placement = UNKNOWN, least_scale: float = 0.0
    ) -> float:
        """Return the difference by the explanation that fits best, relative to the largest value.

        It is 0 if nothing is known and no explanation fits the shapes, and infinite if the known layout of
        a dim does not fit them.
        """
        if not want.is_floating_point() or not want.numel() or not want.isfinite().any():
            return 0.0
        scale = max(1.0, least_scale / float(want[want.isfinite()].abs().max().clamp_min(1e-30)))
        best: float | None = None
        for layouts, summed in self._explanations(want, ranks, placed):
            worst = max(self._distance(want, ranks, layouts, summed, rank) for rank in range(len(ranks)))
            best = worst if best is None else min(best, worst)
            if not best:
                break
        if best is None:
            return math.inf if placed.dims else 0.0
        return best / scale

    def _distance(
        self,
        want: Tensor,
        ranks: Sequence[Tensor],
        layouts: Sequence[_Layout | None],
        summed: Sequence[int],
        rank: int,
    ) -> float:
        for dim, layout in enumerate(layouts):
            if layout is not None:
                want = want.index_select(dim, layout.positions[rank])
        if not want.numel():
            return 0.0
        total = torch.stack([ranks[member] for member in group_of(self._mesh, summed, rank)]).sum(0)
        worst = largest_difference([total], [want])
        for dim, layout in enumerate(layouts):
            if layout is not None and layout.segments and worst > 0:
                worst = min(worst, largest_difference([self._with_sums(ranks, dim, layout, rank)], [want]))
        return worst

    def _with_sums(self, ranks: Sequence[Tensor], dim: int, layout: _Layout, rank: int) -> Tensor:
        """Return a rank's part of a tensor that is a term of a sum where positions are not sharded."""
        pieces = []
        for index, (_, sharded) in enumerate(layout.segments[rank]):
            members = group_of(self._mesh, layout.axes - sharded, rank)
            spans = [(member, *layout.segments[member][index][0]) for member in members]
            terms = [ranks[member].narrow(dim, start, stop - start) for member, start, stop in spans]
            pieces.append(torch.stack(terms).sum(0))
        return torch.cat(pieces, dim)

    def _explanations(
        self, want: Tensor, ranks: Sequence[Tensor], placed: Placement
    ) -> Iterator[tuple[Sequence[_Layout | None], tuple[int, ...]]]:
        """Yield layouts of the dims, and mesh axes over which a tensor is a term of a sum."""
        if any(local.dim() != want.dim() for local in ranks):
            return
        known_layouts: dict[int, Sequence[Dim | None]] = {
            dim % max(want.dim(), 1): (layout,)
            for dim, layout in placed.dims.items()
            if layout is None or isinstance(layout, Leaf) or _is_known(layout)
        }
        options = [
            self._of_dim(
                extent,
                [local.shape[dim] for local in ranks],
                known_layouts.get(dim, (None, *self._known.get(extent, ()), *self._open)),
            )
            for dim, extent in enumerate(want.shape)
        ]
        for layouts in product(*options):
            used = [axis for layout in layouts if layout is not None for axis in layout.axes]
            if len(used) > len(set(used)):
                continue
            free = set(range(len(self._mesh))) - set(used) - placed.complete - placed.summed
            for count in range(len(free) + 1):
                for more in combinations(sorted(free), count):
                    yield layouts, tuple(sorted({*placed.summed, *more}))

    def _of_dim(
        self, extent: int, sizes: Sequence[int], allowed: Sequence[Dim | None]
    ) -> list[_Layout | None]:
        """Return the allowed layouts with which ranks have these sizes; None is the one of all positions."""
        layouts: list[_Layout | None] = []
        for dim in allowed:
            if dim is None:
                layouts += [None] if all(local == extent for local in sizes) else []
            else:
                layout = self._layout(dim, extent)
                layouts += [layout] if layout is not None and layout.fits(sizes) else []
        return layouts

    def _layout(self, dim: Dim, extent: int) -> _Layout | None:
        """Return a layout for a dim of this size; None if it has another one."""
        if isinstance(dim, Leaf) and not dim.size:  # its size depends on the input, and all parts are equal
            dim = Leaf(extent, dim.axes)
        if size(dim) != extent or not extent:
            return None
        if (dim, extent) not in self._made:
            num_ranks = torch.Size(self._mesh).numel()
            spans = [ranges(dim, self._mesh, rank) for rank in range(num_ranks)]
            positions = tuple(
                torch.tensor([i for start, stop in each for i in range(start, stop)], dtype=torch.int64)
                for each in spans
            )
            segments = tuple(tuple(local_segments(dim, self._mesh, rank)) for rank in range(num_ranks))
            is_mixed = is_partially_sharded(dim) and len(set(map(len, segments))) == 1
            self._made[dim, extent] = _Layout(axes_of(dim), positions, segments if is_mixed else ())
        return self._made[dim, extent]


def _is_known(dim: Dim) -> bool:
    return all(leaf.size for leaf in leaves(dim))  # a leaf of size 0 means a size that depends on the input
