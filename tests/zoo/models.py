"""Every model of the zoo: one tiny random model for each type that transformers can build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from .left_out import LEFT_OUT
from .overrides import OVERRIDES
from .shrink import config_class, tiny_config

_BACKBONES = ("albert", "bart", "bert", "deberta-v2", "gpt2", "llama", "mixtral", "qwen2", "roberta", "t5")
_HEADS: Mapping[str, Mapping[str, Any]] = {
    "no head": auto.MODEL_MAPPING_NAMES,
    "sequence classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question answering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}
_OTHER: Mapping[str, str] = {
    "blip-2": "Blip2ForImageTextRetrieval",
    "clip": "CLIPModel",
    "dinov2": "Dinov2ForImageClassification",
    "granite_speech5_ctc": "GraniteSpeech5ForCTC",
    "hubert": "HubertForCTC",
    "idefics": "IdeficsForVisionText2Text",
    "idefics3": "Idefics3ForConditionalGeneration",
    "instructblip": "InstructBlipForConditionalGeneration",
    "instructblipvideo": "InstructBlipVideoForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "kosmos-2": "Kosmos2ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "pi0": "PI0ForConditionalGeneration",
    "pix2struct": "Pix2StructForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "segformer": "SegformerForImageClassification",
    "siglip": "SiglipModel",
    "siglip2": "Siglip2Model",
    "speech_to_text": "Speech2TextForConditionalGeneration",
    "videoprism": "VideoPrismClipModel",
    "vit": "ViTForImageClassification",
    "wav2vec2": "Wav2Vec2ForCTC",
    "whisper": "WhisperForConditionalGeneration",
} | {
    f"{backbone}/{head}": names[backbone]
    for backbone in _BACKBONES
    for head, names in _HEADS.items()
    if backbone in names
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "other": _OTHER,
}
"""What a model is for -> model type -> name of the class. In ``other``, images, sounds, and other heads on
some backbones: ``type`` or ``type/head``."""


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
        model_type: a key of that family; in ``other`` followed by the head.
        **changes: further overrides of the (text) config's arguments.
    """
    name = FAMILIES[family][model_type]
    cls = getattr(transformers, name[0] if isinstance(name, tuple) else name)
    backbone, _, head = model_type.partition("/")
    overrides = {**OVERRIDES.get(backbone, {}), **OVERRIDES.get(f"{family}:{model_type}", {})}
    if head:
        overrides = {"pad_token_id": 0} | overrides
    own = config_class(backbone)
    if family == "causal" and cls.config_class is not own and is_part(cls.config_class, own):
        own = cls.config_class
        overrides = dict(OVERRIDES.get(own.model_type, {}))
    return ZooModel(family, model_type, cls, tiny_config(own, overrides | changes))


def is_part(part: type[PreTrainedConfig], whole: type[PreTrainedConfig]) -> bool:
    """Whether one config is a sub-config of the other."""
    return any(c is part for c in whole.sub_configs.values())
