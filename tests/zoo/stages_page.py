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

    yield "# Which models can be cut into stages"
    yield ""
    yield (
        "Written by `scripts/coverage stages`: a tiny random model of every causal and sequence-to-sequence "
        f"type of transformers {transformers.__version__} (torch "
        f"{torch.__version__.partition('+')[0]}) is cut "
        "into two stages, and into three stages of two ranks each if the type can have six layers (otherwise "
        "into two). The stages are simulated one after another. A prefill and a decoding step must equal the "
        "unsharded model to 1e-9, and six new tokens with greedy decoding and two beams must be the same."
    )
    for family in dict.fromkeys(row["family"] for row in rows):
        for asked, tp in dict.fromkeys((row["asked_pp"], row["tp"]) for row in rows):
            mine = [r for r in rows if (r["family"], r["asked_pp"], r["tp"]) == (family, asked, tp)]
            yield from _section(f"{family}: {asked} stages, each of {tp}", mine)


def _section(title: str, rows: Sequence[Row]) -> Iterable[str]:
    good = [r for r in rows if r["status"] == "equal"]
    same = [r for r in good if r["generated"] == "same"]
    one = sum(set(r["sent"].values()) == {1} for r in good)
    yield from ("", f"## {title}", "")
    yield (
        f"{len(good)} of {len(rows)} types are cut and equal; {one} of these send one tensor across each "
        f"cut. {len(same)} generate the same tokens; of the others, {_count(good, 'unsupported')} cannot "
        f"generate in this way by themselves, and {_count(good, 'different')} are refused or differ. "
        f"{sum(not r['untrained'] for r in good)} can be trained: the gradients of all stages are equal."
    )
    fewer = sum(r["pp"] != r["asked_pp"] for r in rows)
    if fewer:
        yield f"{fewer} were cut into two stages, since the model of the type has two layers."
    others = [r for r in rows if _why_not(r)]
    if others:
        yield from ("", "| type | why not |", "|---|---|")
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
