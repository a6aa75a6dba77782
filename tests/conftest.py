"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Code of model directories is cached under their names, which tests that run at once share.
os.environ["HF_MODULES_CACHE"] = os.path.join(
    tempfile.gettempdir(), f"shardconv-modules-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}"
)

# An error in an operator's rule fails the test; users get a plan that replicates what the call touches.
os.environ["SHARDCONV_STRICT_RULES"] = "1"

import hypothesis
import pytest
import quick_calls  # before the code that is tested
import torch
import transformers
from shardconv_runtime.format.plan import Plan
from small_models import hand_plan, save_random, small_config
from test_log import TestLog

from shardconv.arguments import SolveOptions

SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
SLOW_TIMEOUT_S = 7200
GARBAGE_BYTES = 2**28
"""How much larger this process becomes before all of its objects are searched for garbage."""
SEVERAL_PROCESSES = ("tests/e2e/", "tests/field/", "tests/zoo/", "tests/engines/")

torch.set_num_threads(1)
if hasattr(os, "SCHED_BATCH"):
    # Here and in all processes that tests start: threads of gloo that preempt each other poll for most of the
    # time, see ``comm.process_groups.calm_gloo``.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
hypothesis.settings.register_profile("any machine", deadline=None)  # it may be busy
hypothesis.settings.load_profile("any machine")
gc.set_threshold(100_000, 50, 100)  # as it is by default, it takes an eighth of the time


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TestLog(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that are quick and start no process")


@pytest.hookimpl(optionalhook=True)  # there is no xdist in the environment with vLLM
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from longest_first import LongestFirst

    return LongestFirst(config, log)


@pytest.hookimpl(tryfirst=True)  # before those that ``-m`` leaves out are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = slow_tests()
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S), append=False)
    if config.getoption("--fast"):
        items[:] = [item for item in items if _is_fast(item)]


def slow_tests() -> tuple[str, ...]:
    """The beginnings of the ids of tests that are listed as slow."""
    lines = SLOW_TESTS.read_text().splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


def _is_fast(item: pytest.Item) -> bool:
    """Whether the whole file of a test takes little time, and starts no process."""
    from longest_first import seconds

    assert isinstance(item, pytest.Function)
    file = item.nodeid.partition("::")[0]
    starts = ("run_processes", "run_outcomes", "run_errors", "Forked", "run_forked", "subprocess")
    return (
        not file.startswith(SEVERAL_PROCESSES)
        and file not in seconds()
        and not any(name in vars(item.module) for name in starts)
    )


def pytest_collection_finish() -> None:
    """Leave the objects of all imported modules, some millions, out of every search for garbage.

    It would pass them again and again, and each forked process would copy the memory that holds them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """The same for what the tests before have imported: a compiler has a million objects.

    Garbage among what is frozen is freed when this process has become much larger.
    """
    if _resident_bytes() > _Memory.swept_at + GARBAGE_BYTES:
        quick_calls.real_unfreeze()
        gc.collect()
        _Memory.swept_at = _resident_bytes()
    gc.collect()
    gc.freeze()


class _Memory:
    swept_at = 0
    """Resident bytes after garbage was last searched among all objects."""


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session", autouse=True)
def _solved_plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One place for the plans of all processes of this run."""
    import plans_once  # not in the process that only hands out the tests

    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "plans"
    path.mkdir(exist_ok=True)
    plans_once.install(path)


@pytest.fixture
def solved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that is about solving itself: no plan of another test is taken."""
    import plans_once

    monkeypatch.setattr(plans_once.Solved, "directory", None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what plans say of the memory of ranks, which takes a third of the time of solving."""
    import plans_once

    monkeypatch.setattr(plans_once.Solved, "measures", True)


@pytest.fixture
def other_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of how else attention may be implemented, the proof of which takes a quarter of the time."""
    import plans_once

    monkeypatch.setattr(plans_once.Solved, "other_attentions", True)


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama checkpoint in float32, which no test changes."""
    path = tmp_path_factory.mktemp("saved") / "llama"
    save_random(small_config(), transformers.LlamaForCausalLM, path)
    return path


@pytest.fixture
def llama_dir(saved_llama: Path, tmp_path: Path) -> Path:
    """A small Llama checkpoint in float32, of the test's own."""
    return shutil.copytree(saved_llama, tmp_path / "llama")


@pytest.fixture
def hand_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put ``hand_plan`` in the place of the solver, so that a test is about what lies around it."""

    def solve_plan(
        spec: Any,
        options: SolveOptions,
        *,
        grains: Any = None,
        progress: Callable[[str], None] | None = None,
        built: Any = None,
    ) -> Plan:
        return hand_plan(spec.config, options.tp, spec.dtype)

    import plans_once

    plans_once.solve_with(monkeypatch, solve_plan)
