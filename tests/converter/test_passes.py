"""From a model to its plan."""

from __future__ import annotations

import copy

import pytest
from small_models import small_config

import shardconv


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_a_config_that_asks_for_inner_states_has_the_same_plan(option: str) -> None:
    config = small_config()
    asking = copy.deepcopy(config)
    asking._attn_implementation = config._attn_implementation = "eager"
    setattr(asking, option, True)
    assert shardconv.plan(asking, tp=2) == shardconv.plan(config, tp=2)
    assert getattr(asking, option)
