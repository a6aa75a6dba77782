"""Renders a plan and its files as one self-contained HTML page: no network, no scripts.

The markup is in ``templates/``, where Jinja escapes every value. The Content-Security-Policy of the
page allows its own style sheets by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from itertools import accumulate

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from shardconv_runtime.files.manifest import Manifest
from shardconv_runtime.format.plan import AttributeOverride, Plan
from shardconv_runtime.format.plan_json import of_stage
from shardconv_runtime.format.stored_layout import is_common

from . import plan_lines, report
from . import summary as numbers
from .report import TOKENS
from .summary import Collective, Summary, human_bytes, human_count, local_bytes, percent, summarize

MARK = '<meta name="generator" content="shardconv report">'
"""Near the beginning of every report; a file with it may be replaced."""


def html_report(
    plan: Plan, picture: str, *, manifest: Manifest | None = None, num_tokens: int = TOKENS
) -> str:
    """Render the page; the same plan gives the same bytes.

    Args:
        plan: any plan.
        picture: SVG of the plan; it is embedded unchanged.
        manifest: the manifest of the converted directory, if there is one.
        num_tokens: length of the forward pass whose bytes are shown.
    """
    summary = summarize(plan)
    # Every value is escaped, and a name that is not defined is an error.
    environment = Environment(
        loader=PackageLoader("shardconv", "reporting/templates"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"human_bytes": human_bytes, "percent_of": percent}
    environment.globals |= {"plan_lines": plan_lines, "report": report, "numbers": numbers}
    environment.globals["page"] = sys.modules[__name__]
    css = files(__package__).joinpath("templates", "report.css").read_text(encoding="utf-8")
    styles = [css, *re.findall(r"<style>(.*?)</style>", picture, flags=re.DOTALL)]
    hashes = sorted({base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in styles})
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    sections = {
        "picture": ("How it is sharded", True),
        "layers": ("Layers", summary.kinds),
        "memory": ("Memory per rank", True),
        "communication": ("Communication", summary.collectives),
        "fused": ("Fused products", plan.fused),
        "replicated": ("Replicated parameters", plan.tp > 1),
        "training": ("Training", plan.tp > 1),
        "notes": ("Notes", numbers.all_notes(plan)),
        "origin": ("Origin", True),
        "files": ("Files", manifest is not None and manifest.files),
    }
    return environment.get_template("report.html.jinja").render(
        plan=plan,
        summary=summary,
        manifest=manifest,
        num_tokens=num_tokens,
        svg=Markup(picture.strip()),
        css=Markup(css),
        policy=f"default-src 'none'; style-src {allowed}; base-uri 'none'; form-action 'none'",
        mark=Markup(MARK),
        sections=[(macro, heading) for macro, (heading, is_shown) in sections.items() if is_shown],
    )


def _shown(value: object) -> object:
    """Return text without control characters, and markup, which is ours, as it is."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


# Values that the templates show, computed from a plan and its summary.

MAX_BARS = 16
"""Most bars of ranks. With more ranks, ranks that hold the same number of bytes share a bar."""

CATEGORIES = ("column", "row", "vocab", "experts", "norm", "boundary", "other", "replicated")
"""The categories of a bar's segments in order; ``other`` is sharded in a module without an entry in the
plan."""

MemoryBar = tuple[str, list[tuple[str, float, float]], int]
"""Label of the ranks, (category, start, width) in thousandths of the largest rank's bytes, and bytes."""


def mesh_text(plan: Plan) -> str:
    """Return text such as ``8 ranks, mesh 2 x 4``, or ``2 stages of 4 ranks each``."""
    ranks = "1 rank" if plan.tp == 1 else f"{plan.tp} ranks"
    ranks = f"{plan.stages.count} stages of {ranks} each" if plan.stages else ranks
    return ranks + (f", mesh {' x '.join(map(str, plan.mesh))}" if len(plan.mesh) > 1 else "")


