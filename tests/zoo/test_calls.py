"""Every form of call on a few types, in real processes; ``scripts/coverage calls`` tries all types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .calls import FORMS
from .calls_page import ABOUT, write_page
from .calls_run import ABSENT, CRASH, REFUSED, RIGHT, WRONG, keep, read, read_kept, try_calls

pytestmark = pytest.mark.usefixtures("other_attentions")

ATTENTIONS = "output_attentions"
TYPES = [
    ("causal", "doge", "keys are picked by their values, so that equal tokens tie", {ATTENTIONS, "flex"}),
    ("causal", "falcon", "hidden states stay terms of a sum", {ATTENTIONS, "output_hidden_states"}),
    ("masked", "big_bird", "attention replaced in the forward pass, a pooler that is not read", {ATTENTIONS}),
    ("seq2seq", "bart", "an encoder, embeddings that are reduced behind a sum", {ATTENTIONS}),
]


@pytest.mark.parametrize(
    ("family", "model_type", "refused"),
    [pytest.param(family, name, refused, id=name) for family, name, _, refused in TYPES],
)
def test_every_call_is_right_or_refused(family: str, model_type: str, refused: set[str]) -> None:
    outcomes = try_calls(family, model_type)
    bad = {f: o for f, o in outcomes.items() if o[0] not in (RIGHT, REFUSED, ABSENT)}
    assert not bad
    assert {form for form, (status, _) in outcomes.items() if status == REFUSED} == refused
    assert sum(status == RIGHT for status, _ in outcomes.values()) > len(FORMS) / 2


def test_page(tmp_path: Path) -> None:
    """It says of every form how many types are right."""
    assert ABOUT.keys() == FORMS.keys()
    calls = {form: [RIGHT, ""] for form in FORMS} | {ATTENTIONS: [REFUSED, "PlanError: no"]}
    rows = [
        {"family": "causal", "type": "one", "calls": calls, "seconds": 1.0},
        {"family": "masked", "type": "two", "error": "SolveError: none", "seconds": 1.0},
    ]
    write_page(json.loads(json.dumps(rows)), tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| 1 | 0 | 0 | 0 | 0 | 100.0% |" in text
    assert "- refused, one (output_attentions): PlanError: no" in text
    assert "- two: SolveError: none" in text


def test_rows_that_are_kept(tmp_path: Path) -> None:
    """Of each type the last one, whole again when it is read; those of the repository have no wrong call."""
    calls = {form: [RIGHT, ""] for form in FORMS} | {ATTENTIONS: [REFUSED, "PlanError: no"]}
    rows = [{"family": "causal", "type": "one", "calls": calls, "seconds": seconds} for seconds in (2.0, 1.0)]
    keep(rows, tmp_path / "rows.jsonl")
    assert json.loads(json.dumps(list(read_kept(tmp_path / "rows.jsonl")))) == rows[1:]
    assert len(json.loads((tmp_path / "rows.jsonl").read_text())["calls"]) == 1
    kept = list(read(Path(__file__).with_name("calls_rows.jsonl")))
    assert len(kept) > 270
    assert not [row for row in kept if {status for status, _ in row["calls"].values()} & {WRONG, CRASH}]
