"""A plan and the files made from it as one HTML page, which needs nothing else: no network and no scripts.

Whatever is from a plan or a manifest is escaped. The Content-Security-Policy of the page allows its own style
sheets by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardconv_runtime.format.layout_hash import is_common
from shardconv_runtime.format.manifest import FileEntry, Manifest
from shardconv_runtime.format.plan import Plan

from .html_style import CSS
from .report import TOKENS, human_bytes, human_count, percent, tensor_cells, unplanned
from .summary import Collective, LayerKind, Replicated, Summary, local_bytes, summarize

MARK = '<meta name="generator" content="shardconv report">'
"""In every report, near its beginning: by it a file is known as one that may be replaced."""

MAX_BARS = 16
"""More ranks than so are folded to those that hold equally much."""

CATEGORIES = ("column", "row", "vocab", "experts", "norm", "boundary")
"""Of modules, in the order of the bars' colours; ``other`` is what is split without a module entry."""


def html_report(
    plan: Plan, picture: str, *, manifest: Manifest | None = None, num_tokens: int = TOKENS
) -> str:
    """Write the page.

    Args:
        plan: any plan.
        picture: of the plan, as SVG; it is put into the page as it is.
        manifest: of the converted directory, if there is one.
        num_tokens: tokens of the forward pass whose bytes are shown.

    Returns:
        A document that ends with a newline. The same arguments give the same text.
    """
    summary = summarize(plan)
    sections = [
        ("picture", "How it is split", f'<figure class="picture" tabindex="0">{picture.strip()}</figure>'),
        ("layers", "Layers", _layers(plan, summary.kinds)),
        ("memory", "Memory of each rank", _memory(plan, summary)),
        ("communication", "Communication", _communication(summary.collectives, num_tokens)),
        ("whole", "Whole on every rank", _replicated(summary) if plan.tp > 1 else ""),
        ("training", "Training", _training(plan) if plan.tp > 1 else ""),
        ("notes", "Notes", _notes(plan.notes)),
        ("origin", "Where it comes from", _origin(plan, manifest)),
        ("files", "Files", _files(manifest) if manifest else ""),
    ]
    shown = [section for section in sections if section[2]]
    name = _text(plan.model.class_name.partition(":")[2])
    title = f"{name} over {plan.tp} ranks"
    body = "\n".join(
        f'<section id="{key}"><h2>{heading}</h2>\n{text}\n</section>' for key, heading, text in shown
    )
    links = " ".join(f'<a href="#{key}">{heading}</a>' for key, heading, _ in shown)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(CSS, *_styles(picture))}">
{MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>{name}</h1>
{_subtitle(plan, manifest)}
{_numbers(plan, summary)}
<nav>{links}</nav>
</header>
<main>
{body}
</main>
<footer>Written by <span class="name">shardconv report</span>.</footer>
</body>
</html>
"""


def _policy(*styles: str) -> str:
    hashes = sorted({base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in styles})
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; style-src {allowed}; base-uri 'none'; form-action 'none'"


def _styles(picture: str) -> list[str]:
    return re.findall(r"<style>(.*?)</style>", picture, flags=re.DOTALL)


def _text(text: str) -> str:
    """Text as HTML, without control characters."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def _name(text: str) -> str:
    return f'<span class="name">{_text(text)}</span>'


def _subtitle(plan: Plan, manifest: Manifest | None) -> str:
    source = f"{_text(manifest.source.name)} · " if manifest else ""
    return f'<p class="muted">{source}{_text(plan.model.dtype)} · {_mesh(plan)}</p>'


def _mesh(plan: Plan) -> str:
    ranks = "1 rank" if plan.tp == 1 else f"{plan.tp} ranks"
    return ranks + (f", mesh {' x '.join(map(str, plan.mesh))}" if len(plan.mesh) > 1 else "")


def _numbers(plan: Plan, summary: Summary) -> str:
    smallest, largest = min(summary.rank_bytes), max(summary.rank_bytes)
    replicated = sum(group.num_bytes for group in summary.replicated)
    sent = sum(c.token_bytes for c in summary.collectives)
    count = sum(c.count for c in summary.collectives)
    split = percent(summary.sharded_bytes, summary.total_bytes)
    share = f"{percent(largest, summary.total_bytes)} of the model"
    if human_bytes(smallest) != human_bytes(largest):
        share += f"; the least is {human_bytes(smallest)}"
    found = [
        ("Parameters", human_count(plan.model.num_parameters), plan.model.dtype),
        ("The model", human_bytes(summary.total_bytes), f"{split} is split"),
        ("Each rank", human_bytes(largest), share),
        ("Whole on every rank", human_bytes(replicated), percent(replicated, summary.total_bytes)),
        ("Collectives", str(count), "of one forward pass"),
        ("Sent for each token", human_bytes(sent), "of global tensors"),
    ]
    boxes = "".join(
        f"<div><dt>{head}</dt><dd>{_text(value)}<small>{_text(more)}</small></dd></div>"
        for head, value, more in found
    )
    return f'<dl class="numbers">{boxes}</dl>'


def _table(head: Sequence[tuple[str, bool]], rows: Iterable[str]) -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        head: headings, and whether a column holds numbers.
        rows: markup of the rows.
    """
    cells = "".join(f'<th scope="col"{_number(is_number)}>{text}</th>' for text, is_number in head)
    body = "\n".join(rows)
    heading = f"<thead><tr>{cells}</tr></thead>\n" if any(text for text, _ in head) else ""
    table = f"<table>{heading}<tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _number(is_number: bool, more: str = "") -> str:
    kind = " ".join(word for word in ("number" if is_number else "", more) if word)
    return f' class="{kind}"' if kind else ""


def _row(first: str, cells: Iterable[tuple[str, bool]], kind: str = "") -> str:
    """A row; its first cell is its heading. All is markup."""
    more = "".join(f"<td{_number(is_number, kind)}>{text}</td>" for text, is_number in cells)
    return f'<tr><th scope="row"{_number(False, kind)}>{first}</th>{more}</tr>'


def _layers(plan: Plan, kinds: Sequence[LayerKind]) -> str:
    head = [
        ("Module or parameter", False),
        ("Shape", False),
        ("Layout", False),
        ("Modules", True),
        ("Bytes per rank", True),
    ]
    rows = [row for kind in kinds for row in _kind(plan, kind)]
    about = (
        "<p>Shapes are those of the whole tensor and, behind the arrow, of what a rank holds. In a layout "
    )
    about += "<code>4096@0</code> is a dim of 4096 that is split over mesh axis 0.</p>"
    return about + _table(head, rows) if rows else ""


def _kind(plan: Plan, kind: LayerKind) -> Iterator[str]:
    names = "<br>".join(_name(name or "(the model)") for name in kind.names)
    tag = f'<span class="tag">{_text(kind.category or unplanned(kind))}</span>'
    size = human_bytes(kind.rank_bytes) if kind.tensors else ""
    whole = " whole experts on each rank" if plan.experts == "ep" and kind.category == "experts" else ""
    yield (
        f'<tr class="kind"><th scope="row">{names}</th><td colspan="2">{tag}{whole}</td>'
        f'<td class="number">{kind.count}</td><td class="number">{size}</td></tr>'
    )
    for line in kind.tensors:
        name, shapes, layout = tensor_cells(plan, line)
        cells = f"<td>{_text(shapes).replace(', ', ',&nbsp;')}</td><td>{_name(layout)}</td>"
        yield f'<tr class="tensor"><th scope="row">{_name(name)}</th>{cells}<td></td><td></td></tr>'
    for edit in kind.edits:
        local = " … ".join(map(str, dict.fromkeys((edit.local[0], edit.local[-1]))))
        cells = f"<td>{edit.value} → {local}</td><td>attribute</td>"
        yield f'<tr class="tensor"><th scope="row">{_name(edit.attribute)}</th>{cells}<td></td><td></td></tr>'


def _memory(plan: Plan, summary: Summary) -> str:
    """Bars of what each rank holds, by category."""
    held = _held(plan, summary)
    used = [name for name in (*CATEGORIES, "other", "whole") if any(amounts.get(name) for amounts in held)]
    colours = {name: f"c{index}" for index, name in enumerate((*CATEGORIES, "other"))} | {"whole": "whole"}
    legend = "".join(
        f'<li><svg viewBox="0 0 12 12"><rect width="12" height="12" rx="2" class="{colours[name]}"/></svg>'
        f"{'whole on every rank' if name == 'whole' else name}</li>"
        for name in used
    )
    largest = max(max(summary.rank_bytes), 1)
    rows = []
    for label, rank in _bars(summary.rank_bytes):
        bar = _bar([(colours[name], held[rank].get(name, 0)) for name in used], largest)
        rows.append(_row(label, [(bar, False), (human_bytes(summary.rank_bytes[rank]), True)]))
    table = _table([("Ranks", False), ("Parameters by category", False), ("Bytes", True)], rows)
    about = "<p>Parameters and buffers alone: activations, caches and optimizer state come on top.</p>"
    return f'{about}<ul class="legend">{legend}</ul><div class="bars">{table}</div>'


def _held(plan: Plan, summary: Summary) -> list[dict[str, int]]:
    """For each rank: category -> bytes of what is split; ``whole`` are all others."""
    held: list[dict[str, int]] = []
    for rank, rank_bytes in enumerate(summary.rank_bytes):
        amounts: dict[str, int] = {}
        for kind in summary.kinds:
            split = [line.plan for line in kind.tensors if not is_common(line.plan)]
            num_bytes = kind.count * sum(local_bytes(entry, plan, rank) for entry in split)
            name = kind.category or "other"
            amounts[name] = amounts.get(name, 0) + num_bytes
        held.append(amounts | {"whole": rank_bytes - sum(amounts.values())})
    return held


def _bars(rank_bytes: Sequence[int]) -> list[tuple[str, int]]:
    """(label, a rank that is so) of each bar."""
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


def _bar(parts: Sequence[tuple[str, int]], whole: int) -> str:
    """A stacked bar; ``whole`` is as long as there is room."""
    done, out = 0.0, ""
    for kind, value in parts:
        width = 1000 * value / whole
        out += f'<rect x="{done:.2f}" width="{width:.2f}" height="12" class="{kind}"/>' if value else ""
        done += width
    return f'<svg viewBox="0 0 1000 12" preserveAspectRatio="none">{out}</svg>'


def _communication(collectives: Sequence[Collective], num_tokens: int) -> str:
    head = [
        ("Collective", False),
        ("At", False),
        ("Count", True),
        ("Per token", True),
        (f"{num_tokens:,} tokens", True),
    ]
    rows = [_collective(item, num_tokens) for item in collectives]
    totals = dict.fromkeys(item.op for item in collectives)
    for op in totals:
        found = [item for item in collectives if item.op == op]
        count, num_bytes = sum(c.count for c in found), sum(c.token_bytes for c in found)
        cells = [
            (str(count), True),
            (human_bytes(num_bytes), True),
            (human_bytes(num_bytes * num_tokens), True),
        ]
        rows.append(_row(op, [("all of them", False), *cells], "sum"))
    about = "<p>Of one forward pass; the bytes are those of the global tensor.</p>"
    return about + _table(head, rows) if rows else ""


def _collective(item: Collective, num_tokens: int) -> str:
    places = "<br>".join(_name(f"{name or '(the model)'} {item.slot}") for name in item.names)
    sizes = [(human_bytes(item.token_bytes), True), (human_bytes(item.token_bytes * num_tokens), True)]
    return _row(item.op, [(places, False), (str(item.count), True), *sizes])


def _replicated(summary: Summary) -> str:
    if not summary.replicated:
        return "<p>Nothing: every tensor is split.</p>"
    num_bytes = sum(group.num_bytes for group in summary.replicated)
    share = percent(num_bytes, summary.total_bytes)
    parts = [f"<p>{human_bytes(num_bytes)} on every rank, {share} of the model.</p>"]
    return "\n".join([*parts, *map(_reason, summary.replicated)])


def _reason(group: Replicated) -> str:
    rows = [
        _row(_name(name), [(_text(f"[{', '.join(map(str, shape))}]"), False), (human_bytes(size), True)])
        for name, shape, size in group.tensors
    ]
    head = [("Parameter", False), ("Shape", False), ("Bytes", True)]
    return f"<h3>{_text(group.reason or 'no reason given')}</h3>{_table(head, rows)}"


def _training(plan: Plan) -> str:
    if plan.training is None:
        return "<p>This plan is for inference only.</p>"
    logits = "the ranks' shards of the logits" if plan.training.parallel_loss else "gathered logits"
    form = plan.training.sequence
    sequence = 'is whole (see <span class="name">--sequence-parallel</span>)'
    if form is not None:
        sequence = (
            f"may be split between the parallel blocks, by {len(form.modules)} module entries of their own"
        )
    summed = [name for entry in plan.parameters if entry.grad_axes for name in entry.names]
    parts = [f"<p>The loss is computed from {logits}. The sequence {sequence}.</p>"]
    if not summed:
        return parts[0] + "<p>No gradient of a replicated parameter is summed.</p>"
    items = "".join(f"<li>{_name(name)}</li>" for name in summed)
    return parts[0] + f"<p>Gradients that are summed over the ranks:</p><ul>{items}</ul>"


def _notes(notes: Sequence[str]) -> str:
    items = "".join(
        f"<li{_warning(note)}>{_text(note)}</li>" for note in sorted(notes, key=lambda n: not _warning(n))
    )
    return f'<ul class="notes">{items}</ul>' if items else ""


def _warning(note: str) -> str:
    return ' class="warning"' if note.startswith("for inference only") else ""


def _origin(plan: Plan, manifest: Manifest | None) -> str:
    rows = [("Class", _name(plan.model.class_name))]
    if plan.model.trust_remote_code:
        rows.append(("Code", "of the checkpoint's own repository"))
    if manifest is not None:
        rows.append(("Source", _name(manifest.source.name)))
        rows.append(("Revision", _name(manifest.source.revision) if manifest.source.revision else "none"))
        rows += [(f"Written by {_text(name)}", _name(version)) for name, version in manifest.tools.items()]
        rows.append(("sha256 of the plan", _name(manifest.plan_sha256)))
    rows.append(("Solved for", _name(f"torch {plan.code.torch}, transformers {plan.code.transformers}")))
    rows.append(("Fingerprint of the model's code", _name(plan.code.fingerprint)))
    table = _table([("", False), ("", False)], [_row(head, [(value, False)]) for head, value in rows])
    if manifest is None or not manifest.source.files:
        return table
    sources = [
        _row(
            _name(file.path), [(human_bytes(file.num_bytes), True), (_name(file.sha256 or "unknown"), False)]
        )
        for file in manifest.source.files
    ]
    head = [("Converted file", False), ("Size", True), ("sha256", False)]
    return f"{table}<h3>Weight files that were converted</h3>{_table(head, sources)}"


def _files(manifest: Manifest) -> str:
    owners: dict[str, list[FileEntry]] = {}
    for entry in manifest.files:
        owners.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    head = [("File", False), ("Bytes", True), ("Checksum", False)]
    parts = []
    for place, entries in sorted(owners.items()):
        total = human_bytes(sum(entry.num_bytes for entry in entries))
        files = "1 file" if len(entries) == 1 else f"{len(entries)} files"
        rows = [
            _row(_name(entry.path), [(f"{entry.num_bytes:,}", True), (_name(entry.checksum), False)])
            for entry in entries
        ]
        is_open = " open" if len(owners) <= MAX_BARS else ""
        summary = f"<summary>{_name(place or '.')}: {files}, {total}</summary>"
        parts.append(f"<details{is_open}>{summary}{_table(head, rows)}</details>")
    return "\n".join(parts)
