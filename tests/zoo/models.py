"""Every model of the zoo: one tiny random model for each type that transformers can build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from .overrides import LEFT_OUT, OVERRIDES
from .shrink import config_class, tiny_config

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
"""What a model is for -> model type -> name of the class."""


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model: its class and a tiny config of its own."""

    family: str
    type: str
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig


def types(family: str) -> Iterator[str]:
    """The model types of a family that are not left out."""
    return (t for t in FAMILIES[family] if t not in LEFT_OUT and f"{family}:{t}" not in LEFT_OUT)


def build(family: str, model_type: str, **changes: Any) -> ZooModel:
    """The zoo's model of a type.

    Args:
        family: a key of ``FAMILIES``.
        model_type: a key of that family.
        **changes: further overrides of the (text) config's arguments.
    """
    name = FAMILIES[family][model_type]
    cls = getattr(transformers, name[0] if isinstance(name, tuple) else name)
    overrides = {**OVERRIDES.get(model_type, {}), **OVERRIDES.get(f"{family}:{model_type}", {})}
    own = config_class(model_type)
    if family == "causal" and cls.config_class is not own and _is_part(cls.config_class, own):
        own = cls.config_class
        overrides = dict(OVERRIDES.get(own.model_type, {}))
    return ZooModel(family, model_type, cls, tiny_config(own, overrides | changes))


def _is_part(part: type[PreTrainedConfig], whole: type[PreTrainedConfig]) -> bool:
    return any(c is part for c in whole.sub_configs.values())
