"""The page of ``scripts/coverage models``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .kept_rows import KeptRows, Row, cell, origin, without_blanks
from .left_out import LEFT_OUT

FAMILIES = {
    "causal": "Causal language models",
    "seq2seq": "Sequence to sequence",
    "masked": "Masked language models",
    "other": "Vision, audio, multimodal, and other heads",
}
GOOD = ("equal", "float32", "same")
UNSUPPORTED = "unsupported"
"""The unsharded model cannot generate in this way."""
ENOUGH = 0.95
SECONDS = 10.0
"""The page lists plans that took longer."""

RUN: Mapping[str, Any] = {
    "variant": "",
    "tp": 0,
    "status": "",
    "message": "",
    "error": 0.0,
    "sharded": 0.0,
    "overrides": 0,
    "collectives": {},
    "per_layer": 0.0,
    "plan_seconds": 0.0,
}
"""The fields of one run of a type -> the value that is not written."""
OF_FIRST = ("overrides", "collectives", "per_layer")
"""Fields that the page shows of the first run only."""


def _trim(row: Row) -> Row:
    """Runs without the fields that the page does not show, and remarks instead of lists of parameters."""
    runs = []
    for run in row["runs"]:
        is_first = not runs
        needed = {name: run[name] for name in RUN if is_first or name not in OF_FIRST}
        runs.append(without_blanks({**needed, "message": _message(run)}, RUN))
    return {"runs": runs, "remarks": _remarks(row["runs"]), "seconds": round(row["seconds"])}


def _remarks(runs: Iterable[Row]) -> dict[str, str]:
    """Remark -> the runs that it is about: replicated parameters and the reasons, errors, notes of plans."""
    said: dict[str, list[str]] = {}
    for run in runs:
        label = f"tp {run['tp']}{', ' + run['variant'] if run['variant'] else ''}"
        if run["status"] not in GOOD:
            said.setdefault(f"{run['status']}: {_message(run)[:240]}", []).append(label)
        if run["variant"]:
            continue
        for note in run["notes"]:
            said.setdefault(note[:240], []).append(label)
        reasons: dict[str, list[str]] = {}
        for name, reason in run["replicated"].items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            shown = ", ".join(f"`{name}`" for name in names[:3])
            said.setdefault(f"{shown}{more}: {reason[:160]}", []).append(label)
    return {what: "; ".join(where) for what, where in said.items()}


def _message(run: Row) -> str:
    """Why a run is not good; empty if it is."""
    if run["status"] in GOOD:
        return ""
    return run["message"] or f"the outputs differ by {run['error']:.0e} of the largest"


ROWS = KeptRows("models", ("family", "type"), {"runs": [], "remarks": {}, "seconds": 0}, _trim)


def _runs(rows: Iterable[Row]) -> list[Row]:
    """All runs of all types, with the fields that the file leaves out."""
    return [
        {"family": row["family"], "type": row["type"], **RUN, **run} for row in rows for run in row["runs"]
    ]


# In the repository -----------------------------------------------------------------------------------


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page in the repository; ``table`` says where the tables are."""
    runs = _runs(rows)
    yield "# Coverage"
    yield ""
    yield (
        "`scripts/coverage models` writes this page. It plans a tiny random model of every type that "
        "transformers can build for 2, 3 and 4 ranks. The ranks run as threads of one process and are "
        "compared with the unsharded model in float64. The weights and inputs differ from those of the "
        "converter's own check. `tests/zoo` has the configs. [Coverage of calls](coverage-calls.md) has a "
        f"column for each way to call a loaded model. {origin(rows)} {table}"
    )
    yield ""
    yield from _summary(runs)
    yield from _generation_summary(runs)
    yield from _times(rows, runs)
    bad = [run for run in runs if run["status"] not in (*GOOD, UNSUPPORTED)]
    yield from ("## Refused and wrong", "")
    for run in bad:
        where = f"tp {run['tp']}{', ' if run['variant'] else ''}{run['variant']}"
        yield f"- {run['type']} ({where}): {run['status']}: {run['message']}"
    yield from ([] if bad else ["None."])
    yield ""
    yield from _partly_sharded(rows)
    yield from _left_out()


