"""torch's distributed checkpoints of a sharded model would restore another one: refused on every rank.

https://github.com/huggingface/transformers/issues/48569
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoints import save_causal
from one_and_ranks import of_ranks, require_refused
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8]])
FOLDER = Path("dcp")


def saved(model: Any) -> Tensor:
    dcp.save({"model": model.state_dict()}, checkpoint_id=FOLDER)
    return IDS


def saved_as_an_object(model: Any) -> Tensor:
    dcp.save({"model": model}, checkpoint_id=FOLDER)
    return IDS


def saved_later(model: Any) -> Tensor:
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=FOLDER)
    return IDS


def loaded(model: Any) -> Tensor:
    dcp.load({"model": model.state_dict()}, checkpoint_id=FOLDER)
    return IDS


def of_the_optimizer(model: Any) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters())
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=FOLDER)
    return IDS


def state(model: Any) -> Tensor:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return IDS


def states(model: Any) -> Tensor:
    get_state_dict(model, torch.optim.AdamW(model.parameters()))
    return IDS


def optimizer_state(model: Any) -> Tensor:
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    return IDS


def broadcast(model: Any) -> Tensor:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(model.state_dict()), options=options)
    return IDS


def wrapped(model: Any) -> Tensor:
    get_model_state_dict(torch.nn.ModuleDict({"policy": model}))
    return IDS


USES = (
    saved, saved_as_an_object, saved_later, loaded, of_the_optimizer,
    state, states, optimizer_state, broadcast, wrapped,
)  # fmt: skip


def test_they_are_refused(tmp_path: Path) -> None:
    shardconv.convert(save_causal("llama", tmp_path / "model"), tmp_path / "out", tp=2)
    require_refused(
        USES, of_ranks(tmp_path / "out", USES, training=True), "shardconv_runtime.save(model, DIR)"
    )
