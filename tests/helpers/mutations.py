"""Ways to corrupt a plan: each takes a plan and a random generator, and gives another plan.

A mutation changes one thing, of one entry or (a name of a pattern taken out) of one module alone. What it
gives need not be wrong, and need not even be well-formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from shardconv_runtime.format.dims import Dim, Leaf, Product, Sum, axes_of, leaves, size
from shardconv_runtime.format.module_steps import ModuleStep, layout_of
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import AttributeOverride, LogitsInfo, ModulePlan, ParameterPlan, Plan
from shardconv_runtime.format.typed_json import MalformedError

Mutation = Callable[[Plan, Random], Plan]


class Unchanged(Exception):
    """There is nothing of this kind to corrupt in the plan."""


def pick(random: Random, items: Any) -> Any:
    """One of ``items``."""
    found = list(items)
    if not found:
        raise Unchanged
    return random.choice(found)


# Layouts of a dim ------------------------------------------------------------------------------------


def _at_leaf(dim: Dim, index: int, change: Callable[[Leaf], Dim]) -> Dim:
    """The dim with its leaf number ``index`` changed."""
    if isinstance(dim, Leaf):
        return change(dim)
    children = list(dim.factors if isinstance(dim, Product) else dim.segments)
    for place, child in enumerate(children):
        count = len(list(leaves(child)))
        if index < count:
            children[place] = _at_leaf(child, index, change)
            break
        index -= count
    return Product(tuple(children)) if isinstance(dim, Product) else Sum(tuple(children))


def _parts(dim: Dim) -> list[Dim]:
    """The products and sums of a tree."""
    if isinstance(dim, Leaf):
        return []
    children = dim.factors if isinstance(dim, Product) else dim.segments
    return [dim, *(p for child in children for p in _parts(child))]


def _replaced(dim: Dim, old: Dim, new: Dim) -> Dim:
    if dim is old:
        return new
    if isinstance(dim, Leaf):
        return dim
    if isinstance(dim, Product):
        return Product(tuple(_replaced(f, old, new) for f in dim.factors))
    return Sum(tuple(_replaced(s, old, new) for s in dim.segments))


def _strip(dim: Dim, random: Random) -> Dim:
    """One leaf is whole."""
    split = [i for i, leaf in enumerate(leaves(dim)) if leaf.axes]
    return _at_leaf(dim, pick(random, split), lambda leaf: Leaf(leaf.size))


def _strip_all(dim: Dim, random: Random) -> Dim:
    """No leaf is split."""
    return Leaf(size(dim))


def _merge(dim: Dim, random: Random) -> Dim:
    """A product or sum is one leaf, split over the same axes."""
    part = pick(random, _parts(dim))
    return _replaced(dim, part, Leaf(size(part), tuple(sorted(axes_of(part)))))


def _permute(dim: Dim, random: Random) -> Dim:
    """Factors or segments in another order."""
    part = pick(random, _parts(dim))
    children = list(part.factors if isinstance(part, Product) else part.segments)
    random.shuffle(children)
    return _replaced(dim, part, type(part)(tuple(children)))


def _regroup(dim: Dim, random: Random) -> Dim:
    """A split leaf is a product, of which another factor is split."""
    split = [i for i, leaf in enumerate(leaves(dim)) if leaf.axes and leaf.size > 3]
    index = pick(random, split)
    leaf = list(leaves(dim))[index]
    inner = pick(random, [d for d in range(2, leaf.size) if leaf.size % d == 0])
    pair = [Leaf(leaf.size // inner), Leaf(inner)]
    place = random.randrange(2)
    pair[place] = Leaf(pair[place].size, leaf.axes)
    return _at_leaf(dim, index, lambda _: Product(tuple(pair)))


def _shift(dim: Dim, random: Random) -> Dim:
    """A split leaf is two segments: the ranks' shares begin and end elsewhere."""
    split = [i for i, leaf in enumerate(leaves(dim)) if leaf.axes and leaf.size > 2]
    index = pick(random, split)
    leaf = list(leaves(dim))[index]
    first = random.randrange(1, leaf.size)
    axes = [leaf.axes, pick(random, [leaf.axes, ()])]
    random.shuffle(axes)
    return _at_leaf(dim, index, lambda _: Sum((Leaf(first, axes[0]), Leaf(leaf.size - first, axes[1]))))


