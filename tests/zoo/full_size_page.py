"""The page that a run over models at their sizes writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shardconv.pipeline.numeric_check import TOO_LARGE

from .full_size import FAMILIES, SMALL

Row = Mapping[str, Any]
KEPT = 0.01
"""The page tells why, where a larger share than this is replicated."""
PER_LAYER = 2.1
"""The page tells where, if a layer of a decoder has more collectives."""
SECONDS, GIGABYTES = 15.0, 0.7
"""The page lists what took more."""
TP = 8
"""Of the list of collectives, and of proofs."""
PROOF_SECONDS, PROOF_BYTES = 15.0, 2**30
"""The page lists what took more with its proof."""


def write_page(rows: Sequence[Row], page: Path) -> None:
    """Write the page."""
    page.write_text("\n".join(_page(rows)) + "\n")


def _page(rows: Sequence[Row]) -> Iterable[str]:
    import torch
    import transformers

    yield "# Coverage at full size"
    yield ""
    yield (
        "`scripts/coverage full-size` writes this page. It plans every type of transformers "
        f"{transformers.__version__} (torch {torch.__version__.partition('+')[0]}) without weights, in "
        "bfloat16, or in float32 if the code requires it. The sizes are those of a release in "
        "`tests/zoo/releases.py`, or the defaults of the config. Plans are retraced; the numerical check is "
        "measured separately."
    )
    yield ""
    proofs = {(_key(r), r["tp"]): r for r in rows if r["checked"]}
    rows = [r for r in rows if not r["checked"]]
    yield from _summary(rows)
    yield from _proofs(list(proofs.values()))
    for family in FAMILIES:
        mine = [r for r in rows if r["family"] == family]
        if any(r["status"] == "planned" for r in mine):
            yield from _family(family, mine, proofs)
    yield from _many_collectives(rows)
    yield from _slow(rows)
    yield from _left_out(rows)
    yield from _problems(rows)


def _many_collectives(rows: Sequence[Row]) -> Iterable[str]:
    """Of decoders, where the collectives of a layer are, if they are more than two."""
    yield f"## Decoders with more than two collectives per layer, at tp {TP}"
    yield ""
    said: dict[str, list[str]] = {}
    decoders = [r for r in rows if r["family"] == "causal" and r["tp"] == TP and r["status"] == "planned"]
    for r in decoders:
        if r["per_layer"] > PER_LAYER and "collectives" in r:
            places = [f"`{where}` x {count}" for where, count in r["collectives"].items()]
            said.setdefault(", ".join(places), []).append(f"{r['class_name']} {r['release']}".strip())
    yield from (f"- {', '.join(models)}: {places}" for places, models in said.items())
    yield ""


def _slow(rows: Sequence[Row]) -> Iterable[str]:
    yield f"## More than {SECONDS:.0f} s of CPU time, or {GIGABYTES} GB"
    yield ""
    said: dict[str, list[str]] = {}
    for r in sorted(rows, key=lambda r: (*_key(r), r["tp"])):
        if r["status"] == "planned" and (r["cpu_s"] > SECONDS or r["peak_bytes"] > 1e9 * GIGABYTES):
            cost = f"tp {r['tp']}: {r['cpu_s']:.0f} s, {r['peak_bytes'] / 1e9:.2f} GB"
            said.setdefault(f"{r['class_name']} {r['release']}".strip(), []).append(cost)
    yield from (f"- {model}: {'; '.join(costs)}" for model, costs in said.items())
    yield ""


def _left_out(rows: Sequence[Row]) -> Iterable[str]:
    yield "## Traced without some inputs, which a loaded model rejects"
    yield ""
    said: dict[tuple[str, str], dict[str, None]] = {}
    for r in sorted(rows, key=lambda r: (*_key(r), r["tp"])):
        for name, why in r["left_out"].items() if r["status"] == "planned" else ():
            said.setdefault((name, why[:300]), {})[f"{r['class_name']} {r['release']}".strip()] = None
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


def _proofs(rows: Sequence[Row]) -> Iterable[str]:
    """What plans with their proofs took, and what did not hold."""
    if not rows:
        return
    yield "## Numerical checks"
    yield ""
    yield (
        "These runs include the numerical check of the plan: the forward pass, gradients, a second call, and "
        "other implementations and inputs. All ranks run in one process, on a smaller model of the same code."
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
            good = [r for r in mine if _is_proven(r)]
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
    for r in sorted(rows, key=lambda r: (*_key(r), r["tp"])):
        name = f"{r['class_name']} {r['release']}".strip()
        if r["status"] == "planned":
            if r["cpu_s"] > PROOF_SECONDS or r["peak_bytes"] > PROOF_BYTES:
                said.setdefault(f"{r['cpu_s']:.0f} s, {r['peak_bytes'] / 1e9:.2f} GB", {})[name] = None
            for text in r["proof"]:
                said.setdefault(text[:300], {})[name] = None
        elif r["status"] != "not built":
            said.setdefault(f"{r['status']}: {r['message'][:300]}", {})[name] = None
    yield from (f"- {', '.join(models)}: {text}" for text, models in said.items())
    yield ""


def _is_proven(row: Row) -> bool:
    return row["status"] == "planned" and TOO_LARGE not in row["proof"]


def _family(
    family: str, rows: Sequence[Row], proofs: Mapping[tuple[tuple[str, str, str], int], Row]
) -> Iterable[str]:
    tps = sorted({r["tp"] for r in rows})
    yield f"## {family.capitalize()}"
    yield ""
    yield (
        f"Values are for tp {', '.join(map(str, tps))}. *Replicated*: percentage of the bytes of matrices "
        "that every rank holds. *Unread*: the part of it that the traced call does not read. *Excess*: bytes "
        "on rank 0, relative to an even share. *Per layer*: collectives per layer in one forward pass. "
        "*Rounds*: how many times the model was solved. *Verified*: seconds and GB including the numerical "
        f"check, at tp {TP}."
    )
    yield ""
    names = "class, model, parameters, s, GB, replicated, unread, excess, per layer, rounds, verified"
    cells = names.split(", ")
    yield f"| {' | '.join(cells)} |"
    yield "|---" * len(cells) + "|"
    for key in sorted({_key(r) for r in rows}):
        mine = {r["tp"]: r for r in rows if _key(r) == key}
        if any(r["status"] == "planned" for r in mine.values()):
            yield _line([mine.get(tp) for tp in tps], proofs.get((key, TP)))
    yield ""
    yield from _why(rows)


def _key(row: Row) -> tuple[str, str, str]:
    return row["type"], row["class_name"], row["release"]


def _line(rows: Sequence[Row | None], proof: Row | None) -> str:
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
        "" if proof is None else _each([proof], lambda r: f"{r['cpu_s']:.1f} s, {r['peak_bytes'] / 1e9:.2f}"),
    )
    return f"| {first['class_name']} | {release} | {_count(first['parameters'])} | {' | '.join(cells)} |"


def _each(rows: Sequence[Row | None], show: Any) -> str:
    shown = ["" if r is None else show(r) if r["status"] == "planned" else r["status"] for r in rows]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 10**9 else f"{number / 1e6:.0f} M"


def _why(rows: Sequence[Row]) -> Iterable[str]:
    said: dict[tuple[str, str, str], list[str]] = {}
    for r in sorted(rows, key=lambda r: (*_key(r), r["tp"])):
        if r["status"] != "planned" or r["replicated"] <= KEPT:
            continue
        reasons: dict[str, list[str]] = {}
        for name, reason in r["kept"].items() if r["replicated"] - r["unread"] > KEPT else ():
            reasons.setdefault(reason, []).append(name)
        if r["unread"] > KEPT:
            reasons["the traced call does not read it"] = list(r.get("unread_names", ()))
        for reason, names in reasons.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            what = ", ".join(f"`{n}`" for n in names[:2]) + more
            said.setdefault((f"{r['class_name']} {r['release']}".strip(), what, reason[:200]), []).append(
                str(r["tp"])
            )
    if said:
        yield "Reasons why more than 1% is replicated:"
        yield ""
    for (model, what, reason), tps in said.items():
        yield f"- {model} (tp {', '.join(tps)}): {what}: {reason}"
    if said:
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
                said.setdefault(r["message"][:300], {})[f"{r['class_name']} {r['release']}".strip()] = None
        if said:
            yield f"## {title}"
            yield ""
            yield from (f"- {', '.join(types)}: {message}" for message, types in said.items())
            yield ""
