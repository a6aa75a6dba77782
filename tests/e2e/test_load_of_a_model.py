"""``load`` of a model that was not converted: rank 0 plans it, and the plan is there at the next start."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from distributed import run_errors, run_processes
from shardconv_runtime import CheckpointError, Planning, SourceError, Training
from shardconv_runtime.loading import planned_here
from training_runs import cpu_mesh

import shardconv

IDS = torch.tensor([[1, 5, 40, 7, 50, 9], [3, 2, 33, 0, 51, 8]])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(planned_here.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal("llama", tmp_path_factory.mktemp("model") / "llama")


def unsharded(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def logits(path: str, options: dict[str, Any]) -> tuple[torch.Tensor, list[str]]:
    """The logits of a loaded model, and the messages of its loading."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(planned_here.__name__).addHandler(handler)
    if options.pop("over_mesh", False):
        options["mesh"] = cpu_mesh(2, 2)
    model = shardconv_runtime.load(path, dtype="fp64", **options)
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found, messages


def require_right(path: Path, ranks: int, **options: Any) -> list[list[str]]:
    with torch.inference_mode():
        want = unsharded(path)(IDS).logits
    results = run_processes(ranks, logits, str(path), options)
    for found, _ in results:
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9 * float(want.abs().max()))
    return [messages for _, messages in results]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_is_planned_once(model: Path, cache: Path, ranks: int) -> None:
    first = require_right(model, ranks)
    assert [len(messages) for messages in first] == [1] + [0] * (ranks - 1)
    assert f"planned for {ranks} ranks now" in first[0][0]
    (plan,) = cache.iterdir()
    written = plan.stat().st_mtime_ns
    (message,), *others = require_right(model, ranks)
    assert message == (
        f"{model} was not converted: its plan for {ranks} ranks is the one of an earlier start, in {plan}"
    )
    assert others == [[]] * (ranks - 1)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [written]


def test_other_options_are_other_plans(model: Path, cache: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"plan": Planning(check=True)}, {"sequence_parallel": True}]
    options += [{"training": True, "data_parallel": True, "over_mesh": True}]
    for number, each in enumerate(options, start=1):
        require_right(model, 4 if "over_mesh" in each else 2, **each)
        assert len(list(cache.iterdir())) == min(number, 3), "the last one is planned for 2 ranks, too"


def test_stages_of_a_model(model: Path, cache: Path) -> None:
    require_right(model, 2, plan=Planning(pp=2))
    (error, *_) = run_errors(2, logits, str(model), {"plan": Planning(pp=3)})
    assert "cannot hold 3 stages" in str(error)


def test_a_changed_config_or_a_broken_plan_is_planned_again(model: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "own")
    require_right(tmp_path / "own", 2)
    (plan,) = cache.iterdir()
    whole = plan.read_text()
    plan.write_text(whole[:1000])
    assert "planned" in require_right(tmp_path / "own", 2)[0][0]
    assert plan.read_text() == whole
    config = tmp_path / "own" / "config.json"
    config.write_text(config.read_text().replace('"use_cache": true', '"use_cache": false'))
    require_right(tmp_path / "own", 2)
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(planned_here.CACHE_VARIABLE, str(tmp_path / "file"))
    messages, _ = require_right(model, 2)
    assert "not kept for the next start" in messages[1]


def losses(path: str) -> list[float]:
    model = shardconv_runtime.load(path, dtype=torch.float64, training=Training()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    shardconv_runtime.save(model, Path(path).parent / "trained")
    return found


def test_training_and_saving(model: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "own")
    reference = unsharded(model).train()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    want = []
    for _ in range(3):
        loss = reference(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    for found in run_processes(2, losses, str(tmp_path / "own")):
        assert found == pytest.approx(want, rel=1e-6)
    shardconv.merge(tmp_path / "trained", tmp_path / "merged")
    with torch.inference_mode():
        torch.testing.assert_close(
            unsharded(tmp_path / "merged")(IDS).logits, reference.eval()(IDS).logits, rtol=0, atol=1e-4
        )


def test_one_process_needs_no_launcher(model: Path, cache: Path) -> None:
    found, _ = logits(str(model), {})
    with torch.inference_mode():
        assert torch.allclose(found, unsharded(model)(IDS).logits)


def finds_another(root: str) -> None:
    """Rank 1 finds a converted directory where rank 0 finds a model."""
    rank = int(os.environ["RANK"])
    shardconv_runtime.load(Path(root) / ("model" if rank == 0 else "out"))


def test_all_ranks_must_find_the_same(model: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    shardconv.convert(model, tmp_path / "out", 2, check=False)
    for error in run_errors(2, finds_another, str(tmp_path)):
        assert "rank 0 finds an ordinary model, and rank 1 one that was converted" in str(error)


def test_what_is_neither(model: Path, cache: Path, tmp_path: Path) -> None:
    shardconv.convert(model, tmp_path / "out", 1, check=False)
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        shardconv_runtime.load(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        shardconv_runtime.load(tmp_path / "empty")
    shutil.copytree(model, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(SourceError, match="no weights"):
        shardconv_runtime.load(tmp_path / "weightless")


def test_a_missing_path_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"runs/out, and runs is a directory here"):
        shardconv_runtime.load("runs/out")
    with pytest.raises(SourceError, match=r"runs/out, and runs is a directory here"):
        shardconv.plan("runs/out", 2)
    assert time.monotonic() - start < 1


def test_a_hub_whose_name_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats such a request for minutes."""
    code = (
        "import time, shardconv_runtime as s\n"
        "begin = time.monotonic()\n"
        "try:\n    s.load('someone/model')\n"
        "except s.ShardconvError as error:\n    print(time.monotonic() - begin, error)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://no-such-host.invalid"}
    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_HUB_OFFLINE"):
        environment.pop(name, None)
        environment.pop(name.upper(), None)

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    seconds, _, message = done.stdout.partition(" ")
    assert float(seconds) < 20, done.stderr
    assert "the Hub cannot be reached for someone/model" in message
    assert done.stderr.count("\n") < 3, done.stderr
