"""A hundred habits, each on every rank as with the unsharded model, or an error of ours on every rank."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from distributed import run_processes
from habits import HABITS, REFUSED, Place
from plans_once import Solved
from shardconv_runtime import ShardconvError
from warm_compiler import warm_up

import shardconv

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-2}
"""Relative; what was computed in lower precision is compared in float32."""

Outcome = list[torch.Tensor] | str
"""Of a habit: its tensors, or the class and text of its error."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Outcome], list[dict[str, Outcome]]]:
    """Of the unsharded model, and of each rank."""
    warm_up()
    root = tmp_path_factory.mktemp("habits")
    plain = save_causal(
        "gpt2", root / "gpt2", n_layer=1
    )  # a tied head, biases, embeddings that are summed, dropout
    Solved.other_attentions = True  # attention weights are among the habits
    try:
        shardconv.convert(plain, root / "out", tp=2)
    finally:
        Solved.other_attentions = False
    unsharded = run_processes(1, all_unsharded, plain, root)[0]
    return unsharded, run_processes(2, all_on_rank, root / "out", plain, root)


def all_unsharded(plain: Path, root: Path) -> dict[str, Outcome]:
    @cache
    def shared_model() -> Any:
        return load()

    def load(dtype: Any = torch.float64, training: bool = False, shared: bool = False, **other: Any) -> Any:
        if shared:
            return shared_model()
        return transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=dtype).eval()

    place = Place(root / "of one", plain, 0, 1)
    place.scratch.mkdir()
    return {name: outcome(name, load, place) for name in HABITS if name not in REFUSED}


def all_on_rank(out: Path, plain: Path, root: Path) -> dict[str, Outcome]:
    @cache
    def shared_model() -> Any:
        return load()

    def load(shared: bool = False, **options: Any) -> Any:
        if shared:
            return shared_model()
        return shardconv_runtime.load(out, **{"dtype": torch.float64, "timeout_s": 20} | options)

    place = Place(root / "of two", plain, int(os.environ["RANK"]), 2)
    place.scratch.mkdir(exist_ok=True)
    return {name: outcome(name, load, place) for name in HABITS}


def outcome(name: str, load: Any, place: Place) -> Outcome:
    torch.manual_seed(0)
    try:
        return [x.detach() for x in HABITS[name](load, place)]
    except ShardconvError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_there_are_a_hundred() -> None:
    assert len(HABITS) >= 100


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_right_or_refused_on_every_rank(name: str, outcomes: Any) -> None:
    unsharded, ranks = outcomes
    for found in (rank[name] for rank in ranks):
        if name in REFUSED:
            assert isinstance(found, str), "not refused"
            assert found.startswith("refused: "), found
            continue
        want = unsharded[name]
        assert not isinstance(want, str), want
        assert not isinstance(found, str), found
        assert len(found) == len(want)
        for one, other in zip(found, want, strict=True):
            if one.is_floating_point():
                scale = TOLERANCE[one.dtype] * max(1.0, other.abs().max().item())
                torch.testing.assert_close(one, other, rtol=0, atol=scale)
            else:
                assert torch.equal(one, other)
