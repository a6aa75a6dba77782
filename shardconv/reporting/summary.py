"""The numbers of a plan that a person asks for, worked out once for the text report and others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardconv_runtime.format.block_scales import stored_entries
from shardconv_runtime.format.dtypes import STORED_BITS, STORED_NAME
from shardconv_runtime.format.layout_hash import is_common
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import (
    Edit,
    ModulePlan,
    ParameterPlan,
    Plan,
    by_name,
    global_shape,
    local_shape,
    module_plans,
)

COMMUNICATING = ("all_reduce", "all_gather", "reduce_scatter")
"""The boundary steps that move bytes between ranks."""


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One parameter of a layer kind."""

    name: str
    """Relative to its module."""
    plan: ParameterPlan


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Modules that are treated alike and hold alike parameters."""

    names: tuple[str, ...]
    """Patterns of the FQNs."""
    count: int
    category: str
    """The plan's category, or empty where the module is left as it is."""
    tensors: tuple[TensorLine, ...]
    edits: tuple[Edit, ...]
    rank_bytes: int
    """Of all ``count`` modules together, on the rank that holds most of them."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Parameters that every rank holds whole, for one reason."""

    reason: str
    tensors: tuple[tuple[str, tuple[int, ...], int], ...]
    """(pattern, global shape, bytes of all that the pattern stands for), the largest first."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a forward pass, at the same place of alike modules."""

    op: str
    names: tuple[str, ...]
    slot: str
    count: int
    token_bytes: int
    """Bytes of the global tensor for each token of the input, of all ``count`` together."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a plan."""

    kinds: tuple[LayerKind, ...]
    replicated: tuple[Replicated, ...]
    collectives: tuple[Collective, ...]
    total_bytes: int
    sharded_bytes: int
    """Global bytes of the tensors of which no rank holds everything."""
    rank_bytes: tuple[int, ...]


def summarize(plan: Plan) -> Summary:
    """Work out the numbers of a plan."""
    entries = tuple(stored_entries(plan))
    parameters = by_name("parameters", entries)
    numbers = Counter(map(id, parameters.values()))
    counts = [(entry, numbers[id(entry)]) for entry in entries]
    return Summary(
        kinds=_kinds(plan, parameters),
        replicated=_replicated(plan, parameters),
        collectives=_collectives(plan),
        total_bytes=sum(count * global_bytes(entry) for entry, count in counts),
        sharded_bytes=sum(
            count * global_bytes(e) for e, count in counts if not is_common(e) and not e.partial
        ),
        rank_bytes=tuple(
            sum(count * local_bytes(entry, plan, rank) for entry, count in counts) for rank in range(plan.tp)
        ),
    )


def global_bytes(entry: ParameterPlan) -> int:
    """Bytes of the whole tensor."""
    return math.prod(global_shape(entry)) * item_bytes(entry.dtype)


def local_bytes(entry: ParameterPlan, plan: Plan, rank: int) -> int:
    """Bytes of what ``rank`` holds."""
    return math.prod(local_shape(entry, plan.mesh, rank)) * item_bytes(entry.dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return STORED_BITS[STORED_NAME[dtype]] // 8


def _kinds(plan: Plan, parameters: Mapping[str, ParameterPlan]) -> tuple[LayerKind, ...]:
    """Group the modules that are planned or hold parameters which are not just replicated."""
    modules = module_plans(plan)
    owned: dict[str, list[TensorLine]] = {name: [] for name in modules}
    for name, entry in parameters.items():
        owner, _, leaf = name.rpartition(".")
        if owner in modules or not is_common(entry):
            owned.setdefault(owner, []).append(TensorLine(leaf, entry))
    groups: dict[tuple[int, tuple[tuple[str, int], ...]], list[str]] = {}
    for owner, tensors in owned.items():
        alike = id(modules.get(owner)), tuple((line.name, id(line.plan)) for line in tensors)
        groups.setdefault(alike, []).append(owner)
    return tuple(_kind(plan, names, modules.get(names[0]), owned[names[0]]) for names in groups.values())


def _kind(plan: Plan, names: list[str], module: ModulePlan | None, tensors: list[TensorLine]) -> LayerKind:
    counts = Counter(id(line.plan) for line in tensors)
    entries = list({id(line.plan): line.plan for line in tensors}.values())
    held = (
        sum(counts[id(entry)] * local_bytes(entry, plan, rank) for entry in entries)
        for rank in range(plan.tp)
    )
    return LayerKind(
        names=compress(names),
        count=len(names),
        category=module.category if module else "",
        tensors=tuple(tensors),
        edits=module.edits if module else (),
        rank_bytes=len(names) * max(held),
    )


def _replicated(plan: Plan, parameters: Mapping[str, ParameterPlan]) -> tuple[Replicated, ...]:
    by_reason: dict[str, dict[tuple[int, ...], list[tuple[str, int]]]] = {}
    for name, entry in parameters.items():
        if is_common(entry) and plan.tp > 1:
            shapes = by_reason.setdefault(entry.reason, {})
            shapes.setdefault(global_shape(entry), []).append((name, global_bytes(entry)))
    found = [_one_reason(reason, shapes) for reason, shapes in by_reason.items()]
    return tuple(sorted(found, key=lambda group: -group.num_bytes))


def _one_reason(reason: str, shapes: Mapping[tuple[int, ...], list[tuple[str, int]]]) -> Replicated:
    tensors: list[tuple[str, tuple[int, ...], int]] = []
    for shape, members in shapes.items():
        sizes = dict(members)
        by_leaf: dict[str, list[str]] = {}
        for name in sizes:
            by_leaf.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), []).append(
                name
            )
        for names in by_leaf.values():
            text = ", ".join(compress(names))
            tensors.append((text, shape, sum(sizes[name] for name in names)))
    tensors.sort(key=lambda item: (-item[2], item[0]))
    return Replicated(reason, tuple(tensors), sum(item[2] for item in tensors))


def _collectives(plan: Plan) -> tuple[Collective, ...]:
    modules = module_plans(plan)
    counts: dict[int, list[str]] = {}
    for name, module in modules.items():
        counts.setdefault(id(module), []).append(name)
    found: list[Collective] = []
    for module in plan.modules:
        names = counts.get(id(module), [])
        for op, slot, elements, dtype in collective_steps(module, plan.model.dtype):
            token_bytes = len(names) * elements * item_bytes(dtype)
            found.append(Collective(op, module.names, slot, len(names), token_bytes))
    return tuple(found)


def collective_steps(module: ModulePlan, dtype: str) -> Iterable[tuple[str, str, int, str]]:
    """(op, slot, elements per token, dtype) of each collective of one call of the module."""
    for step in (*module.inputs, *module.outputs):
        if step.op in COMMUNICATING:
            yield step.op, step.slot, step.per_token, dtype
    if module.norm is not None and module.norm.axes:
        statistics = {"rms": 1}.get(module.norm.kind, 2)
        kept = module.norm.compute_dtype
        yield "all_reduce", "statistic", statistics, dtype if kept == "input" else kept
