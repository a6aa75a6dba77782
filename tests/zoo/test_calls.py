"""Every form of call on a few types, in real processes; ``scripts/coverage calls`` tries all types."""

from __future__ import annotations

import pytest

from .calls import FORMS
from .calls_page import ABOUT, FAMILIES, ROWS
from .calls_run import ABSENT, CRASH, REFUSED, RIGHT, WRONG, try_calls
from .models import types

pytestmark = pytest.mark.usefixtures("other_attentions")

TYPES = [
    ("causal", "doge", "keys are picked by their values, so that equal tokens tie", {"flex"}),
    ("causal", "falcon", "hidden states stay terms of a sum", {"output_hidden_states"}),
    ("masked", "big_bird", "attention replaced in the forward pass, a pooler that is not read", set()),
    ("seq2seq", "bart", "an encoder, embeddings that are reduced behind a sum", set()),
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


def test_the_rows_have_every_form_and_type() -> None:
    """Those of the repository have no wrong call."""
    assert ABOUT.keys() == FORMS.keys()
    rows = ROWS.read()
    assert {(row["family"], row["type"]) for row in rows} == {(f, t) for f in FAMILIES for t in types(f)}
    assert not [row for row in rows if {status for status, *_ in row["calls"].values()} & {WRONG, CRASH}]
