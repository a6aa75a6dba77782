"""Every option of ``TrainingArguments``: training and evaluation as in one process, or refused by name.

Elsewhere losses were multiplied by the number of ranks, and tokens were counted once for each rank.
https://github.com/huggingface/transformers/issues/39648, https://github.com/huggingface/trl/issues/7100
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import save_causal
from distributed import forget_launcher, run_processes
from shardconv_runtime import Communication
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("accelerate")

import shardconv_runtime
from shardconv_runtime.errors import PlanError
from shardconv_runtime.integrations import ShardedTrainer
from shardconv_runtime.integrations.trainer import REFUSED
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import shardconv

CLOSE = 1e-5
TRAINED = torch.randint(3, 200, (16, 9), generator=torch.Generator().manual_seed(0))
EVALUATED = TRAINED[:7]
"""Not a multiple of any batch."""

RIGHT = {
    "own tokens": {"average_tokens_across_devices": False},
    "own tokens, accumulated": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    "other order": {"accelerator_config": {"use_seedable_sampler": False}},
    "split batches": {"accelerator_config": {"split_batches": True}},
    "order of data": {"data_seed": 7},
    "smoothed": {"label_smoothing_factor": 0.1},
    "metrics by batch": {"batch_eval_metrics": True},
    "on start": {"eval_on_start": True},
    "workers": {"dataloader_num_workers": 1},
}
"""Name of a case -> its options."""
OWN_LOSS = "own loss, own tokens"
ADDED_NOISE = "workers"
"""The case in which each sample is changed at random when it is read."""
OF_ONE_REPLICA = ("other order", "split batches", ADDED_NOISE)
"""Cases in which two replicas see other samples than one process, or other numbers."""


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, one of which is replaced at random if ``noisy``."""

    def __init__(self, rows: torch.Tensor, noisy: bool = False) -> None:
        self._rows = rows
        self._noisy = noisy

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index].clone()
        if self._noisy:
            row[int(torch.randint(0, 9, ()))] = int(np.random.randint(3, 200))  # as users do
        return {"input_ids": row, "labels": row.clone()}


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def number_of_rows(found: Any, compute_result: bool = True) -> dict[str, float]:
    return {"rows": float(len(found.predictions))}


class ShardedSeq2SeqTrainer(ShardedTrainer, Seq2SeqTrainer):  # type: ignore[misc]
    """Collects predictions in its own way."""


def arguments(output: Path, replicas: int, **given: Any) -> Seq2SeqTrainingArguments:
    common: dict[str, Any] = {
        "max_steps": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "logging_steps": 1,
    }
    is_split = (given.get("accelerator_config") or {}).get("split_batches")
    size = 4 if is_split else 4 // replicas
    return Seq2SeqTrainingArguments(
        str(output),
        **common | given,
        save_strategy="no",
        report_to="none",
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )


def run(name: str, models: Path, output: Path, sharded: bool, is_seq2seq: bool) -> dict[str, Any]:
    """Losses and norms of the steps, and what an evaluation and a prediction give."""
    replicas = int(os.environ["WORLD_SIZE"]) // 2 if sharded else 1
    given = RIGHT.get(name, {"average_tokens_across_devices": False})
    args = arguments(output, replicas, **given)
    common: dict[str, Any] = {
        "args": args,
        "train_dataset": Rows(TRAINED, noisy=name == ADDED_NOISE),
        "eval_dataset": Rows(EVALUATED),
        "compute_metrics": number_of_rows,
        "compute_loss_func": own_loss if name == OWN_LOSS else None,
    }
    kinds = (Seq2SeqTrainer, ShardedSeq2SeqTrainer) if is_seq2seq else (Trainer, ShardedTrainer)
    if sharded:
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
        model = shardconv_runtime.load(
            models / "out",
            mesh=mesh,
            training=True,
            data_parallel=replicas > 1,
            communication=Communication(timeout_s=60),
        )
        trainer: Any = kinds[1](model, mesh=mesh, **common)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
        trainer = kinds[0](model, **common)
    trainer.train()
    evaluated = [trainer.evaluate() for _ in range(2)]
    predicted = trainer.predict(Rows(EVALUATED))
    return {
        "steps": [[e["loss"], e["grad_norm"]] for e in trainer.state.log_history if "grad_norm" in e],
        "rows": [each["eval_rows"] for each in evaluated],
        "predicted": [float(np.abs(predicted.predictions).sum()), *predicted.predictions.shape],
    }


