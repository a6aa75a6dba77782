"""The page of ``scripts/coverage stages``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .kept_rows import KeptRows, Row, cell, origin

ROWS = KeptRows(
    "stages",
    ("family", "type", "asked_pp", "tp"),
    {"pp": 0, "status": "", "message": "", "sent": {}, "generated": "", "untrained": "", "seconds": 0.0},
)


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page in the repository; ``table`` says where the table is."""
    yield "# Coverage of pipeline stages"
    yield ""
    yield (
        "`scripts/coverage stages` writes this page. It divides a tiny random model of every causal and "
        "sequence-to-sequence type of transformers into two stages, and into three stages of two ranks each "
        "if the type can have six layers (otherwise into two). The stages are simulated one after another. A "
        "prefill and a decoding step must equal the unsharded model to 1e-9, and six new tokens must be the "
        f"same with greedy decoding and with two beams. {origin(rows)} {table}"
    )
    for family in dict.fromkeys(row["family"] for row in rows):
        for asked, tp in sorted({(row["asked_pp"], row["tp"]) for row in rows}):
            mine = [r for r in rows if (r["family"], r["asked_pp"], r["tp"]) == (family, asked, tp)]
            if mine:
                title = f"{family}: {asked} stages, {tp} rank{'s' if tp > 1 else ''} each"
                yield from ("", f"## {title}", "")
                yield from _section(mine)


def _section(rows: Sequence[Row]) -> Iterator[str]:
    good = [r for r in rows if r["status"] == "equal"]
    same = [r for r in good if r["generated"] == "same"]
    trained = sum(not r["untrained"] for r in good)
    one = sum(set(r["sent"].values()) == {1} for r in good)
    yield (
        f"{len(good)} of {len(rows)} types can be divided into stages with equal outputs; {one} of them send "
        f"one tensor across each cut. {len(same)} generate the same tokens. Of the others, "
        f"{_count(good, 'unsupported')} cannot generate in this way even when unsharded, and "
        f"{_count(good, 'different')} raise an error or generate other tokens. {trained} can be trained: "
        "the gradients of all stages are equal."
    )
    fewer = sum(r["pp"] != r["asked_pp"] for r in rows)
    if fewer:
        yield f"{fewer} were divided into two stages because their model has two layers."
    others = [(row["type"], reason) for row in rows if (reason := _why_not(row))]
    if others:
        yield from ("", "| type | reason |", "|---|---|")
        yield from (f"| `{name}` | {cell(reason)} |" for name, reason in others)


def _why_not(row: Row) -> str:
    generates = row["generated"].startswith(("same", "unsupported"))
    untrained = f"not trained: {row['untrained']}" if row["untrained"] else ""
    parts = (row["message"], "" if generates else row["generated"], untrained)
    return "; ".join(filter(None, parts))


def _count(rows: Sequence[Row], status: str) -> int:
    return sum(r["generated"].startswith(status) for r in rows)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that the site has below: a line for each type and number of stages."""
    yield from ("## All types", "")
    yield "*Sent*: tensors that cross each cut. *Seconds*: of the plan, its check and the generation."
    yield ""
    yield from (
        "| type | family | stages | tp | outputs | sent | generated | trained | seconds |",
        "|---" * 9 + "|",
    )
    for row in rows:
        sent = ", ".join(f"{cut}: {count}" for cut, count in row["sent"].items())
        is_trained = row["status"] == "equal" and not row["untrained"]
        cells = (
            row["type"],
            row["family"],
            row["pp"],
            row["tp"],
            row["status"],
            sent,
            cell(row["generated"]),
            "yes" if is_trained else "no",
            f"{row['seconds']:.0f}",
        )
        yield f"| {' | '.join(map(str, cells))} |"
