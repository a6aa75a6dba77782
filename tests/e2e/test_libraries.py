"""Other libraries with a sharded model: on every rank as with the unsharded model, or an error on every rank.

The habits start processes themselves, so that their ranks are started as a user starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from library_habits import HABITS, REFUSED
from places import ROOT

import shardconv

for name in ("datasets", "lightning_fabric", "sentence_transformers", "outlines", "xgrammar", "accelerate"):
    pytest.importorskip(name)

CLOSE = 1e-5
"""Relative: the loss of an unsharded model is in float32."""
IN_BFLOAT16 = {"fabric_in_mixed_precision": 1e-2}
PROGRAM = ROOT / "tests" / "helpers" / "library_habits.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model and an encoder of float64, each with its shards."""
    root = tmp_path_factory.mktemp("models")
    sizes = {
        "vocab_size": 260, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 6, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    causal = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=3))
    encoder = transformers.BertModel(transformers.BertConfig(**sizes))
    for name, model in {"causal": causal, "encoder": encoder}.items():
        model.to(torch.float64).save_pretrained(root / name)
        transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(root / name)
        shardconv.convert(root / name, root / f"{name}-2", tp=2)
    return root


def run(launcher: list[str], models: Path, place: Path, *names: str) -> dict[str, dict[str, Any]]:
    """What processes wrote, by their names."""
    place.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    command = [sys.executable, *launcher, str(PROGRAM), str(models), str(place), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return {file.name: json.loads(file.read_text()) for file in place.iterdir()}


@pytest.fixture(scope="module")
def outcomes(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of the unsharded model, and of each rank."""
    place = tmp_path_factory.mktemp("outcomes")
    return run([], models, place / "alone") | run(TORCHRUN, models, place / "ranks")


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_right_or_refused_on_every_rank(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    for found in (outcomes[rank][name] for rank in ("0", "1")):
        if name in REFUSED:
            assert str(found).startswith("refused: "), found
            assert REFUSED[name] in found
            continue
        want = outcomes["alone"][name]
        assert isinstance(want, list), want
        assert isinstance(found, list), found
        close = IN_BFLOAT16.get(name, CLOSE)
        assert found == [pytest.approx(x, rel=close, abs=1e-9) if isinstance(x, float) else x for x in want]


def test_accelerate_starts_ranks(models: Path, tmp_path: Path, outcomes: dict[str, dict[str, Any]]) -> None:
    found = run(ACCELERATE, models, tmp_path / "ranks", "accelerate_for_evaluation")
    want = outcomes["alone"]["accelerate_for_evaluation"]
    assert found.keys() == {"0", "1"}
    assert all(each["accelerate_for_evaluation"] == pytest.approx(want, rel=CLOSE) for each in found.values())
