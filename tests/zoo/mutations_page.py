"""The page of ``scripts/coverage mutations``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .kept_rows import KeptRows, Row, cell, origin

ROWS = KeptRows(
    "mutations",
    ("fault", "model", "tp"),
    {
        "room": "",
        "module": "",
        "convert": "named",
        "verify": "named",
        "convert_message": "",
        "verify_message": "",
    },
)

RESULTS = ("named", "neighbor", "another module", "no module", "not noticed")
NOT_ON_PATH = "not on its path"
_COMMANDS = ("convert", "verify")


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page in the repository; ``table`` says where the table is."""
    faults = {row["fault"] for row in rows}
    yield "# Coverage of faults in the runtime"
    yield ""
    yield (
        "`scripts/coverage mutations` writes this page. It puts faults into the runtime's code one at a "
        "time, each at one module: a sum that is skipped, another rank's slice, an adjoint without its sum. "
        "`convert` must refuse the plan, or make another plan, and its message must name the module. "
        "Without the check, `verify --numerics` must name it. Tiny random models of five kinds run on 2 and "
        f"on 3 ranks. The faults are in `tests/helpers/shardconv_faults.py`. {origin(rows)} {table}"
    )
    yield ""
    yield (
        "A *neighbor* is around the faulty module, inside of it or next to it. A command that does not run "
        f"the faulty code cannot show the fault, which is {NOT_ON_PATH}: `verify` runs no backward pass and "
        "no sequence-parallel form, and `convert` reads no packed weights."
    )
    yield ""
    yield f"| of {len(faults)} faults | " + " | ".join((*RESULTS, NOT_ON_PATH)) + " |"
    yield "|---" * (len(RESULTS) + 2) + "|"
    for command in _COMMANDS:
        counted = Counter(row[command] for row in rows)
        yield f"| {command}, runs | " + " | ".join(str(counted[r]) for r in (*RESULTS, NOT_ON_PATH)) + " |"
        worst = Counter(_worst([row[command] for row in rows if row["fault"] == name]) for name in faults)
        yield f"| {command}, faults | " + " | ".join(str(worst[r]) for r in (*RESULTS, NOT_ON_PATH)) + " |"
    yield ""
    yield "A fault counts by the worst of its runs."
    yield from ("", "## Faults", "")
    models = list(dict.fromkeys(row["model"] for row in rows))
    yield f"| fault | in | {' | '.join(models)} |"
    yield "|---" * (len(models) + 2) + "|"
    for name in sorted(faults, key=lambda name: (_room(name, rows), name)):
        cells = (_cell([row for row in rows if (row["fault"], row["model"]) == (name, m)]) for m in models)
        yield f"| {name} | {_room(name, rows)} | {' | '.join(cells)} |"
    yield ""
    yield (
        "A cell says what `convert` and `verify` named, at 2 and at 3 ranks; `-` is a model whose plan does "
        "not run that code."
    )
    for command in _COMMANDS:
        yield from ("", f"## Not named by {command}", "")
        yield from _listed([row for row in rows if row[command] not in ("named", NOT_ON_PATH)], command)


def _room(fault: str, rows: Sequence[Row]) -> str:
    return next(str(row["room"]) for row in rows if row["fault"] == fault)


def _worst(results: Sequence[str]) -> str:
    order = (NOT_ON_PATH, *RESULTS)
    return max(results, key=order.index)


def _cell(rows: Sequence[Row]) -> str:
    """The results of one fault in one model."""
    if not rows:
        return "-"
    parts = []
    for command in _COMMANDS:
        by_result: dict[str, list[str]] = {}
        for row in rows:
            by_result.setdefault(row[command], []).append(str(row["tp"]))
        texts = [
            result if len(by_result) == 1 else f"{result} ({', '.join(tps)})"
            for result, tps in by_result.items()
            if result != NOT_ON_PATH
        ]
        parts.append(", ".join(texts) or "-")
    text = parts[0] if parts[0] == parts[1] else " / ".join(parts)
    return text if len(rows) > 1 else f"{text} (tp {rows[0]['tp']})"


def _listed(rows: Sequence[Row], command: str) -> Iterator[str]:
    for row in rows:
        where = f"{row['fault']}, {row['model']} at tp {row['tp']}, in `{row['module']}`"
        yield f"- {where}: {row[command]}: {cell(row[f'{command}_message']) or 'no message'}"
    if not rows:
        yield "None."


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that the site has below: a line for each fault, model and number of ranks."""
    yield from ("## All faults", "")
    yield from ("| fault | model | tp | module | convert | verify |", "|---" * 6 + "|")
    for row in rows:
        cells = (
            row["fault"],
            row["model"],
            str(row["tp"]),
            f"`{row['module']}`",
            *(row[c] for c in _COMMANDS),
        )
        yield f"| {' | '.join(cells)} |"
