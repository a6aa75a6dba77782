"""What people do with a Trainer, at tp 2 and at tp 2 x dp 2: it logs what it logs in one process."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from distributed import forget_launcher, run_processes
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("accelerate")
pytest.importorskip("tensorboard")  # scripts/test_integrations installs it

import shardconv_runtime
from shardconv_runtime.errors import LaunchError, PlanError
from shardconv_runtime.integrations import ShardedTrainer
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

import shardconv

CLOSE = 1e-5
"""Relative; losses of an unsharded model are in float32."""
TIMES = ("runtime", "per_second", "flos", "jit_compilation", "preparation_time")
ROWS = torch.randint(2, 200, (34, 12), generator=torch.Generator().manual_seed(0))
TRAIN, EVAL, TEST = slice(0, 24), slice(24, 32), slice(24, 31)
"""The last batch of the test is not full: 7 rows in batches of 4."""
LENGTHS = [5 + i % 8 if i < TRAIN.stop else 12 for i in range(len(ROWS))]
"""Those of the evaluation are alike: the Trainer takes the mean of the batches' means."""


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Of other lengths."""

    def __init__(self, part: slice) -> None:
        self._rows = list(zip(ROWS[part], LENGTHS[part], strict=True))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row, length = self._rows[index]
        return {"input_ids": row[:length], "labels": row[:length]}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def accuracy(found: Any, compute_result: bool = True) -> dict[str, float]:
    """Of the next token, and what else the Trainer was told to hand over."""
    logits, labels = found.predictions, found.label_ids
    tensors = [torch.as_tensor(x) for x in (logits, labels)]
    predicted = tensors[0] if tensors[0].dim() == 2 else tensors[0].argmax(-1)
    mask = tensors[1][:, 1:] != -100
    right = (predicted[:, :-1] == tensors[1][:, 1:]) & mask
    values = {"right": float(right.sum()), "of": float(mask.sum()), "rows": float(len(predicted))}
    if found.losses is not None:
        values["losses"] = float(np.sum(np.asarray(found.losses)))
    if found.inputs is not None:
        values["inputs"] = float(np.sum(np.asarray(found.inputs)))
    return values


def tokens_of_logits(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def second_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A user's own."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 2 * total / (100 if num_items_in_batch is None else num_items_in_batch)


class Seen(TrainerCallback):
    """What a callback is told, and on which processes."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_first = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_first = state.is_world_process_zero
        self.events.append(f"log {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"evaluate {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"save {state.global_step}")


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
DIVERGES: dict[str, Any] = {"learning_rate": 0.3, "max_grad_norm": 0.0, "optim": "sgd"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "metrics": (
        {**EVALUATED, "include_for_metrics": ["inputs", "loss"]},
        {"compute_metrics": accuracy},
    ),
    "metrics of tokens": (
        {**EVALUATED, "eval_accumulation_steps": 1},
        {"compute_metrics": accuracy, "preprocess_logits_for_metrics": tokens_of_logits},
    ),
    "early stopping": (
        {**EVALUATED, **DIVERGES, "metric_for_best_model": "eval_loss", "max_steps": 12},
        {"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)]},
    ),
    "best checkpoint": (
        {**EVALUATED, "metric_for_best_model": "eval_loss", "save_strategy": "best", "max_steps": 4},
        {},
    ),
    "rotated checkpoints": ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}, {}),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}),
    "own loss": ({}, {"compute_loss_func": second_loss}),
    "tokens seen": ({"include_num_input_tokens_seen": "all"}, {}),
    "tokens without padding": ({"include_num_input_tokens_seen": "non_padding"}, {}),
    "by length": ({"train_sampling_strategy": "group_by_length"}, {}),
    "in order": ({"train_sampling_strategy": "sequential"}, {}),
    "epochs": ({"max_steps": -1, "num_train_epochs": 1.5, "logging_strategy": "epoch"}, {}),
    "plateau": ({**EVALUATED, **DIVERGES, "lr_scheduler_type": "reduce_lr_on_plateau"}, {}),
    "sgd": ({"optim": "sgd", "weight_decay": 0.1}, {}),
    "fused": ({"optim": "adamw_torch_fused"}, {}),
    "tensorboard": ({"report_to": "tensorboard"}, {}),
    "sequence parallel": ({"gradient_accumulation_steps": 2}, {}),
}
OF_ONE_REPLICA = {"tokens seen", "by length"}
"""Cases whose batches, or whose padding, depend on the number of replicas."""


