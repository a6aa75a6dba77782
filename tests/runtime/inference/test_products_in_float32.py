"""Products of many rows in 16 bits, on CPUs without instructions for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.nn.functional as F
import transformers
from batches import NEW, batch, prompts
from checkpoints import VOCAB
from shardconv_runtime.inference import products_in_float32
from shardconv_runtime.inference.products_in_float32 import LEAST_ROWS, in_float32, product
from small_models import small_config
from torch import Tensor, nn

import shardconv

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs that are multiplied in float32, on a CPU without instructions."""
    shapes: list[tuple[int, ...]] = []

    def recorded(x: Tensor, *args: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return product(x, *args)

    monkeypatch.setattr(products_in_float32, "product", recorded)
    monkeypatch.setattr(products_in_float32, "has_no_instructions", lambda: True)
    return shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_rounded_once(
    dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_in_float32, "PART", 7 * 24)  # the last part is smaller
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 24).to(dtype), torch.randn(33, 24).to(dtype)
    bias = torch.randn(33).to(dtype) if has_bias else None
    got = product(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == dtype
    assert got.shape == (2, 5, 33)
    # Half of the distance between two numbers of the dtype, and what float32 adds.
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-5)


def test_linear_layers_of_many_rows_are_in_float32(counted: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(16, 8, dtype=torch.bfloat16)
    with torch.no_grad(), in_float32(LEAST_ROWS, torch.bfloat16, CPU):
        layer(torch.ones(1, LEAST_ROWS, 16, dtype=torch.bfloat16))
        layer(torch.ones(1, LEAST_ROWS - 1, 16, dtype=torch.bfloat16))  # such as the head of a few requests
        nn.Linear(16, 8)(torch.ones(1, LEAST_ROWS, 16))
    assert counted == [(1, LEAST_ROWS, 16)]


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "device"),
    [
        (LEAST_ROWS - 1, torch.bfloat16, "cpu"),
        (LEAST_ROWS, torch.float32, "cpu"),
        (LEAST_ROWS, torch.bfloat16, "cuda"),
    ],
)
def test_other_calls_have_no_mode(
    num_tokens: int, dtype: torch.dtype, device: str, counted: list[tuple[int, ...]]
) -> None:
    with torch.no_grad(), in_float32(num_tokens, dtype, torch.device(device)):
        nn.Linear(4, 4, dtype=torch.bfloat16)(torch.ones(64, 4, dtype=torch.bfloat16))
    assert not counted


def test_batches_multiply_in_float32(tmp_path: Path, counted: list[tuple[int, ...]]) -> None:
    """The guard of a gain: 64 requests took 4 times as long."""
    source, out = tmp_path / "source", tmp_path / "out"
    config = small_config(vocab_size=VOCAB)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    shardconv.convert(source, out, tp=1, check=False)
    asked = prompts()
    model = shardconv_runtime.load(out)
    answers = batch(model, asked)
    assert [1 <= len(answer) <= NEW for answer in answers] == [True] * len(asked)
    layers = [shape for shape in counted if shape[-1] == config.hidden_size]
    assert len(layers) >= config.num_hidden_layers * 5  # queries, keys, values, gate and up of one step
    assert max(shape[1] for shape in counted) > LEAST_ROWS
    counted.clear()
    model.generate(torch.ones(1, 12, dtype=torch.int64), max_new_tokens=2, do_sample=False)
    assert not counted  # its tokens stay those of transformers


def test_calls_with_gradients_have_no_mode(counted: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    with in_float32(64, torch.bfloat16, CPU):
        layer(torch.ones(64, 4, dtype=torch.bfloat16)).sum().backward()
    assert not counted
    assert layer.weight.grad is not None
