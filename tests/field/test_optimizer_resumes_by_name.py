"""A run is resumed with parameter groups in another order, or with a parameter that was frozen before.

torch's optimizers know parameters by their numbers: the state of one becomes that of another without a word,
or "loaded state dict contains a parameter group that doesn't match the size of optimizer's group". Here state
is stored by name. Reports: kohya-ss/sd-scripts#378, STVIR/pysot#92 (a backbone that is trained from an epoch
on), technicolor-research/dsve-loc#15 and #16 (a group that was added), CompVis/latent-diffusion#231.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_errors_of_each, run_processes
from shardconv_runtime.errors import CheckpointError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
Parameters = Mapping[str, Any]
Groups = list[dict[str, Any]]

EMBEDDING = "model.embed_tokens.weight"


def matrices(named: Parameters) -> list[Any]:
    return [p for n, p in named.items() if p.dim() > 1 and n != EMBEDDING]


def others(named: Parameters) -> list[Any]:
    return [p for p in named.values() if p.dim() == 1]


def as_saved(named: Parameters) -> Groups:
    """Without the embedding, which is frozen."""
    return [{"params": matrices(named)}, {"params": others(named), "lr": 0.03, "weight_decay": 0.0}]


RESUMED: Mapping[str, Callable[[Parameters], Groups]] = {
    "as it was": as_saved,
    "other order": lambda named: as_saved(named)[::-1],
    "other order of parameters": lambda named: [{"params": matrices(named)[::-1]}, {"params": others(named)}],
    "a parameter more": lambda named: [
        {"params": others(named)},
        {"params": [named[EMBEDDING], *matrices(named)]},
    ],
    "a group more": lambda named: [{"params": [named[EMBEDDING]], "lr": 0.07}, *as_saved(named)],
    "a group in two": lambda named: [
        {"params": matrices(named)[::2]},
        {"params": others(named)},
        {"params": matrices(named)[1::2]},
    ],
}


def step(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS).logits
    return found


def begin(out: Path, root: Path) -> None:
    model = shardconv_runtime.load(out, training=True)
    named = dict(model.named_parameters())
    named[EMBEDDING].requires_grad_(False)
    optimizer = torch.optim.AdamW(as_saved(named), lr=0.01)
    step(model, optimizer, 2)
    shardconv_runtime.save(model, root / "model")
    shardconv_runtime.save_optimizer(model, optimizer, root / "optimizer")


def go_on(path: Path, state: Path, case: str, options: Mapping[str, Any]) -> tuple[Tensor, list[str]]:
    """The logits after two steps more, and the warnings."""
    if options:
        options = {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), **options}
    model = shardconv_runtime.load(path, training=True, **options)
    optimizer = torch.optim.AdamW(RESUMED[case](dict(model.named_parameters())), lr=0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shardconv_runtime.load_optimizer(model, optimizer, state)
    step(model, optimizer, 2)
    return logits(model), [str(w.message) for w in said if "load_optimizer" in str(w.message)]


def resume_all(root: Path) -> dict[str, tuple[Tensor, list[str]]]:
    found = {case: go_on(root / "model", root / "optimizer", case, {}) for case in RESUMED}
    found["in parts"] = go_on(root / "model", root / "optimizer", "a parameter more", {"data_parallel": True})
    return found


def one_process(source: Path, case: str) -> Tensor:
    """The same, with the state of each parameter handed over by its name."""
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    named = dict(model.named_parameters())
    named[EMBEDDING].requires_grad_(False)
    before = torch.optim.AdamW(as_saved(named), lr=0.01)
    step(model, before, 2)
    named[EMBEDDING].requires_grad_(True)
    after = torch.optim.AdamW(RESUMED[case](named), lr=0.5)
    saved = {id(p): group for group in before.param_groups for p in group["params"]}
    for group in after.param_groups:
        theirs = next((saved[id(p)] for p in group["params"] if id(p) in saved), {})
        group.update({key: value for key, value in theirs.items() if key != "params"})
    after.state.update(before.state)
    step(model, after, 2)
    return logits(model)


@pytest.fixture(scope="module")
def root(saved_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resumed")
    shardconv.convert(saved_llama, path / "out", tp=2, check=False)
    run_processes(2, begin, path / "out", path, start_group=True)
    shardconv.reshard(path / "model", path / "one", tp=1, check=False)
    return path


def test_state_follows_names(root: Path, saved_llama: Path) -> None:
    """On two ranks, whole and in parts, and on one."""
    ranks = run_processes(2, resume_all, root, start_group=True)
    (alone,) = run_processes(1, go_on, root / "one", root / "optimizer", "a group more", {}, start_group=True)
    wanted = {case: one_process(saved_llama, case) for case in RESUMED}
    assert not torch.allclose(wanted["as it was"], wanted["a parameter more"], atol=1e-3)
    for rank, found in enumerate([*ranks, {"a group more": alone}]):
        for case, (own, said) in found.items():
            name = case if case in wanted else "a parameter more"
            assert torch.allclose(own, wanted[name], atol=1e-4), (rank, case)
            is_told = name in ("a parameter more", "a group more") and rank != 1
            assert [text.split(":")[1].split(",")[0] for text in said] == [
                " 1 parameter starts anew"
            ] * is_told
            assert not said or said[0].endswith(f": {EMBEDDING}")


REFUSED: Mapping[str, tuple[Callable[[Parameters], Groups], str]] = {
    "two that differ": (
        lambda named: [{"params": [*matrices(named), *others(named)]}],
        "has 2 parameter groups, and this optimizer has 1",
    ),
    "moved": (
        lambda named: [{"params": matrices(named)[1:]}, {"params": [*others(named), matrices(named)[0]]}],
        "parameter group 0: 1 parameter of the saved state is missing",
    ),
    "fewer": (
        lambda named: [{"params": others(named)}, {"params": matrices(named)[1:]}],
        "of the saved state are missing from this optimizer",
    ),
}


def load_refused(root: Path, case: str) -> None:
    model = shardconv_runtime.load(root / "model", training=True)
    optimizer = torch.optim.AdamW(REFUSED[case][0](dict(model.named_parameters())), lr=0.5)
    try:
        shardconv_runtime.load_optimizer(model, optimizer, root / "optimizer")
    finally:
        assert not optimizer.state


def test_what_is_ambiguous_is_refused(root: Path) -> None:
    """On all ranks, and the optimizer is as it was."""
    calls = [(root, case) for case in REFUSED]
    for errors, (_, said) in zip(
        run_errors_of_each(2, load_refused, calls, start_group=True), REFUSED.values(), strict=True
    ):
        assert all(isinstance(error, CheckpointError) and said in str(error) for error in errors), errors
