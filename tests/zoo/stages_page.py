"""The page of ``scripts/coverage stages``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def write_page(results: Path, page: Path) -> None:
    """Write the page from a file of JSON lines."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    page.write_text("\n".join(_page(rows)) + "\n")


def _page(rows: Sequence[Row]) -> Iterable[str]:
    import torch
    import transformers

    yield "# Coverage of pipeline stages"
    yield ""
    yield (
        "`scripts/coverage stages` writes this page. It divides a tiny random model of every causal and "
        f"sequence-to-sequence type of transformers {transformers.__version__} (torch "
        f"{torch.__version__.partition('+')[0]}) into two stages, and into three stages of two ranks each if "
        "the type can have six layers (otherwise into two). The stages are simulated one after another. A "
        "prefill and a decoding step must equal the unsharded model to 1e-9, and six new tokens must be the "
        "same with greedy decoding and with two beams."
    )
    for family in dict.fromkeys(row["family"] for row in rows):
        for asked, tp in dict.fromkeys((row["asked_pp"], row["tp"]) for row in rows):
            mine = [r for r in rows if (r["family"], r["asked_pp"], r["tp"]) == (family, asked, tp)]
            yield from _section(f"{family}: {asked} stages, {tp} rank{'s' if tp > 1 else ''} each", mine)


def _section(title: str, rows: Sequence[Row]) -> Iterable[str]:
    good = [r for r in rows if r["status"] == "equal"]
    same = [r for r in good if r["generated"] == "same"]
    trained = sum(not r["untrained"] for r in good)
    one = sum(set(r["sent"].values()) == {1} for r in good)
    yield from ("", f"## {title}", "")
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
    others = [r for r in rows if _why_not(r)]
    if others:
        yield from ("", "| type | reason |", "|---|---|")
    for row in others:
        reason = _why_not(row).replace("|", "\\|")
        yield f"| `{row['type']}` | {reason} |"


def _why_not(row: Row) -> str:
    generates = row["generated"].startswith(("same", "unsupported"))
    untrained = row.get("untrained", "")
    return "; ".join(
        part
        for part in (
            row["message"],
            "" if generates else row["generated"],
            f"not trained: {untrained}" if untrained else "",
        )
        if part
    )


def _count(rows: Sequence[Row], status: str) -> int:
    return sum(r["generated"].startswith(status) for r in rows)
