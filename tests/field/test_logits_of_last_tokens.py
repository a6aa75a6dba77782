"""The head of a prompt on a CPU: the last tokens of a batch are a view, which torch multiplies one by one.

In bfloat16 this took ten times as long as the rest of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_same
from shardconv_runtime.loaded import LOADED_ATTRIBUTE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardconv

IDS = torch.tensor([[3, 14, 15, 9], [2, 6, 5, 3]])


class Products(TorchDispatchMode):
    """The shapes of results of batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.shapes.append(tuple(result.shape))
        return result


def last_logits(model: Any) -> Tensor:
    vocabulary = model.get_output_embeddings().weight.shape[0]
    for ids in (IDS, IDS[:1]):
        with Products() as products:
            logits = model(ids, logits_to_keep=1).logits
        if hasattr(model, LOADED_ATTRIBUTE):
            assert all(shape[-1] != vocabulary for shape in products.shapes)
    return logits


@pytest.mark.parametrize("tp", [1, 2])
def test_it_is_one_product(tmp_path: Path, tp: int) -> None:
    plain = save_causal("llama", tmp_path / "model")
    shardconv.convert(plain, tmp_path / "out", tp=tp, check=False)
    ranks = of_ranks(tmp_path / "out", [last_logits], tp)
    require_same([last_logits], of_one(plain, [last_logits]), ranks)
