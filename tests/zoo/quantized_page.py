"""The page of ``scripts/coverage quantized``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .kept_rows import KeptRows, Row, cell, origin

ROWS = KeptRows(
    "quantized",
    ("name", "model", "experts", "tp"),
    {
        "sharded": "",
        "rank_share": 0.0,
        "merged": False,
        "packed": "",
        "memory": 0.0,
        "dequantized": 0.0,
    },
)

NOTES = """
A rank's share is above 1 / tp if groups are odd (2 of 3 on one rank) or tensors are replicated (norms;
scales in act-order). bitsandbytes int8 and FP8 scale each token by its largest value, and a rank of a
row-parallel layer sees only its part of the token: the error is about the error of that quantization.
AWQ's kernel computes in float16. The nested factors of bitsandbytes become float32 in row-parallel
layers. *Refused* means that packed loading raises an error before anything is read: transformers would
decompress the integers of compressed-tensors and NVFP4 at the first call, and has no kernel for MXFP4 on
a CPU."""


COLUMNS = (
    "format",
    "model",
    "experts",
    "packed weights sharded",
    "rank / file",
    "merge is the identity",
    "packed: error",
    "memory / files",
    "dequantized: error",
)


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page, which has a line for each format and no further table."""
    del table
    tps = " / ".join(map(str, sorted({row["tp"] for row in rows})))
    yield "# Coverage of quantized formats"
    yield ""
    yield (
        "`scripts/coverage quantized` writes this page. Tiny checkpoints, made by the libraries of the "
        "formats, are converted with the numerical check, merged, and loaded by real processes over gloo on "
        "a CPU. Widths are 3 and 5 groups, so shares are uneven. Errors are the largest difference of logits "
        "over the largest logit, with float32 activations: *packed* compares packed ranks with the quantized "
        "model in transformers, and *dequantized* compares `load(dequantize=True)` with the model that "
        "`--dtype` makes for one rank. Float8 kernels for GPUs are replaced by the same products in plain "
        f"torch. Values are for tp {tps}, or for all of them. {origin(rows)} The rows are in "
        f"`tests/zoo/rows/{ROWS.path.name}`."
    )
    yield from ("", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|")
    for kind in dict.fromkeys((row["name"], row["model"], row["experts"]) for row in rows):
        mine = [row for row in rows if (row["name"], row["model"], row["experts"]) == kind]
        cells = (
            *kind,
            _each(row["sharded"] for row in mine),
            _each(f"{row['rank_share']:.3f}" for row in mine),
            _each("yes" if row["merged"] else "no" for row in mine),
            _each(row["packed"] if row["memory"] else "refused" for row in mine),
            _each(f"{row['memory']:.3f}" if row["memory"] else "" for row in mine),
            _each(f"{row['dequantized']:.0e}" for row in mine),
        )
        yield f"| {' | '.join(map(cell, cells))} |"
    yield from NOTES.splitlines()
    refused: dict[str, dict[str, None]] = {}
    for row in rows:
        if not row["memory"]:
            refused.setdefault(row["packed"], {})[row["name"]] = None
    if refused:
        yield from ("", "Refused:", "")
        yield from (f"- {', '.join(names)}: {' '.join(why.split())}" for why, names in refused.items())


def _each(cells: Iterable[str]) -> str:
    found = list(cells)
    return found[0] if len(set(found)) == 1 else " / ".join(found)