def _summary(runs: Sequence[Row]) -> Iterator[str]:
    yield from ("## Summary", "")
    yield (
        "| | tp | types | equal (1e-9) | equal, with float32 inside (1e-5) | refused | wrong | "
        "at least 95% sharded |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for family, title in FAMILIES.items():
        of_family = [run for run in runs if run["family"] == family and run["tp"]]
        for variant in sorted({r["variant"] for r in of_family if not r["variant"].startswith("generate")}):
            for tp in sorted({run["tp"] for run in of_family}):
                mine = [run for run in of_family if (run["variant"], run["tp"]) == (variant, tp)]
                if mine:
                    yield _summary_line(f"{title}{', ' + variant if variant else ''}", tp, mine)
    yield ""


def _summary_line(label: str, tp: int, runs: Sequence[Row]) -> str:
    count = Counter(run["status"] for run in runs)
    sharded = sum(run["sharded"] >= ENOUGH for run in runs if run["status"] in GOOD)
    return (
        f"| {label} | {tp} | {len(runs)} | {count['equal']} | {count['float32']} | "
        f"{count['refused']} | {count['wrong']} | {sharded} |"
    )


def _generation_summary(runs: Sequence[Row]) -> Iterator[str]:
    generated = [run for run in runs if run["variant"].startswith("generate")]
    for variant in sorted({run["variant"] for run in generated}):
        count = Counter(run["status"] for run in generated if run["variant"] == variant)
        yield (
            f"- `{variant}`: {count['same']} types generate the tokens of the unsharded model, "
            f"{count['different']} generate other tokens, and {count[UNSUPPORTED]} do not support it."
        )
    if generated:
        yield ""


def _times(rows: Sequence[Row], runs: Sequence[Row]) -> Iterator[str]:
    """How long the run took, and which plans took long."""
    seconds = sorted(run["plan_seconds"] for run in runs if run["plan_seconds"])
    if not seconds:
        return
    yield (
        f"The run took {sum(row['seconds'] for row in rows) / 60:.0f} minutes on one core. A plan with its "
        f"numerical check took {seconds[len(seconds) // 2]:.1f} s (median) and at most {seconds[-1]:.1f} s."
    )
    slow: dict[str, list[str]] = {}
    for run in runs:
        if run["plan_seconds"] > SECONDS:
            variant = f" with {run['variant']}" * bool(run["variant"])
            slow.setdefault(run["type"], []).append(f"{run['plan_seconds']:.0f} s at tp {run['tp']}{variant}")
    if slow:
        shown = "; ".join(f"{name} ({', '.join(times)})" for name, times in slow.items())
        yield f"More than {SECONDS:.0f} s: {shown}."
    yield ""


def _partly_sharded(rows: Sequence[Row]) -> Iterator[str]:
    """Types of which a part stays replicated, and why."""
    yield from (f"## Less than {ENOUGH:.0%} sharded", "")
    for row in rows:
        plain = _plain(row)
        if any(run["status"] in GOOD and run["sharded"] < ENOUGH for run in plain):
            yield f"- {row['type']}: {' / '.join(map(_percent, plain))}"
            yield from (f"    - {what} ({where})" for what, where in row["remarks"].items())
    yield ""


def _left_out() -> Iterator[str]:
    yield from ("## Left out", "")
    yield from (f"- {name}: {reason}" for name, reason in sorted(LEFT_OUT.items()))
    yield from ([] if LEFT_OUT else ["No type."])


# In the site -----------------------------------------------------------------------------------------


COLUMNS = (
    "type",
    "sharded",
    "overrides",
    "reduce + gather",
    "per layer",
    "error",
    "few heads",
    "generate",
    "plan",
)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that the site has below: a table for each family, with a line for each type."""
    yield from ("## All types", "")
    yield (
        "*Sharded*: percentage of the matrix elements read by the forward pass that are sharded, at "
        "tp 2 / 3 / 4. *Overrides*: integer attributes of modules with local values. *Reduce + gather*, *per "
        "layer*: collectives in one forward pass at tp 2. *Error*: the largest error at any tp. *Plan*: "
        "seconds at tp 2, including the numerical check."
    )
    yield ""
    for family, title in FAMILIES.items():
        mine = [row for row in rows if row["family"] == family]
        if mine:
            yield from (f"### {title}", "")
            yield f"| {' | '.join(COLUMNS)} |"
            yield "|---" * len(COLUMNS) + "|"
            yield from map(_type_line, mine)
            yield ""
    yield from ("## Remarks", "", "Replicated parameters and reasons, errors, and notes of the plans.", "")
    yield from ("| type | family | runs | remark |", "|---|---|---|---|")
    for row in rows:
        for what, where in row["remarks"].items():
            yield f"| {row['type']} | {row['family']} | {where} | {cell(what)} |"


def _plain(row: Row) -> list[Row]:
    return sorted((run for run in _runs([row]) if not run["variant"] and run["tp"]), key=lambda r: r["tp"])


def _type_line(row: Row) -> str:
    runs = _runs([row])
    plain = _plain(row)
    good = [run for run in plain if run["status"] in GOOD]
    first = plain[0] if plain else None
    sharded = " / ".join(map(_percent, plain)) or "none"
    if first is None or not good:
        status = first["status"] if first else "not built"
        return f"| {row['type']} | {sharded} | | | | {status} | | | |"
    c = first["collectives"]
    worst = max(run["error"] for run in good)
    error = f"{worst:.0e}" + (" (float32 inside)" if any(r["status"] == "float32" for r in good) else "")
    return (
        f"| {row['type']} | {sharded} | {first['overrides']} | {c.get('all_reduce', 0)} + "
        f"{c.get('all_gather', 0)} | {first['per_layer']:.1f} | {error} | {_few(runs)} | "
        f"{_generated(runs)} | {first['plan_seconds']:.1f} |"
    )


def _percent(run: Row) -> str:
    if run["status"] not in GOOD:
        return str(run["status"])
    return f"{100 * run['sharded']:.4g}%" if run["sharded"] < 0.9995 else "100%"


def _few(runs: Sequence[Row]) -> str:
    few = [run for run in runs if "key/value" in run["variant"] and run["tp"]]
    bad = [f"{run['variant'][0]} at {run['tp']} {run['status']}" for run in few if run["status"] not in GOOD]
    return "; ".join(bad) or (f"{len(few)} equal" if few else "")


def _generated(runs: Sequence[Row]) -> str:
    found = [
        (run["variant"].removeprefix("generate, ").removesuffix(" cache"), run["status"])
        for run in runs
        if run["variant"].startswith("generate")
    ]
    if {status for _, status in found} == {"same"}:
        return "same"
    return ", ".join(f"{cache}: {status}" for cache, status in sorted(found))
