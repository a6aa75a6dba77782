"""By which argument a call is given a cache of earlier calls."""

from __future__ import annotations

import pytest
import transformers
from shardconv_runtime.parallel.boundary import CACHE_ARGUMENTS, forward_signature, given_cache
from small_models import small_config


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_all_names_are_known(name: str) -> None:
    assert given_cache({"input_ids": 1, name: object()}) == name
    assert given_cache({"input_ids": 1, name: None}) is None


def test_a_model_of_the_installed_transformers_takes_one_of_them() -> None:
    model = transformers.LlamaForCausalLM(small_config())
    assert not set(CACHE_ARGUMENTS).isdisjoint(forward_signature(model).parameters)
