"""The examples of training, run as scripts, have the losses of one process with the unsharded model."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from distributed import forget_launcher, run_processes
from safetensors.torch import load_file

import shardconv

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
DATA = EXAMPLES / "train.py"
CLOSE = 1e-6
"""Relative: models compute in float64, but rotary tables and losses of transformers are in float32."""

Losses = list[tuple[float, float]]
"""Of each step the loss and the norm of the gradients."""


def run(script: str, arguments: list[str], alone: bool = False) -> None:
    """What ``torchrun examples/SCRIPT`` does on a rank; ``alone``: what ``python`` does."""
    if alone:
        forget_launcher()
    sys.argv = [script, *arguments, str(DATA)]
    sys.path.insert(0, str(EXAMPLES))  # as python does for a script
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``out`` for two ranks, and ``plain``, the same weights for transformers; in float64."""
    root = tmp_path_factory.mktemp("models")
    config = json.loads((EXAMPLES / "small" / "config.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "dtype": "float64"}
    (root / "config").mkdir()
    (root / "config" / "config.json").write_text(json.dumps({**config, **small}))
    shardconv.convert(root / "config", root / "out", 2, random_init=True, sequence_parallel=True)
    shardconv.merge(root / "out", root / "plain")
    return root


def require_close(found: Losses, expected: Losses) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for value, wanted in zip(ours, theirs, strict=True):
            assert math.isclose(value, wanted, rel_tol=CLOSE), (found, expected)


def lines(path: Path) -> Losses:
    """That ``train.py`` wrote."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["step"] for each in found] == list(range(len(found)))
    return [(each["loss"], each["grad_norm"]) for each in found]


def test_the_loop_in_parts_and_resumed(models: Path, tmp_path: Path) -> None:
    """Accumulation, sequence parallelism of a length that tp does not divide, recomputation, clipping."""
    common = ["--batch", "4", "--length", "33", "--accumulate", "2", "--warmup", "9", "--clip", "0.5"]
    unsharded = ["--model", str(models / "plain"), "--unsharded", "--losses", str(tmp_path / "unsharded")]
    run_processes(1, run, "train", [*common, *unsharded, "--steps", "4"], True)
    parts = [*common, "--sequence-parallel", "--checkpoint-activations", "--losses", str(tmp_path / "parts")]
    saved = tmp_path / "saved"
    first = ["--model", str(models / "out"), "--steps", "2", "--save", str(saved)]
    run_processes(4, run, "train", [*parts, *first])
    rest = ["--model", str(saved / "model"), "--resume", str(saved), "--steps", "4"]
    run_processes(4, run, "train", [*parts, *rest])
    expected = lines(tmp_path / "unsharded")
    assert expected[-1][0] < expected[0][0]
    require_close(lines(tmp_path / "parts"), expected)


def history(output: Path) -> tuple[Losses, list[float]]:
    """Of each step, and of evaluations, from what the Trainer saved."""
    logs = json.loads((output / "trainer_state.json").read_text())["log_history"]
    steps = [(each["loss"], each["grad_norm"]) for each in logs if "loss" in each]
    return steps, [each["eval_loss"] for each in logs if "eval_loss" in each]


def test_the_trainer_and_resumed(models: Path, tmp_path: Path) -> None:
    """Also evaluation, whose last batch is not full."""
    pytest.importorskip("accelerate")
    assert transformers.Trainer  # is imported here once, and not by each rank
    common = ["--batch", "4", "--length", "64", "--accumulate", "2", "--steps", "4", "--save-every", "2"]
    common += ["--eval-file", str(EXAMPLES / "small" / "config.json")]
    unsharded = ["--model", str(models / "plain"), "--unsharded", "--output", str(tmp_path / "unsharded")]
    run_processes(1, run, "trainer", [*common, *unsharded], True)
    out = ["--model", str(models / "out"), "--output", str(tmp_path / "parts")]
    run_processes(4, run, "trainer", [*common, *out])
    expected, evaluated = history(tmp_path / "unsharded")
    found, ours = history(tmp_path / "parts")
    assert expected[-1][0] < expected[0][0]
    require_close(found, expected)
    assert ours == pytest.approx(evaluated, rel=CLOSE)
    middle = tmp_path / "parts" / "checkpoint-2"
    resumed = ["--model", str(middle / "model"), "--resume", str(middle), "--output", str(tmp_path / "again")]
    run_processes(4, run, "trainer", [*common, *resumed])
    require_close(history(tmp_path / "again")[0], expected)


@pytest.fixture(scope="module")
def adapter(models: Path) -> Path:
    """For ``out``, and for peft."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    shardconv.adapt(models / "out", config, models / "adapter", seed=1)
    return models / "adapter"


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_adapter_with_trl(models: Path, adapter: Path, tmp_path: Path, ranks: int) -> None:
    """Batches with padding, of other numbers of tokens on each replica; resumed."""
    pytest.importorskip("trl")
    common = ["--steps", "4", "--save-every", "2"]
    given = ["--adapter", str(adapter), *common]
    unsharded = ["--model", str(models / "plain"), "--unsharded", "--output", str(tmp_path / "unsharded")]
    run_processes(1, run, "sft", [*given, *unsharded], True)
    out = ["--model", str(models / "out")]
    run_processes(ranks, run, "sft", [*given, *out, "--output", str(tmp_path / "parts")])
    expected = history(tmp_path / "unsharded")[0]
    require_close(history(tmp_path / "parts")[0], expected)
    middle = tmp_path / "parts" / "checkpoint-2"
    resumed = [
        "--adapter",
        str(middle / "model"),
        "--resume",
        str(middle),
        "--output",
        str(tmp_path / "again"),
    ]
    run_processes(ranks, run, "sft", [*common, *out, *resumed])
    require_close(history(tmp_path / "again")[0], expected)
    ours, theirs = (
        load_file(tmp_path / each / "adapter_model.safetensors") for each in ("again/model", "unsharded")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
