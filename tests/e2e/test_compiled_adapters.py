"""Adapters on a model that is compiled, and on one with fused products: the numbers of neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from adapters import CONFIGS, save_adapters, save_base
from captured import capturing
from distributed import run_processes
from shardconv_runtime import Communication
from shardconv_runtime.inference.generation import DECODER
from shardconv_runtime.loading.loaded_adapters import unwrapped
from torch import Tensor
from warm_compiler import warm_up

import shardconv

NAME = "everything"
IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))


def results(model: Any) -> list[Tensor]:
    """Logits and tokens: with the adapter, without it, and with it once more."""
    found = []
    with torch.no_grad():
        for _ in range(2):
            found += [model(IDS).logits, tokens(model)]
            with model.disable_adapter():
                found += [model(IDS).logits, tokens(model)]
    return found


def tokens(model: Any) -> Tensor:
    mask = torch.ones_like(IDS)
    found: Tensor = model.generate(
        input_ids=IDS, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    return found


def on_rank(out: Path, adapter: Path) -> tuple[list[float], list[bool], int]:
    """The differences from the eager model whose products are apart, and how many steps were recorded."""
    want = results(shardconv_runtime.load(out, adapter=adapter))
    assert not torch.equal(want[0], want[2]), "the adapter does something"
    fused = results(shardconv_runtime.load(out, adapter=adapter, fuse=True))
    with capturing() as graphs:
        model = shardconv_runtime.load(
            out, adapter=adapter, compile=True, communication=Communication(timeout_s=100)
        )
        compiled = results(model)
        assert graphs.count
    errors, same = [], []
    for found in (fused, compiled):
        errors += [float((a - b).abs().max()) for a, b in zip(found[::2], want[::2], strict=True)]
        same += [torch.equal(a, b) for a, b in zip(found[1::2], want[1::2], strict=True)]
    return errors, same, vars(unwrapped(model))[DECODER].num_recordings


@pytest.mark.slow
def test_numbers_are_those_of_neither(tmp_path: Path) -> None:
    warm_up()
    save_base(tmp_path / "base")
    save_adapters(tmp_path / "base", tmp_path / "adapters", {NAME: CONFIGS[NAME]})
    shardconv.convert(tmp_path / "base", tmp_path / "out", tp=2, check=False)
    shardconv.adapt(tmp_path / "out", tmp_path / "adapters" / NAME, tmp_path / "adapter")
    for errors, same, num_recordings in run_processes(2, on_rank, tmp_path / "out", tmp_path / "adapter"):
        assert max(errors) < 1e-5
        assert all(same)
        assert num_recordings == 1, "not recorded: the compiled step notices that the adapter is disabled"
