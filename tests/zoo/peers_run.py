"""Runs the shared suites of transformers on one type: unsharded, then on ranks that run each test together.

A process without our code runs each test first. Ranks are then right in a test if it passes on all of them,
and every call of a model returned what it returned in the first process.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
import traceback
import types
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import plans_once
import torch
import torch.distributed as dist
import transformers
from distributed import torchrun_env
from ports import free_port
from shardconv_runtime.format.plan import Plan

from .kept_rows import Row
from .peers_left_out import why_left_out
from .peers_models import Digest, Models, is_refusal
from .peers_suite import suite_modules, test_case, tests_of

PASSED, REFUSED, FAILED, SKIPPED, LEFT_OUT = "passed", "refused", "failed", "skipped", "left out"
"""As unsharded; an error of ours on every rank; anything else; skipped by the suite or failed unsharded, too;
not applicable."""
TEST_S = 180
"""Limit for one test."""

AMPLIFIES_ROUNDING = {"test_training_overfit"}
"""Tests that train for hundreds of steps: what models return then is not compared, only the outcome."""


@dataclass(frozen=True)
class Outcome:
    """What became of a test in one process."""

    status: str
    text: str = ""
    digests: Sequence[Digest] = ()


@dataclass
class Ranks:
    """Processes that run the tests that they are told, all of them the same.

    Args:
        folder: the source distribution.
        num_ranks: 0 for one process whose models stay as they are.
        plans: a file of plans; rank 0 adds new ones.
    """

    folder: Path
    model_type: str
    num_ranks: int
    plans: Path
    without_sums: bool = False
    _processes: list[Any] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _scratch: Path = Path()

    def run(self, test: str) -> list[Outcome]:
        """Return the outcomes of a test by rank; start the processes if there are none."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(test)
        limit = time.monotonic() + TEST_S
        outcomes = []
        for pipe in self._pipes:
            outcome = Outcome(FAILED, "took too long, or a process died")
            with suppress(EOFError, ConnectionError):
                if pipe.poll(max(0.0, limit - time.monotonic())):
                    outcome = pickle.loads(pipe.recv_bytes())
            outcomes.append(outcome)
        # Ranks whose outcomes differ may be at different collectives.
        if len({outcome.status for outcome in outcomes}) > 1 or any(
            outcome.status == FAILED for outcome in outcomes
        ):
            self.stop()
        return outcomes

    def _start(self) -> None:
        context, port = multiprocessing.get_context("fork"), free_port()
        self._scratch = Path(tempfile.mkdtemp(prefix="peers-"))
        for rank in range(max(self.num_ranks, 1)):
            ours, theirs = context.Pipe()
            environment = torchrun_env(rank, self.num_ranks, port) if self.num_ranks > 1 else {}
            process = context.Process(target=_rank, args=(theirs, environment, self), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes; the next test starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def read_plans(self) -> dict[str, Plan]:
        """Return the plans that earlier processes wrote."""
        plans: dict[str, Plan] = {}
        if self.plans.exists():
            with self.plans.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
                while True:
                    plans |= pickle.load(file)
        return plans


def _rank(pipe: Connection, environment: Mapping[str, str], ranks: Ranks) -> None:
    gc.freeze()  # a search for garbage would copy all memory of the parent
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # threads that poll do not preempt others
    output = os.open(ranks._scratch / f"output-{environment.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(environment)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_warning()  # some tests read the warnings
    plans_once.install(ranks._scratch)  # plans without measuring
    plans_once.Solved.attention_weights = True
    models = Models(ranks.num_ranks, ranks.read_plans(), without_sums=ranks.without_sums)
    models.install()
    case = test_case(ranks.folder, ranks.model_type)
    if ranks.num_ranks > 1:
        dist.init_process_group("gloo")
    common = suite_modules(ranks.folder)[0]
    while True:
        try:
            test = pipe.recv()
        except EOFError:
            return
        common.tempfile = _SharedDirectories(ranks._scratch / test)
        known = set(models.plans)
        outcome = _run(case, test, models, common)
        if outcome.status == REFUSED:  # the form for training refuses calls that the one for inference takes
            models.training = False
            common.tempfile = _SharedDirectories(ranks._scratch / test / "inference")
            for_inference = _run(case, test, models, common)
            outcome = for_inference if for_inference.status == PASSED else outcome
            models.training = True
        new = {key: plan for key, plan in models.plans.items() if key not in known}
        if new and os.environ.get("RANK", "0") == "0":
            with ranks.plans.open("ab", buffering=0) as file:
                file.write(pickle.dumps(new))
        pipe.send_bytes(pickle.dumps(outcome))


class _SharedDirectories(types.ModuleType):
    """In place of ``tempfile`` in a suite: the n-th directory of a test is the same for all ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tempfile")
        self._folder, self._count = folder, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)

    def mkdtemp(self, *args: Any, **kwargs: Any) -> str:
        self._count += 1
        path = self._folder / str(self._count)
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def TemporaryDirectory(self, *args: Any, **kwargs: Any) -> _Directory:
        return _Directory(self.mkdtemp())


@dataclass(frozen=True)
class _Directory:
    """It is removed when the ranks end, since another rank may still read."""

    name: str

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *error: object) -> None:
        pass

    def cleanup(self) -> None:
        pass


class _Result(unittest.TestResult):
    """Keeps the first error itself, and the reason for skipping."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.skip_reason = ""

    def addError(self, test: Any, error: Any) -> None:
        self.error = self.error or error[1]

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        if error is not None:
            self.addError(test, error)

    def addSkip(self, test: Any, reason: str) -> None:
        self.skip_reason = reason or "skipped"


def _run(case: type[unittest.TestCase], test: str, models: Models, suite: Any) -> Outcome:
    random.seed(0)
    suite.global_rng.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    models.digests.clear()
    result = _Result()
    case(test).run(result)
    digests = tuple(models.digests)
    gc.collect()
    if result.error is not None:
        status = REFUSED if is_refusal(result.error) else FAILED
        if status == FAILED:
            traceback.print_exception(result.error)
        return Outcome(status, _line(result.error), digests)
    if result.skip_reason:
        return Outcome(SKIPPED, result.skip_reason)
    return Outcome(PASSED, "", digests)


def _line(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None and is_refusal(cause):  # the innermost error of ours
        error, cause = cause, cause.__cause__ or cause.__context__
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "unittest" not in frame.filename
    ]
    suite = [frame for frame in frames if "test_modeling_common" in frame.filename]
    where = f" (line {suite[-1].lineno} of the suite)" if suite and not is_refusal(error) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}{where}"


def judge(unsharded: Outcome, ranks: Sequence[Outcome]) -> Outcome:
    """Return what the outcomes of the ranks amount to, beside that of the unsharded model."""
    for rank, outcome in enumerate(ranks):
        if outcome.status != ranks[0].status:
            differing = f"{ranks[0].status} {ranks[0].text}, rank {rank}: {outcome.status} {outcome.text}"
            return Outcome(FAILED, f"not alike on all ranks: rank 0: {differing}")
    if ranks[0].status == SKIPPED:
        return Outcome(FAILED, f"skipped on ranks only: {ranks[0].text}")
    if ranks[0].status != PASSED:
        return ranks[0]
    for rank, outcome in enumerate(ranks):
        if len(outcome.digests) != len(unsharded.digests):
            counts = f"{len(outcome.digests)} tensors, unsharded {len(unsharded.digests)}"
            return Outcome(FAILED, f"other results: rank {rank} returns {counts}")
        for expected, digest in zip(unsharded.digests, outcome.digests, strict=True):
            if difference := expected.difference(digest):
                return Outcome(FAILED, f"other results: rank {rank}: {difference}")
    return Outcome(PASSED)


@dataclass
class Suites:
    """The suites on one type, with the outcomes of the unsharded model."""

    folder: Path
    model_type: str
    plans: Path
    unsharded: dict[str, Outcome]

    @classmethod
    def begin(cls, folder: Path, model_type: str, plans: Path, only: Sequence[str] = ()) -> Suites:
        """Run the tests unsharded.

        Args:
            plans: a file for plans, which the processes of one run share.
            only: parts of names of tests.
        """
        plans.unlink(missing_ok=True)
        names = tests_of(test_case(folder, model_type))
        chosen = [name for name in names if not only or any(part in name for part in only)]
        ranks = Ranks(folder, model_type, 0, plans)
        unsharded = {
            name: Outcome(LEFT_OUT, reason)
            if (reason := why_left_out(model_type, name))
            else ranks.run(name)[0]
            for name in chosen
        }
        ranks.stop()
        return cls(folder, model_type, plans, unsharded)

    def run(self, num_ranks: int, without_sums: bool = False) -> Iterator[tuple[str, Outcome]]:
        """Yield the outcome of each test on ranks."""
        ranks = Ranks(self.folder, self.model_type, num_ranks, self.plans, without_sums)
        for name, unsharded in self.unsharded.items():
            if unsharded.status in (SKIPPED, LEFT_OUT):
                yield name, unsharded
            elif unsharded.status != PASSED:
                yield name, Outcome(SKIPPED, f"fails unsharded: {unsharded.text}")
            else:
                outcomes = ranks.run(name)
                if name in AMPLIFIES_ROUNDING:
                    unsharded, *outcomes = (replace(each, digests=()) for each in (unsharded, *outcomes))
                yield name, judge(unsharded, outcomes)
        ranks.stop()


def row_of(model_type: str, num_ranks: int, outcomes: Mapping[str, Outcome], seconds: float) -> Row:
    """Return the row of a type: counts, and the tests that did not pass by what was said."""
    row: Row = {"type": model_type, "tp": num_ranks, "seconds": round(seconds)}
    row |= Counter(outcome.status.replace(" ", "_") for outcome in outcomes.values())
    for status in (REFUSED, FAILED):
        said: dict[str, list[str]] = {}
        for name, outcome in outcomes.items():
            if outcome.status == status:
                said.setdefault(outcome.text, []).append(name)
        row[f"{status}_tests"] = said
    return row
