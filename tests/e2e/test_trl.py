"""TRL's trainers at tp 2 and dp 2 log what they log in one process."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import forget_launcher, run_processes
from places import ROOT

pytest.importorskip("trl")

import peft
import shardconv_runtime
import trl
from datasets import Dataset
from shardconv_runtime.errors import PlanError
from shardconv_runtime.integrations import (
    ShardedDPOTrainer,
    ShardedGRPOTrainer,
    ShardedRewardTrainer,
    ShardedSFTTrainer,
)
from torch.distributed.device_mesh import init_device_mesh

import shardconv

STEPS = 4
CLOSE = 1e-5
"""Relative: TRL and transformers compute losses of float64 models in float32 in places."""

UNLIKE = ("runtime", "per_second", "flos", "epoch", "step_time")
"""Parts of the names of what is logged of time."""

LINES = [f"{i} times {k} is {i * k}" for i in range(2, 32) for k in range(3, 19)]
WORDS = ("yes", "maybe so", "no, not at all")


def text() -> Dataset:
    return Dataset.from_dict({"text": LINES})


def pairs() -> Dataset:
    rows = [
        {"prompt": line, "chosen": f" {WORDS[i % 3]}", "rejected": f" {WORDS[(i + 1) % 3]}!"}
        for i, line in enumerate(LINES)
    ]
    return Dataset.from_list(rows)


def options(config: type, output: Path, **given: Any) -> Any:
    """Of a trainer; the batch is of all replicas together."""
    dp = max(1, int(os.environ.get("WORLD_SIZE", "1")) // 2)
    return config(
        output_dir=str(output),
        per_device_train_batch_size=4 // dp,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to="none",
        **given,
    )


def tokenizer() -> Any:
    return transformers.ByT5Tokenizer(extra_ids=0)


def mesh_of(args: Any) -> Any:
    args.device  # noqa: B018  # starts the process group
    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))


def trained(trainer: Any, log: Path) -> None:
    trainer.train()
    if trainer.is_world_process_zero():
        log.write_text(json.dumps(trainer.state.log_history))


def sft(models: Path, log: Path, sharded: bool, given: dict[str, Any]) -> None:
    if not sharded:
        forget_launcher()
    args = options(trl.SFTConfig, log.with_suffix(""), max_length=48, **given)
    common: dict[str, Any] = {"train_dataset": text(), "processing_class": tokenizer()}
    if sharded:
        mesh = mesh_of(args)
        model = shardconv_runtime.load(models / "out", mesh=mesh, training=True, data_parallel=True)
        trained(ShardedSFTTrainer(model, args, mesh=mesh, **common), log)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
        trained(trl.SFTTrainer(model, args, **common), log)


def dpo(models: Path, log: Path, sharded: bool, with_adapter: bool) -> None:
    if not sharded:
        forget_launcher()
    args = options(trl.DPOConfig, log.with_suffix(""), max_length=64)
    common: dict[str, Any] = {"train_dataset": pairs(), "processing_class": tokenizer()}
    adapter = models / "adapter"
    if sharded:
        mesh = mesh_of(args)
        load = {"mesh": mesh, "data_parallel": True, "training": True}
        if with_adapter:
            both = {"default": adapter, "ref": adapter}
            model = shardconv_runtime.load(models / "out", adapter=both, **load)
        else:
            model = shardconv_runtime.load(models / "out", **load)
            common["ref_model"] = shardconv_runtime.load(models / "out", **load).eval()
        trained(ShardedDPOTrainer(model, args, mesh=mesh, **common), log)
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
    if with_adapter:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    else:
        common["ref_model"] = transformers.AutoModelForCausalLM.from_pretrained(
            models / "plain", dtype="auto"
        )
    trained(trl.DPOTrainer(model, args=args, **common), log)


def reward(models: Path, log: Path, sharded: bool) -> None:
    if not sharded:
        forget_launcher()
    args = options(trl.RewardConfig, log.with_suffix(""), max_length=64)
    common: dict[str, Any] = {"train_dataset": pairs(), "processing_class": tokenizer()}
    if sharded:
        mesh = mesh_of(args)
        model = shardconv_runtime.load(models / "judge-2", mesh=mesh, training=True, data_parallel=True)
        trained(ShardedRewardTrainer(model, args, mesh=mesh, **common), log)
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            models / "judge", dtype="auto"
        )
        trained(trl.RewardTrainer(model, args, **common), log)


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [sum(letter in "aeiou" for letter in text) / 8 + len(text) / 100 for text in completions]


def grpo(models: Path, log: Path, sharded: bool, given: dict[str, Any]) -> None:
    if not sharded:
        forget_launcher()
    args = options(trl.GRPOConfig, log.with_suffix(""), max_completion_length=10, num_generations=4, **given)
    common: dict[str, Any] = {
        "train_dataset": pairs().remove_columns(["chosen", "rejected"]),
        "processing_class": tokenizer(),
        "reward_funcs": vowels,
    }
    if sharded:
        mesh = mesh_of(args)
        model = shardconv_runtime.load(models / "out", mesh=mesh, training=True)
        trained(ShardedGRPOTrainer(model, args, mesh=mesh, **common), log)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
        trained(trl.GRPOTrainer(model, args=args, **common), log)


def compare(tmp_path: Path, run: Any, models: Path, *given: Any, ranks: int = 4) -> list[dict[str, float]]:
    """All that is logged, of several processes and of one."""
    run_processes(ranks, run, models, tmp_path / "sharded.json", True, *given)
    run_processes(1, run, models, tmp_path / "alone.json", False, *given)
    found, expected = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("sharded", "alone"))
    assert len(found) == len(expected) == STEPS + 1
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not any(part in name for part in UNLIKE):
                assert math.isclose(ours[name], value, rel_tol=CLOSE, abs_tol=CLOSE), (name, ours, theirs)
    return expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``out`` for two ranks and ``plain``; an adapter; ``judge``, with one label, and ``judge-2``."""
    root = tmp_path_factory.mktemp("models")
    sizes = {
        "vocab_size": 259, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "pad_token_id": 0, "eos_token_id": 1,
        "attention_dropout": 0.0, "num_labels": 1,
    }  # fmt: skip
    config = transformers.LlamaConfig(**sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.float64).save_pretrained(root / "plain")
    transformers.LlamaForSequenceClassification(config).to(torch.float64).save_pretrained(root / "judge")
    shardconv.convert(root / "plain", root / "out", 2)
    shardconv.convert(root / "judge", root / "judge-2", 2)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    shardconv.adapt(root / "out", lora, root / "adapter", seed=1)
    return root


