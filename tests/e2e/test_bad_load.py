"""Converted directories that somebody has changed: every rank says what is wrong, and none hangs.

The errors of a launch and of single files are tested with hand-made plans elsewhere; here are those
that need a second conversion.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import shardconv_runtime
import torch
from checkpoints import save_causal
from distributed import run_errors, run_errors_of_each
from safetensors.torch import load_file, save_file
from shardconv_runtime import CheckpointError, LaunchError, PlanError, ShardconvError
from shardconv_runtime.files.manifest import rank_directory

import shardconv


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories ``llama-2``, ``llama-4``, ``qwen2-2``, and ``tuned-2``, a llama of other weights."""
    root = tmp_path_factory.mktemp("conversions")
    for model_type, sizes in (("llama", (2, 4)), ("qwen2", (2,))):
        path = save_causal(model_type, root / model_type)
        for tp in sizes:
            shardconv.convert(path, root / f"{model_type}-{tp}", tp=tp, check=False)
    shutil.copytree(root / "llama", root / "tuned")
    weights = root / "tuned" / "model.safetensors"
    save_file({n: 2 * t for n, t in load_file(weights).items()}, weights, {"format": "pt"})
    shardconv.convert(root / "tuned", root / "tuned-2", tp=2, check=False)
    return root


def lose_common(out: Path, root: Path) -> None:
    shutil.rmtree(out / "common")


def take_rank_of_other_tp(out: Path, root: Path) -> None:
    for file in (root / "llama-4" / rank_directory(1, 4)).iterdir():
        shutil.copy(file, out / rank_directory(1, 2) / file.name)


def take_rank_of_other_model(out: Path, root: Path) -> None:
    shutil.rmtree(out / rank_directory(1, 2))
    shutil.copytree(root / "qwen2-2" / rank_directory(1, 2), out / rank_directory(1, 2))


def take_plan_of_other_tp(out: Path, root: Path) -> None:
    shutil.copy(root / "llama-4" / "plan.json", out)


def take_plan_and_manifest_of_other_tp(out: Path, root: Path) -> None:
    take_plan_of_other_tp(out, root)
    shutil.copy(root / "llama-4" / "manifest.json", out)


def lose_manifest(out: Path, root: Path) -> None:
    (out / "manifest.json").unlink()


def change_config(out: Path, root: Path) -> None:
    text = (out / "config.json").read_text()
    assert '"num_hidden_layers": 2' in text
    (out / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))


CHANGES: dict[Callable[[Path, Path], None], tuple[type[ShardconvError], str]] = {
    lose_common: (CheckpointError, "common"),
    take_rank_of_other_tp: (CheckpointError, rank_directory(1, 2)),
    take_rank_of_other_model: (CheckpointError, rank_directory(1, 2)),
    take_plan_of_other_tp: (ShardconvError, "plan.json"),
    take_plan_and_manifest_of_other_tp: (CheckpointError, rank_directory(0, 4)[-8:]),
    lose_manifest: (CheckpointError, "manifest.json"),
    change_config: (ShardconvError, "config.json"),
}
"""What some rank raises, and what all say."""


def test_every_rank_raises(conversions: Path, tmp_path: Path) -> None:
    for change in CHANGES:
        shutil.copytree(conversions / "llama-2", tmp_path / change.__name__)
        change(tmp_path / change.__name__, conversions)
    calls = [(tmp_path / change.__name__,) for change in CHANGES]
    begin = time.monotonic()
    found = run_errors_of_each(2, shardconv_runtime.load, calls)
    assert time.monotonic() - begin < 60
    for errors, (kind, says) in zip(found, CHANGES.values(), strict=True):
        assert any(isinstance(error, kind) for error in errors)
        for error in errors:
            assert isinstance(error, ShardconvError)
            assert says in str(error)
            assert "\n" not in str(error)
            assert len(str(error)) < 500


def train(path: Path) -> None:
    model = shardconv_runtime.load(path)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]))


