"""The runtime is a distribution of its own: what it does where the converter is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
import shardconv_runtime
from places import ROOT
from shardconv_runtime.errors import LaunchError
from shardconv_runtime.versions import CONVERTER, converter_function

import shardconv

RANK = """
import json, os, sys
import torch
import shardconv_runtime

out, saved = sys.argv[1:]
assert "shardconv" not in sys.modules and "click" not in sys.modules
ids = torch.arange(3, 11).reshape(1, 8)
tokens = shardconv_runtime.load(out).generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)

model = shardconv_runtime.load(out, training=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
shardconv_runtime.save(model, saved)
with torch.no_grad():
    again = float(shardconv_runtime.load(saved)(input_ids=ids, labels=ids).loss)
    losses.append(float(model(input_ids=ids, labels=ids).loss))
try:
    model.save_pretrained(saved + "-merged")
    refusal = ""
except shardconv_runtime.LaunchError as error:
    refusal = str(error)
found = [tokens.tolist(), losses, again, refusal, shardconv_runtime.__file__, "shardconv" in sys.modules]
if os.environ["RANK"] == "0":
    print(json.dumps(found))
"""


def project(file: Path) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads(file.read_text())["project"]
    return found


def test_the_converter_needs_the_runtime_of_its_version() -> None:
    assert (
        f"shardconv-runtime=={shardconv_runtime.__version__}"
        in project(ROOT / "pyproject.toml")["dependencies"]
    )


def test_the_runtime_needs_as_new_libraries_and_no_others() -> None:
    of_both = project(ROOT / "pyproject.toml")["dependencies"]
    of_runtime = project(ROOT / "runtime" / "pyproject.toml")["dependencies"]
    assert isinstance(of_both, list)
    assert isinstance(of_runtime, list)
    assert set(of_runtime) < set(of_both)
    assert {line.partition(">")[0] for line in of_runtime} == {
        "huggingface_hub", "numpy", "safetensors", "torch", "transformers",
    }  # fmt: skip


def test_extras_of_the_converter_are_those_of_the_runtime() -> None:
    of_both = project(ROOT / "pyproject.toml")["optional-dependencies"]
    of_runtime = project(ROOT / "runtime" / "pyproject.toml")["optional-dependencies"]
    assert isinstance(of_both, dict)
    assert isinstance(of_runtime, dict)
    assert {name: of_both[name] for name in of_runtime} == {
        name: [f"shardconv-runtime[{name}]"] for name in of_runtime
    }


def test_the_converter_is_found_where_it_is_installed() -> None:
    assert converter_function("merge", "merging").__name__ == "merge"
    assert converter_function("plan_adapter", "planning").__module__ == "shardconv.converted.adaptation"


def test_where_it_is_missing_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardconv_runtime.versions.entry_points", lambda **_: metadata.EntryPoints())
    with pytest.raises(LaunchError, match=r"needs a plan.*which needs the package shardconv; install it"):
        converter_function("plan_adapter", "a new adapter needs a plan")
    assert CONVERTER.startswith("shardconv_runtime")


@pytest.mark.slow  # installs torch and transformers
def test_an_empty_environment(saved_llama: Path, tmp_path: Path) -> None:
    """The wheel is installed, and nothing of the repository is on the path."""
    out = tmp_path / "out"
    shardconv.convert(saved_llama, out, tp=2, dtype="float32")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    subprocess.run([*pip, "torch==2.13.0"], check=True, cwd=tmp_path)  # before what depends on it
    subprocess.run([*pip, ROOT / "runtime"], check=True, cwd=tmp_path)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*launch, out, tmp_path / "saved"],
        cwd=tmp_path,
        env=environment | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    tokens, losses, again, refusal, file, imported = json.loads(done.stdout.splitlines()[-1])
    assert file.startswith(str(tmp_path))
    assert not imported
    assert len(tokens[0]) == 8 + 5
    assert losses[0] > losses[1] > losses[2]
    assert again == pytest.approx(losses[2], rel=1e-5)
    assert "save_pretrained merges the shards of all ranks, which needs the package shardconv" in refusal
    assert "shardconv merge" in refusal
    subprocess.run(
        [sys.executable, "-m", "shardconv", "merge", tmp_path / "saved", tmp_path / "merged"], check=True
    )
    assert (tmp_path / "merged" / "config.json").is_file()
