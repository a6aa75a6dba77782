"""``save_pretrained`` of a loaded model: an ordinary checkpoint of the full model, as it is now."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from checkpoints import save_causal
from distributed import run_errors, run_processes
from shardconv_runtime import CheckpointError, LaunchError, PlanError
from shardconv_runtime.comm import agreement
from torch.distributed.device_mesh import init_device_mesh

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrained")
    shardconv.convert(save_causal("gpt2", root / "gpt2"), root / "out", tp=2, check=False)
    return root / "out"


def trained(path: Path) -> tuple[Any, torch.Tensor]:
    """A model after a step at tp 2 x FSDP 2, and its logits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shardconv_runtime.load(path, mesh=mesh, training=True, gather_logits=True)
    shardconv_runtime.data_parallel(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = IDS[mesh["dp"].get_local_rank()][None]
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        return model, model(IDS).logits


def train_and_save(path: Path, target: Path) -> torch.Tensor:
    model, logits = trained(path)
    model.config.id2label = {0: "mine"}
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(target, max_shard_size="20KB")
    return logits


def test_a_trained_model_loads_in_transformers(out: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    target.mkdir()
    for stale in ("model.safetensors", "config.json", "notes.txt"):
        (target / stale).write_text("stale")
    logits = run_processes(4, train_and_save, out, target)[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]
    assert (target / "notes.txt").exists()
    assert not (target / "model.safetensors").exists()
    assert (target / "model.safetensors.index.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    assert model.config.id2label == {0: "mine"}
    assert model.generation_config.max_new_tokens == 7
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits)
    before = transformers.AutoModelForCausalLM.from_pretrained(out.parent / "gpt2")
    assert not torch.equal(before.transformer.wte.weight, model.transformer.wte.weight)


def save_base_model(path: Path, target: Path) -> None:
    model: Any = shardconv_runtime.load(path)
    model.config.id2label = {0: "mine"}
    model.base_model.save_pretrained(target, max_shard_size="20KB")


def test_a_base_model_is_saved_as_transformers_saves_it(out: Path, tmp_path: Path) -> None:
    run_processes(2, save_base_model, out, tmp_path / "ranks")
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(out.parent / "gpt2")
    whole.config.id2label = {0: "mine"}
    whole.base_model.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    written, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("ranks", "whole")
    )
    assert len(expected) > 2
    assert written == expected


def save_in_float64(path: Path, target: Path) -> None:
    model = shardconv_runtime.load(path, dtype="float64")
    model.save_pretrained(target)


def test_the_config_says_the_dtype_of_the_weights(out: Path, tmp_path: Path) -> None:
    run_processes(2, save_in_float64, out, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["dtype"] == "float64"
    assert config["architectures"] == ["GPT2LMHeadModel"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.dtype == torch.float64


def save_on_one(path: Path, target: Path) -> None:
    agreement.AGREE_TIMEOUT_S = 2
    model = shardconv_runtime.load(path)
    if dist.get_rank() == 0:
        model.save_pretrained(target)
    else:
        time.sleep(4)  # something else


def test_a_call_on_one_rank_ends_in_bounded_time(out: Path, tmp_path: Path) -> None:
    error, _ = run_errors(2, save_on_one, out, tmp_path / "saved")
    assert isinstance(error, LaunchError)
    assert not (tmp_path / "saved").exists()


def save_with(path: Path, target: Path, options: dict[str, Any]) -> None:
    shardconv_runtime.load(path).save_pretrained(target, **options)


@pytest.mark.parametrize("option", ["state_dict", "push_to_hub", "variant", "distributed_checkpoint"])
def test_other_options_are_refused(out: Path, tmp_path: Path, option: str) -> None:
    options = {option: {} if option == "state_dict" else "fp16" if option == "variant" else True}
    for error in run_errors(2, save_with, out, tmp_path / "saved", options):
        assert isinstance(error, PlanError)
        assert option in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_its_place_is_an_error_on_all_ranks(out: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("a file")
    first, second = run_errors(2, save_with, out, tmp_path / "saved", {})
    assert isinstance(first, CheckpointError | LaunchError)
    assert isinstance(second, CheckpointError | LaunchError)
    assert "is a file" in str(first)
    assert "is a file" in str(second)
