"""A user's model that contains a loaded one: transformers draws the weights of the outer one only.

``post_init`` of the outer model walks over all modules, and initialized the loaded ones anew without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from distributed import run_processes
from torch import Tensor, nn

import shardconv

IDS = torch.tensor([[1, 5, 40, 7, 50, 9]])


class WithValue(transformers.PreTrainedModel):
    """A model with a value head, as trainers of rewards and policies build one."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any, inner: Any) -> None:
        super().__init__(config)
        self.inner = inner
        self.value = nn.Linear(config.vocab_size, 1, dtype=torch.float64)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.zeros_(module.weight)  # not transformers' own functions, which look at each tensor

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.value(self.inner(input_ids).logits)


def logits(path: str) -> list[Tensor]:
    model: Any = shardconv_runtime.load(path, dtype=torch.float64)
    found = [model(IDS).logits]
    around = WithValue(model.config, model)
    assert float(around.value.weight.detach().abs().max()) == 0, "the new head is initialized"
    found.append(around.inner(IDS).logits)
    model.post_init()
    found.append(model(IDS).logits)
    model.init_weights()
    found.append(model(IDS).logits)
    return [each.detach() for each in found]


@pytest.mark.parametrize("tp", [1, 2])
def test_loaded_weights_stay(tmp_path: Path, tp: int) -> None:
    path = save_causal("llama", tmp_path / "model")
    shardconv.convert(path, tmp_path / "out", tp, check=False)
    for first, *others in run_processes(tp, logits, str(tmp_path / "out")):
        assert all(torch.equal(first, other) for other in others)
