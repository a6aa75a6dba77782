"""A host that waits for a GPU that waits for other ranks: here an event that nobody sets."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from captured import capturing
from converted import llama_plan, random_llama, write_directory
from distributed import run_outcomes
from forked import run_forked
from shardconv_runtime import Communication, LaunchError
from shardconv_runtime.comm import deadline as deadlines
from shardconv_runtime.comm.deadline import EXIT_CODE, Deadline, deadline, progress
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.inference.generation import DECODER
from shardconv_runtime.inference.replay import Replay
from warm_compiler import warm_up

LONG_S = 20


class Clock:
    """Goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def __call__(self) -> float:
        return next(self._seconds)


def unexpected() -> None:
    raise AssertionError("aborted")


def test_progress_keeps_a_call_alive() -> None:
    with Deadline(0, 0.5, unexpected):
        for _ in range(20):
            time.sleep(0.05)
            progress()


def test_what_reports_no_progress_is_not_watched() -> None:
    """Models with a loop of their own may take any time."""
    with Deadline(0, 0.05, unexpected):
        time.sleep(0.3)


def wait_for_others(then: Callable[[], Any], **options: Any) -> None:
    released = threading.Event()
    with Deadline(3, 2, released.set, **options):
        progress()
        assert released.wait(LONG_S)
        then()


def test_a_wait_that_is_aborted_is_an_error() -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 3: no progress in 2 s.*load\(timeout_s=\)"):
        wait_for_others(lambda: None, clock=Clock())
    assert time.monotonic() - begin < 2, "by its own clock"
    assert not deadlines._running


def test_an_error_of_an_aborted_collective_is_told_as_the_cause() -> None:
    def fail() -> None:
        raise dist.DistBackendError("NCCL communicator was aborted")

    with pytest.raises(LaunchError) as found:
        wait_for_others(fail, clock=Clock())
    assert isinstance(found.value.__cause__, dist.DistBackendError)


def test_steps_after_an_abort_are_refused() -> None:
    def go_on() -> None:
        progress()
        raise AssertionError("went on")

    with pytest.raises(LaunchError):
        wait_for_others(go_on, clock=Clock())


def hang() -> None:
    with Deadline(1, 0.1, lambda: None, grace_s=0.1):
        progress()
        time.sleep(LONG_S)


def test_a_process_that_does_not_notice_ends_with_a_message() -> None:
    done = run_forked(hang, timeout=LONG_S)
    assert done.returncode == EXIT_CODE
    assert "shardconv: rank 1: no progress in 0 s" in done.stderr


def test_nothing_is_watched_without_nccl() -> None:
    with deadline(Launch(0, 1, torch.device("cpu"))):
        assert not deadlines._running
        progress()


class AtStep(transformers.LogitsProcessor):
    """Calls something before the fourth token."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._step += 1
        if self._step == 4:
            self._action()
        return scores


def generate_while_one_fails(path: Path) -> int:
    """As if the collectives were in a graph: rank 0 waits until the abort of its groups."""
    aborted = threading.Event()
    deadlines.can_capture = lambda start: True
    deadlines.abort_groups = lambda group: aborted.set()
    model = shardconv_runtime.load(path, communication=Communication(timeout_s=1))
    seen = []

    def action() -> None:
        seen.append(len(deadlines._running))
        if os.environ["RANK"] == "1":
            raise ValueError("no such token")
        aborted.wait(LONG_S)

    ids = torch.tensor([[3, 1, 4]])
    try:
        model.generate(ids, max_new_tokens=9, pad_token_id=0, logits_processor=[AtStep(action)])
    finally:
        assert seen == [1]
        assert not deadlines._running
    return 0


def test_a_rank_fails_while_another_one_waits_in_a_graph(tmp_path: Path) -> None:
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,)))
    (_, _, waiting), (_, _, failed) = run_outcomes(2, generate_while_one_fails, path)
    assert isinstance(waiting, LaunchError)
    assert str(waiting).startswith("rank 0: no progress in 1 s")
    assert isinstance(failed, ValueError)


class FailsAtPut:
    """A streamer that raises in mid-decode."""

    def __init__(self) -> None:
        self._num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then tokens."""
        self._num_puts += 1
        if self._num_puts == 4:
            raise ValueError("no such letter")

    def end(self) -> None:
        """No more."""


def decode_while_a_streamer_fails(path: Path) -> int:
    """Rank 1's step is as if its sums were in a CUDA graph: it waits until the abort of its groups."""
    aborted = threading.Event()
    deadlines.can_capture = lambda start: True
    deadlines.abort_groups = lambda group: aborted.set()
    steps_of_call = Replay.steps_of_call
    issued = []

    def waiting(self: Replay) -> Callable[[], None]:
        step = steps_of_call(self)

        def next_step() -> None:
            issued.append(len(deadlines._running))
            if os.environ["RANK"] == "1" and len(issued) == 3:
                assert aborted.wait(LONG_S)
            else:
                step()

        return next_step

    with capturing():
        model = shardconv_runtime.load(path, communication=Communication(timeout_s=60), compile=True)
        ids = torch.tensor([[3, 1, 4]])
        model.generate(ids, max_new_tokens=2, pad_token_id=0, do_sample=False)
        Replay.steps_of_call = waiting  # type: ignore[method-assign]
        deadlines.timeout_of = lambda group: timedelta(seconds=1)
        try:
            streamer = FailsAtPut() if os.environ["RANK"] == "0" else None
            model.generate(ids, max_new_tokens=9, pad_token_id=0, do_sample=False, streamer=streamer)
        finally:
            assert issued[:2] == [1, 1], "one graph for each token, watched"
            assert vars(model)[DECODER].num_recordings == 1
            assert not deadlines._running
    return 0


def test_a_streamer_fails_while_another_rank_waits_in_a_graph(tmp_path: Path) -> None:
    warm_up()
    model = random_llama()
    path = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,)))
    begin = time.monotonic()
    (_, _, failed), (_, _, waiting) = run_outcomes(2, decode_while_a_streamer_fails, path)
    assert isinstance(failed, ValueError)
    assert isinstance(waiting, LaunchError)
    assert str(waiting).startswith("rank 1: no progress in 1 s")
    assert time.monotonic() - begin < LONG_S + 10
