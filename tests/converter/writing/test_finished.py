"""A command into an output that an earlier run has finished."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import CheckpointError, ShardconvError
from shardconv_runtime.files import fingerprint
from shardconv_runtime.format.plan import Plan
from small_models import hand_plan, small_config

import shardconv
from shardconv import cli, conversion
from shardconv.arguments import RandomInit, SolveOptions

pytestmark = pytest.mark.usefixtures("hand_solver")


def change_values(model: Path) -> None:
    """Give the first element of one tensor another value; sizes and times tell nothing."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, {"format": "pt"})


def change_config(model: Path) -> None:
    """Change a field that no plan depends on."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "changed"}))


def state_of(out: Path) -> dict[str, int]:
    """When each file was written."""
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("*")}


class TestTheSameRun:
    """It changes nothing."""

    @pytest.mark.parametrize("more", [[], ["--ranks", "1"], ["--ranks", "0"]], ids=str)
    def test_of_convert(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
    ) -> None:
        out = tmp_path / "out"
        shardconv.convert(llama_dir, out, 2)
        before = state_of(out)
        assert cli.run(["convert", str(llama_dir), "--tp", "2", str(out), *more]) == 0
        assert capsys.readouterr().out == f"{out}: already complete\n"
        assert state_of(out) == before

    def test_it_is_not_solved_again(
        self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unless the earlier plan may be another one: with other options, or of older code."""
        out = tmp_path / "out"
        plan = replace(hand_plan(small_config(), 2), code=fingerprint.code_info(["transformers"]))
        solved: list[SolveOptions] = []

        def solve_plan(spec: object, options: SolveOptions, **_: object) -> Plan:
            solved.append(options)
            return plan

        monkeypatch.setattr(conversion, "solve_plan", solve_plan)
        for _ in range(2):
            assert shardconv.convert(llama_dir, out, 2, check=False) == plan
        assert len(solved) == 1
        shardconv.convert(llama_dir, out, 2)  # the plan does not show whether it was checked
        assert len(solved) == 2
        os.utime(out / "manifest.json", ns=(0, 0))
        shardconv.convert(llama_dir, out, 2, check=False)
        assert len(solved) == 3

    def test_of_a_model_that_is_drawn(self, llama_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        shardconv.convert(llama_dir, out, 2, random_init=RandomInit(seed=1))
        shardconv.convert(llama_dir, out, 2, random_init=RandomInit(seed=1))
        with pytest.raises(ShardconvError, match=r"of another conversion \(source.name was .*seed 1"):
            shardconv.convert(llama_dir, out, 2, random_init=RandomInit(seed=2))

    @pytest.mark.parametrize(
        "command",
        [
            ["reshard", "OUT", "NEW", "--tp", "3"],
            ["export", "OUT", "NEW"],
            ["export", "OUT", "NEW", "--format", "hf"],
        ],
    )
    def test_of_other_commands(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
    ) -> None:
        shardconv.convert(llama_dir, tmp_path / "out", 2)
        argv = [{"OUT": str(tmp_path / "out"), "NEW": str(tmp_path / "new")}.get(arg, arg) for arg in command]
        assert cli.run(argv) == 0
        before = state_of(tmp_path / "new")
        capsys.readouterr()
        assert cli.run(argv) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'new'}: already complete\n"
        assert state_of(tmp_path / "new") == before


class TestAnotherRun:
    """It is refused, and the output stays."""

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"tp": 4}, "tp was 2, is now 4"),
            (
                {"tp": 4, "dtype": "bfloat16", "experts": "ep"},
                "tp was 2, is now 4, experts was tp, is now ep, dtype was float32, is now bfloat16",
            ),
            ({"max_file_size": 20_000}, "do --max-file-size and --keep-unused agree"),
        ],
        ids=str,
    )
    def test_with_other_options(
        self, llama_dir: Path, tmp_path: Path, options: dict[str, Any], reason: str
    ) -> None:
        shardconv.convert(llama_dir, tmp_path / "out", 2)
        before = state_of(tmp_path / "out")
        with pytest.raises(ShardconvError, match=f"{reason}.*pass --overwrite"):
            shardconv.convert(llama_dir, tmp_path / "out", **{"tp": 2, **options})
        assert state_of(tmp_path / "out") == before

    def test_of_a_model_with_several_changes(self, llama_dir: Path, tmp_path: Path) -> None:
        shardconv.convert(llama_dir, tmp_path / "out", 2)
        change_config(llama_dir)
        (llama_dir / "generation_config.json").write_text('{"note": "changed"}')
        with pytest.raises(ShardconvError, match=r"\(config.json changed, generation_config.json changed\)"):
            shardconv.convert(llama_dir, tmp_path / "out", 2)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [(change_values, "model.norm.weight has other values"), (change_config, "config.json changed")],
    )
    def test_of_a_source_that_changed(
        self, llama_dir: Path, tmp_path: Path, change: Any, reason: str
    ) -> None:
        shardconv.convert(llama_dir, tmp_path / "out", 2)
        change(llama_dir)
        with pytest.raises(ShardconvError, match=reason):
            shardconv.convert(llama_dir, tmp_path / "out", 2)

    def test_into_its_own_source(self, llama_dir: Path) -> None:
        with pytest.raises(ShardconvError, match=r"holds the model to convert; name another directory$"):
            shardconv.convert(llama_dir, llama_dir, 2)


def test_a_finished_output_that_is_damaged(llama_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardconv.convert(llama_dir, out, 2)
    shard = next(out.glob("rank-00001*/*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"rank-00001.* bytes and should have"):
        shardconv.convert(llama_dir, out, 2)
    shutil.rmtree(shard.parent)
    with pytest.raises(CheckpointError, match=r"rank-00001.* is missing \(rank 1 needs it\)"):
        shardconv.convert(llama_dir, out, 2)


def test_values_are_compared_as_bytes(llama_dir: Path, tmp_path: Path) -> None:
    file = llama_dir / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][:] = torch.nan  # not equal to itself as a number
    save_file(tensors, file, {"format": "pt"})
    shardconv.convert(llama_dir, tmp_path / "out", 2)
    shardconv.convert(llama_dir, tmp_path / "out", 2)
