"""What every type's plan shards, asks collectives for, leaves out and cannot train, beside what was recorded.

Plans are made for two ranks and not proven here. A change fails if it shards less of some type, needs more
collectives for it, or gives it no gradients. If it was meant to, record them anew and look at the
difference::

    SHARDCONV_RECORD=1 pytest -n 0 -m "" tests/zoo/test_planned.py

The types of ``EVERY_DAY`` are planned by default, all of them in the slow tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

from .measure import plan_facts
from .models import FAMILIES, build, types
from .tasks import specification

RECORDED = Path(__file__).with_name("planned.json")
RECORD = "SHARDCONV_RECORD"
TP = 2
ROUNDING = 4
"""Digits of what is recorded."""

EVERY_DAY = {
    "causal": """bloom falcon fuyu gemma4_unified jetmoe minicpm3 musicgen_melody nemotron_h qwen3_5
        reformer roformer xlstm""",
    "seq2seq": "musicflamingo",
    "masked": "esm longformer luke mobilebert squeezebert ultravbert",
    "other": "granite_speech5_ctc internvl segformer siglip2 wav2vec2",
}
"""With ``OTHER_HEADS`` 26 types.

48 were picked one by one for the most new branches in a second (measured with coverage.py), until they took
99.2% of the branches of the packages that all types take. These run 98% of the lines that those 48 run.
"""
OTHER_HEADS = ("albert/question answering", "t5/sequence classification")


def is_for_every_day(family: str, model_type: str) -> bool:
    """Whether the plan of a type is made in the default run."""
    return model_type in EVERY_DAY[family].split() or model_type in OTHER_HEADS


def planned(family: str, model_type: str) -> dict[str, Any]:
    """What the plan of a tiny model says."""
    plan = solve_plan(specification(build(family, model_type)), SolveOptions(TP, check=False))
    facts = plan_facts(plan)
    return {
        "sharded": round(facts["sharded"], ROUNDING),
        "never read": round(facts["unused"], ROUNDING),
        "collectives in a layer": round(facts["per_layer"], ROUNDING),
        "without": list(plan.left_out),
        "cannot be trained": plan.inference_only,
    }


def recorded() -> dict[str, dict[str, Any]]:
    """What was recorded of each type, by family and type."""
    document: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return document


def record(name: str, found: dict[str, Any]) -> None:
    """Write what was found of one type; the others stay, one in a line."""
    known = recorded() | {name: found}
    names = (f"{family}: {t}" for family in FAMILIES for t in types(family))
    lines = [f"{json.dumps(n)}: {json.dumps(known[n])}" for n in names if n in known]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.parametrize(
    ("family", "model_type"),
    [
        pytest.param(f, t, marks=[pytest.mark.slow] * (not is_for_every_day(f, t)))
        for f in FAMILIES
        for t in types(f)
    ],
)
def test_every_type_is_planned_as_was_recorded(family: str, model_type: str) -> None:
    name, found = f"{family}: {model_type}", planned(family, model_type)
    if os.environ.get(RECORD):
        record(name, found)
    assert found == recorded().get(name), (
        f"if the change is meant, set {RECORD}=1 and run this file; say in the commit what was lost and why"
    )


def test_types_of_every_day_are_in_the_zoo() -> None:
    """Those that were renamed would be left out without a word."""
    chosen = [(f, t) for f in FAMILIES for t in types(f) if is_for_every_day(f, t)]
    assert len(chosen) == sum(len(names.split()) for names in EVERY_DAY.values()) + len(OTHER_HEADS)
