"""The numbers of a plan that a person asks for, and how they are written, for all reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardconv_runtime.files.manifest import FileEntry, Manifest
from shardconv_runtime.format.header import item_bytes
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import (
    AttributeOverride,
    ModulePlan,
    ParameterPlan,
    Plan,
    by_name,
    global_shape,
    local_shape,
    module_plans,
    parameter_plans,
)
from shardconv_runtime.format.stage_names import held_names, num_stages
from shardconv_runtime.format.stored_layout import is_common, stored_entries, tensor_name

COMMUNICATING = ("all_reduce", "all_gather", "reduce_scatter")
"""The boundary steps that move bytes between ranks."""


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One parameter of a layer kind."""

    name: str
    """The name relative to its module."""
    plan: ParameterPlan


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Modules with the same treatment and the same parameters."""

    names: tuple[str, ...]
    """Patterns of the FQNs."""
    count: int
    category: str
    """The plan's category; empty if the plan has no entry for the module."""
    tensors: tuple[TensorLine, ...]
    overrides: tuple[AttributeOverride, ...]
    rank_bytes: int
    """Bytes of all ``count`` modules together, on the rank that holds most."""
    collectives: tuple[tuple[str, str, int], ...]
    """(op, port, bytes of the global tensor for each token) of one module."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Parameters that are replicated for the same reason."""

    reason: str
    tensors: tuple[tuple[str, tuple[int, ...], int], ...]
    """(pattern, global shape, bytes of all parameters that match), largest first."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a forward pass, at the same port of modules of one kind."""

    op: str
    names: tuple[str, ...]
    port: str
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
    """Global bytes of the sharded tensors."""
    rank_bytes: tuple[int, ...]
    """Bytes of each rank, with stages of the ranks of each stage in turn, or of the plan's own stage."""


def all_notes(plan: Plan) -> tuple[str, ...]:
    """Return the notes of a plan; the first say why it cannot be trained, and which devices decided it."""
    why = (f"for inference only: {plan.inference_only}",) if plan.inference_only else ()
    where = (f"planned for {plan.devices}: predicted to be faster there",) if plan.devices else ()
    return (*why, *where, *plan.notes)


def summarize(plan: Plan) -> Summary:
    """Compute the numbers of a plan."""
    entries = tuple(stored_entries(plan))
    parameters = by_name("parameters", entries)
    by_stage = stage_bytes(plan)
    numbers = Counter(parameters.values())
    counts = [(entry, numbers[entry]) for entry in entries]
    modules = module_plans(plan)
    planned: dict[ModulePlan, list[str]] = {}
    for name, module in modules.items():
        planned.setdefault(module, []).append(name)
    collectives: list[Collective] = []
    for module in plan.modules:
        names = planned.get(module, [])
        for op, port, elements, dtype in collective_steps(module, plan.model.dtype):
            token_bytes = len(names) * elements * item_bytes(dtype)
            collectives.append(Collective(op, module.names, port, len(names), token_bytes))
    return Summary(
        kinds=_kinds(plan, parameters),
        replicated=_replicated(plan, parameters),
        collectives=tuple(collectives),
        total_bytes=sum(count * global_bytes(entry) for entry, count in counts),
        sharded_bytes=sum(
            count * global_bytes(e) for e, count in counts if not is_common(e) and not e.partial
        ),
        rank_bytes=tuple(n for stage in shown_stages(plan) for n in by_stage[stage]),
    )


def summed_gradients(plan: Plan) -> list[str]:
    """Return the replicated parameters whose gradients are summed over the ranks."""
    return [name for entry in plan.parameters if entry.grad_axes for name in entry.names]


def folders(manifest: Manifest) -> list[tuple[str, list[FileEntry]]]:
    """Return (folder, its files) of a converted directory."""
    by_folder: dict[str, list[FileEntry]] = {}
    for entry in manifest.files:
        by_folder.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    return sorted(by_folder.items())


def shown_stages(plan: Plan) -> Sequence[int]:
    """Return the stages that a plan is about: all, or its own; stage 0 of a plan without any."""
    if plan.stages is None or plan.stages.own is None:
        return range(num_stages(plan))
    return (plan.stages.own,)


def stage_bytes(plan: Plan) -> list[list[int]]:
    """Return the bytes of the parameters of each rank of each stage; of one stage, without any."""
    entries = by_name("parameters", tuple(stored_entries(plan)))
    stage_counts = (
        Counter(entries[n] for n in held_names(plan, k, entries.keys())) for k in range(num_stages(plan))
    )
    return [
        [sum(n * local_bytes(entry, plan, rank) for entry, n in counts.items()) for rank in range(plan.tp)]
        for counts in stage_counts
    ]


def global_bytes(entry: ParameterPlan) -> int:
    """Return the bytes of the full tensor."""
    return math.prod(global_shape(entry)) * item_bytes(entry.dtype)


def local_bytes(entry: ParameterPlan, plan: Plan, rank: int) -> int:
    """Return the bytes of the tensor on ``rank``."""
    return math.prod(local_shape(entry, plan.mesh, rank)) * item_bytes(entry.dtype)


