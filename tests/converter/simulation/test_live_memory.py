"""Live bytes on the meta device: what is made, what is gone, and values that code asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardconv.simulation.live_memory import AsksForValues, LiveMemory, OperatorMemo, TooLong

META = torch.device("meta")


def run(function: Callable[..., Any], *tensors: Tensor, max_operators: int = 100) -> tuple[list[int], Any]:
    """Live bytes after each event, and the result."""
    mode = LiveMemory(max_operators, str, tensors, OperatorMemo())
    for tensor in tensors:
        mode.values.fill(tensor, 3)
    with torch.inference_mode(), mode:
        result = function(*tensors)
    live, levels = 0, []
    for index, is_made in mode.lives:
        live += mode.sizes[index] if is_made else -mode.sizes[index]
        levels.append(live)
    return levels, result


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def test_views_and_writes_make_nothing() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 1:].add_(1)
        return y.transpose(0, 1)

    assert run(function, empty(4, 5))[0] == [80]


def test_temporaries_are_gone_when_python_lets_go() -> None:
    def function(x: Tensor) -> Tensor:
        x = x.double() + 1
        return x.float()

    assert run(function, empty(10))[0] == [80, 160, 80, 120, 40]


def test_a_kernel_of_attention_makes_no_scores() -> None:
    x = empty(2, 4, 100, 8)
    assert run(lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True))[0] == [x.nbytes]
    mask = empty(1, 1, 100, 100, dtype=torch.bool)
    levels, _ = run(lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
    assert max(levels) == 100 * 100 * 4 + x.nbytes


def test_values_that_inputs_decide_are_known() -> None:
    def function(x: Tensor) -> int:
        y = x + torch.arange(4, device=x.device)
        y.mul_(2)
        return int(y.sum()) + int((y > 7).nonzero().shape[0])

    assert run(function, empty(4, dtype=torch.long))[1] == 2 * (3 + 4 + 5 + 6) + 3


def test_others_are_not() -> None:
    weight = empty(4)
    with pytest.raises(AsksForValues, match="depend on its parameters"):
        run(lambda x: (x * weight).sum().item(), empty(4))


def test_an_alias_of_written_memory_is_not_known_by_its_old_value() -> None:
    def function(x: Tensor) -> int:
        y = x + 1
        alias = y[:2]
        y.zero_()
        return int(alias.sum())

    with pytest.raises(AsksForValues):
        run(function, empty(4, dtype=torch.long))


def test_a_run_is_bounded() -> None:
    def function(x: Tensor) -> None:
        for _ in range(200):
            x = x + 1

    with pytest.raises(TooLong):
        run(function, empty(1))
