"""Choose which leaves are sharded, and where values change placement. The choice is the cheapest one,
exactly.

For each mesh axis, of n ranks, there are binary variables: s(l), whether the axis shards leaf l, and p(t),
whether the state of tensor t is partial on it. The methods in parentheses belong to ``AxisProblem``.

Constraints:

- leaves a, b that multiply in one tensor: s(a) + s(b) <= 1 (``_exclusions``);
- leaf l of tensor t: s(l) + p(t) <= 1 (``_exclusions``);
- a product y of x1, x2 that contracts dims c: p(y) = p(x1) + p(x2) + sum of s(c), of which at most one is 1;
  all segments of a contracted dim are sharded, or none (``_contraction``);
- a mark from x to y: p(y) <= p(x), except where a module returns its input: there one rank may keep a
replicated
  value, and the others zeros (``_mark``);
- outputs of the model, of its encoder and base model: s = p = 0 (``_must_be_replicated``);
- tensors of folded layers, of a module that is called again, or that the next call reads instead of each
other:
  equal variables (``_tie``).

Costs, where V is the number of elements of the tensor times (n - 1)/n and L the latency of a collective:

- a mark from x to y: p(x) (1 - p(y)) (2V + L) for an all_reduce, and s(lx) (1 - s(ly)) (V + L) for an
  all_gather of each pair of leaves; slicing is free (``_mark``). These are the volumes of ring algorithms
  (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009);
- a parameter of N elements: -w N s(l), less where shares are uneven, so that sharding pays (``_savings``);
- a norm whose normalized dim is sharded: most of L (in ``__init__``);
- small rewards: rows of looked-up tables before columns, and work that is divided (in ``__init__``).

tp is a mesh of its prime factors, solved one after another: with fewer key/value heads than ranks, the
heads take the first axes and the group the rest.

If the ranks are on several hosts and the links between them are known, the first mesh axes are the hosts, and
their costs are seconds of a call instead (``AxisPrices``): bytes over the link, and bytes of weights or
operations on the device. The ranks of a host are the last axes, with the costs above. The saved seconds weigh
more until the weights fit; if they do not with the highest weight, all axes have the costs above.

Otherwise costs are in elements and scale with the square of the model's width, so that a small model gets
the plan of a large one of the same shape.

If more than ``MAX_REPLICATED`` of the model would stay replicated, the model is solved again with a higher
value of each sharded element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import Dim, Leaf, Product, axes_of, size
from shardconv_runtime.format.plan import ParameterPlan
from shardconv_runtime.format.slices import Mesh

from ..arguments import HostLinks
from ..dim_analysis.analysis import Analysis, Partial, find_partial
from ..dim_analysis.dim_trees import LEAF, SUM, IncompatibleDims, Node, cut, factors, find, leaves, split
from ..tracing.fold import Folded
from .axis_variables import SolverInput
from .elimination import Infeasible
from .mesh_axis_problem import AxisPrices, solve_axis

# Pin the layouts of parameters to another plan, and let related parameters follow.
#
# An adapter is solved with the plan of its model, whose shards stay as they are. A dim of an adapter's
# parameter gets the axes of the nearest linked dim of the model (the inputs or outputs of a layer), so that
# products of the adapter's parameters have the layout of the weight that they are added to. Dims that the
# model does not have, such as the rank of a low-rank product, stay replicated.


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
    unpinned: list[Node] = []
    parameters = [
        (info.name, tid)
        for tid, info in enumerate(analysis.tape.tensors)
        if info.kind in ("parameter", "buffer") and tid in analysis.dims
    ]
    for refine in (True, False):  # refining one dim may refine another
        for name, tid in parameters:
            entry = given.parameters.get(name)
            if entry is None:
                unpinned += () if refine else (x for dim in analysis.dims[tid] for x in leaves(dim))
                continue
            for node, dim in zip(analysis.dims[tid], entry.dims, strict=True):
                try:
                    chosen = dict(_chosen(node, dim))
                except IncompatibleDims:
                    raise SolveError(
                        f"{name}: with the adapter, its dim of {node.size} cannot be laid out as it is in "
                        "the model; leave that layer out of the adapter's target modules"
                    ) from None
                if not refine:
                    pinned |= {x: tuple(f for a in axes for f in primes[a]) for x, axes in chosen.items()}
    for leaf in unpinned:
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
        IncompatibleDims: if the dim cannot be refined to the layout.
    """
    node = find(node)
    if not axes_of(dim):
        yield from ((x, ()) for x in leaves(node))
    elif isinstance(dim, Leaf):
        parts = [find(x) for x in factors(node)]
        if not parts or parts[0].kind != LEAF:
            raise IncompatibleDims
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
        neighbors = dict.fromkeys(find(y) for x in level for y in x.links)
        level = [y for y in neighbors if y not in seen]
        seen.update(level)
    return ()