def figures(plan: Plan, summary: Summary) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page: heading, value, and a remark."""
    smallest, largest = min(summary.rank_bytes), max(summary.rank_bytes)
    replicated = sum(group.num_bytes for group in summary.replicated)
    sent = sum(c.token_bytes for c in summary.collectives)
    count = sum(c.count for c in summary.collectives)
    sharded = percent(summary.sharded_bytes, summary.total_bytes)
    share = f"{percent(largest, summary.total_bytes)} of the model"
    if human_bytes(smallest) != human_bytes(largest):
        share += f"; the smallest rank holds {human_bytes(smallest)}"
    return [
        ("Parameters", human_count(plan.model.num_parameters), numbers.weights_text(plan)),
        ("Model", human_bytes(summary.total_bytes), f"{sharded} is sharded"),
        ("Per rank", human_bytes(largest), share),
        ("Replicated", human_bytes(replicated), percent(replicated, summary.total_bytes)),
        ("Collectives", str(count), "in one forward pass"),
        ("Sent per token", human_bytes(sent), "of global tensors"),
    ]


def shown_names(names: Sequence[str], port: str = "") -> list[str]:
    """Return the names of modules, with the port at them; the model itself is ``(the model)``."""
    return [f"{name or '(the model)'} {port}".rstrip() for name in names]


def local_text(override: AttributeOverride) -> str:
    """Return the value of an attribute on the first rank and, if it differs, on the last."""
    return " … ".join(map(str, dict.fromkeys((override.local[0], override.local[-1]))))


def memory_bars(plan: Plan, summary: Summary) -> list[MemoryBar]:
    """Return one bar for each rank, or beyond ``MAX_BARS`` ranks for each number of bytes."""
    alike: dict[int, list[int]] = {}
    for rank, num_bytes in enumerate(summary.rank_bytes):
        alike.setdefault(rank if len(summary.rank_bytes) <= MAX_BARS else num_bytes, []).append(rank)
    kinds = [summarize(of_stage(plan, stage)).kinds for stage in numbers.shown_stages(plan)]
    bars: list[MemoryBar] = []
    for ranks in list(alike.values())[:MAX_BARS]:
        stage, rank = divmod(ranks[0], plan.tp)
        amounts = dict.fromkeys(CATEGORIES, 0)
        for kind in kinds[stage]:
            sharded = (line.plan for line in kind.tensors if not is_common(line.plan))
            num_bytes = kind.count * sum(local_bytes(entry, plan, rank) for entry in sharded)
            amounts[kind.category or "other"] += num_bytes
        amounts["replicated"] = summary.rank_bytes[ranks[0]] - sum(amounts.values())
        ends = list(accumulate(1000 * n / max(max(summary.rank_bytes), 1) for n in amounts.values()))
        starts = zip(amounts, (0.0, *ends), ends, strict=False)
        segments = [(category, start, end - start) for category, start, end in starts if end > start]
        bars.append((_ranks(ranks), segments, summary.rank_bytes[ranks[0]]))
    return bars


def categories(bars: Sequence[MemoryBar]) -> list[str]:
    """Return the categories that some bar shows, in the order of ``CATEGORIES``."""
    used = {category for _, segments, _ in bars for category, _, _ in segments}
    return [category for category in CATEGORIES if category in used]


def _ranks(ranks: Sequence[int]) -> str:
    """Return ascending numbers as text, such as ``ranks 0-3, 8-63``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:6]]
    more = f" and {len(runs) - 6} more runs" if len(runs) > 6 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + more


def totals(collectives: Sequence[Collective]) -> list[tuple[str, int, int]]:
    """Return (op, count, bytes per token) for each kind of collective, in the order of their first use."""
    by_op: dict[str, list[Collective]] = {}
    for item in collectives:
        by_op.setdefault(item.op, []).append(item)
    return [(op, sum(c.count for c in it), sum(c.token_bytes for c in it)) for op, it in by_op.items()]
