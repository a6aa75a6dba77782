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
    "float64": "the kinds of inputs of the plan's check, in other sizes, after `model.double()`",
    "float32": "a copy of the model, cast back",
    "bfloat16": "a copy, cast: at most three times as far from float64 as the unsharded model",
    "positional": "ids by position",
    "return_dict=False": "a tuple in place of named outputs",
    "inputs_embeds": "random embeddings in place of ids",
    "own inputs_embeds": "the result of `get_input_embeddings()`",
    "decoder_inputs_embeds": "random embeddings in place of the decoder's ids",
    "encoder": "only `get_encoder()(ids)`",
    "encoder_outputs": "the outputs of the unsharded encoder, in place of ids",
    "output_hidden_states": "all outputs are compared",
    "output_attentions": "all outputs are compared",
    "embedding": "`get_input_embeddings()(ids)`",
    "base_model": "`model.base_model(ids)`, all outputs",
    "no mask": "no attention mask",
    "padding left": "three tokens of one row masked at its start",
    "padding right": "the same at its end",
    "4-D mask": "a random causal mask `[B, 1, S, S]` of zeros and the smallest number",
    "position_ids": "positions that do not begin at zero",
    "one row": "a batch of one",
    "labels": "the loss and the logits",
    "logits_to_keep": "only the logits of the last token",
    "eager": "after `set_attn_implementation`",
    "sdpa": "after `set_attn_implementation`",
    "flex": "after `set_attn_implementation`, not compiled",
    "decode loop": "a manual loop: a prefill and three steps with the returned cache",
    "generate": "greedily",
    "generate, sampled": "with one seed",
    "generate, beams": "two beams",
    "generate, inputs_embeds": "from random embeddings",
    "ids beyond the table": "the number of its rows as an id: an error, if the unsharded model raises one",
    "negative ids": "-1 as an id: likewise",
    "hook on embedding": "a forward hook on `get_input_embeddings()` adds seeded noise",
    "packed positions": "two samples in a row, told by `position_ids`, without a cache",
    "streamer": "the tokens and the end that a streamer gets on each rank",
    "kept dtypes": "the dtype of each parameter, as after `from_pretrained(dtype=bfloat16)`",
    "float64 again": "the first call, after all others",
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
        "Written by `scripts/coverage calls`: a tiny random model of every type that transformers "
        f"{transformers.__version__} can build (torch {torch.__version__.partition('+')[0]}) is converted "
        "for two ranks, loaded by two processes over gloo, and called in each of these ways. The results are "
        "compared with the unsharded model in float64. [Coverage](coverage.md) has the plans of these "
        "types."
    )
    yield ""
    tried = [row for row in rows if "calls" in row]
    yield from _forms(tried)
    minutes = sum(row["seconds"] for row in rows) / 60
    yield (
        f"{len(tried)} types. The sweep took {minutes:.0f} minutes, one type at a time, with the conversions "
        "and their proofs."
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
        "Right: every rank has the tensors of the unsharded model. Refused: every rank raises a "
        "ShardconvError "
        "that names the remedy. Absent: the unsharded model does not support the call. Share: the share of "
        "right calls without the absent ones."
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
    yield "`+` is right, `r` refused; nothing: absent."
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
    yield "## What is refused"
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
