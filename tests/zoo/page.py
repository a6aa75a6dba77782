"""The page that a coverage run writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .overrides import LEFT_OUT

Row = Mapping[str, Any]

FAMILIES = {
    "causal": "Causal language models",
    "seq2seq": "Sequence to sequence",
    "masked": "Masked language models",
    "other": "Vision, audio, multimodal, and other heads",
}
GOOD = ("equal", "float32", "same")
ENOUGH = 0.95


def write_page(results: Path, page: Path) -> None:
    """Write the page from a file of JSON lines."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    page.write_text("\n".join(_page(rows)) + "\n")


def _page(rows: Sequence[Row]) -> Iterable[str]:
    import torch
    import transformers

    yield "# Coverage"
    yield ""
    yield (
        "`scripts/coverage models` writes this page. It plans a tiny random model of every type that "
        f"transformers {transformers.__version__} can build (torch "
        f"{torch.__version__.partition('+')[0]}) for 2, 3 and 4 ranks. The ranks run as threads of one "
        "process and are compared with the unsharded model in float64. The weights and inputs differ from "
        "those of the converter's own check. `tests/zoo` has the configs. [Coverage of "
        "calls](coverage-calls.md) has a column for each way to call a loaded model."
    )
    yield ""
    yield from _summary(rows)
    for family, title in FAMILIES.items():
        mine = [r for r in rows if r["family"] == family]
        if mine:
            yield from _family(title, mine)
    yield from _left_out()


def _plain(rows: Iterable[Row], variant: str = "") -> list[Row]:
    return [r for r in rows if r["variant"] == variant and r["tp"]]


# Summary -------------------------------------------------------------------------------------------