def arguments(output: Path, replicas: int, **given: Any) -> TrainingArguments:
    common: dict[str, Any] = {
        "max_steps": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    return TrainingArguments(
        str(output),
        **common | given,
        per_device_train_batch_size=4 // replicas,
        per_device_eval_batch_size=4 // replicas,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )


def run(name: str, models: Path, output: Path, sharded: bool) -> dict[str, Any]:
    """What a case logs, predicts and leaves on disk."""
    given, options = CASES[name]
    replicas = int(os.environ["WORLD_SIZE"]) // 2 if sharded else 1
    args = arguments(output / name, replicas, **given)
    seen = Seen()
    common: dict[str, Any] = {
        **options,
        "args": args,
        "train_dataset": Rows(TRAIN),
        "eval_dataset": Rows(EVAL),
        "data_collator": collate,
        "callbacks": [*options.get("callbacks", ()), seen],
    }
    if sharded:
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
        model = shardconv_runtime.load(
            models / "out",
            mesh=mesh,
            training=True,
            data_parallel=replicas > 1,
            sequence_parallel=name == "sequence parallel",
        )
        trainer: Any = ShardedTrainer(model, mesh=mesh, **common)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
        trainer = transformers.Trainer(model, **common)
    trainer.train()
    predicted = trainer.predict(Rows(TEST))
    best = trainer.state.best_model_checkpoint
    return {
        "log": [
            {key: x for key, x in each.items() if not any(part in key for part in TIMES)}
            for each in trainer.state.log_history
        ],
        "events": seen.events,
        "first": seen.is_first,
        "predicted": [float(np.abs(predicted.predictions).sum()), *map(int, predicted.label_ids.shape)],
        "best": best and Path(best).name,
        "checkpoints": sorted(path.name for path in (output / name).glob("checkpoint-*")),
        "runs": len(list((output / name).rglob("events.out.tfevents*"))),
    }


def run_all(models: Path, output: Path, sharded: bool, names: list[str]) -> dict[str, dict[str, Any]]:
    if not sharded:
        forget_launcher()
    else:
        arguments(output, 2).device  # noqa: B018  # starts the process group
    return {name: run(name, models, output, sharded) for name in names}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``plain``, and ``out`` for two ranks, of float64."""
    root = tmp_path_factory.mktemp("models")
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.float64).save_pretrained(root / "plain")
    shardconv.convert(root / "plain", root / "out", 2, sequence_parallel=True)
    return root


@pytest.fixture(scope="module")
def outcomes(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of one process, and of each of four."""
    root = tmp_path_factory.mktemp("outcomes")
    names = list(CASES)
    alone = run_processes(1, run_all, models, root / "alone", False, names)[0]
    two = run_processes(2, run_all, models, root / "two", True, names)
    four = run_processes(
        4, run_all, models, root / "four", True, [n for n in names if n not in OF_ONE_REPLICA]
    )
    return alone, {2: two, 4: four}


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [(name, n) for name in CASES for n in (2, 4) if n == 2 or name not in OF_ONE_REPLICA],
)
def test_a_trainer_does_what_it_does_in_one_process(name: str, num_ranks: int, outcomes: Any) -> None:
    alone, ranks = outcomes
    want = alone[name]
    for rank, found in enumerate(each[name] for each in ranks[num_ranks]):
        assert found["first"] == (rank == 0)
        for key in ("events", "best", "checkpoints", "runs"):
            assert found[key] == want[key], key
        assert found["predicted"] == pytest.approx(want["predicted"], rel=CLOSE)
        assert len(found["log"]) == len(want["log"])
        for ours, theirs in zip(found["log"], want["log"], strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert math.isclose(ours[key], value, rel_tol=CLOSE, abs_tol=1e-9), (key, ours, theirs)


def test_the_cases_do_what_they_say(outcomes: Any) -> None:
    alone, _ = outcomes
    assert alone["early stopping"]["log"][-1]["step"] < 12
    assert alone["best checkpoint"]["best"] in alone["best checkpoint"]["checkpoints"]
    assert alone["rotated checkpoints"]["checkpoints"] == ["checkpoint-6"]
    assert alone["metrics"]["log"][2]["eval_rows"] == 8
    assert alone["tokens seen"]["log"][-2]["num_input_tokens_seen"] > 0


def in_bfloat16(models: Path, output: Path, sharded: bool) -> list[float]:
    """Losses: a model of bfloat16 while it computes, in weights of float32."""
    if not sharded:
        forget_launcher()
    args = arguments(output, 2 if sharded else 1, bf16=not sharded, learning_rate=1e-3)
    data = {"train_dataset": Rows(TRAIN), "data_collator": collate}
    if sharded:
        args.device  # noqa: B018  # starts the process group
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mixed = shardconv_runtime.DataParallel(param_dtype=torch.bfloat16)
        model = shardconv_runtime.load(
            models / "out", mesh=mesh, training=True, data_parallel=mixed, dtype=torch.float32
        )
        trainer: Any = ShardedTrainer(model, args, mesh=mesh, **data)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype=torch.float32)
        trainer = transformers.Trainer(model, args, **data)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def test_mixed_precision(models: Path, tmp_path: Path) -> None:
    """Autocast of one process, and FSDP2's of four, round in other places."""
    want = run_processes(1, in_bfloat16, models, tmp_path / "alone", False)[0]
    for found in run_processes(4, in_bfloat16, models, tmp_path / "ranks", True):
        assert found == pytest.approx(want, rel=1e-2)


def refusals(models: Path, output: Path) -> list[str]:
    """On a rank, the errors of what cannot be done."""
    args = arguments(output, 1)
    args.device  # noqa: B018  # starts the process group
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = shardconv_runtime.load(models / "out", mesh=mesh, training=True)
    refused: list[dict[str, Any]] = [
        {"load_best_model_at_end": True, **EVALUATED, "save_strategy": "steps", "save_steps": 2},
        {"auto_find_batch_size": True},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"train_sampling_strategy": "batch_rebalance"},
        {"optim": "adafactor"},
    ]
    found = []
    for options in refused:
        given = arguments(output, 1, **options)
        data = {"train_dataset": Rows(TRAIN), "data_collator": collate}
        with pytest.raises(PlanError) as caught:
            ShardedTrainer(model, given, mesh=mesh, **data).train()
        found.append(str(caught.value))
    return found


