"""Attribute overrides: found where they exist; where none does, the dim stays replicated, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import Leaf, to_text
from shardconv_runtime.format.plan import Plan, module_plans, parameter_plans
from torch import Tensor

from shardconv import plan_forms
from shardconv.planning import localize
from shardconv.planning.conflict import Conflict


def overrides(plan: Plan, fqn: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Attribute -> (global, local) of a module."""
    entry = module_plans(plan).get(fqn)
    return {e.attribute: (e.value, e.local) for e in entry.overrides} if entry else {}


def dims(plan: Plan, name: str) -> str:
    """The layout of a parameter."""
    return ", ".join(map(to_text, parameter_plans(plan)[name].dims))


def test_head_counts_in_views_and_in_the_config() -> None:
    plan = models.plan_of(models.OddModel, 2)
    assert overrides(plan, "stack.0.mixer") == {"quux": (8, (4,)), "config.blip": (4, (2,))}
    assert overrides(plan, "stack.1.chewer") == {"half": (96, (48,))}


def test_a_size_that_both_dims_share_is_not_overridden() -> None:
    """``reach`` is read in the same view as the head counts, and keeps its value."""
    plan = models.plan_of(models.InterleavedModel, 2)
    assert overrides(plan, "stack.0.mixer") == {"horns": (8, (4,))}
    assert dims(plan, "stack.0.mixer.braid.weight") == "8@0*18, 64"


