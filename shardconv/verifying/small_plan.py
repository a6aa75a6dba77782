"""Translate a plan to the smaller model. It is made from the plan's own entries, so that a wrong plan stays
wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, axes_of, size
from shardconv_runtime.format.fused_groups import fused_groups
from shardconv_runtime.format.module_steps import (
    LocalRowsOrEndStep,
    LocalRowsStep,
    ModuleStep,
    ReshardingStep,
)
from shardconv_runtime.format.pipeline_stages import StagesPlan
from shardconv_runtime.format.plan import (
    AttributeOverride,
    DrawPlan,
    FusedPlan,
    GradientPlan,
    ModulePlan,
    ParameterPlan,
    Plan,
    by_name,
)
from shardconv_runtime.format.slices import local_size
from shardconv_runtime.format.stage_names import staged_modules

from ..dim_analysis.dim_trees import LEAF, PRODUCT, SUM, Node, find
from ..planning.solution import stand_in
from ..tracing.tape import Mark, prefixes
from .small_model import Resized, SmallModel
from .small_shapes import SmallShapes

# The dim of a plan is matched with the tree of the tensor's dim, part by part, and each part gets its smaller
# size. So a wrong dim is wrong in the same way in the smaller model.


class Misfit(Exception):
    """A dim does not match the tree, so it cannot be translated to the smaller model."""


def resized(dim: Dim, node: Node, shapes: SmallShapes) -> Dim:
    """Return a dim of a plan with the sizes of the smaller model."""
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
    """Join neighboring parts so that they have these sizes."""
    pending, out = list(parts), []
    for target in sizes:
        taken: list[_Part] = []
        have = 1 if kind == PRODUCT else 0
        while have != target:
            if not pending:
                raise Misfit
            part = pending.pop(0)
            rest = target // have if kind == PRODUCT else target - have
            if part.full > rest:
                beyond = part.full // rest if kind == PRODUCT else part.full - rest
                if part.shrinks or (kind == PRODUCT and part.full % rest):
                    raise Misfit
                part = _Part(rest, rest, False)
                pending.insert(0, _Part(beyond, beyond, False))
            taken.append(part)
            have = have * part.full if kind == PRODUCT else have + part.full
            if have > target or (kind == PRODUCT and target % have):
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
    """Return the factors, outer to inner, without factors of size 1."""
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


ResultDim = Callable[[str, str, int, Dim], Dim]
"""(module, port of its output, index of a dim, the dim) -> the dim in the smaller model."""


def small_stages(plan: Plan, dim_of: ResultDim) -> StagesPlan:
    """Return the same stages with an entry for each module. Bypassed layers return some of their
    arguments."""
    assert plan.stages is not None
    modules = []
    for name, (entry, position) in staged_modules(plan).items():
        items = list(entry.items)
        for index, item in enumerate(items):
            if item.tensor is not None:
                port = "output" if entry.returns == "tensor" else f"output.{index}"
                dims = tuple(
                    dim if dim.size is None else replace(dim, size=dim_of(name, port, number, dim.size))
                    for number, dim in enumerate(item.tensor.dims)
                )
                items[index] = replace(item, tensor=replace(item.tensor, dims=dims))
        cache = []
        for call in entry.cache:
            # An entry has one number for each of its modules, or one for all of them.
            arguments = (
                replace(a, numbers=a.numbers and (a.numbers[position % len(a.numbers)],))
                for a in call.arguments
            )
            cache.append(replace(call, arguments=tuple(arguments)))
        modules.append(replace(entry, names=(name,), items=tuple(items), cache=tuple(cache)))
    return replace(plan.stages, modules=tuple(modules))


_Entry = TypeVar("_Entry", ParameterPlan, ModulePlan, GradientPlan, DrawPlan)


def small_plan(plan: Plan, small: SmallModel, skipped: Mapping[str, object]) -> Plan:
    """Translate a plan of the full model to the smaller model."""
    return _Translation(plan, small, skipped).plan()


class _Translation:
    """One plan, one smaller model."""

    def __init__(self, plan: Plan, small: SmallModel, skipped: Mapping[str, object]) -> None:
        self.full = plan
        self.small = small
        self.skipped = skipped
        analysis = small.shapes.analysis
        self.dims = analysis.dims
        self.parameters = {i.name: t for t, i in enumerate(analysis.tape.tensors) if i.name}
        self.pairs: list[tuple[str, Dim, Dim]] = []
        """Name of a parameter, one of its dims in the plan, and this dim in the smaller model."""
        self.norms = {use.site.fqn: use for use in analysis.norms}
        calls = analysis.tape.calls
        self.tables = {(calls[u.call].fqn, u.port): u.table for u in analysis.lookups}
        self.marks: dict[tuple[str, str], int] = {}
        for event in analysis.tape.events:
            if isinstance(event, Mark):
                for port in event.ports:
                    self.marks.setdefault((calls[event.call].fqn, port), event.source)

    def plan(self) -> Plan:
        """Return the translated plan."""
        training = self.full.training
        if training is not None:
            sequence = training.sequence
            if sequence is not None:
                sequence = replace(
                    sequence,
                    modules=self._modules(sequence.modules),
                    gradients=tuple(self._kept("gradients", sequence.gradients)),
                    draws=tuple(self._kept("draws", sequence.draws)),
                    hooks=(),
                )
            training = replace(training, sequence=sequence, draws=tuple(self._kept("draws", training.draws)))
        parameters = []
        for entry in self._kept("parameters", self.full.parameters):
            parameters.append(self._parameter(entry))
            self.pairs += [(entry.names[0], *p) for p in zip(entry.dims, parameters[-1].dims, strict=True)]
        return replace(
            self.full,
            parameters=tuple(parameters),
            modules=self._modules(self.full.modules),
            tied=tuple(pair for pair in self.full.tied if not any(map(self._is_skipped, pair))),
            fused=tuple(
                FusedPlan(tuple((fqn,) for fqn in group))
                for group in fused_groups(self.full)
                if not any(map(self._is_skipped, group))
            ),
            training=training,
            hooks=(),
            stages=self.full.stages and small_stages(self.full, self._result_dim),
        )

    def _result_dim(self, name: str, port: str, index: int, dim: Dim) -> Dim:
        """Translate a dim of a module's result. The module may be a layer that the smaller model lacks."""
        fqn = stand_in(name, self.small.stand_ins)
        tid = self.marks.get((fqn, port))
        nodes = self.dims.get(tid, ()) if tid is not None else ()
        return self._dim(fqn, dim, nodes[index]) if index < len(nodes) else dim

    def _kept(self, path: str, entries: tuple[_Entry, ...]) -> Iterator[_Entry]:
        """Yield one entry for each name that the smaller model has."""
        for name, entry in by_name(path, entries).items():
            if not self._is_skipped(name):
                yield replace(entry, names=(name,))

    def _is_skipped(self, name: str) -> bool:
        return any(p in self.skipped for p in prefixes(name))

    def _parameter(self, entry: ParameterPlan) -> ParameterPlan:
        name = entry.names[0]
        tid = self.parameters.get(stand_in(name, self.small.stand_ins))
        entry = replace(entry, packing=None)
        if name in self.small.resized:
            entry = replace(entry, dims=_with_sizes(name, entry.dims, self.small.resized[name]))
        if tid is None or tid not in self.dims:
            return entry
        nodes = self.dims[tid]
        if len(nodes) != len(entry.dims):
            raise PlanError(f"{name}: the plan has {len(entry.dims)} dims, the model {len(nodes)}")
        return replace(
            entry, dims=tuple(self._dim(name, d, n) for d, n in zip(entry.dims, nodes, strict=True))
        )

    def _dim(self, where: str, dim: Dim, node: Node) -> Dim:
        try:
            return resized(dim, node, self.small.shapes)
        except Misfit as error:
            raise PlanError(f"{where}: the plan has a dim {dim}, the model {node!r}") from error

    # Modules ---------------------------------------------------------------------------------

    def _modules(self, entries: tuple[ModulePlan, ...]) -> tuple[ModulePlan, ...]:
        return tuple(self._module(entry) for entry in self._kept("modules", entries))

    def _module(self, entry: ModulePlan) -> ModulePlan:
        fqn = stand_in(entry.names[0], self.small.stand_ins)
        norm = entry.norm
        if norm is not None:
            use = self.norms.get(fqn)
            if use is None:
                raise PlanError(f"{fqn}: the plan has a norm, the model has none")
            full, small = use.normalized.size, self.small.shapes.size(use.normalized)
            if norm.size * small % full:
                raise PlanError(f"{fqn}: the plan has a norm over {norm.size}, the model one over {full}")
            norm = replace(norm, size=norm.size * small // full)
        return replace(
            entry,
            inputs=tuple(self._step(fqn, step) for step in entry.inputs),
            outputs=tuple(self._step(fqn, step) for step in entry.outputs),
            overrides=tuple(self._override(entry.names[0], fqn, override) for override in entry.overrides),
            norm=norm,
        )

    def _step(self, fqn: str, step: ModuleStep) -> ModuleStep:
        if isinstance(step, LocalRowsStep | LocalRowsOrEndStep):
            table = self.tables.get((fqn, step.port))
            if table is None:
                return step
            return replace(step, layout=self._dim(fqn, step.layout, self.dims[table][0]))
        if not isinstance(step, ReshardingStep):
            return step
        tid = self.marks.get((fqn, step.port))
        nodes = self.dims.get(tid, ()) if tid is not None else ()
        if not -len(nodes) <= step.dim < len(nodes):
            raise PlanError(
                f"{fqn}: the plan has a step at dim {step.dim} of {step.port!r}, the model has none"
            )
        return replace(step, layout=self._dim(fqn, step.layout, nodes[step.dim]))

    def _override(self, name: str, fqn: str, override: AttributeOverride) -> AttributeOverride:
        change = self.small.changes.get((fqn, override.attribute))
        if change is None:
            return override
        if override.value != change.value:
            raise PlanError(
                f"{fqn}: the plan overrides {override.attribute} of {override.value}, which is {change.value}"
            )
        return replace(override, value=change.local, local=self._locals(name, override, change.local))

    def _locals(self, fqn: str, override: AttributeOverride, small: int) -> tuple[int, ...]:
        """Return the local values of an attribute in the smaller model.

        They are the local sizes of a dim of the module's parameters that has the attribute's global and local
        sizes. If there is none, each rank's share of the value is the same as in the full model.
        """
        mesh = self.full.mesh
        for name, full, other in self.pairs:
            if name.startswith(f"{fqn}.") and (size(full), size(other)) == (override.value, small):
                sizes = tuple(local_size(full, mesh, rank) for rank in range(self.full.tp))
                if sizes == override.local * (self.full.tp // len(override.local)):
                    return tuple(local_size(other, mesh, rank) for rank in range(self.full.tp))
        return tuple(self._local(fqn, override, value, small) for value in override.local)

    def _local(self, fqn: str, override: AttributeOverride, local: int, small: int) -> int:
        divisors = {1}  # numbers of ranks that may share a dim
        for extent in self.full.mesh:
            divisors |= {p * extent for p in divisors}
        for divisor in sorted(divisors):  # uneven shares have one more
            if override.value // divisor <= local <= override.value // divisor + 1:
                return small // divisor + local - override.value // divisor
        if local * small % override.value:
            raise PlanError(
                f"{fqn}: {local} of {override.value} ({override.attribute}) is not the share of a rank"
            )
        return local * small // override.value


def _with_sizes(name: str, dims: Sequence[Dim], resized: Resized) -> tuple[Dim, ...]:
    """Return the dims of a parameter of which some have other sizes in the model that is proven."""
    if tuple(map(size, dims)) != resized.before:
        raise PlanError(f"{name}: the plan is for {tuple(map(size, dims))}, the model has {resized.before}")
    return tuple(
        dim if before == after else _with_size(name, dim, after)
        for dim, before, after in zip(dims, resized.before, resized.after, strict=True)
    )


def _with_size(name: str, dim: Dim, after: int) -> Dim:
    """Return a dim with another size. Only a replicated factor of a product changes."""
    if isinstance(dim, Leaf) or not axes_of(dim):
        return Leaf(after, dim.axes if isinstance(dim, Leaf) else ())
    factors = dim.factors if isinstance(dim, Product) else ()
    whole = [factor for factor in factors if isinstance(factor, Leaf) and not factor.axes]
    if len(whole) != 1 or after % (rest := size(dim) // whole[0].size):
        raise PlanError(f"{name}: positions that become fewer are sharded in parts, {dim}")
    return Product(tuple(Leaf(after // rest) if f is whole[0] else f for f in factors))