def test_what_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    words = (
        "trainer.state.best_model_checkpoint",
        "auto_find_batch_size",
        "DataParallel(param_dtype=...)",
        "checkpoint_activations",
        "batch_rebalance",
        "Adafactor computes its step from full tensors",
    )
    for errors in run_processes(2, refusals, models, tmp_path):
        assert all(word in error for word, error in zip(words, errors, strict=True)), errors


def on_cpus_unsaid(models: Path, output: Path) -> None:
    """Without ``use_cpu``: accelerate then takes each process for the only one."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = shardconv_runtime.load(models / "out", mesh=mesh, training=True)
    args = TrainingArguments(str(output), report_to="none")
    with pytest.raises(PlanError, match="use_cpu=True"):
        ShardedTrainer(model, args, mesh=mesh, train_dataset=Rows(TRAIN))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_processes_on_cpus_are_found_with_an_option(models: Path, tmp_path: Path) -> None:
    run_processes(2, on_cpus_unsaid, models, tmp_path)


def with_noise(models: Path, output: Path, sharded: bool) -> list[float]:
    """Losses with noise in the embeddings, which each process draws."""
    CASES["noise"] = ({"neftune_noise_alpha": 5}, {})
    log = run_all(models, output, sharded, ["noise"])["noise"]["log"]
    return [each["loss"] for each in log if "loss" in each]


@pytest.mark.parametrize("use", [with_noise])
def test_noise_is_the_same_on_the_ranks_of_a_replica(
    models: Path, tmp_path: Path, use: Callable[..., list[float]]
) -> None:
    """With one replica: two would draw for half of a batch each."""
    want = run_processes(1, use, models, tmp_path / "alone", False)[0]
    for found in run_processes(2, use, models, tmp_path / "ranks", True):
        assert found == pytest.approx(want, rel=CLOSE)


def resumed(models: Path, output: Path) -> list[str]:
    """On a rank: errors of resuming from another checkpoint, and with weights from elsewhere."""
    args = arguments(output, 1, max_steps=2, save_strategy="steps", save_steps=1)
    args.device  # noqa: B018  # starts the process group
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    data = {"train_dataset": Rows(TRAIN), "data_collator": collate}
    common = {"mesh": mesh, "training": True, "timeout_s": 60}

    def make(out: Path, output: Path = output, **options: Any) -> ShardedTrainer:
        model = shardconv_runtime.load(out, **common, **options)
        given = arguments(output, 1, max_steps=4, save_strategy="steps", save_steps=2)
        return ShardedTrainer(model, given, mesh=mesh, **data)

    ShardedTrainer(shardconv_runtime.load(models / "out", **common), args, mesh=mesh, **data).train()
    first, last = output / "checkpoint-1", output / "checkpoint-2"
    found = []
    own = last if mesh["tp"].get_local_rank() == 0 else None
    for error, trainer, checkpoint in (
        (LaunchError, make(last / "model"), str(own) if own else None),
        (PlanError, make(models / "out"), True),
        (PlanError, make(first / "model"), str(last)),
    ):
        with pytest.raises(error) as caught:
            trainer.train(resume_from_checkpoint=checkpoint)
        found.append(str(caught.value))
    shutil.copytree(last / "model", output / f"copy-{mesh.get_rank()}")  # as on another disk
    make(output / f"copy-{mesh.get_rank()}").train(resume_from_checkpoint=str(last))

    adapted = output / "adapted"
    make(models / "out", adapted, adapter=models / "adapter").train()
    with pytest.raises(PlanError) as caught:
        make(models / "out", adapted, adapter=models / "adapter").train(resume_from_checkpoint=True)
    found.append(str(caught.value))
    again = make(models / "out", adapted, adapter=adapted / "checkpoint-2" / "model")
    again.train(resume_from_checkpoint=str(adapted / "checkpoint-2"))
    return found


def test_resuming_with_other_weights_is_refused(models: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    shardconv.adapt(models / "out", config, models / "adapter", seed=1)
    for errors in run_processes(2, resumed, models, tmp_path):
        assert "train was called with another resume_from_checkpoint" in errors[0]
        assert all("the model was not loaded from" in error for error in errors[1:])
        assert "checkpoint-2/model" in errors[2]
        assert "adapter=" in errors[3]
