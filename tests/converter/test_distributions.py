"""A model that makes distributions: torch may turn their checks off while its plan is made."""

from __future__ import annotations

import pytest
from shardconv_runtime.checkpoint.resolve import ModelSpec
from torch.distributions import Distribution
from zoo.models import build

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan


def test_checks_that_are_turned_off_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does when something is compiled for the first time."""
    monkeypatch.setattr(Distribution, "_validate_args", True)

    def compiles_something(what: str) -> None:
        if what == "solving":
            Distribution.set_default_validate_args(False)

    model = build("causal", "gemma3n_text")
    spec = ModelSpec(model.type, model.config, model.model_class, "float32")
    plan = solve_plan(spec, SolveOptions(2, check=False), progress=compiles_something)
    assert plan.tp == 2
    assert Distribution._validate_args
