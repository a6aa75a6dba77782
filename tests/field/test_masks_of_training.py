"""Code that masks activations in training mode only, with random numbers of numpy (SpecAugment).

A plan that is made from a pass in evaluation does not see the masks. A mask of features is as wide as the
full activations, and ranks with other states of numpy mask other frames. The numbers are numpy's:
https://github.com/huggingface/transformers/issues/10459; users leave them on, or do not know of them:
https://github.com/nikvaessen/w2v2-speaker-few-samples/issues/1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from torch import Tensor

import shardconv

SOUND = torch.randn(2, 600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OFF = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0}
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "mask_feature_length": 3,
    "layerdrop": 0.0,
} | dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "CTC": ("Wav2Vec2ForCTC", {"mask_time_prob": 0.3, "mask_feature_prob": 0.3}),
    "classes": ("HubertForSequenceClassification", {"mask_time_prob": 0.0, "mask_feature_prob": 0.3}),
    "adapter": ("Wav2Vec2ForCTC", {"mask_time_prob": 0.3, "mask_feature_prob": 0.0, "add_adapter": True}),
}


def save(name: str, path: Path, **options: Any) -> Path:
    kind = getattr(transformers, CASES[name][0])
    torch.manual_seed(0)
    kind(kind.config_class(**SIZES | {"final_dropout": 0.0} | CASES[name][1] | options)).save_pretrained(path)
    return path


def step(model: Any) -> Tensor:
    """The outputs, and the gradients of parameters that every rank has all of."""
    scores = model(SOUND).logits
    scores.square().sum().backward()
    whole = ("masked_spec_embed", "encoder.layer_norm.weight")
    shared = [
        p.grad.flatten() for n, p in model.named_parameters() if n.endswith(whole) and p.grad is not None
    ]
    return torch.cat([scores.detach().flatten(), *shared])


def seeded_alike(model: Any) -> Tensor:
    np.random.seed(3)
    return step(model)


def evaluated(model: Any) -> Tensor:
    np.random.seed(dist.get_rank() if dist.is_initialized() else 0)
    return step(model.eval())


def seeded_by_rank(model: Any) -> Tensor:
    np.random.seed(dist.get_rank())
    return step(model)


def asked_for_after_loading(model: Any) -> Tensor:
    model.config.mask_feature_prob = 0.3
    return seeded_alike(model)


@pytest.mark.parametrize("name", CASES)
def test_masks_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    source, out = save(name, tmp_path / "model"), tmp_path / "out"
    plan = shardconv.convert(source, out, tp=2, check=name != "CTC")
    assert not plan.inference_only
    uses = (seeded_alike, *((evaluated,) if name != "adapter" else ()))
    ranks = of_ranks(out, (*uses, seeded_by_rank), training=True)
    require_same(uses, of_one(source, uses, training=True), ranks[:-1])
    require_refused((seeded_by_rank,), ranks[-1:], "from different states")


def test_masks_that_the_plan_does_not_know(tmp_path: Path) -> None:
    source, out = save("CTC", tmp_path / "model", **OFF), tmp_path / "out"
    shardconv.convert(source, out, tp=2, check=False)
    ranks = of_ranks(out, (asked_for_after_loading,), training=True)
    require_refused((asked_for_after_loading,), ranks, "with numpy in training mode")
