"""An inference job imports what it uses, and the package alone imports neither torch nor transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from converted import llama_plan, random_llama, write_directory
from distributed import free_port, torchrun_env

import shardconv

MODULES = """
    shardconv_runtime errors hub_options loaded
    comm comm.agreement comm.collectives comm.mesh
    format format.dims format.fingerprint format.header format.manifest format.measured
    format.names format.pipeline_stages format.plan format.plan_checks format.plan_json format.slices
    format.stored_layout format.typed_json
    inference inference.generation
    loading loading.building loading.load loading.rank_files loading.read_ahead loading.reading
    parallel parallel.build parallel.meta_model parallel.model_config parallel.shared_storage
"""
"""Of the runtime: those that one rank imports that loads a local directory, and generates."""

MAX_MODULES, MAX_LINES = 35, 6000
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
    (found,) = imported_by(out, 1)
    return found


def imported_by(out: Path, tp: int) -> list[Imported]:
    """By each rank, in interpreters of their own."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(out)],
            env=os.environ | (torchrun_env(rank, tp, port) if tp > 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(tp)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    return [Imported(*json.loads(text.splitlines()[-1])) for text in printed]


def test_importing_the_package_imports_neither_torch_nor_transformers(imported: Imported) -> None:
    assert imported.heavy == []


def test_one_rank_imports_what_it_uses(imported: Imported) -> None:
    """Each module that is added here is read and imported by every inference job."""
    assert imported.num_tokens == 4 + 3
    assert not rooms(imported) & set(FORBIDDEN)
    assert {name.removeprefix("shardconv_runtime.") for name in imported.files} == set(MODULES.split())


def rooms(imported: Imported) -> set[str]:
    return {name.removeprefix("shardconv_runtime.").partition(".")[0] for name in imported.files}


def num_lines(imported: Imported) -> int:
    return sum(len(Path(file).read_text().splitlines()) for file in imported.files.values())


def test_what_one_rank_imports_is_small(imported: Imported) -> None:
    assert len(imported.files) <= MAX_MODULES
    assert num_lines(imported) <= MAX_LINES


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "max_modules", "max_lines"), [(1, 38, 6000), (2, 68, 9000)])
def test_what_ranks_of_a_conversion_import_is_small(
    tp: int, max_modules: int, max_lines: int, saved_llama: Path, tmp_path: Path
) -> None:
    """With all that a converter adds to a plan; several ranks communicate, and compare their calls."""
    shardconv.convert(saved_llama, tmp_path / "out", tp=tp)
    for imported in imported_by(tmp_path / "out", tp):
        assert imported.num_tokens == 4 + 3
        assert not rooms(imported) & set(FORBIDDEN)
        assert len(imported.files) <= max_modules
        assert num_lines(imported) <= max_lines
