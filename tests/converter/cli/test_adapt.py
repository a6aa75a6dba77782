"""``shardconv adapt``: what it writes, and what it refuses with one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapters import low_rank, save_adapters, save_base
from safetensors.torch import load_file

import shardconv
from shardconv.cli.entry import run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``lora`` and ``out``."""
    root = tmp_path_factory.mktemp("adapt")
    save_base(root / "base")
    save_adapters(root / "base", root / "lora", {"default": low_rank()})
    shardconv.convert(root / "base", root / "out", 2, check=False)
    (root / "lora.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    return root


def test_a_trained_adapter_keeps_its_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adapt", str(root / "out"), str(root / "lora"), str(root / "trained")]) == 0
    names = {"adapter_config.json", "adapter_model.safetensors", "adapter_plan.json", "README.md"}
    assert {path.name for path in (root / "trained").iterdir()} == names
    for name in names - {"adapter_plan.json"}:
        assert (root / "trained" / name).read_bytes() == (root / "lora" / name).read_bytes()
    assert f'adapter="{root / "trained"}")' in capsys.readouterr().out


def test_a_new_adapter_depends_on_its_seed(root: Path) -> None:
    for name, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        command = ["adapt", str(root / "out"), str(root / name), "--new", str(root / "lora.json")]
        assert run([*command, "--seed", seed, "--no-check", "--quiet"]) == 0
    one, again, two = (load_file(root / n / "adapter_model.safetensors") for n in ("one", "again", "two"))
    a = next(name for name in one if "lora_A" in name)
    assert (one[a] == again[a]).all()
    assert (one[a] != two[a]).any()
    assert not any(one[name].any() for name in one if "lora_B" in name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out", "lora"], "give ADAPTER and DST"),
        (["out", "lora", "new", "--seed", "1"], "--seed is for the weights of a new adapter"),
        (["out", "lora", "new", "--new", "lora.json"], "give DST"),
        (["out", "lora", "base"], "is not empty; name a directory to make"),
        (["base", "lora", "new"], "manifest.json"),
        (["out", "base", "new"], "adapter_config.json"),
        (["out", "new", "--new", "absent.json"], "absent.json"),
        (["out", "lora", "lora.json"], "is a file"),
    ],
)
def test_wrong_use_is_one_line(
    root: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [a if a.startswith("--") or a.isdigit() else str(root / a) for a in arguments]
    before = {path.name for path in root.iterdir()}
    assert run(["adapt", *paths]) in (2, 3, 5)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: ")
    assert message in line
    assert {path.name for path in root.iterdir()} == before