def _kinds(plan: Plan, parameters: Mapping[str, ParameterPlan]) -> tuple[LayerKind, ...]:
    """Group the modules that have an entry in the plan or hold parameters that are not replicated."""
    modules = module_plans(plan)
    # The name of a stored tensor of a packed parameter may have dots after the name of the module.
    owners = {
        tensor_name(name, tensor.name): name.rpartition(".")[0]
        for name, entry in parameter_plans(plan).items()
        if entry.packing is not None
        for tensor in entry.packing.tensors
    }
    owned: dict[str, list[TensorLine]] = {name: [] for name in modules}
    for name, entry in parameters.items():
        owner = owners.get(name, name.rpartition(".")[0])
        leaf = name.removeprefix(f"{owner}.")
        if owner in modules or not is_common(entry):
            owned.setdefault(owner, []).append(TensorLine(leaf, entry))
    groups: dict[tuple[ModulePlan | None, tuple[TensorLine, ...]], list[str]] = {}
    for owner, lines in owned.items():
        groups.setdefault((modules.get(owner), tuple(lines)), []).append(owner)
    kinds = []
    for (module, tensors), names in groups.items():
        counts = Counter(line.plan for line in tensors)
        bytes_of_kind = (
            sum(count * local_bytes(entry, plan, rank) for entry, count in counts.items())
            for rank in range(plan.tp)
        )
        category, overrides = (module.category, module.overrides) if module else ("", ())
        steps = collective_steps(module, plan.model.dtype) if module else ()
        collectives = tuple((op, port, count * item_bytes(dtype)) for op, port, count, dtype in steps)
        num_bytes = len(names) * max(bytes_of_kind)
        kinds.append(
            LayerKind(compress(names), len(names), category, tensors, overrides, num_bytes, collectives)
        )
    return tuple(kinds)


def packed_methods(plan: Plan) -> tuple[str, ...]:
    """Return the formats in which parameters are stored packed, sorted."""
    return tuple(sorted({entry.packing.method for entry in plan.parameters if entry.packing is not None}))


def num_packed(plan: Plan) -> int:
    """Return the number of parameters that are stored packed."""
    return sum(entry.packing is not None for entry in parameter_plans(plan).values())


def weights_text(plan: Plan) -> str:
    """Return the dtype of a model, and the formats of its packed parameters, as text."""
    packed = ", ".join(packed_methods(plan))
    return f"{plan.model.dtype}, packed in {packed}" if packed else plan.model.dtype


def _replicated(plan: Plan, parameters: Mapping[str, ParameterPlan]) -> tuple[Replicated, ...]:
    by_reason: dict[str, dict[tuple[int, ...], list[tuple[str, int]]]] = {}
    for name, entry in parameters.items():
        if is_common(entry) and plan.tp > 1:
            shapes = by_reason.setdefault(entry.reason, {})
            shapes.setdefault(global_shape(entry), []).append((name, global_bytes(entry)))
    rows = []
    for reason, shapes in by_reason.items():
        tensors: list[tuple[str, tuple[int, ...], int]] = []
        for shape, members in shapes.items():
            sizes = dict(members)
            by_leaf: dict[str, list[str]] = {}
            for name in sizes:
                leaf = ".".join(part for part in name.split(".") if not part.isdigit())
                by_leaf.setdefault(leaf, []).append(name)
            for names in by_leaf.values():
                tensors.append((", ".join(compress(names)), shape, sum(sizes[name] for name in names)))
        tensors.sort(key=lambda item: (-item[2], item[0]))
        rows.append(Replicated(reason, tuple(tensors), sum(item[2] for item in tensors)))
    return tuple(sorted(rows, key=lambda group: -group.num_bytes))


def collective_steps(module: ModulePlan, dtype: str) -> Iterable[tuple[str, str, int, str]]:
    """Yield (op, port, elements per token, dtype) of each collective in one call of the module."""
    for step in (*module.inputs, *module.outputs):
        if step.op in COMMUNICATING:
            yield step.op, step.port, step.per_token, dtype
    if module.norm is not None and module.norm.axes:
        statistics = {"layer": 2}.get(module.norm.kind, 1)
        compute_dtype = module.norm.compute_dtype
        yield "all_reduce", "statistic", statistics, dtype if compute_dtype == "input" else compute_dtype


def seconds_text(seconds: float) -> str:
    """Return a time with three digits, such as ``1.71 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def human_bytes(num_bytes: float) -> str:
    """Return bytes with three or four digits, such as ``16.8 MB`` (decimal units)."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def human_count(count: float) -> str:
    """Return a number of parameters, such as ``405.9 B``."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def _scaled(value: float, units: Sequence[str]) -> str:
    unit = 0
    while value >= 999.95 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    number = f"{value:.0f}" if unit == 0 else f"{value:.1f}"
    return f"{number} {units[unit]}".rstrip()


def percent(part: int, total: int) -> str:
    """Return a share with two decimals; 0% and 100% only if that is exact."""
    if total == 0:
        return "0%"
    percent = 100 * part / total
    if 0 < percent < 0.01:
        return "less than 0.01%"
    if percent < 100 and f"{percent:.2f}" == "100.00":
        return "more than 99.99%"
    return f"{percent:.2f}%"
