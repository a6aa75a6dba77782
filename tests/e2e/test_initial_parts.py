"""Weights that a loaded model draws: the same for any number of ranks, spread as in the unsharded model."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime import RefusedCallError

LAYERS = 8
CONFIG = transformers.GPT2Config(
    n_embd=96, n_head=6, n_layer=LAYERS, vocab_size=101, n_positions=64, bos_token_id=0, eos_token_id=0
)
IDS = torch.tensor([[1, 5, 100, 7, 50], [3, 2, 99, 0, 51]])


def on_meta() -> Any:
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(copy.deepcopy(CONFIG))


def drawn_on_rank(path: Path, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    model: Any = shardconv_runtime.parallelize(on_meta(), **options)
    model.to_empty(device="cpu")
    model.init_weights()
    after = torch.rand(3)
    model.save_pretrained(path)
    with torch.no_grad():
        return model.eval()(IDS).logits, after


def test_ranks_draw_parts_of_one_model(tmp_path: Path) -> None:
    logits: list[torch.Tensor] = []
    for num_ranks, options in ((2, {}), (3, {"training": True})):
        path = tmp_path / str(num_ranks)
        ranks = run_processes(num_ranks, drawn_on_rank, path, options)
        model: Any = transformers.GPT2LMHeadModel.from_pretrained(path)
        with torch.no_grad():
            logits.append(model(IDS).logits)
        for of_rank, after in ranks:
            torch.testing.assert_close(of_rank, logits[-1])
            assert torch.equal(after, ranks[0][1])
    # Saved parts are those of one model, whatever the number of ranks.
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
    block = model.transformer.h[3]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.03)
    # The model draws this weight again when it comes to the whole model.
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * LAYERS), rel=0.03)
    halves = block.attn.c_attn.weight.detach().chunk(2, 1)
    assert not torch.equal(*halves)
    assert not block.mlp.c_fc.bias.any()


def loaded_weights_on_rank(source: Path) -> tuple[bool, str]:
    model: Any = shardconv_runtime.parallelize(transformers.GPT2LMHeadModel.from_pretrained(source))
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    stays = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    empty: Any = shardconv_runtime.parallelize(on_meta())
    empty.to_empty(device="cpu")
    empty = shardconv_runtime.add_adapter(empty, peft.LoraConfig(target_modules=["c_attn"]))
    with pytest.raises(RefusedCallError) as error:
        empty.base_model.model.init_weights()
    return stays, str(error.value)


def test_loaded_weights_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(CONFIG).save_pretrained(tmp_path)
    for stays, error in run_processes(2, loaded_weights_on_rank, tmp_path):
        assert stays
        assert "call it before that" in error
