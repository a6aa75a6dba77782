"""A module that returns a tensor as it was given, where the caller goes on with its own: gradients are right.

The steps at the module's boundary are about the tensor that it returns. The caller's is another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import save
from one_and_ranks import of_one, of_ranks, require_same
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [35, 8, 9, 7, 93, 2, 1]])
CONFIG = {
    "vocab_size": 128, "hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 2,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def gradients(model: Any) -> Tensor:
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    gradient = model.get_parameter("mobilebert.embeddings.LayerNorm.weight").grad  # all of it on each rank
    return torch.cat([loss.detach().reshape(1), gradient])


def test_the_callers_tensor_is_another_one(tmp_path: Path) -> None:
    kind = transformers.MobileBertForMaskedLM
    model = kind._from_config(kind.config_class(**CONFIG), dtype=torch.float64)
    save(model, tmp_path / "model")
    plan = shardconv.convert(tmp_path / "model", tmp_path / "out", tp=2)
    assert not plan.inference_only
    want = of_one(tmp_path / "model", (gradients,), training=True)
    require_same((gradients,), want, of_ranks(tmp_path / "out", (gradients,), training=True))
