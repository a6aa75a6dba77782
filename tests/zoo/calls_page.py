"""The page that a sweep of calls writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .calls import FORMS

Row = Mapping[str, Any]

FAMILIES = {
    "causal": "Causal language models",
    "seq2seq": "Sequence to sequence",
    "masked": "Masked language models",
}
SHORT = {"right": "+", "refused": "r", "wrong": "**wrong**", "crash": "**crash**", "absent": ""}
ABOUT = {
    "float64": "the inputs of the numerical check at other sizes, after `model.double()`",
    "float32": "a copy of the model, cast back to float32",
    "bfloat16": "a copy in bfloat16; its error is at most three times that of the unsharded model",
    "positional": "ids as a positional argument",
    "return_dict=False": "a tuple instead of named outputs",
    "inputs_embeds": "random embeddings instead of ids",
    "own inputs_embeds": "embeddings from `get_input_embeddings()`",
    "decoder_inputs_embeds": "random embeddings instead of decoder ids",
    "encoder": "only `get_encoder()(ids)`",
    "encoder_outputs": "the outputs of the unsharded encoder instead of ids",
    "output_hidden_states": "all outputs are compared",
    "output_attentions": "all outputs are compared",
    "embedding": "`get_input_embeddings()(ids)`",
    "base_model": "`model.base_model(ids)`, all outputs",
    "no mask": "no attention mask",
    "padding left": "the first three tokens of one row are masked",
    "padding right": "the last three tokens of one row are masked",
    "4-D mask": "a random causal mask `[B, 1, S, S]` of zeros and the smallest value of the dtype",
    "position_ids": "positions that do not start at zero",
    "one row": "a batch of size 1",
    "labels": "the loss and the logits",
    "logits_to_keep": "only the logits of the last token",
    "eager": "after `set_attn_implementation`",
    "sdpa": "after `set_attn_implementation`",
    "flex": "after `set_attn_implementation`, not compiled",
    "decode loop": "a manual loop: prefill and three steps with the returned cache",
    "generate": "greedy",
    "generate, sampled": "with a fixed seed",
    "generate, beams": "two beams",
    "generate, inputs_embeds": "from random embeddings",
    "ids beyond the table": "the vocabulary size as an id; an error if the unsharded model raises one",
    "negative ids": "-1 as an id; an error if the unsharded model raises one",
    "hook on embedding": "a forward hook on `get_input_embeddings()` adds seeded noise",
    "packed positions": "two samples in one row, separated by `position_ids`, without a cache",
    "streamer": "the tokens and the end signal of a streamer on each rank",
    "kept dtypes": "each parameter has the dtype of `from_pretrained(dtype=bfloat16)`",
    "float64 again": "the first call again, after all others",
}


def write_page(rows: Iterable[Row], page: Path) -> None:
    """Write the page from the rows of a sweep."""
    page.write_text("\n".join(_page(list(rows))) + "\n")


def _page(rows: Sequence[Row]) -> Iterator[str]:
    import torch
    import transformers

    yield "# Coverage of calls"
    yield ""
    yield (
        "`scripts/coverage calls` writes this page. It converts a tiny random model of every type that "
        f"transformers {transformers.__version__} can build (torch "
        f"{torch.__version__.partition('+')[0]}) for two ranks, loads it in two processes over gloo, and "
        "calls it in each of the ways below. The results are compared with the unsharded model in float64. "
        "[Coverage](coverage.md) shows the plans of these types."
    )
    yield ""
    tried = [row for row in rows if "calls" in row]
    yield from _forms(tried)
    minutes = sum(row["seconds"] for row in rows) / 60
    yield (
        f"The sweep covers {len(tried)} types and took {minutes:.0f} minutes, one type at a time, including "
        "conversions and numerical checks."
    )
    yield ""
    for family, title in FAMILIES.items():
        mine = [row for row in tried if row["family"] == family]
        if mine:
            yield from _matrix(title, mine)
    yield from _refusals(tried)
    yield from _unplanned(rows)


def _forms(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Forms"
    yield ""
    yield (
        "*Right*: every rank returns the tensors of the unsharded model. *Refused*: every rank raises a "
        "`ShardconvError` that says what to do. *Absent*: the unsharded model does not support the call. "
        "*Share*: right calls as a percentage of all calls that are not absent."
    )
    yield ""
    yield "| form | | right | refused | wrong | crash | absent | share |"
    yield "|---|---|---|---|---|---|---|---|"
    for form, about in ABOUT.items():
        count = Counter(row["calls"][form][0] for row in rows if form in row["calls"])
        present = sum(count.values()) - count["absent"]
        share = f"{count['right'] / present:.1%}" if present else ""
        yield (
            f"| {form} | {about} | {count['right']} | {count['refused']} | {count['wrong']} | "
            f"{count['crash']} | {count['absent']} | {share} |"
        )
    yield ""


def _matrix(title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "`+`: right; `r`: refused; empty: absent."
    yield ""
    yield f"| type | {' | '.join(FORMS)} |"
    yield "|---" * (len(FORMS) + 1) + "|"
    for row in sorted(rows, key=lambda row: row["type"]):
        cells = (SHORT[row["calls"].get(form, ["absent"])[0]] for form in FORMS)
        yield f"| {row['type']} | {' | '.join(cells)} |"
    yield ""


def _refusals(rows: Sequence[Row]) -> Iterator[str]:
    """What is said, by what is said."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for form, (status, text) in row["calls"].items():
            if status in ("refused", "wrong", "crash"):
                said.setdefault((status, text), []).append(f"{row['type']} ({form})")
    yield "## Refused calls"
    yield ""
    for (status, text), where in sorted(said.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(where[:6]) + (f" and {len(where) - 6} more" if len(where) > 6 else "")
        yield f"- {status}, {shown}: {text}"
    yield ""


def _unplanned(rows: Sequence[Row]) -> Iterator[str]:
    lost = [row for row in rows if "error" in row]
    if not lost:
        return
    yield "## Not converted"
    yield ""
    yield from (f"- {row['type']}: {row['error'][:300]}" for row in lost)
