"""States that a program saves itself: each rank loads its own, and not that of rank 0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
from checkpoints import save_causal
from distributed import run_processes
from shardconv_runtime.errors import PlanError

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])
OTHER = r"the state of rank 0 of 2, and this process is rank 1 of 2; each has its own part"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both ranks have parameters of the same shapes."""
    root = tmp_path_factory.mktemp("states")
    shardconv.convert(save_causal("llama", root / "llama"), root / "out", tp=2)
    return root / "out"


def trained(out: Path) -> tuple[Any, Any]:
    """A model and its optimizer after a step."""
    model = shardconv_runtime.load(out, training=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> float:
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def saved(place: Path, states: dict[str, Any]) -> dict[str, Any]:
    """What each rank reads where rank 0 alone has written."""
    if dist.get_rank() == 0:
        torch.save(states, place)
    dist.barrier()
    found: dict[str, Any] = torch.load(place)
    return found


def of_rank_0(out: Path, place: Path) -> None:
    model, optimizer = trained(out)
    found = saved(place, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    shapes = [[tuple(x.shape) for x in state.values()] for state in (found["model"], model.state_dict())]
    assert shapes[0] == shapes[1], "nothing else tells them apart"
    other = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        model.load_state_dict(found["model"])
        other.load_state_dict(found["optimizer"])
        other.step()
        return
    with pytest.raises(PlanError, match=OTHER):
        model.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    with pytest.raises(PlanError, match=OTHER):
        other.step()


def own(out: Path, place: Path) -> tuple[float, float, float]:
    model, optimizer = trained(out)
    file = place / os.environ["RANK"]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    second = step(model, optimizer)
    third = step(model, optimizer)
    found = torch.load(file)
    model.load_state_dict(found["model"])
    again = torch.optim.AdamW(model.parameters(), lr=1e-2)
    again.load_state_dict(found["optimizer"])
    shardconv_runtime.save_optimizer(model, again, place / "saved")  # before a step
    repeated = step(model, again)
    assert second == repeated
    reloaded = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardconv_runtime.load_optimizer(model, reloaded, place / "saved")
    assert "shardconv_rank" not in reloaded.param_groups[0]
    return second, third, step(model, again)


def test_the_state_of_rank_0_is_refused_on_the_others(out: Path, tmp_path: Path) -> None:
    run_processes(2, of_rank_0, out, tmp_path / "state.pt")


def test_each_rank_goes_on_from_its_own_state(out: Path, tmp_path: Path) -> None:
    ranks = run_processes(2, own, out, tmp_path)
    assert ranks[0] == ranks[1]
    second, third, again = ranks[0]
    assert third == again < second
