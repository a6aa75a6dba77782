"""Changes of a loaded model that would be wrong on every rank: refused on each, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from checkpoints import save_causal
from distributed import run_errors, run_processes
from shardconv_runtime import Communication, PlanError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardconv


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("changed")
    shardconv.convert(save_causal("llama", root / "llama"), root / "out", tp=2, check=False)
    return root / "out"


def push_to_hub(model: Any, path: Path) -> None:
    model.push_to_hub("user/model")


def add_adapter(model: Any, path: Path) -> None:
    model.add_adapter(None)


def replace_head(model: Any, path: Path) -> None:
    model.lm_head = nn.Linear(64, 256)


def replace_layers(model: Any, path: Path) -> None:
    model.model.layers = model.model.layers[:1]


def replace_norm(model: Any, path: Path) -> None:
    """By one of another class that has the same parameters, which no proof has run."""
    other = nn.RMSNorm(64)
    other.weight = model.model.norm.weight
    model.model.norm = other


class Adapted(nn.Module):
    """A layer and an adapter beside it, as libraries for adapters put them in a model."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 2)
        self.up = nn.Linear(2, layer.out_features)


def adapt(model: Any, path: Path) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def replicate(model: Any, path: Path) -> None:
    DistributedDataParallel(model)


def replicate_wrapped(model: Any, path: Path) -> None:
    DistributedDataParallel(Wrapper(model))


def change_on_rank(path: Path, change: Callable[[Any, Path], None], training: bool, scratch: Path) -> None:
    model = shardconv_runtime.load(path, training=training, communication=Communication(timeout_s=60))
    change(model, scratch)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (push_to_hub, "shardconv push"),
        (add_adapter, "shardconv_runtime.add_adapter"),
        (replace_head, "convert it again"),
        (replace_layers, "convert it again"),
        (replace_norm, "convert it again"),
        (adapt, "convert it again"),
        (replicate, "shardconv_runtime.data_parallel"),
        (replicate_wrapped, "shardconv_runtime.data_parallel"),
    ],
)
def test_changes_are_refused(
    out: Path, tmp_path: Path, change: Callable[[Any, Path], None], says: str
) -> None:
    training = change in (replicate, replicate_wrapped)
    for error in run_errors(2, change_on_rank, out, change, training, tmp_path):
        assert isinstance(error, PlanError)
        assert says in str(error)


class Wrapper(nn.Module):
    """A layer that is run as it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def wrapped_logits(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits before and after wrappers that keep the parameters were put around layers and the model."""
    model = shardconv_runtime.load(path, training=True, communication=Communication(timeout_s=60))
    ids = torch.tensor([[3, 4, 5]])
    before = model(ids).logits.detach()
    model.model.layers[0] = Wrapper(model.model.layers[0])
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return before, DistributedDataParallel(model, process_group=alone)(ids).logits.detach()


def test_wrappers_are_allowed(out: Path) -> None:
    for before, after in run_processes(2, wrapped_logits, out):
        assert torch.equal(before, after)


def save_alone(path: Path, target: Path) -> None:
    """A model of one process is all of it."""
    shardconv_runtime.load(path).save_pretrained(target)


def test_one_process_saves_what_it_has(tmp_path: Path) -> None:
    shardconv.convert(save_causal("llama", tmp_path / "llama"), tmp_path / "out", tp=1)
    run_processes(1, save_alone, tmp_path / "out", tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()
