"""Values that the templates of the HTML report show, computed from a plan and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardconv_runtime.format.manifest import FileEntry, Manifest
from shardconv_runtime.format.plan import Edit, Plan
from shardconv_runtime.format.plan_json import of_stage
from shardconv_runtime.format.stored_layout import is_common

from .human_numbers import human_bytes, human_count, percent
from .summary import Collective, Summary, local_bytes, shown_stages, summarize, weights_text

MAX_BARS = 16
"""With more ranks, those that hold the same number of bytes share a bar."""

CATEGORIES = ("column", "row", "vocab", "experts", "norm", "boundary", "other", "replicated")
"""In the order of a bar's segments; ``other`` is sharded in a module without an entry in the plan."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the numbers at the top of the page."""

    head: str
    value: str
    more: str


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """The bytes of one rank, or of several with the same number of bytes."""

    label: str
    segments: tuple[tuple[str, float, float], ...]
    """(category, start, width), in thousandths of the largest rank's bytes."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OpTotal:
    """All collectives of one op together."""

    op: str
    count: int
    token_bytes: int


def mesh_text(plan: Plan) -> str:
    """``8 ranks, mesh 2 x 4``, after ``2 stages, each of``."""
    ranks = "1 rank" if plan.tp == 1 else f"{plan.tp} ranks"
    ranks = f"{plan.stages.count} stages, each of {ranks}" if plan.stages else ranks
    return ranks + (f", mesh {' x '.join(map(str, plan.mesh))}" if len(plan.mesh) > 1 else "")


def figures(plan: Plan, summary: Summary) -> list[Figure]:
    """The numbers at the top of the page."""
    smallest, largest = min(summary.rank_bytes), max(summary.rank_bytes)
    replicated = sum(group.num_bytes for group in summary.replicated)
    sent = sum(c.token_bytes for c in summary.collectives)
    count = sum(c.count for c in summary.collectives)
    sharded = percent(summary.sharded_bytes, summary.total_bytes)
    share = f"{percent(largest, summary.total_bytes)} of the model"
    if human_bytes(smallest) != human_bytes(largest):
        share += f"; the smallest holds {human_bytes(smallest)}"
    return [
        Figure("Parameters", human_count(plan.model.num_parameters), weights_text(plan)),
        Figure("The model", human_bytes(summary.total_bytes), f"{sharded} is sharded"),
        Figure("Each rank", human_bytes(largest), share),
        Figure("Replicated", human_bytes(replicated), percent(replicated, summary.total_bytes)),
        Figure("Collectives", str(count), "of one forward pass"),
        Figure("Sent per token", human_bytes(sent), "of global tensors"),
    ]


def shown_names(names: Sequence[str], slot: str = "") -> list[str]:
    """Names of modules, with the slot at them if there is one; the model itself has the empty name."""
    return [f"{name or '(the model)'} {slot}".rstrip() for name in names]


def local_text(edit: Edit) -> str:
    """The value of an attribute on the first rank and, where it differs, on the last."""
    return " … ".join(map(str, dict.fromkeys((edit.local[0], edit.local[-1]))))


def memory_bars(plan: Plan, summary: Summary) -> list[MemoryBar]:
    """One bar for each rank, or beyond ``MAX_BARS`` ranks for each number of bytes."""
    largest = max(max(summary.rank_bytes), 1)
    held = _held(plan, summary)
    return [
        MemoryBar(label, _segments(held[rank], largest), summary.rank_bytes[rank])
        for label, rank in _labels(summary.rank_bytes)
    ]


def categories(bars: Sequence[MemoryBar]) -> list[str]:
    """Categories that some bar shows, in the order of ``CATEGORIES``."""
    used = {category for bar in bars for category, _, _ in bar.segments}
    return [category for category in CATEGORIES if category in used]


def _held(plan: Plan, summary: Summary) -> list[dict[str, int]]:
    """For each rank: category -> bytes of sharded tensors; all others count as ``replicated``."""
    held: list[dict[str, int]] = []
    kinds = [summarize(of_stage(plan, stage)).kinds for stage in shown_stages(plan)]
    for number, rank_bytes in enumerate(summary.rank_bytes):
        index, rank = divmod(number, plan.tp)
        amounts: dict[str, int] = {}
        for kind in kinds[index]:
            sharded = [line.plan for line in kind.tensors if not is_common(line.plan)]
            num_bytes = kind.count * sum(local_bytes(entry, plan, rank) for entry in sharded)
            name = kind.category or "other"
            amounts[name] = amounts.get(name, 0) + num_bytes
        held.append(amounts | {"replicated": rank_bytes - sum(amounts.values())})
    return held


def _segments(amounts: dict[str, int], largest: int) -> tuple[tuple[str, float, float], ...]:
    start, found = 0.0, []
    for category in CATEGORIES:
        width = 1000 * amounts.get(category, 0) / largest
        if width:
            found.append((category, start, width))
        start += width
    return tuple(found)


def _labels(rank_bytes: Sequence[int]) -> list[tuple[str, int]]:
    """(label, one of its ranks) of each bar."""
    if len(rank_bytes) <= MAX_BARS:
        return [(f"rank {rank}", rank) for rank in range(len(rank_bytes))]
    alike: dict[int, list[int]] = {}
    for rank, num_bytes in enumerate(rank_bytes):
        alike.setdefault(num_bytes, []).append(rank)
    found = [(_ranks(ranks), ranks[0]) for ranks in alike.values()]
    return found[:MAX_BARS]


def _ranks(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 8-63`` of ascending numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:6]]
    more = f" and {len(runs) - 6} more runs" if len(runs) > 6 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + more


def totals(collectives: Sequence[Collective]) -> list[OpTotal]:
    """One for each kind of collective, in the order of their first use."""
    found = []
    for op in dict.fromkeys(item.op for item in collectives):
        items = [item for item in collectives if item.op == op]
        found.append(OpTotal(op, sum(c.count for c in items), sum(c.token_bytes for c in items)))
    return found


def summed_gradients(plan: Plan) -> list[str]:
    """Replicated parameters whose gradients are summed over the ranks."""
    return [name for entry in plan.parameters if entry.grad_axes for name in entry.names]


def folders(manifest: Manifest) -> list[tuple[str, list[FileEntry]]]:
    """(folder, its files) of a converted directory."""
    found: dict[str, list[FileEntry]] = {}
    for entry in manifest.files:
        found.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    return sorted(found.items())
