"""The page of ``scripts/coverage quantized``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .quantized import Row

HEAD = """# Coverage of quantized formats

Tiny checkpoints that the formats' own libraries made, written by `scripts/coverage quantized`: converted
with the proof of the plan, merged, and loaded by real processes over gloo on a CPU. Widths are 3 and 5
groups, so that shares are uneven. Errors are the largest difference of logits over the largest logit, in
float32 activations: *packed* ranks against the unsharded quantized model that transformers loads,
*dequantized* ones (`load(dequantize=True)`) against the plain model that `--dtype` makes for one rank.
Float8 kernels come from a hub, for GPUs; here they are replaced by the same products in plain torch.

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
A rank's share is above 1 / tp where groups are odd (2 of 3 on one rank) and by what is replicated (norms;
scales in act-order). bitsandbytes int8 and FP8 quantize activations token by token, and each rank of a row-
parallel layer sees the largest value of its own part: their errors are of the order of that quantization.
AWQ's kernel computes in float16. The nested factors of bitsandbytes become float32 in row-parallel layers.
What is refused packed says so before anything is read: transformers would decompress compressed-tensors'
integers and NVFP4 at the first call, and has no kernel for MXFP4 on a CPU.
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