def _summary(rows: Sequence[Row]) -> Iterable[str]:
    yield "## Summary"
    yield ""
    yield (
        "| | tp | types | equal (1e-9) | equal, with float32 inside (1e-5) | refused | wrong | "
        "at least 95% sharded |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for family, title in FAMILIES.items():
        for variant in sorted({r["variant"] for r in rows if not r["variant"].startswith("generate")}):
            for tp in sorted({r["tp"] for r in rows if r["tp"]}):
                mine = [r for r in _plain(rows, variant) if r["family"] == family and r["tp"] == tp]
                if mine:
                    label = f"{title}{', ' + variant if variant else ''}"
                    yield _summary_line(label, tp, mine)
    yield ""
    yield from _generation_summary(rows)
    seconds: dict[tuple[str, str], float] = {}
    for r in rows:
        seconds[r["family"], r["type"]] = r.get("task_seconds", 0.0)
    plans = [r["plan_seconds"] for r in rows if r["plan_seconds"]]
    if plans:
        plans.sort()
        yield (
            f"The run took {sum(seconds.values()) / 60:.0f} minutes on one core. A plan with its numerical "
            f"check took {plans[len(plans) // 2]:.1f} s (median) and at most {plans[-1]:.1f} s."
        )
        yield ""


def _summary_line(label: str, tp: int, rows: Sequence[Row]) -> str:
    count = Counter(r["status"] for r in rows)
    sharded = sum(r["sharded"] >= ENOUGH for r in rows if r["status"] in GOOD)
    return (
        f"| {label} | {tp} | {len(rows)} | {count['equal']} | {count['float32']} | "
        f"{count['refused']} | {count['wrong']} | {sharded} |"
    )


def _generation_summary(rows: Sequence[Row]) -> Iterable[str]:
    generated = [r for r in rows if r["variant"].startswith("generate")]
    for variant in sorted({r["variant"] for r in generated}):
        mine = [r for r in generated if r["variant"] == variant]
        count = Counter(r["status"] for r in mine)
        yield (
            f"- `{variant}`: {count['same']} types generate the tokens of the unsharded model, "
            f"{count['different']} generate other tokens, and {count['unsupported']} do not support it."
        )
    if generated:
        yield ""


# Families ------------------------------------------------------------------------------------------


def _family(title: str, rows: Sequence[Row]) -> Iterable[str]:
    yield f"## {title}"
    yield ""
    yield (
        "*Sharded*: percentage of the matrix elements read by the forward pass that are sharded, at "
        "tp 2 / 3 / 4. *Edits*: integer attributes of modules that get local values. *Reduce + gather*, *per "
        "layer*: collectives in one forward pass at tp 2. *Error*: the largest error at any tp. *Plan*: "
        "seconds at tp 2, including the numerical check."
    )
    yield ""
    yield "| type | sharded | edits | reduce + gather | per layer | error | few heads | generate | plan |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for model_type in sorted({r["type"] for r in rows}):
        yield _type_line(model_type, [r for r in rows if r["type"] == model_type])
    yield ""
    yield from _remarks(rows)


def _type_line(model_type: str, rows: Sequence[Row]) -> str:
    plain = sorted(_plain(rows), key=lambda r: r["tp"])
    good = [r for r in plain if r["status"] in GOOD]
    first = plain[0] if plain else None
    sharded = " / ".join(_percent(r) for r in plain) or "none"
    if first is None or not good:
        return f"| {model_type} | {sharded} | | | | {first['status'] if first else 'not built'} | | | |"
    c = first["collectives"]
    worst = max(r["error"] for r in good)
    error = f"{worst:.0e}" + (" (float32 inside)" if any(r["status"] == "float32" for r in good) else "")
    return (
        f"| {model_type} | {sharded} | {first['edits']} | {c.get('all_reduce', 0)} + "
        f"{c.get('all_gather', 0)} | {first['per_layer']:.1f} | {error} | {_few(rows)} | "
        f"{_generated(rows)} | {first['plan_seconds']:.1f} |"
    )


def _percent(row: Row) -> str:
    if row["status"] not in GOOD:
        return row["status"]
    return f"{100 * row['sharded']:.4g}%" if row["sharded"] < 0.9995 else "100%"


def _few(rows: Sequence[Row]) -> str:
    few = [r for r in rows if "key/value" in r["variant"] and r["tp"]]
    if not few:
        return ""
    bad = [f"{r['variant'][0]} at {r['tp']} {r['status']}" for r in few if r["status"] not in GOOD]
    return "; ".join(bad) or f"{len(few)} equal"


def _generated(rows: Sequence[Row]) -> str:
    found = {r["variant"].split()[1]: r["status"] for r in rows if r["variant"].startswith("generate")}
    if not found:
        return ""
    if set(found.values()) == {"same"}:
        return "same"
    return ", ".join(f"{cache}: {status}" for cache, status in sorted(found.items()))


def _remarks(rows: Sequence[Row]) -> Iterable[str]:
    lines = []
    for model_type in sorted({r["type"] for r in rows}):
        mine = [r for r in rows if r["type"] == model_type]
        lines += _type_remarks(model_type, mine)
    if lines:
        yield "Replicated parameters and reasons, errors, and notes of the plans:"
        yield ""
        yield from lines
        yield ""


def _type_remarks(model_type: str, rows: Sequence[Row]) -> Iterable[str]:
    said: dict[str, list[str]] = {}
    for r in rows:
        label = f"tp {r['tp']}{', ' + r['variant'] if r['variant'] else ''}"
        if r["status"] not in GOOD and r["message"]:
            said.setdefault(f"{r['status']}: {r['message'][:240]}", []).append(label)
        if r["variant"]:
            continue
        for note in r["notes"]:
            said.setdefault(note[:240], []).append(label)
        reasons: dict[str, list[str]] = {}
        for name, reason in r["replicated"].items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            shown = ", ".join(f"`{n}`" for n in names[:3]) + (
                f" and {len(names) - 3} more" if len(names) > 3 else ""
            )
            said.setdefault(f"{shown}: {reason[:160]}", []).append(label)
    for what, where in said.items():
        yield f"- {model_type} ({'; '.join(where)}): {what}"


def _left_out() -> Iterable[str]:
    yield "## Left out"
    yield ""
    if not LEFT_OUT:
        yield "No type."
        return
    for name, reason in sorted(LEFT_OUT.items()):
        yield f"- {name}: {reason}"