def run_all(models: Path, output: Path, sharded: bool) -> dict[str, dict[str, Any]]:
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # to start the loader's workers
    if not sharded:
        forget_launcher()
    else:
        arguments(output, 1).device  # noqa: B018  # starts the process group
    one_replica = not sharded or os.environ["WORLD_SIZE"] == "2"
    names = [name for name in (*RIGHT, OWN_LOSS) if one_replica or name not in OF_ONE_REPLICA]
    found = {name: run(name, models, output, sharded, is_seq2seq=False) for name in names}
    found["sequence to sequence"] = run(OWN_LOSS, models, output, sharded, is_seq2seq=True)
    if sharded and one_replica:
        found["refused"] = refusals(models, output)
    return found


def refusals(models: Path, output: Path) -> dict[str, Any]:
    """On a rank, the error of each option that is refused."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = shardconv_runtime.load(models / "out", mesh=mesh, training=True)
    found = {}
    values = dict.fromkeys(REFUSED, True) | {"accelerator_config": {"dispatch_batches": True}}
    for name, value in values.items():
        args = arguments(output, 1)
        if name == "accelerator_config":
            args = arguments(output, 1, accelerator_config=value)
        else:
            setattr(args, name, value)  # several of them need a GPU, or a library, to be made
        try:
            ShardedTrainer(model, args, mesh=mesh, train_dataset=Rows(TRAINED))
        except PlanError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and its converted directory."""
    root = tmp_path_factory.mktemp("options")
    shardconv.convert(save_causal("llama", root / "plain"), root / "out", tp=2)
    return root


@pytest.fixture(scope="module")
def alone(models: Path) -> Any:
    """The results of one process."""
    return run_processes(1, run_all, models, models / "alone", False)[0]


@pytest.fixture(scope="module")
def of_two_ranks(models: Path) -> Any:
    """The results of two ranks."""
    return run_processes(2, run_all, models, models / "2", True)


@pytest.fixture(scope="module")
def of_two_replicas(models: Path) -> Any:
    """The results of two replicas of two ranks."""
    return run_processes(4, run_all, models, models / "4", True)


@pytest.mark.parametrize("fixture", ["of_two_ranks", pytest.param("of_two_replicas", marks=pytest.mark.slow)])
def test_results_are_those_of_one_process(fixture: str, alone: Any, request: pytest.FixtureRequest) -> None:
    for found in request.getfixturevalue(fixture):
        for name, got in found.items():
            if name == "refused":
                continue
            want = alone[name]
            assert got["rows"] == want["rows"] or name == "metrics by batch", name
            assert got["predicted"] == pytest.approx(want["predicted"], rel=CLOSE), name
            assert len(got["steps"]) == len(want["steps"]) == 2, name
            for ours, theirs in zip(got["steps"], want["steps"], strict=True):
                assert all(math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(ours, theirs, strict=True)), (
                    name, ours, theirs,
                )  # fmt: skip
    assert alone["sequence to sequence"]["rows"] == [7.0, 7.0]


def test_options_that_would_be_wrong_are_refused_by_name(of_two_ranks: Any) -> None:
    for found in of_two_ranks:
        assert found["refused"].keys() == {*REFUSED, "accelerator_config"}
        assert all(name.split("_config")[0] in text for name, text in found["refused"].items())


def test_every_option_is_known() -> None:
    """The options of transformers that this package was tried with; a new one must be looked at."""
    names = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    table = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text().partition("### Options")[2]
    missing = sorted(name for name in names if f"`{name}`" not in table)
    assert not missing, f"docs/integrations.md does not say what becomes of {', '.join(missing)}"
