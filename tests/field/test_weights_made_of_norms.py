"""Weight norms, spectral norms and pruning of a loaded model: each rank would take them of its part.

They are set up on modules after loading, by hooks or parametrizations, and gave other weights without a word.
https://github.com/pytorch/pytorch/issues/61470 has them beside data parallelism.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import save_causal
from one_and_ranks import of_ranks, require_refused
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import shardconv

IDS = torch.tensor([[3, 14, 15, 9]])


def module(model: Any) -> Any:
    return model.get_submodule("model.layers.0.mlp.down_proj")


def with_weight_norm(model: Any) -> Tensor:
    parametrizations.weight_norm(module(model))
    return model(IDS).logits


def with_spectral_norm(model: Any) -> Tensor:
    parametrizations.spectral_norm(module(model))
    return model(IDS).logits


def with_own_parametrization(model: Any) -> Tensor:
    parametrize.register_parametrization(module(model), "weight", torch.nn.Softmax(-1), unsafe=True)
    return model(IDS).logits


def with_hook_of_a_norm(model: Any) -> Tensor:
    spectral_norm(module(model))
    return model(IDS).logits


def pruned(model: Any) -> Tensor:
    prune.l1_unstructured(module(model), "weight", amount=0.3)
    return model(IDS).logits


USES = (with_weight_norm, with_spectral_norm, with_own_parametrization, with_hook_of_a_norm, pruned)


def test_they_are_refused_on_every_rank(tmp_path: Path) -> None:
    plain = save_causal("llama", tmp_path / "model")
    shardconv.convert(plain, tmp_path / "out", tp=2, check=False)
    require_refused(USES, of_ranks(tmp_path / "out", USES, training=True), "convert it again")
