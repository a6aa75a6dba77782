"""A few tests of transformers' own suites on ranks; ``scripts/test_peers`` runs them all, on many types."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from places import ROOT

from .peers_page import ROWS
from .peers_run import FAILED, PASSED, Suites
from .peers_suite import TYPES, download, pinned

FEW = ("test_determinism", "test_save_load")
"""Calls, and a checkpoint that is written and loaded."""


@pytest.fixture(scope="module")
def folder() -> Path:
    """The source distribution with the suites."""
    try:
        return download(ROOT / "build" / "peers", pinned(ROOT))
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"the source distribution of transformers cannot be had: {error}")


def test_tests_of_transformers_pass_on_ranks_and_fail_without_sums(folder: Path, tmp_path: Path) -> None:
    suites = Suites.begin(folder, "llama", tmp_path / "plans", FEW)
    outcomes = dict(suites.run(2))
    assert [(name, outcomes[name].status, outcomes[name].text) for name in FEW] == [
        (name, PASSED, "") for name in FEW
    ]
    wrong = dict(suites.run(2, without_sums=True))
    assert [wrong[name].status for name in FEW] == [FAILED] * len(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "t5"])
def test_whole_suites_have_the_kept_outcomes(folder: Path, tmp_path: Path, model_type: str) -> None:
    row = next(row for row in ROWS.read() if (row["type"], row["tp"]) == (model_type, 2))
    outcomes = dict(Suites.begin(folder, model_type, tmp_path / "plans").run(2))
    failed = {name for name, outcome in outcomes.items() if outcome.status == FAILED}
    assert failed == {name for names in row["failed_tests"].values() for name in names}


def test_the_rows_are_of_types_in_the_table() -> None:
    assert {row["type"] for row in ROWS.read()} <= TYPES.keys()