@pytest.mark.parametrize("given", [{}, {"packing": True}, {"loss_type": "dft"}], ids=str)
def test_supervised_fine_tuning(models: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    """With entropy, accuracy and numbers of tokens."""
    logged = compare(tmp_path, sft, models, given)
    assert {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"} <= logged[0].keys()


@pytest.mark.parametrize("with_adapter", [True, False], ids=["adapter", "reference model"])
def test_preferences(models: Path, tmp_path: Path, with_adapter: bool) -> None:
    logged = compare(tmp_path, dpo, models, with_adapter)
    assert {"loss", "rewards/margins", "rewards/accuracies", "logps/chosen"} <= logged[0].keys()


def test_reward_model(models: Path, tmp_path: Path) -> None:
    logged = compare(tmp_path, reward, models)
    assert {"loss", "accuracy", "margin", "mean_reward"} <= logged[0].keys()


def test_answers_in_the_loop(models: Path, tmp_path: Path) -> None:
    """Sampled with the seed of one process, and so the same."""
    logged = compare(tmp_path, grpo, models, {"temperature": 0.7}, ranks=2)
    assert {"loss", "reward", "reward_std", "completions/mean_length"} <= logged[0].keys()


def refused(models: Path, tmp_path: Path) -> None:
    """On a rank: each trainer, with what it refuses."""
    grpo = options(trl.GRPOConfig, tmp_path, num_generations=2)
    mesh = mesh_of(grpo)
    model = shardconv_runtime.load(models / "out", mesh=mesh, training=True)
    adapted = shardconv_runtime.load(models / "out", mesh=mesh, training=True, adapter=models / "adapter")
    local = shardconv_runtime.load(models / "out", mesh=mesh, training=True, gather_logits=False)
    texts = {"train_dataset": text(), "processing_class": tokenizer(), "mesh": mesh}
    judged = {"train_dataset": pairs(), "processing_class": tokenizer(), "mesh": mesh}
    answered = {**judged, "reward_funcs": vowels}
    sft = options(trl.SFTConfig, tmp_path)
    dpo = options(trl.DPOConfig, tmp_path)
    precomputed = changed(dpo, precompute_ref_log_probs=True)
    by_batch, compared = changed(grpo, scale_rewards="batch"), changed(grpo, beta=0.1)
    for message, trainer, given, args, how in (
        ("without gather_logits=False", ShardedSFTTrainer, local, sft, texts),
        ("bf16, fp16, fsdp", ShardedSFTTrainer, model, changed(sft, bf16=True), texts),
        ("load the model again", ShardedSFTTrainer, model, changed(sft, auto_find_batch_size=True), texts),
        ("the model loaded once more, as ref_model=", ShardedDPOTrainer, model, dpo, judged),
        ('"ref": DIRECTORY', ShardedDPOTrainer, adapted, dpo, judged),
        ("copy whole weights", ShardedDPOTrainer, model, precomputed, {**judged, "ref_model": adapted}),
        ("scale rewards by groups", ShardedGRPOTrainer, model, by_batch, answered),
        ("compares with a second model", ShardedGRPOTrainer, model, compared, answered),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            trainer(given, args, **how)


def changed(args: Any, **fields: Any) -> Any:
    """A copy, whose own checks do not run again."""
    other = copy.copy(args)
    vars(other).update(fields)
    return other


def test_what_would_be_wrong_is_refused_on_every_rank(models: Path, tmp_path: Path) -> None:
    run_processes(2, refused, models, tmp_path)


@pytest.mark.slow
def test_the_lines_of_the_guide(models: Path, tmp_path: Path) -> None:
    """The first program of docs/training.md, on CPUs."""
    page = (ROOT / "docs" / "training.md").read_text()
    section = page.partition("## An adapter in fifteen lines")[2]
    program = section.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    (tmp_path / "sft.py").write_text(program.replace("bf16=False,", "bf16=False, use_cpu=True,"))
    (tmp_path / "README.md").write_text("\n\n".join(LINES))
    (tmp_path / "out-lora").symlink_to(models / "adapter")
    shutil.copytree(models / "out", tmp_path / "out")
    tokenizer().save_pretrained(tmp_path / "out")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "sft.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'loss'" in done.stdout
    base = transformers.AutoModelForCausalLM.from_pretrained(models / "plain")
    trained = peft.PeftModel.from_pretrained(base, tmp_path / "trained" / "model").state_dict()
    assert any(bool(tensor.any()) for name, tensor in trained.items() if "lora_B" in name)
