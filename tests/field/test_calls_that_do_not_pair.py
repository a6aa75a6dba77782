"""Ranks that make different calls get an error with both names, and one that waits alone a hint.

Elsewhere the message of one call is read as that of another ("not enough values to unpack"), or all wait for
the time limit of the group: a validation pass, a checkpoint or a norm inside of ``if rank == 0``. Reports:
OpenRLHF#1126, open-r1#160, llama-cookbook#65.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime import Communication
from shardconv_runtime.comm import waiting
from shardconv_runtime.errors import LaunchError
from small_models import save_random, small_config

import shardconv

IDS = torch.tensor([[5, 9, 2, 7]])


def calls(model: Any, root: Path) -> dict[str, Callable[[], Any]]:
    optimizer = torch.optim.SGD(model.parameters())
    return {
        "a call of the model": lambda: model(IDS),
        "generate": lambda: model.generate(IDS, max_new_tokens=2),
        "save": lambda: shardconv_runtime.save(model, root / "saved"),
        "save_pretrained": lambda: model.save_pretrained(root / "pretrained"),
        "save_optimizer": lambda: shardconv_runtime.save_optimizer(model, optimizer, root / "state"),
    }


def on_rank(root: Path) -> list[str]:
    """The errors of all pairs of calls, and the hints."""
    waiting.HINT_S = 1.0
    hints: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: hints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(waiting.__name__).addHandler(handler)
    model = shardconv_runtime.load(
        root / "out", training=True, communication=Communication(timeout_s=30, check_inputs=True)
    )
    rank = torch.distributed.get_rank()
    named = calls(model, root)
    found = []
    for one in named:
        for other in named:
            if one < other:
                with pytest.raises(LaunchError, match=f"rank 1 is in {other} while rank 0 is in {one},"):
                    named[(one, other)[rank]]()
                found.append(one)
    model(IDS).logits.sum().backward()
    shardconv_runtime.clip_grad_norm(model, 1.0)  # together
    assert not hints
    if rank == 1:
        time.sleep(2)
    shardconv_runtime.clip_grad_norm(model, 1.0)
    assert bool(hints) == (rank == 0)
    if rank == 1:
        time.sleep(2)
    model(IDS)
    return hints


def test_both_are_named(tmp_path: Path) -> None:
    save_random(small_config(), transformers.LlamaForCausalLM, tmp_path / "base")
    shardconv.convert(tmp_path / "base", tmp_path / "out", tp=2, check=False)
    first, second = run_processes(2, on_rank, tmp_path)
    assert not second
    assert [hint.split(" has waited")[0] for hint in first] == [
        "rank 0: clip_grad_norm or grad_norm",
        "rank 0: a call of the model",
    ]
    assert "every rank must make this call" in first[0]
