"""An inference job imports what it uses, and the package alone imports neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from converted import llama_plan, random_llama, write_directory

MODULES = """
    shardconv_runtime errors hub_options loaded
    comm comm.agreement comm.collectives comm.mesh
    format format.dims format.fingerprint format.header format.manifest format.measured
    format.names format.pipeline_stages format.plan format.plan_checks format.plan_json format.slices
    format.stored_layout format.typed_json
    inference inference.generation
    loading loading.building loading.load loading.rank_files loading.read_ahead loading.reading
    parallel parallel.boundary parallel.build parallel.layers parallel.meta_model parallel.model_config
    parallel.shared_storage
"""
"""Of the runtime: those that one rank imports that loads a local directory, and generates."""

MAX_MODULES, MAX_LINES = 37, 6700
FORBIDDEN = ("training", "saving", "hub", "tensors", "checkpoint")

CODE = """
import json, sys
import shardconv_runtime, shardconv_runtime.format.plan, shardconv_runtime.format.manifest
heavy = {"torch", "transformers", "shardconv", "click", "tqdm"} & set(sys.modules)
from shardconv_runtime import load
assert callable(load) and callable(shardconv_runtime.load)
heavy |= {"shardconv", "click"} & set(sys.modules)
model = load(sys.argv[1])
import torch
ids = torch.ones(1, 4, dtype=torch.long)
tokens = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("shardconv")}
print(json.dumps([sorted(heavy), files, tokens.shape[1]]))
"""


@dataclass(frozen=True)
class Imported:
    """What a new interpreter has imported."""

    heavy: list[str]
    """By the package and its formats: what they must not import."""
    files: dict[str, str]
    """Of each module of the runtime and of the converter, after tokens were generated."""
    num_tokens: int


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """Load for one rank, generate, and look."""
    model = random_llama()
    out = write_directory(tmp_path_factory.mktemp("imports") / "out", model, llama_plan(model.config, (1,)))
    command = [sys.executable, "-c", CODE, str(out)]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    return Imported(*json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_imports_neither_torch_nor_transformers(imported: Imported) -> None:
    assert imported.heavy == []


def test_one_rank_imports_what_it_uses(imported: Imported) -> None:
    """Each module that is added here is read and imported by every inference job."""
    assert imported.num_tokens == 4 + 3
    rooms = {name.removeprefix("shardconv_runtime.").partition(".")[0] for name in imported.files}
    assert not rooms & set(FORBIDDEN)
    assert {name.removeprefix("shardconv_runtime.") for name in imported.files} == set(MODULES.split())


def test_what_one_rank_imports_is_small(imported: Imported) -> None:
    lines = sum(len(Path(file).read_text().splitlines()) for file in imported.files.values())
    assert len(imported.files) <= MAX_MODULES
    assert lines <= MAX_LINES
