"""Ranks that die, stall or fail while others wait for them: the others raise, soon, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from checkpoints import save_causal
from distributed import run_outcomes, run_processes
from shardconv_runtime import LaunchError, from_rank_0
from shardconv_runtime.comm import mesh, process_groups

import shardconv

SOON_S = 20
"""Well under any timeout of torch; these machines are slow."""


@dataclass(frozen=True)
class Ended:
    """How a call of a rank ended."""

    error: str
    """Type and message of what it raised."""
    seconds: float


def ended(call: Any) -> Ended:
    """Run what should raise."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return Ended(f"{type(error).__name__}: {error}", time.monotonic() - begin)
    raise AssertionError("the call returned")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted for two ranks."""
    root = tmp_path_factory.mktemp("bounded")
    shardconv.convert(save_causal("llama", root / "llama"), root / "out", tp=2, check=False)
    return root / "out"


class AtStep(transformers.LogitsProcessor):
    """Does something before the fourth token."""

    def __init__(self, action: Any) -> None:
        self.action = action
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 4:
            self.action()
        return scores


def generate(path: Path, action: Any, **options: Any) -> Ended:
    """Tokens until something happens to rank 1."""
    model = shardconv_runtime.load(path, **options)
    processor = AtStep(action if os.environ["RANK"] == "1" else lambda: None)
    ids = torch.tensor([[11, 245, 3, 77]])
    return ended(
        lambda: model.generate(
            ids, max_new_tokens=60, do_sample=False, pad_token_id=0, logits_processor=[processor]
        )
    )


def die(path: Path, how: str) -> Ended:
    deaths = {"exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    return generate(path, deaths[how])


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_rank_dies_while_all_generate(llama: Path, how: str) -> None:
    begin = time.monotonic()
    (survivor, text, _), (_, gone, _) = run_outcomes(2, die, llama, how)
    assert text is None
    assert gone == "the process died"
    assert survivor.error.startswith("RanksTimeoutError: rank 0: another rank ended")
    assert survivor.seconds < SOON_S
    assert time.monotonic() - begin < 2 * SOON_S


def fail(path: Path) -> Ended:
    def action() -> None:
        raise ValueError("no such token")

    return generate(path, action, timeout_s=2)


def test_a_rank_fails_while_all_generate(llama: Path) -> None:
    """It keeps its own error, and the other one waits no longer than it was told."""
    other, failed = run_processes(2, fail, llama)
    assert failed.error == "ValueError: no such token"
    assert other.error.startswith("RanksTimeoutError: rank 0: another rank ended")
    assert other.seconds < SOON_S


def stall(path: Path, raised: Path) -> Ended:
    """Rank 1 does nothing until rank 0 has raised."""

    def action() -> None:
        while not raised.exists():
            time.sleep(0.01)

    found = generate(path, action, timeout_s=2)
    raised.touch()
    return found


def test_a_rank_stalls_while_all_generate(llama: Path, tmp_path: Path) -> None:
    """Both raise: the one that waits after two seconds, the other one when it goes on."""
    waiting, stalled = run_processes(2, stall, llama, tmp_path / "raised")
    assert 1 < waiting.seconds < SOON_S
    assert stalled.seconds < 2 * SOON_S


def timeout_of_a_pair() -> float:
    start = mesh.launch(timeout_s=77)
    assert start.group is not None
    first = start.rank // 2 * 2
    pair = process_groups.axes_group(start.group, (first, first + 1))
    assert dist.get_world_size(pair) == 2
    return float(pair._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_groups_of_some_ranks_wait_as_long_as_that_of_all() -> None:
    """Torch gives a new group its own default, half an hour."""
    assert run_processes(4, timeout_of_a_pair) == [77] * 4


# from_rank_0 ----------------------------------------------------------------------------------------


def bring(kind: str) -> Any:
    """Something that only rank 0 makes."""
    is_first = os.environ["RANK"] == "0"

    def make() -> Any:
        assert is_first, "called on rank 0 alone"
        if kind == "value":
            return {"prompt": "hello", "ids": torch.arange(3)}
        if kind == "large":
            return b"x" * 10_000_000
        if kind == "late":
            time.sleep(1)
            return kind
        if kind == "error":
            raise KeyError("prompt")
        if kind == "end of file":
            raise EOFError
        if kind == "cannot be pickled":
            return lambda: 0
        os._exit(4)

    return from_rank_0(make)


@pytest.mark.parametrize("kind", ["value", "large", "late"])
def test_what_rank_0_has(kind: str) -> None:
    values = run_processes(3, bring, kind, start_group=True)
    if kind == "value":
        assert all(v["prompt"] == "hello" and v["ids"].tolist() == [0, 1, 2] for v in values)
    else:
        assert values == [values[0]] * 3


@pytest.mark.parametrize(
    ("kind", "own", "told"),
    [
        ("error", KeyError, "rank 0: KeyError: 'prompt'"),
        ("end of file", EOFError, "rank 0: EOFError"),
        ("cannot be pickled", Exception, "pickle"),
    ],
)
def test_what_fails_on_rank_0_fails_on_all(kind: str, own: type[Exception], told: str) -> None:
    begin = time.monotonic()
    first, *others = (error for _, _, error in run_outcomes(3, bring, kind, start_group=True))
    assert isinstance(first, own)
    assert not isinstance(first, LaunchError)
    for error in others:
        assert isinstance(error, LaunchError)
        assert str(error).startswith("rank 0: ")
        assert told in str(error)
    assert time.monotonic() - begin < SOON_S


def test_rank_0_dies_while_others_wait_for_it() -> None:
    begin = time.monotonic()
    _, *others = run_outcomes(3, bring, "death", start_group=True)
    for _, _, error in others:
        assert isinstance(error, LaunchError)
        assert "rank 0 ended" in str(error)
    assert time.monotonic() - begin < SOON_S


def one_of_them_is_gone() -> Any:
    """Rank 1 ends at once; rank 0 takes a while to answer the others."""
    from_rank_0(lambda: "all are here")
    if os.environ["RANK"] == "1":
        os._exit(4)
    for number in range(3):
        from_rank_0(lambda number=number: time.sleep(0.5) or number)
    return "done"


def test_another_rank_dies_while_rank_0_thinks() -> None:
    """Nobody learns of it before rank 0 answers; then nobody hangs, whoever passes messages to whom."""
    begin = time.monotonic()
    first, _, third = run_outcomes(3, one_of_them_is_gone, start_group=True)
    assert first[2] is not None
    assert third[2] is not None
    assert time.monotonic() - begin < 2 * SOON_S


def test_one_process_needs_no_others() -> None:
    assert not dist.is_initialized()
    assert from_rank_0(lambda: 5) == 5
    assert run_processes(1, bring, "value", start_group=True)[0]["prompt"] == "hello"
    with pytest.raises(ZeroDivisionError):
        from_rank_0(lambda: 1 // 0)
    function = from_rank_0(lambda: lambda: 3)
    assert function() == 3, "nothing is pickled where nobody else gets it"
