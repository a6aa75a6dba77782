"""The plain Trainer of transformers, and a loss that reads the head's weights: errors on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import shardconv_runtime
import torch
from adapters import low_rank
from checkpoints import save_causal
from distributed import run_errors
from shardconv_runtime import Communication
from shardconv_runtime.errors import LaunchError, PlanError, ShardconvError

import shardconv

ROWS = torch.randint(0, 200, (32, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``out``, and ``adapter`` for it."""
    root = tmp_path_factory.mktemp("plain_trainer")
    shardconv.convert(save_causal("llama", root / "llama"), root / "out", tp=2, check=False)
    shardconv.adapt(root / "out", low_rank(["q_proj"]), root / "adapter")
    return root


def trainer(model: Any, output: Path) -> Any:
    """Of rows that all differ."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(output), max_steps=1, save_strategy="no", use_cpu=True, report_to="none")
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    return Trainer(model, args, train_dataset=data, eval_dataset=data)


def train(root: Path, output: Path) -> None:
    trainer(
        shardconv_runtime.load(root / "out", training=True, communication=Communication(timeout_s=60)), output
    ).train()


def train_alike(root: Path, output: Path) -> None:
    """An adapter, where all processes have the same batch by chance."""
    model = shardconv_runtime.load(
        root / "out", adapter=root / "adapter", training=True, communication=Communication(timeout_s=60)
    )
    found = trainer(model, output)
    found.train_dataset = [{"input_ids": ROWS[0], "labels": ROWS[0]}] * len(ROWS)
    found.train()


def evaluate(root: Path, output: Path) -> None:
    trainer(
        shardconv_runtime.load(root / "out", training=True, communication=Communication(timeout_s=60)), output
    ).evaluate()


def with_fused_loss(root: Path) -> Any:
    """A model with what TRL puts in the place of the forward method."""
    model = shardconv_runtime.load(
        root / "out", training=True, communication=Communication(timeout_s=60)
    ).train()

    def forward(
        self: Any, input_ids: torch.Tensor, labels: Any = None, shift_labels: Any = None
    ) -> torch.Tensor:
        states = self.model(input_ids).last_hidden_state
        logits = states @ self.lm_head.weight.T
        targets = shift_labels if labels is None else labels
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model.forward = MethodType(forward, model)
    return model


def fused_loss(root: Path, output: Path) -> None:
    with_fused_loss(root)(input_ids=ROWS[:2] % 100, labels=ROWS[:2] % 100)


def fused_loss_of_shifted_labels(root: Path, output: Path) -> None:
    with_fused_loss(root)(input_ids=ROWS[:2] % 100, shift_labels=ROWS[:2] % 100)


@pytest.mark.parametrize(
    ("use", "kind", "says"),
    [
        (train, PlanError, "docs/training.md has a Trainer that does not"),
        (train_alike, PlanError, "docs/training.md has a Trainer that does not"),
        (evaluate, LaunchError, "a sampler shares data out over replicas"),
        (fused_loss, PlanError, "use the model's own loss"),
        (fused_loss_of_shifted_labels, PlanError, "use the model's own loss"),
    ],
)
def test_each_rank_has_the_error(
    root: Path, tmp_path: Path, use: Callable[[Path, Path], None], kind: type[ShardconvError], says: str
) -> None:
    pytest.importorskip("accelerate")
    for error in run_errors(2, use, root, tmp_path):
        assert isinstance(error, kind)
        assert says in str(error)
