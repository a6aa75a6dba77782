"""Cuts that share out bytes and work."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardconv_runtime.errors import ShardconvError

from shardconv.pp.stage_plans import StageLoad, balanced, parse_stages

LOADS = st.lists(st.builds(StageLoad, st.integers(0, 50), st.floats(0, 50)), min_size=2, max_size=8)


def worst(loads: list[StageLoad], cuts: list[int]) -> float:
    """The largest share of bytes or of work that a stage has."""
    total = sum(loads, StageLoad(0, 0.0))
    edges = [0, *(cut + 1 for cut in cuts), len(loads)]
    stages = [sum(loads[a:b], StageLoad(0, 0.0)) for a, b in itertools.pairwise(edges)]
    return max(max(s.num_bytes / max(1, total.num_bytes), s.work / max(1.0, total.work)) for s in stages)


@settings(deadline=None)
@given(LOADS, st.integers(2, 4), st.data())
def test_no_other_cuts_are_better(loads: list[StageLoad], count: int, data: st.DataObject) -> None:
    allowed = data.draw(st.lists(st.booleans(), min_size=len(loads) - 1, max_size=len(loads) - 1))
    places = [i for i, ok in enumerate(allowed) if ok]
    if len(places) < count - 1:
        with pytest.raises(ShardconvError, match=r"give a smaller --pp"):
            balanced(loads, allowed, count)
        return
    found = balanced(loads, allowed, count)
    assert set(found) <= set(places)
    best = min(worst(loads, list(cuts)) for cuts in itertools.combinations(places, count - 1))
    assert worst(loads, found) <= best + 1e-9


def test_bytes_and_work_both_count() -> None:
    loads = [StageLoad(4, 1.0), *[StageLoad(1, 1.0)] * 6, StageLoad(2, 1.0)]
    assert balanced(loads, [True] * 7, 2) == [3]


def test_layers_of_stages_are_read() -> None:
    assert parse_stages("0-3,4-4,5-7", 8) == [3, 4]
    assert parse_stages("0,1", 2) == [0]


@pytest.mark.parametrize(
    "text", ["", "0-3", "0-3,5-7", "1-3,4-7", "0-3,4-8", "0-3,3-7", "4-7,0-3", "a-b", "0-3,4-2"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ShardconvError, match=r"does not share out the 8 layers 0 to 7"):
        parse_stages(text, 8)
