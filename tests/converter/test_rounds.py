"""Rounds of solving: conflicts rule out leaves, until an attempt meets none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from shardconv_runtime.errors import SolveError

from shardconv.dim_analysis.dim_trees import Node, leaf, split
from shardconv.plan_forms import MAX_ROUNDS, RuledOut, in_rounds
from shardconv.planning.conflict import Conflict, joined

Seen = list[Sequence[Node]]


def test_conflicts_are_ruled_out_one_after_another() -> None:
    forbidden, first, second = leaf(4), leaf(8), leaf(16)
    conflicts = [Conflict((first,), "first.call"), Conflict((second,), "second.call")]
    seen: Seen = []

    def attempt(ruled_out: RuledOut) -> str | Conflict:
        seen.append(list(ruled_out.nodes))
        return conflicts.pop(0) if conflicts else "a plan"

    found, ruled_out = in_rounds(attempt, [forbidden])
    assert found == "a plan"
    assert seen == [[forbidden], [forbidden, first], [forbidden, first, second]]
    assert ruled_out.reasons == {first: "first.call", second: "second.call"}
    assert ruled_out.last_reason() == "second.call"


def test_the_reason_is_kept_for_each_leaf_of_a_dim() -> None:
    dim = leaf(32)
    heads, width = split(dim, 8)
    ruled_out = RuledOut(()).and_also(Conflict((dim,), "mixer: view"))
    assert ruled_out.reasons == {heads: "mixer: view", width: "mixer: view"}


def test_an_attempt_may_give_up() -> None:
    found, ruled_out = in_rounds(lambda _: None, [])
    assert found is None
    assert ruled_out.last_reason() == ""


def test_rounds_are_limited() -> None:
    rounds: Seen = []

    def attempt(ruled_out: RuledOut) -> Conflict:
        rounds.append(ruled_out.nodes)
        return Conflict((leaf(4),), "mixer: view")

    found, ruled_out = in_rounds(attempt, [])
    assert found is None
    assert len(rounds) == MAX_ROUNDS
    assert ruled_out.last_reason() == "mixer: view"


def test_an_conflict_that_nothing_is_to_blame_for_is_an_error() -> None:
    with pytest.raises(SolveError, match="mixer: view: no attribute override makes this call local"):
        in_rounds(lambda _: Conflict((), "mixer: view"), [])


def test_calls_of_a_module_are_made_alike_before_dims_are_ruled_out() -> None:
    conflicts = [Conflict((dim := leaf(4),), "norm is called in different ways", "norm")] * 2
    seen: list[RuledOut] = []

    def attempt(ruled_out: RuledOut) -> str | Conflict:
        seen.append(ruled_out)
        return conflicts.pop() if conflicts else "a plan"

    found, _ = in_rounds(attempt, [])
    assert found == "a plan"
    assert [(list(known.nodes), known.alike) for known in seen] == [
        ([], frozenset()),
        ([], {"norm"}),
        ([dim], {"norm"}),
    ]


def test_conflicts_that_were_met_together_are_ruled_out_together() -> None:
    first, second = leaf(4), leaf(8)
    both = joined([Conflict((first,), "first"), Conflict((second,), "second")])
    assert both is not None
    assert RuledOut(()).and_also(both) == RuledOut((first, second), {first: "first", second: "second"})


def test_of_conflicts_that_blame_one_dim_the_first_counts() -> None:
    shared, other = leaf(4), leaf(8)
    first = Conflict((shared,), "first")
    assert joined([first, Conflict((other, shared), "second"), Conflict((), "nothing to blame")]) == first
    assert joined([]) is None
