"""The page of ``scripts/coverage quantized``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .quantized import Row

HEAD = """# Coverage of quantized formats

`scripts/coverage quantized` writes this page. Tiny checkpoints, made by the libraries of the formats, are
converted with the numerical check, merged, and loaded by real processes over gloo on a CPU. Widths are 3
and 5 groups, so shares are uneven. Errors are the largest difference of logits over the largest logit,
with float32 activations: *packed* compares packed ranks with the quantized model in transformers, and
*dequantized* compares `load(dequantize=True)` with the model that `--dtype` makes for one rank. Float8
kernels for GPUs are replaced by the same products in plain torch.

"""

COLUMNS = (
    "format",
    "model",
    "experts",
    "tp",
    "packed weights sharded",
    "rank / file",
    "merge is the identity",
    "packed: error",
    "memory / files",
    "dequantized: error",
)

NOTES = """
A rank's share is above 1 / tp if groups are odd (2 of 3 on one rank) or tensors are replicated (norms;
scales in act-order). bitsandbytes int8 and FP8 scale each token by its largest value, and a rank of a
row-parallel layer sees only its part of the token: the error is about the error of that quantization.
AWQ's kernel computes in float16. The nested factors of bitsandbytes become float32 in row-parallel
layers. *Refused* means that packed loading raises an error before anything is read: transformers would
decompress the integers of compressed-tensors and NVFP4 at the first call, and has no kernel for MXFP4 on
a CPU.
"""


def write_page(lines: Iterable[str], path: Path) -> None:
    """Write the page, of rows as ``line`` has them."""
    heads = ("| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS))
    path.write_text(HEAD + "\n".join([*heads, *lines]) + "\n" + NOTES)


def line(row: Row) -> str:
    packed = row.packed if row.memory else "refused"
    memory = f"{row.memory:.3f}" if row.memory else ""
    cells = [
        row.name,
        row.model,
        row.experts,
        str(row.tp),
        row.sharded,
        f"{row.rank_share:.3f}",
        "yes" if row.merged else "no",
        packed,
        memory,
        f"{row.dequantized:.0e}",
    ]
    return "| " + " | ".join(cells) + " |"
