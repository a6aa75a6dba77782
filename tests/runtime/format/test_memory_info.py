"""The formulas of a plan's field ``memory``, and what is wrong with others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from shardconv_runtime.errors import PlanError, ShardconvError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.measured import CacheTerm, LiveBytes, MemoryPlan, cache_bytes, prefill_bytes
from small_models import hand_plan, small_config

MEMORY = MemoryPlan(
    prefill=(LiveBytes((1000, 10, 0)), LiveBytes((-50, 12, 1), (0, 3, 0))),
    cache=(CacheTerm(8), CacheTerm(6, window=16), CacheTerm(4, source=True)),
    sequence_bytes=100,
    fixed_bytes=7,
    logits_token_bytes=404,
    buffer_bytes=16,
)


def test_the_formulas() -> None:
    assert cache_bytes(MEMORY, 2, 10) == 7 + 2 * (100 + 80 + 60)
    assert cache_bytes(MEMORY, 2, 100, 5) == 7 + 2 * (100 + 800 + 96 + 20)
    assert prefill_bytes(MEMORY, 1, 2) == 1020
    assert prefill_bytes(MEMORY, 3, 100) == 3 * (-50 + 1200 + 10_000) + 300


def test_it_is_in_the_plan() -> None:
    plan = replace(hand_plan(small_config(), 2), memory=MEMORY)
    text = plan_json.dumps(plan)
    assert plan_json.loads(text) == plan
    assert json.loads(text)["memory"]["cache"] == [
        {"token_bytes": 8},
        {"token_bytes": 6, "window": 16},
        {"token_bytes": 4, "source": True},
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_bytes": -1}, "memory.sequence_bytes: must be 0 or more"),
        ({"cache": [{"token_bytes": 8, "window": -1}]}, r"memory.cache\[0\].window: must be 0 or more"),
        ({"cache": [{"token_bytes": 2**60}]}, r"memory.cache\[0\].token_bytes: must be 0 or more"),
        ({"cache": [{"token_bytes": 8}] * 65}, "memory.cache: more than 64 entries"),
        ({"prefill": [{"sequence": [0, 2**60, 0]}]}, r"memory.prefill\[0\]: a coefficient"),
    ],
)
def test_wrong_numbers_are_refused(changes: dict[str, Any], message: str) -> None:
    document = json.loads(plan_json.dumps(replace(hand_plan(small_config(), 2), memory=MEMORY)))
    document["memory"] |= changes
    with pytest.raises(PlanError, match=f"^{message}"):
        plan_json.loads(json.dumps(document))


def test_a_wrong_number_cannot_be_made() -> None:
    with pytest.raises(ShardconvError, match=r"^token_bytes: must be 0 or more"):
        CacheTerm(-1)
