"""The loss of a call of stages, on each of them: the last one computes it, in a dtype of its own.

The others received its bytes in another dtype: the loss was noise there.
https://github.com/deepspeedai/DeepSpeed/pull/3316, https://github.com/deepspeedai/DeepSpeed/issues/4726
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_same
from shardconv_runtime import Training
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 93, 2]])


@torch.no_grad()
def loss(model: Any) -> Tensor:
    return model.eval()(IDS, labels=IDS).loss


@torch.no_grad()
def loss_and_logits(model: Any) -> Tensor:
    found = model.eval()(IDS, labels=IDS)
    return torch.cat((found.loss.reshape(1).double(), found.logits.flatten().double()))


@torch.no_grad()
def two_losses(model: Any) -> Tensor:
    model.eval()
    return torch.stack([model(ids[None], labels=ids[None]).loss for ids in IDS])


USES = (loss, loss_and_logits, two_losses)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of four layers, saved as "model"."""
    root = tmp_path_factory.mktemp("llama")
    save_causal("llama", root / "model", num_hidden_layers=4)
    shardconv.convert(root / "model", root / "1", tp=1, pp=4, check=False)
    shardconv.convert(root / "model", root / "2", tp=2, pp=2, check=False)
    return root


@pytest.mark.parametrize(
    ("out", "options"),
    [
        ("1", {"training": Training(stages_per_process=2)}),
        ("2", {"training": True}),
        ("2", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_stage_has_it(llama: Path, out: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    one = of_one(llama / "model", USES, dtype=dtype)
    ranks = of_ranks(llama / out, USES, 2 if out == "1" else 4, dtype=dtype, **options)
    require_same(USES, one, ranks, 1e-5 if dtype == torch.float64 else 0.05)
