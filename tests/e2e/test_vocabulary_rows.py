"""Rows of a sharded vocabulary by numbers of tokens: refused on every rank, and written in a right way."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime import RefusedCallError
from shardconv_runtime.parallel.row_ids import VocabularyRows
from small_models import save_random, small_config
from torch import Tensor
from torch.optim import Optimizer

import shardconv

IDS = torch.tensor([[1, 5, 100, 7, 50], [3, 2, 99, 0, 51]])
TOKENS = torch.tensor([2, 100, 51])
ROWS = torch.arange(3.0 * 32, dtype=torch.float64).view(3, 32).cos()


def set_row(weight: Tensor) -> None:
    weight[5] = 0.0


def read_rows(weight: Tensor) -> None:
    weight[TOKENS]


def copy_rows(weight: Tensor) -> None:
    weight.index_copy_(0, TOKENS, ROWS)


CHANGES: list[Callable[[Tensor], None]] = [set_row, read_rows, copy_rows]


def changed_on_rank(out: Path) -> tuple[list[str], Tensor, Tensor]:
    model: Any = shardconv_runtime.load(out, dtype=torch.float64)
    refused = []
    with torch.no_grad():
        for kind in (model, copy.deepcopy(model), model.to(torch.float32).to(torch.float64)):
            for weight in (kind.get_input_embeddings().weight, kind.lm_head.weight):
                for change in CHANGES:
                    try:
                        change(weight)
                    except RefusedCallError:
                        refused.append(change.__name__)
        model = shardconv_runtime.load(out, dtype=torch.float64)
        before = model(IDS).logits
        table = model.get_input_embeddings()
        local, elsewhere = table.rows(TOKENS)
        table.weight.detach()[local[~elsewhere]] = ROWS[~elsewhere]
        return refused, before, model(IDS).logits


def test_rows_are_not_numbered_as_tokens(tmp_path: Path) -> None:
    model = save_random(small_config(), transformers.LlamaForCausalLM, tmp_path / "in").double().eval()
    shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    with torch.no_grad():
        before = model(IDS).logits
        model.get_input_embeddings().weight[TOKENS] = ROWS
        after = model(IDS).logits
    for refused, was, now in run_processes(2, changed_on_rank, tmp_path / "out"):
        assert refused == [change.__name__ for change in CHANGES] * 6
        torch.testing.assert_close(was, before)
        torch.testing.assert_close(now, after)


def test_an_optimizer_takes_all_parameters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with plain ones; on a CPU, it would go through them one by one."""
    weight = VocabularyRows(torch.ones(3, 2))
    module = sys.modules[Optimizer.__module__]  # torch.optim has deleted its name
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    assert vars(module)["_default_to_fused_or_foreach"]([weight], differentiable=False) == (False, True)
    optimizer = torch.optim.SGD([weight], lr=0.5, foreach=True)
    weight.grad = torch.ones(3, 2)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((3, 2), 0.5))


def test_compiled_code_takes_it() -> None:
    """torch looks at the data of parameters, and at their type, in its checks of a compiled graph."""
    table = torch.nn.Embedding(3, 2)
    table.weight = VocabularyRows(torch.arange(6.0).view(3, 2))
    rows = torch.compile(table, backend="aot_eager")(torch.tensor([2, 0]))
    assert rows.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    rows.sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