class Shares(models.Plain):
    """The number of heads also divides a tensor that every rank holds all of."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        return super().forward(x.view(b, s, self.quux, -1).flip(-1).reshape(b, s, -1))


def test_an_attribute_that_replicated_tensors_need_is_not_overridden() -> None:
    """Half of it would give their view another shape; the weights are sharded and gathered."""

    class SharedModel(models.OddModel):
        mixer = Shares

    plan = models.plan_of(SharedModel, 2)
    assert "quux" not in overrides(plan, "stack.0.mixer")
    assert "could not be localized; its inputs are replicated: stack.*.mixer: view" in plan.notes


def test_a_tuple_of_sizes() -> None:
    plan = models.plan_of(models.FusedModel, 2)
    assert overrides(plan, "stack.0.mixer") == {
        "cuts.0": (48, (24,)),
        "cuts.1": (24, (12,)),
        "cuts.2": (24, (12,)),
        "many": (8, (4,)),
        "few": (4, (2,)),
    }
    assert dims(plan, "stack.0.mixer.everything.weight") == "4@0*12 + 4@0*6 + 4@0*6, 64"


def test_uneven_sizes_give_each_rank_its_own_value() -> None:
    plan = models.plan_of(models.FusedModel, 3)
    assert overrides(plan, "stack.0.mixer")["many"] == (8, (4, 2, 2))
    assert overrides(plan, "stack.0.mixer")["cuts.1"] == (24, (12, 6, 6))
    assert overrides(plan, "stack.0.chewer") == {"half": (96, (32,))}


def test_more_ranks_than_key_value_heads() -> None:
    """The key/value heads take the first mesh axes, the group takes the rest."""
    plan = models.plan_of(models.OddModel, 8)
    assert overrides(plan, "stack.0.mixer") == {"quux": (8, (1,)), "config.blip": (4, (1,))}
    assert plan.mesh == (2, 2, 2) or plan.mesh == (4, 2)


def test_more_ranks_than_heads_that_are_repeated_by_an_attribute() -> None:
    """``repeat_interleave(many // few)`` repeats as often as the rank's heads need."""
    plan = models.plan_of(models.FusedModel, 8)
    found = overrides(plan, "stack.0.mixer")
    assert (found["many"], found["few"]) == ((8, (1,)), (4, (1,)))


def test_what_a_number_in_the_code_needs_is_gathered_and_the_plan_says_so() -> None:
    """The weights are sharded all the same: attention is a fifth of this model."""
    plan = models.plan_of(models.LiteralModel, 2)
    entry = parameter_plans(plan)["stack.0.mixer.alpha.weight"]
    assert [to_text(d) for d in entry.dims] == ["8@0*6", "64"]
    assert [b.op for b in module_plans(plan)["stack.0.mixer.alpha"].outputs] == ["all_gather"]
    assert "could not be localized; its inputs are replicated: stack.*.mixer: view" in plan.notes
    assert not overrides(plan, "stack.0.mixer")
    assert overrides(plan, "stack.0.chewer")


@pytest.mark.parametrize("tp", [2, 4])
def test_rows_that_the_length_is_compared_with_are_replicated(tp: int) -> None:
    """The trace is short, and would not show that a rank with fewer rows refuses longer inputs."""
    entries = parameter_plans(models.plan_of(models.PlacedModel, tp))
    assert entries["places.weight"].dims[0] == Leaf(128)


def test_a_size_that_the_class_of_the_config_computes() -> None:
    plan = models.plan_of(models.DerivedModel, 2)
    assert overrides(plan, "stack.0.mixer") == {"config.span": (48, (24,))}


def test_a_count_of_heads_where_only_groups_of_them_are_seen() -> None:
    """Three groups of four heads: two ranks take two and one, and heads are no quotient."""
    plan = models.plan_of(models.SlicedModel, 2, zork=12, blip=3)
    assert dims(plan, "stack.0.mixer.everything.weight") == "3@0*24 + 3@0*6 + 3@0*6, 64"
    assert overrides(plan, "stack.0.mixer") == {"many": (12, (8, 4)), "few": (3, (2, 1))}


def test_an_attribute_of_calls_that_hold_as_long_as_nothing_is_overridden() -> None:
    """``many // few``: what reads ``many`` alone fails, and after an override of it so does the quotient."""
    plan = models.plan_of(models.GroupedModel, 4)
    assert overrides(plan, "stack.0.mixer") == {"many": (8, (2,)), "few": (4, (1,))}


def test_an_embedding_takes_as_many_ids_as_before() -> None:
    plan = models.plan_of(models.AllPlacesModel, 2)
    assert dims(plan, "places.weight") == "101@0, 64"
    assert not overrides(plan, "places")


def test_a_row_of_padding_that_other_ranks_hold_is_a_position_and_not_a_size() -> None:
    """It has no local value to be found; the runtime knows which rank holds it."""
    plan = models.plan_of(models.PaddedModel, 2)
    assert (dims(plan, "lookup.weight"), dims(plan, "louder.weight")) == ("101@0, 64", "101@0, 64")
    assert not overrides(plan, "lookup")
    assert not overrides(plan, "louder")


@pytest.mark.parametrize("tp", [2, 4])
def test_numbers_in_the_code_never_fail(tp: int) -> None:
    models.plan_of(models.LiteralModel, tp)


def test_the_number_of_trials_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sets of overrides there are: here one for each subset of three attributes."""
    seen: list[tuple[Any, ...]] = []
    tried: list[Mapping[Any, int]] = []
    holds = localize._Localizer._holds

    def no_override_of_mixers_holds(self: Any, call: Any, overrides: Mapping[Any, int]) -> bool:
        if not overrides or "mixer" not in call.replay.fqn:
            return holds(self, call, overrides)
        tried.append(overrides)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_forms, "retrace", lambda *given: seen.append(given))
        models.plan_of(models.FusedModel, 2)
    _, layouts, *_ = seen[-1]
    monkeypatch.setattr(localize, "MAX_TRIALS", 3)
    monkeypatch.setattr(localize._Localizer, "_holds", no_override_of_mixers_holds)
    assert isinstance(localize.localize(layouts), Conflict)
    assert len(tried) == 3


def test_a_model_that_fails_on_meta_is_named() -> None:
    class Broken(models.OddModel):
        def forward(self, input_ids: object) -> object:  # type: ignore[override]
            return self.speak(self.lookup(input_ids).numpy())

    with pytest.raises(SolveError, match="cannot be traced"):
        models.plan_of(Broken, 2)