MAX_REPLICATED = 0.01
"""Fraction of the matrices that may stay replicated to save collectives. At tp 8, a hundredth of a model on
every rank is 7% more memory than an even share."""
SAVING_WEIGHTS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Values of a sharded element: the one in ``mesh_axis_problem``, and higher ones if too much stays
replicated."""
MIN_GAIN = 0.01
"""A higher weight is used if it shards at least this fraction of the matrices more, or leaves at most
``MAX_REPLICATED`` of them."""


@dataclass(frozen=True)
class Assignment:
    """The solution: mesh axes of every leaf and partial state. Leaves and states without axes are
    replicated."""

    mesh: tuple[int, ...]
    leaves: Mapping[Node, tuple[int, ...]]
    """``find(leaf)`` -> mesh axes, outer first."""
    partials: Mapping[Partial, tuple[int, ...]]
    """``find_partial(state)`` -> mesh axes."""
    replicated: tuple[float, float] = (0.0, 0.0)
    """Fraction of the elements of matrices that every rank holds: here, and in the plan with the fewest
    collectives. They differ if more collectives were accepted to shard more."""

    def axes(self, leaf: Node) -> tuple[int, ...]:
        """Return the mesh axes that shard a leaf."""
        return self.leaves.get(find(leaf), ())

    def partial_axes(self, state: Partial) -> tuple[int, ...]:
        """Return the mesh axes over which a state is partial."""
        return self.partials.get(find_partial(state), ())


def solve(
    analysis: Analysis,
    tp: int,
    forbidden: Iterable[Node] = (),
    folded: Folded | None = None,
    pins: Pins | None = None,
    links: HostLinks | None = None,
    element_bytes: int = 2,
    *,
    fewest_collectives: bool = False,
) -> Assignment:
    """Return the cheapest assignment for ``tp`` ranks.

    Args:
        analysis: dims and constraints of the traced model.
        tp: number of ranks.
        forbidden: leaves that must stay replicated.
        folded: tensors that must get the same choice, and weights of layers.
        pins: leaves with a fixed choice: the leaves of all parameters, or none.
        links: the links between the hosts of the ranks; None: all links are alike.
        element_bytes: bytes of an element of the model.
        fewest_collectives: do not accept more collectives to shard more of the model.

    Raises:
        SolveError: if the pinned choices contradict the constraints.
    """
    problem = SolverInput(analysis, forbidden, folded or Folded(analysis.tape))
    if pins:
        try:
            return _solve(problem, tp, SAVING_WEIGHTS[0], pins)
        except Infeasible as error:
            raise SolveError(
                "with the adapter, a layer cannot be computed from the parts that ranks have of its weight; "
                "leave out layers of its target modules"
            ) from error
    if links is not None and links.hosts > 1:
        return _solve_on_hosts(problem, tp, links, element_bytes)
    first = best = _solve(problem, tp, SAVING_WEIGHTS[0])

    least = _fraction_without(problem, problem.may_be_sharded)
    enough = MAX_REPLICATED if least < MAX_REPLICATED else least + MIN_GAIN
    if best.replicated[0] <= enough or fewest_collectives:
        return best
    most = _solve(problem, tp, SAVING_WEIGHTS[-1])  # no other weight shards more
    if not _is_gain(best, most):
        return best
    for weight in SAVING_WEIGHTS[1:]:
        if best.replicated[0] <= enough:
            break
        other = _solve(problem, tp, weight) if weight != SAVING_WEIGHTS[-1] else most
        if _is_gain(best, other):
            best = replace(other, replicated=(other.replicated[0], first.replicated[0]))
    return best


def _solve_on_hosts(problem: SolverInput, tp: int, links: HostLinks, element_bytes: int) -> Assignment:
    """Return the cheapest assignment in seconds whose weights fit."""
    # An element is read in each call. With many tokens, their products take longer than that.
    held_s = max(element_bytes / links.memory_bandwidth, 2 * links.tokens / links.flops)
    prices = AxisPrices(links.tokens, element_bytes / links.bandwidth, links.latency_s, held_s)
    for weight in SAVING_WEIGHTS:
        best = _solve(problem, tp, weight, hosts=links.hosts, prices=prices)
        if _rank_elements(problem, best) * element_bytes <= links.weight_bytes:
            return best
    return _solve(problem, tp, SAVING_WEIGHTS[0], hosts=links.hosts)


def _rank_elements(problem: SolverInput, assignment: Assignment) -> float:
    """Return the elements of all parameters on a rank, if shares are even."""
    analysis = problem.analysis

    def share(node: Node) -> float:
        node = find(node)
        if node.kind == LEAF:
            return 1 / math.prod(assignment.mesh[axis] for axis in assignment.axes(node))
        if node.kind == SUM:
            return sum(child.size / node.size * share(child) for child in node.children)
        return math.prod(map(share, node.children))

    total = 0.0
    for tid, info in enumerate(analysis.tape.tensors):
        if info.kind == "parameter" and tid in analysis.dims:
            held_share = math.prod(map(share, analysis.dims[tid]))
            total += math.prod(info.shape) * problem.folded.weight(info.name) * held_share
    return total


def _is_gain(before: Assignment, after: Assignment) -> bool:
    """Return whether enough more is sharded for the collectives that it costs."""
    (was, _), (now, _) = before.replicated, after.replicated
    return now < was - MIN_GAIN or now <= MAX_REPLICATED < was


def _solve(
    given: SolverInput,
    tp: int,
    saving_weight: float,
    pins: Pins = MappingProxyType({}),
    hosts: int = 1,
    prices: AxisPrices | None = None,
) -> Assignment:
    """Solve one mesh axis after another.

    Args:
        hosts: hosts of the ranks, which divide the number of ranks; the first axes.
        prices: costs of the axes of hosts; an element takes its ``held_s`` if no axis shards it.
    """
    mesh = (*prime_factors(hosts), *prime_factors(tp // hosts))
    between = len(prime_factors(hosts))
    leaf_axes: dict[Node, tuple[int, ...]] = {}
    partial_axes: dict[Partial, tuple[int, ...]] = {}
    for axis, extent in enumerate(mesh):
        taken = {leaf: math.prod(mesh[a] for a in axes) for leaf, axes in leaf_axes.items()}
        pinned: dict[Node | Partial, bool] = {leaf: axis in axes for leaf, axes in pins.items()}
        axis_prices = None
        if prices is not None and axis < between:  # most parameters are sharded over all other axes, too
            axis_prices = replace(prices, held_s=prices.held_s * extent / tp)
        sharded, partial = solve_axis(given, extent, taken, saving_weight, pinned, axis_prices)
        for leaf in sharded:
            leaf_axes[leaf] = (*leaf_axes.get(leaf, ()), axis)
        for state in partial:
            partial_axes[state] = (*partial_axes.get(state, ()), axis)
    replicated = _fraction_without(given, lambda leaf: leaf in leaf_axes) if mesh else 0.0
    # Adjacent axes that are always used together become one.
    used = [*leaf_axes.values(), *partial_axes.values()]
    merged: list[list[int]] = []
    for axis in range(len(mesh)):
        if merged and all((axis in axes) == (axis - 1 in axes) for axes in used):
            merged[-1].append(axis)
        else:
            merged.append([axis])
    renamed = {old: new for new, group in enumerate(merged) for old in group}
    mesh = tuple(math.prod(mesh[a] for a in group) for group in merged)
    merged_leaves = {leaf: _renamed(axes, renamed) for leaf, axes in leaf_axes.items()}
    merged_states = {state: _renamed(axes, renamed) for state, axes in partial_axes.items()}
    return Assignment(mesh, merged_leaves, merged_states, (replicated, replicated))


def _fraction_without(given: SolverInput, is_one: Callable[[Node], bool]) -> float:
    """Return the fraction of the elements of matrices that have no such leaf."""
    without = total = 0.0
    for tid, info in enumerate(given.analysis.tape.tensors):
        dims = given.analysis.dims.get(tid, ())
        if info.kind == "parameter" and len(dims) > 1:
            numel = math.prod(info.shape) * given.folded.weight(info.name)
            total += numel
            if not any(is_one(find(x)) for d in dims for x in leaves(d)):
                without += numel
    return without / total if total else 0.0


def _renamed(axes: tuple[int, ...], names: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(names[axis] for axis in axes))
