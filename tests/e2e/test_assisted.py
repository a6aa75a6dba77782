"""Assisted decoding in real processes: the tokens of plain generation, wherever the draft model is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from checkpoints import save_causal
from distributed import run_errors, run_processes
from shardconv_runtime import Communication, LaunchError
from torch import Tensor

import shardconv

NEW = 16
IDS = torch.tensor([[11, 245, 3, 77, 130, 9, 201]])


@dataclass(frozen=True)
class Models:
    """A model, converted for 2 and 3 ranks, and drafts of it."""

    root: Path
    unsharded: Any

    def draft(self) -> Any:
        """An ordinary model."""
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(self.root / "draft", dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("assisted")
    source = save_causal("llama", root / "model")
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    # The model itself, a little off: some of its candidates are right.
    near = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1 * float(parameter.std()))
    near.save_pretrained(root / "draft")
    for name, tp in (("model", 2), ("model", 3), ("draft", 1), ("draft", 2)):
        shardconv.convert(root / name, root / f"{name}-tp{tp}", tp=tp, check=False)
    return Models(root, unsharded)


def generate(model: Any, draft: Any | None, **options: Any) -> Tensor:
    torch.manual_seed(11 + int(os.environ.get("RANK", 0)))
    given = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(IDS)} | options
    tokens: Tensor = model.generate(IDS, assistant_model=draft, **given)
    return tokens


def draft_of_rank(saved: Models, where: str) -> Any | None:
    rank = dist.get_rank()
    if where == "ordinary":
        return saved.draft()
    if where == "on rank 0 alone":
        return saved.draft() if rank == 0 else None
    if where == "other weights":
        draft = saved.draft()
        with torch.no_grad():
            draft.lm_head.weight.mul_(1 - 2 * rank)
        return draft
    if where == "loaded":
        return shardconv_runtime.load(saved.root / "draft-tp2")
    size = 1 if where == "loaded on rank 0" else 2
    group = dist.new_group(list(range(size)))
    return (
        shardconv_runtime.load(saved.root / f"draft-tp{size}", process_group=group) if rank < size else None
    )


def on_rank(saved: Models, where: str, tp: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Assisted, and plain afterward."""
    model = shardconv_runtime.load(saved.root / f"model-tp{tp}", communication=Communication(timeout_s=60))
    return generate(model, draft_of_rank(saved, where), **options), generate(model, None)


@pytest.mark.parametrize(
    ("where", "tp"),
    [
        ("ordinary", 2),
        ("on rank 0 alone", 2),
        ("other weights", 2),
        ("loaded", 2),
        ("loaded on rank 0", 2),
        pytest.param("loaded on two of three", 3, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_of_plain_generation(saved: Models, where: str, tp: int) -> None:
    want = generate(saved.unsharded, None)
    for assisted, plain in run_processes(tp, on_rank, saved, where, tp, {}):
        assert torch.equal(assisted, want)
        assert torch.equal(plain, want)


@pytest.mark.parametrize("where", ["ordinary", "on rank 0 alone"])
def test_sampled_tokens_are_those_of_the_unsharded_model(saved: Models, where: str) -> None:
    options = {"do_sample": True, "temperature": 1.3}
    want = generate(saved.unsharded, saved.draft(), **options)
    assert not torch.equal(want, generate(saved.unsharded, None))
    for sampled, _ in run_processes(2, on_rank, saved, where, 2, options):
        assert torch.equal(sampled, want)


class Broken(torch.nn.Module):
    """A draft that fails when it is asked."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.generation_config, self.device = model.config, model.generation_config, model.device
        self._supports_logits_to_keep = lambda: True

    def generate(self, **inputs: Any) -> Any:
        raise ValueError("no candidates today")


def fail_on_rank(saved: Models, what: str) -> None:
    model = shardconv_runtime.load(saved.root / "model-tp2", communication=Communication(timeout_s=60))
    first = dist.get_rank() == 0
    if what == "not on rank 0":
        generate(model, None if first else saved.draft())
    else:
        generate(model, Broken(model) if first else None)


def test_a_draft_that_is_not_on_rank_0(saved: Models) -> None:
    for error in run_errors(2, fail_on_rank, saved, "not on rank 0"):
        assert isinstance(error, LaunchError)
        assert "rank 1 was given an assistant_model, and rank 0" in str(error)


def test_a_draft_that_fails(saved: Models) -> None:
    first, second = run_errors(2, fail_on_rank, saved, "broken")
    assert "no candidates today" in str(first)
    assert isinstance(second, LaunchError)
    assert "rank 0 failed to draft candidates" in str(second)
