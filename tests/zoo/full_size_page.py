"""The page of ``scripts/coverage full-size``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .kept_rows import KeptRows, Row, cell, origin

FAMILIES = ("causal", "seq2seq", "masked", "vision", "audio", "multimodal")
SMALL = 1000
"""Models of a smaller hidden size are said to be small."""
KEPT = 0.01
"""The page tells why, where a larger share than this is replicated."""
PER_LAYER = 2.1
"""The page tells where, if a layer of a decoder has more collectives."""
SECONDS, GIGABYTES = 15.0, 0.7
"""The page lists what took more."""
TP = 8
"""Of the list of collectives, and of numerical checks."""
PROOF_SECONDS, PROOF_BYTES = 15.0, 2**30
"""The page lists what took more with its proof."""


FIELDS: Mapping[str, Any] = {
    "status": "",
    "message": "",
    "hidden": 0,
    "parameters": 0,
    "cpu_s": 0.0,
    "peak_bytes": 0,
    "rounds": 1,
    "replicated": 0.0,
    "unread": 0.0,
    "unread_names": {},
    "left_out": {},
    "rank_excess": 0.0,
    "per_layer": 0.0,
    "collectives": {},
    "kept": {},
    "proof": [],
    "is_verified": False,
}
OF_CHECKED = ("status", "message", "cpu_s", "peak_bytes", "proof", "is_verified")
"""The fields that the page shows of a run with the numerical check."""


def _trim(row: Row) -> Row:
    """A row without what the page does not show."""
    if row["checked"]:
        return {name: row[name] for name in OF_CHECKED}
    is_shown = {
        "unread_names": row["unread"] > KEPT,
        "kept": row["replicated"] - row["unread"] > KEPT,
        "collectives": row["per_layer"] > PER_LAYER and row["family"] == "causal" and row["tp"] == TP,
        "proof": False,
    }
    return {name: value for name, value in row.items() if is_shown.get(name, True)}


ROWS = KeptRows("full-size", ("family", "type", "release", "class_name", "tp", "checked"), FIELDS, _trim)


# In the repository -----------------------------------------------------------------------------------


def summary(rows: Sequence[Row], table: str) -> Iterable[str]:
    """The lines of the page in the repository; ``table`` says where the tables are."""
    yield "# Coverage at full size"
    yield ""
    yield (
        "`scripts/coverage full-size` writes this page. It plans every type of transformers without weights, "
        "in bfloat16, or in float32 if the code requires it. The sizes are those of a release in "
        "`tests/zoo/releases.py`, or the defaults of the config. Plans are retraced; the numerical check is "
        f"measured separately. {origin(rows)} {table}"
    )
    yield ""
    checked = [row for row in rows if row["checked"]]
    rows = [row for row in rows if not row["checked"]]
    yield from _summary(rows)
    yield from _checks(checked)
    yield from _slow(rows)
    yield from _left_out(rows)
    yield from _problems(rows)


def _key(row: Row) -> tuple[str, str, str]:
    return row["type"], row["class_name"], row["release"]


def _name(row: Row) -> str:
    return f"{row['class_name']} {row['release']}".strip()


def _slow(rows: Sequence[Row]) -> Iterable[str]:
    yield f"## More than {SECONDS:.0f} s of CPU time, or {GIGABYTES} GB"
    yield ""
    said: dict[str, list[str]] = {}
    for r in rows:
        if r["status"] == "planned" and (r["cpu_s"] > SECONDS or r["peak_bytes"] > 1e9 * GIGABYTES):
            cost = f"tp {r['tp']}: {r['cpu_s']:.0f} s, {r['peak_bytes'] / 1e9:.2f} GB"
            said.setdefault(_name(r), []).append(cost)
    yield from (f"- {model}: {'; '.join(costs)}" for model, costs in said.items())
    yield ""


def _left_out(rows: Sequence[Row]) -> Iterable[str]:
    yield "## Traced without some inputs, which a loaded model rejects"
    yield ""
    said: dict[tuple[str, str], dict[str, None]] = {}
    for r in rows:
        for name, why in r["left_out"].items() if r["status"] == "planned" else ():
            said.setdefault((name, why), {})[_name(r)] = None
    yield from (f"- {', '.join(models)}: `{name}` {why}" for (name, why), models in said.items())
    yield ""


def _summary(rows: Sequence[Row]) -> Iterable[str]:
    yield (
        "| | tp | models | planned | refused | time limit | not built by transformers | median s | "
        "max s | max GB | replicated over 1% |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for family in FAMILIES:
        for tp in sorted({r["tp"] for r in rows if r["family"] == family}):
            mine = [r for r in rows if r["family"] == family and r["tp"] == tp]
            good = [r for r in mine if r["status"] == "planned"]
            count = Counter(r["status"] for r in mine)
            seconds = [r["cpu_s"] for r in good] or [0.0]
            peak = max((r["peak_bytes"] for r in good), default=0) / 1e9
            wide = sum(r["replicated"] > KEPT for r in good)
            yield (
                f"| {family} | {tp} | {len(mine)} | {len(good)} | {count['refused'] + count['crash']} | "
                f"{count['timeout']} | {count['not built']} | {median(seconds):.1f} | {max(seconds):.1f} | "
                f"{peak:.2f} | {wide} |"
            )
    yield ""
    yield "Times are CPU seconds on one core. Times and memory do not include the imports."
    yield ""


def _checks(rows: Sequence[Row]) -> Iterable[str]:
    """What plans with their numerical checks took, and what did not hold."""
    if not rows:
        return
    yield "## Numerical checks"
    yield ""
    yield (
        "These runs include the numerical check of the plan: the forward pass, gradients, a second call, and "
        "other implementations and inputs. All ranks run in one process, on a smaller model of its code. "
        "Rows are renewed one by one, also on other machines: compare seconds of one date only."
    )
    yield ""
    yield (
        "| | tp | models | verified | inference only | not verified | median s | max s | median GB | "
        f"max GB | over {PROOF_SECONDS:.0f} s | over 1 GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for family in FAMILIES:
        for tp in sorted({r["tp"] for r in rows if r["family"] == family}):
            mine = [r for r in rows if r["family"] == family and r["tp"] == tp and r["status"] != "not built"]
            good = [r for r in mine if r["is_verified"]]
            seconds = [r["cpu_s"] for r in good] or [0.0]
            memory = [r["peak_bytes"] / 1e9 for r in good] or [0.0]
            only = sum(any(text.startswith("for inference only") for text in r["proof"]) for r in good)
            yield (
                f"| {family} | {tp} | {len(mine)} | {len(good)} | {only} | {len(mine) - len(good)} | "
                f"{median(seconds):.1f} | {max(seconds):.1f} | {median(memory):.2f} | {max(memory):.2f} | "
                f"{sum(n > PROOF_SECONDS for n in seconds)} | {sum(n > PROOF_BYTES / 1e9 for n in memory)} |"
            )
    yield ""
    said: dict[str, dict[str, None]] = {}
    for r in rows:
        if r["status"] == "planned":
            for text in r["proof"]:
                said.setdefault(text, {})[_name(r)] = None
        elif r["status"] != "not built":
            said.setdefault(f"{r['status']}: {r['message']}", {})[_name(r)] = None
    yield from (f"- {', '.join(models)}: {text}" for text, models in said.items())
    yield ""


def _problems(rows: Sequence[Row]) -> Iterable[str]:
    titles = {
        "refused": "No plan",
        "crash": "Crashed",
        "timeout": "Time limit exceeded",
        "not built": "Models that transformers cannot build at these sizes",
    }
    for status, title in titles.items():
        said: dict[str, dict[str, None]] = {}
        for r in rows:
            if r["status"] == status:
                said.setdefault(r["message"], {})[_name(r)] = None
        if said:
            yield f"## {title}"
            yield ""
            yield from (f"- {', '.join(types)}: {message}" for message, types in said.items())
            yield ""


# In the site -----------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """The lines that the site has below: a table for each family, with a line for each model."""
    checked = {(_key(row), row["tp"]): row for row in rows if row["checked"]}
    rows = [row for row in rows if not row["checked"]]
    tps = sorted({row["tp"] for row in rows})
    yield from ("## All models", "")
    yield (
        f"Values are for tp {', '.join(map(str, tps))}. *Replicated*: percentage of the bytes of matrices "
        "that every rank holds. *Unread*: the part of it that the traced call does not read. *Excess*: bytes "
        "on rank 0, relative to an even share. *Per layer*: collectives per layer in one forward pass. "
        "*Rounds*: how many times the model was solved. *Verified*: seconds and GB including the numerical "
        f"check, at tp {TP}."
    )
    yield ""
    for family in FAMILIES:
        mine = [row for row in rows if row["family"] == family]
        if any(row["status"] == "planned" for row in mine):
            yield from _family(family, mine, checked)
    yield from _why(rows)
    yield from _many_collectives(rows)


def _family(
    family: str, rows: Sequence[Row], checked: Mapping[tuple[tuple[str, str, str], int], Row]
) -> Iterable[str]:
    tps = sorted({row["tp"] for row in rows})
    names = "class, model, parameters, s, GB, replicated, unread, excess, per layer, rounds, verified"
    cells = names.split(", ")
    yield from (f"### {family.capitalize()}", "", f"| {' | '.join(cells)} |", "|---" * len(cells) + "|")
    for key in dict.fromkeys(map(_key, rows)):
        mine = {row["tp"]: row for row in rows if _key(row) == key}
        if any(row["status"] == "planned" for row in mine.values()):
            yield _line([mine.get(tp) for tp in tps], checked.get((key, TP)))
    yield ""


def _line(rows: Sequence[Row | None], checked: Row | None) -> str:
    first = next(r for r in rows if r and r["status"] == "planned")
    release = first["release"] or f"defaults{', small' if 0 < first['hidden'] < SMALL else ''}"
    cells = (
        _each(rows, lambda r: f"{r['cpu_s']:.1f}"),
        _each(rows, lambda r: f"{r['peak_bytes'] / 1e9:.2f}"),
        _each(rows, lambda r: f"{100 * r['replicated']:.2g}%"),
        _each(rows, lambda r: f"{100 * r['unread']:.2g}%"),
        _each(rows, lambda r: f"{r['rank_excess']:.2f}"),
        _each(rows, lambda r: f"{r['per_layer']:.1f}"),
        _each(rows, lambda r: str(r["rounds"])),
        ""
        if checked is None
        else _each([checked], lambda r: f"{r['cpu_s']:.1f} s, {r['peak_bytes'] / 1e9:.2f}"),
    )
    return f"| {first['class_name']} | {release} | {_count(first['parameters'])} | {' | '.join(cells)} |"


def _each(rows: Sequence[Row | None], show: Any) -> str:
    shown = ["" if r is None else show(r) if r["status"] == "planned" else r["status"] for r in rows]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 10**9 else f"{number / 1e6:.0f} M"


def _why(rows: Sequence[Row]) -> Iterable[str]:
    """Parameters that stay replicated, of models in which they are more than 1%."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for r in rows:
        reasons: dict[str, list[str]] = {}
        for name, reason in r["kept"].items():
            reasons.setdefault(reason, []).append(name)
        if r["unread"] > KEPT:
            reasons["the traced call does not read it"] = list(r["unread_names"])
        for reason, names in reasons.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            what = ", ".join(f"`{n}`" for n in names[:2]) + more
            said.setdefault((_name(r), what, reason[:200]), []).append(str(r["tp"]))
    yield from ("## Reasons why more than 1% is replicated", "", "| model | tp | parameters | reason |")
    yield "|---|---|---|---|"
    for (model, what, reason), tps in said.items():
        yield f"| {cell(model)} | {', '.join(tps)} | {cell(what)} | {cell(reason)} |"
    yield ""


def _many_collectives(rows: Sequence[Row]) -> Iterable[str]:
    """Where the collectives of a layer are, of decoders with more than two."""
    yield f"## Decoders with more than two collectives per layer, at tp {TP}"
    yield ""
    said: dict[str, list[str]] = {}
    for r in rows:
        if r["collectives"]:
            places = [f"`{where}` x {count}" for where, count in r["collectives"].items()]
            said.setdefault(", ".join(places), []).append(_name(r))
    yield from ("| models | collectives |", "|---|---|")
    yield from (f"| {cell(', '.join(models))} | {cell(places)} |" for places, models in said.items())
    yield ""
