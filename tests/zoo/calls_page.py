"""The page of ``scripts/coverage calls``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .kept_rows import KeptRows, Row, origin

FAMILIES = {
    "causal": "Causal language models",
    "seq2seq": "Sequence to sequence",
    "masked": "Masked language models",
}
SHORT = {"right": "+", "refused": "r", "wrong": "**wrong**", "crash": "**crash**", "absent": ""}
MANY = 20
"""If more types refuse a call with the same message, only the first ones are named."""
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
    "output_attentions": 'after `set_attn_implementation("eager")`; all outputs are compared',
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


def _trim(row: Row) -> Row:
    """A row without the calls that were right, of which only the number is kept."""
    calls = {form: [status, text] for form, (status, text) in row.get("calls", {}).items()}
    others = {
        form: [status] if status == "absent" else [status, text]
        for form, (status, text) in calls.items()
        if status != "right"
    }
    return {**row, "calls": others, "right": len(calls) - len(others), "seconds": round(row["seconds"], 1)}


ROWS = KeptRows("calls", ("family", "type"), {"right": 0, "calls": {}, "error": "", "seconds": 0.0}, _trim)


def _tried(rows: Sequence[Row]) -> list[Row]:
    """The types that were converted, with the status and text of every call."""
    tried = []
    for row in rows:
        if row["error"]:
            continue
        if row["right"] + len(row["calls"]) != len(ABOUT):
            raise ValueError(
                f"the row of {row['family']} {row['type']} in {ROWS.path.name} has other forms than ABOUT: "
                f"run scripts/coverage calls --only {row['type']}"
            )
        tried.append({**row, "calls": {form: [*row["calls"].get(form, ["right"]), ""][:2] for form in ABOUT}})
    return tried


# In the repository -----------------------------------------------------------------------------------


def summary(rows: Sequence[Row], table: str) -> Iterator[str]:
    """The lines of the page in the repository; ``table`` says where the tables are."""
    yield "# Coverage of calls"
    yield ""
    yield (
        "`scripts/coverage calls` writes this page. It converts a tiny random model of every type that "
        "transformers can build for two ranks, loads it in two processes over gloo, and calls it in each of "
        "the ways below. The results are compared with the unsharded model in float64. "
        f"[Coverage](coverage.md) shows the plans of these types. {origin(rows)} {table}"
    )
    yield ""
    tried = _tried(rows)
    yield from _forms(tried)
    minutes = sum(row["seconds"] for row in rows) / 60
    yield (
        f"The sweep covers {len(tried)} types and took {minutes:.0f} minutes, one type at a time, including "
        "conversions and numerical checks."
    )
    yield ""
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
        count = Counter(row["calls"][form][0] for row in rows)
        present = sum(count.values()) - count["absent"]
        share = f"{count['right'] / present:.1%}" if present else ""
        yield (
            f"| {form} | {about} | {count['right']} | {count['refused']} | {count['wrong']} | "
            f"{count['crash']} | {count['absent']} | {share} |"
        )
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
        is_long = status == "refused" and len(where) > MANY
        shown = f"{', '.join(where[:6])} and {len(where) - 6} more" if is_long else ", ".join(where)
        yield f"- {status}, {shown}: {text}"
    yield ""


def _unplanned(rows: Sequence[Row]) -> Iterator[str]:
    lost = [row for row in rows if row["error"]]
    if lost:
        yield from ("## Not converted", "")
        yield from (f"- {row['type']}: {row['error']}" for row in lost)


# In the site -----------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines that the site has below: a table for each family, with a line for each type."""
    yield from ("## All types", "", "`+`: right; `r`: refused; empty: absent.", "")
    for family, title in FAMILIES.items():
        mine = [row for row in _tried(rows) if row["family"] == family]
        if mine:
            yield from (
                f"### {title}",
                "",
                f"| type | {' | '.join(ABOUT)} |",
                "|---" * (len(ABOUT) + 1) + "|",
            )
            for row in mine:
                cells = (SHORT[status] for status, _ in row["calls"].values())
                yield f"| {row['type']} | {' | '.join(cells)} |"
            yield ""
