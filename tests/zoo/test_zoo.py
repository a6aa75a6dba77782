"""The zoo has every type that transformers can build; what it leaves out, it leaves out for a true reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from places import ROOT
from torch import nn
from transformers import PreTrainedConfig

from .left_out import LEFT_OUT
from .measure import measure
from .models import FAMILIES, build, types
from .overrides import OVERRIDES
from .shrink import config_class

MAX_PARAMETERS = 1_500_000
LEFT = [(f, t) for f in FAMILIES for t in FAMILIES[f] if t in LEFT_OUT or f"{f}:{t}" in LEFT_OUT]
SAMPLE = {family: list(types(family))[3::19] for family in FAMILIES}


def reason(family: str, model_type: str) -> str:
    """Why a type is left out."""
    return LEFT_OUT.get(f"{family}:{model_type}") or LEFT_OUT[model_type]


def construct(family: str, model_type: str) -> nn.Module:
    """The model of a type, without numbers."""
    model = build(family, model_type)
    with torch.device("meta"):
        return model.model_class(model.config)


def num_parameters(model: nn.Module) -> int:
    """How many elements its parameters have."""
    return sum(p.numel() for p in model.parameters())


def kinds(config: PreTrainedConfig) -> dict[str, set[Any]]:
    """What the lists with an entry for each layer say, by name."""
    text = config.get_text_config()
    names = ("layer_types", "layers_block_type", "mlp_layer_types")
    return {n: set(v) for n in names if isinstance(v := getattr(text, n, None), (list, tuple))}


def test_every_type_is_in_the_zoo_or_left_out() -> None:
    known = {t for names in FAMILIES.values() for t in names}
    for family, names in FAMILIES.items():
        shown = set(types(family))
        assert shown | {t for f, t in LEFT if f == family} == set(names)
        assert len(shown) >= 0.95 * len(names)
    assert {key.rpartition(":")[2] for key in LEFT_OUT} <= known


def test_overrides_are_of_types_that_exist() -> None:
    """Or that a later release adds, on the page of new architectures."""
    installed = Version(transformers.__version__)
    rows = map(json.loads, (ROOT / "docs/new-architectures.jsonl").read_text().splitlines())
    later = {row["type"] for row in rows if Version(row["release"]) > installed}
    for key in OVERRIDES:
        family, _, name = key.rpartition(":")
        if name in later:
            continue
        assert config_class(name.partition("/")[0])
        assert not family or name in FAMILIES[family]


@pytest.mark.parametrize(("family", "model_type"), LEFT)
def test_what_is_left_out_fails_as_the_reason_says(family: str, model_type: str) -> None:
    expected, _, why = reason(family, model_type).partition(": ")
    assert why
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the reason names it)
        construct(family, model_type)
    assert expected in [t.__name__ for t in type(caught.value).__mro__]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_tiny_and_deterministic(family: str) -> None:
    for model_type in SAMPLE[family]:
        first, second = (build(family, model_type).config.to_dict() for _ in range(2))
        assert first == second, model_type
        assert num_parameters(construct(family, model_type)) < MAX_PARAMETERS, model_type


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_models_are_tiny_and_show_every_kind_of_layer(family: str) -> None:
    for model_type in types(family):
        assert num_parameters(construct(family, model_type)) < MAX_PARAMETERS, model_type
        config = build(family, model_type).config
        shown = kinds(config)
        for name, values in kinds(type(config)()).items():
            assert values <= shown.get(name, set()), (model_type, name)


@pytest.mark.parametrize("model_type", ["clip", "whisper", "qwen2_vl", "bart/sequence classification"])
def test_models_of_other_inputs_and_heads_are_sharded(model_type: str) -> None:
    result = measure(build("other", model_type), 2)
    assert (result.status, result.message) == ("equal", "")
    assert result.sharded > 0.95
    assert not any(note.startswith("traced without") for note in result.notes)
