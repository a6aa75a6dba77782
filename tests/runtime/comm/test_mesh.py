"""Launching without processes: environments, axes in use."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from boundaries import boundary
from converted import llama_plan
from shardconv_runtime.comm import agreement, mesh, rank_0
from shardconv_runtime.errors import LaunchError
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import ModulePlan, NormInfo
from small_models import small_config


def test_used_axes_are_those_of_collectives() -> None:
    plan = llama_plan(small_config(), (2, 2))
    assert mesh.used_axes(plan) == {(0, 1)}
    steps = (
        boundary("output", "all_reduce", axes=(1,)),
        boundary("output", "slice", dim=0, layout=Leaf(4, (0,))),
    )
    norm = NormInfo("rms", 1e-6, 8, (0,))
    more = (ModulePlan(("a",), "boundary", outputs=steps), ModulePlan(("b",), "norm", norm=norm))
    assert mesh.used_axes(dataclasses.replace(plan, modules=more)) == {(0,), (1,)}
    assert mesh.used_axes(dataclasses.replace(plan, modules=more, mesh=(1, 4))) == {(1,)}


def test_a_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (mesh.rank(), mesh.world_size()) == (0, 1)
    start = mesh.launch(device="cpu")
    assert start == mesh.Launch(0, 1, torch.device("cpu"))
    agreement.agree(start, None)
    rank_0.share_rng_state(start)
    with pytest.raises(LaunchError, match="only here"):
        agreement.agree(start, LaunchError("only here"))


def test_a_malformed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(LaunchError, match="WORLD_SIZE is 'two'; it should be a number"):
        mesh.world_size()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(LaunchError, match="start the program with torchrun"):
        mesh.launch(device="cpu")