def test_a_plan_for_inference_is_not_trained(conversions: Path) -> None:
    """Its gradients would be wrong."""
    for error in run_errors(2, train, conversions / "llama-2"):
        assert isinstance(error, PlanError)
        assert "inference" in str(error)


def load_by_rank(paths: tuple[Path, Path], dtypes: tuple[str | None, str | None] = (None, None)) -> None:
    rank = int(os.environ["RANK"])
    shardconv_runtime.load(paths[rank], dtype=dtypes[rank])


def test_ranks_that_load_different_models_raise(conversions: Path) -> None:
    """The plans are equal, and so are all sizes and headers."""
    for error in run_errors(2, load_by_rank, (conversions / "llama-2", conversions / "tuned-2")):
        assert isinstance(error, LaunchError)
        assert "the same conversion" in str(error)
        assert "of tuned" in str(error)


def test_ranks_that_load_in_different_forms_raise(conversions: Path) -> None:
    out = conversions / "llama-2"
    for error in run_errors(2, load_by_rank, (out, out), ("float32", None)):
        assert isinstance(error, LaunchError)
        assert "dtype" in str(error)


def test_copies_in_different_directories_are_one_conversion(conversions: Path, tmp_path: Path) -> None:
    shutil.copytree(conversions / "llama-2", tmp_path / "copy")
    assert run_errors(2, load_by_rank, (conversions / "llama-2", tmp_path / "copy")) == [None, None]


def verified(path: Path) -> None:
    shardconv_runtime.load(path, verify=True)


def flip(file: Path) -> None:
    """Change the last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("directory", [rank_directory(1, 2), "common"])
def test_verifying_finds_a_changed_byte(conversions: Path, tmp_path: Path, directory: str) -> None:
    out = tmp_path / "out"
    shutil.copytree(conversions / "llama-2", out)
    assert run_errors(2, verified, out) == [None, None]
    flip(next((out / directory).iterdir()))
    for error in run_errors(2, verified, out):
        assert isinstance(error, ShardconvError)
        assert f"{directory}/" in str(error)
        assert "checksum" in str(error)


def test_every_changed_bit_is_found(tmp_path: Path) -> None:
    """Of the weights, the plan, the configs and the manifest, whatever its meaning."""
    out = tmp_path / "out"
    shardconv.convert(save_causal("llama", tmp_path / "llama"), out, tp=1, check=False)
    files = sorted(file for file in out.rglob("*") if file.is_file())
    rng = random.Random(5)
    for number in range(60):
        file = files[number % len(files)]
        data = file.read_bytes()
        position = rng.randrange(len(data))
        changed = bytes([data[position] ^ 1 << rng.randrange(8)])
        file.write_bytes(data[:position] + changed + data[position + 1 :])
        with pytest.raises(ShardconvError):
            verified(out)
        file.write_bytes(data)
    verified(out)


def test_an_ordinary_checkpoint_has_no_checksums_to_verify(conversions: Path) -> None:
    with pytest.raises(PlanError, match="verify=True"):
        shardconv_runtime.load(conversions / "llama", plan=conversions / "llama-2" / "plan.json", verify=True)


def take_rank_of_other_weights(out: Path, root: Path) -> None:
    """Names, sizes and headers are equal."""
    shutil.rmtree(out / rank_directory(1, 2))
    shutil.copytree(root / "tuned-2" / rank_directory(1, 2), out / rank_directory(1, 2))


def test_a_file_of_another_conversion_is_noticed(conversions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(conversions / "llama-2", out)
    take_rank_of_other_weights(out, conversions)
    for error in run_errors(2, shardconv_runtime.load, out):
        assert isinstance(error, ShardconvError)
        assert f"{rank_directory(1, 2)}/" in str(error)
        assert "is not the file that was written" in str(error)
    for function in (shardconv.merge, shardconv.reshard):
        with pytest.raises(CheckpointError, match="is not the file that was written"):
            function(out, tmp_path / "made", **({"tp": 4} if function is shardconv.reshard else {}))