def _other_axes(dim: Dim, random: Random) -> Dim:
    """A leaf's axes the other way round, or of another leaf, or one more."""
    found = list(leaves(dim))
    index = random.randrange(len(found))
    other = pick(random, [found[index].axes[::-1], *(leaf.axes for leaf in found), (0,), (1,), (0, 1)])
    return _at_leaf(dim, index, lambda leaf: Leaf(leaf.size, other))


def _other_size(dim: Dim, random: Random) -> Dim:
    """A leaf is larger or smaller."""
    index = random.randrange(len(list(leaves(dim))))
    return _at_leaf(dim, index, lambda leaf: Leaf(max(0, leaf.size + pick(random, (-1, 1))), leaf.axes))


_LAYOUT = (_strip, _strip_all, _merge, _permute, _regroup, _shift, _other_axes, _other_size)


def other_layout(dim: Dim, random: Random) -> Dim:
    """Any of these."""
    return pick(random, _LAYOUT)(dim, random)  # type: ignore[no-any-return]


# Entries ---------------------------------------------------------------------------------------------


def _with_entry(entries: tuple[Any, ...], random: Random, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The first of the entries, in random order, that can be changed: for all its names or for one."""
    for index in random.sample(range(len(entries)), len(entries)):
        entry = entries[index]
        try:
            new = change(entry)
        except (Unchanged, IndexError):
            continue
        if new == entry:
            continue
        names = expand_all(entry.names)
        if len(names) == 1 or random.random() < 0.5:
            return (*entries[:index], new, *entries[index + 1 :])
        name = random.choice(names)
        rest = replace(entry, names=tuple(n for n in names if n != name))
        return (*entries[:index], rest, replace(new, names=(name,)), *entries[index + 1 :])
    raise Unchanged


def _parameter(change: Callable[[ParameterPlan, Random, Plan], ParameterPlan]) -> Mutation:
    def mutate(plan: Plan, random: Random) -> Plan:
        return replace(
            plan, parameters=_with_entry(plan.parameters, random, lambda e: change(e, random, plan))
        )

    mutate.__name__ = change.__name__
    return mutate


def _module(change: Callable[[ModulePlan, Random, Plan], ModulePlan]) -> Mutation:
    def mutate(plan: Plan, random: Random) -> Plan:
        return replace(plan, modules=_with_entry(plan.modules, random, lambda e: change(e, random, plan)))

    mutate.__name__ = change.__name__
    return mutate


# Parameters ------------------------------------------------------------------------------------------


def parameter_layout(entry: ParameterPlan, random: Random, plan: Plan) -> ParameterPlan:
    """A dim is laid out in another way."""
    index = pick(random, range(len(entry.dims)))
    dims = list(entry.dims)
    dims[index] = other_layout(dims[index], random)
    return replace(entry, dims=tuple(dims))


def parameter_other_dim(entry: ParameterPlan, random: Random, plan: Plan) -> ParameterPlan:
    """Another dim is sharded, over the same axes."""
    axes = tuple(sorted({a for d in entry.dims for a in axes_of(d)})) or (0,)
    index = pick(random, range(len(entry.dims)))
    dims: list[Dim] = [Leaf(size(d)) for d in entry.dims]
    dims[index] = Leaf(size(dims[index]), axes)
    return replace(entry, dims=tuple(dims), reason="")


def parameter_of_another(entry: ParameterPlan, random: Random, plan: Plan) -> ParameterPlan:
    """As another parameter of this shape is laid out."""
    shape = [size(d) for d in entry.dims]
    alike = [p for p in plan.parameters if [size(d) for d in p.dims] == shape and p != entry]
    other = pick(random, alike)
    return replace(entry, dims=other.dims, partial=other.partial)


def parameter_partial(entry: ParameterPlan, random: Random, plan: Plan) -> ParameterPlan:
    """A partial parameter is whole everywhere, or a whole one partial."""
    if entry.partial:
        return replace(entry, partial=())
    return replace(entry, partial=pick(random, [(a,) for a in range(len(plan.mesh))]))


def parameter_dtype(entry: ParameterPlan, random: Random, plan: Plan) -> ParameterPlan:
    """Stored with fewer bits."""
    return replace(entry, dtype=pick(random, ("float32", "bfloat16", "int64")))


def axes_swapped(entry: ParameterPlan, random: Random, plan: Plan) -> ParameterPlan:
    """Two dims get each other's axes."""
    if len(entry.dims) < 2:
        raise Unchanged
    i, j = random.sample(range(len(entry.dims)), 2)
    dims = list(entry.dims)
    first, second = (tuple(sorted(axes_of(dims[x]))) for x in (i, j))
    dims[i], dims[j] = Leaf(size(dims[i]), second), Leaf(size(dims[j]), first)
    return replace(entry, dims=tuple(dims))


# Modules ---------------------------------------------------------------------------------------------


def _step_changed(
    entry: ModulePlan, random: Random, change: Callable[[list[ModuleStep], int], None], field: str = "op"
) -> ModulePlan:
    """The steps of one side, changed at one that has ``field``."""
    places = [
        (side, i)
        for side in ("inputs", "outputs")
        for i, step in enumerate(getattr(entry, side))
        if getattr(step, field, None) not in (None, ())
    ]
    side, index = pick(random, places)
    steps = list(getattr(entry, side))
    change(steps, index)
    return replace(entry, **{side: tuple(steps)})


def step_dropped(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """A step is left out."""
    return _step_changed(entry, random, lambda steps, i: steps.__delitem__(i))


def step_twice(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """A step runs twice."""
    return _step_changed(entry, random, lambda steps, i: steps.insert(i, steps[i]))


def step_order(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """Steps in another order."""
    return _step_changed(entry, random, lambda steps, _: random.shuffle(steps))


def step_axes(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """Reduced over other axes."""

    def change(steps: list[ModuleStep], i: int) -> None:
        steps[i] = replace(steps[i], axes=pick(random, ((0,), (1,), (0, 1))))

    return _step_changed(entry, random, change, "axes")


def step_dim(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """At another dim."""

    def change(steps: list[ModuleStep], i: int) -> None:
        steps[i] = replace(steps[i], dim=random.randrange(-3, 4))

    return _step_changed(entry, random, change, "dim")


def step_layout(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """Laid out in another way."""

    def change(steps: list[ModuleStep], i: int) -> None:
        layout = layout_of(steps[i])
        assert layout is not None
        steps[i] = replace(steps[i], layout=other_layout(layout, random))

    return _step_changed(entry, random, change, "layout")


def step_op(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """Another step of the plan at this port."""
    others = [b for m in plan.modules for b in (*m.inputs, *m.outputs)]

    def change(steps: list[ModuleStep], i: int) -> None:
        steps[i] = replace(pick(random, others), port=steps[i].port)

    return _step_changed(entry, random, change)


def step_port(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """A step of another port of the plan."""
    ports = {b.port for m in plan.modules for b in (*m.inputs, *m.outputs)} | {"output.0", "input.0"}

    def change(steps: list[ModuleStep], i: int) -> None:
        steps[i] = replace(steps[i], port=pick(random, sorted(ports)))

    return _step_changed(entry, random, change)


def step_added(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """A step that another module has."""
    step = pick(random, [b for m in plan.modules for b in (*m.inputs, *m.outputs)])
    side = "inputs" if step.port.startswith("input") else "outputs"
    return replace(entry, **{side: (*getattr(entry, side), step)})


def steps_of_another(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """What another module does at its boundary."""
    other = pick(random, [m for m in plan.modules if m != entry])
    return replace(
        other,
        names=entry.names,
        overrides=entry.overrides,
        category=pick(random, (entry.category, other.category)),
    )


def category(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """A module is taken for another kind."""
    kind = pick(random, ("column", "row", "vocab", "experts", "boundary"))
    return replace(entry, category=kind)


def _override_changed(
    entry: ModulePlan, random: Random, change: Callable[[AttributeOverride], AttributeOverride | None]
) -> ModulePlan:
    index = pick(random, range(len(entry.overrides)))
    new = change(entry.overrides[index])
    return replace(
        entry, overrides=(*entry.overrides[:index], *((new,) if new else ()), *entry.overrides[index + 1 :])
    )


def override_dropped(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """An attribute stays what it was."""
    return _override_changed(entry, random, lambda _: None)


def override_value(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """An attribute gets another value on every rank."""

    def change(override: AttributeOverride) -> AttributeOverride:
        value = pick(
            random, (override.local[0] - 1, override.local[0] + 1, override.local[0] * 2, 1, override.value)
        )
        return replace(override, local=(max(1, value),))

    return _override_changed(entry, random, change)


def override_of_a_rank(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """An attribute gets another value on one rank."""

    def change(override: AttributeOverride) -> AttributeOverride:
        local = list(override.local * plan.tp if len(override.local) == 1 else override.local)
        local[random.randrange(plan.tp)] += pick(random, (-1, 1))
        return replace(override, local=tuple(local))

    return _override_changed(entry, random, change)


def override_of_another(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """The value of another override."""
    others = [e for m in plan.modules for e in m.overrides]
    return _override_changed(
        entry, random, lambda override: replace(override, local=pick(random, others).local)
    )


def norm_constant(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """A norm that computes something else."""
    if entry.norm is None:
        raise Unchanged
    norm = entry.norm
    changes: tuple[dict[str, Any], ...] = (
        {"eps": norm.eps * 2},
        {"eps": 0.0},
        {"size": norm.size // plan.tp},
        {"size": norm.size + 1},
        {"kind": "layer" if norm.kind == "rms" else "rms"},
        {"weight": ""},
        {"weight": norm.bias, "bias": norm.weight},
        {"bias": norm.weight},
        {"weight_offset": 1.0 - norm.weight_offset},
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "input"},
        {"weight_before_cast": not norm.weight_before_cast},
        {"axes": (1,)},
    )
    return replace(entry, norm=replace(norm, **pick(random, changes)))


def flags_dropped(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """Ids past the last expert are not left out."""
    return replace(entry, flags=())


def norm_dropped(entry: ModulePlan, random: Random, plan: Plan) -> ModulePlan:
    """A norm over a sharded dim computes on its part."""
    if entry.norm is None:
        raise Unchanged
    return replace(entry, norm=None, category="boundary")


# The plan --------------------------------------------------------------------------------------------


def module_dropped(plan: Plan, random: Random) -> Plan:
    """A module, or an entry, is left as it is."""
    index = pick(random, range(len(plan.modules)))
    entry = plan.modules[index]
    names = expand_all(entry.names)
    lost = {random.choice(names)} if random.random() < 0.5 else set(names)
    rest = tuple(n for n in names if n not in lost)
    kept = (replace(entry, names=rest),) if rest else ()
    return replace(plan, modules=(*plan.modules[:index], *kept, *plan.modules[index + 1 :]))


def mesh(plan: Plan, random: Random) -> Plan:
    """The ranks form another mesh."""
    meshes = [plan.mesh[::-1], (plan.tp,), (1, plan.tp), (plan.tp, 1)]
    meshes += [(d, plan.tp // d) for d in range(2, plan.tp) if plan.tp % d == 0]
    return replace(plan, mesh=pick(random, meshes))


def tied(plan: Plan, random: Random) -> Plan:
    """A tie less, or one more."""
    if plan.tied and random.random() < 0.5:
        return replace(plan, tied=plan.tied[1:])
    names = expand_all(pick(random, plan.parameters).names)
    alias, name = random.choice(names), random.choice(expand_all(pick(random, plan.parameters).names))
    entries = [replace(p, names=tuple(n for n in expand_all(p.names) if n != alias)) for p in plan.parameters]
    return replace(plan, tied=(*plan.tied, (alias, name)), parameters=tuple(p for p in entries if p.names))


def logits(plan: Plan, random: Random) -> Plan:
    """Another gather is said to be that of the logits."""
    gathers = [
        LogitsInfo(name, b.port)
        for m in plan.modules
        for b in m.outputs
        if b.op == "all_gather"
        for name in expand_all(m.names)
    ]
    return replace(plan, logits=pick(random, [None, *gathers]))


MUTATIONS: tuple[Mutation, ...] = (
    *map(
        _parameter,
        (
            parameter_layout,
            parameter_layout,
            parameter_other_dim,
            parameter_of_another,
            parameter_partial,
            parameter_dtype,
            axes_swapped,
        ),
    ),
    *map(
        _module,
        (
            step_dropped,
            step_twice,
            step_order,
            step_axes,
            step_dim,
            step_layout,
            step_layout,
            step_op,
            step_port,
            step_added,
            steps_of_another,
            category,
            override_dropped,
            override_value,
            override_of_a_rank,
            override_of_another,
            norm_constant,
            norm_dropped,
            flags_dropped,
        ),
    ),
    module_dropped,
    mesh,
    tied,
    logits,
)


def mutations(plan: Plan, random: Random, count: int) -> Iterator[tuple[str, Plan | MalformedError]]:
    """So many plans that differ in one thing, and what was done to each; all kinds in turn.

    Or the error with which a value of such a plan refuses to be made.

    Layouts of parameters and steps can be wrong in many ways: they come up more than once in a turn.
    """
    made = 0
    while made < count:
        for mutation in random.sample(MUTATIONS, len(MUTATIONS)):
            found: Plan | MalformedError
            try:
                found = mutation(plan, random)
            except MalformedError as error:
                found = error
            except (Unchanged, IndexError):
                continue
            if found != plan and made < count:
                made += 1
                yield mutation.__name__, found
