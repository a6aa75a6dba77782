"""A fault in the runtime's code is named, with its module, by converting and by verifying.

``scripts/coverage mutations`` runs all faults on all models and writes docs/coverage-mutations.md.
"""

from __future__ import annotations

import pytest
from shardconv_faults import FAULTS

from .mutations_page import ROWS
from .mutations_run import MODELS, NAMED, NEIGHBOR, NOT_ON_PATH, TPS, judge

EVERY_DAY = {
    ("dense", 3): (
        "sum skipped after an embedding",
        "gather pads in front",
        "fused layers get each other's part",
        "override is not applied",
        "gradient of an input is not summed",
        "adjoint of a sum does not sum",
    ),
    ("experts", 2): (
        "norm statistic is not summed",
        "ids of experts are off by one",
    ),
    ("encoder-decoder", 2): ("weight of the next rank",),
    ("parallel blocks", 3): ("partial bias on every rank",),
    ("quantized", 2): ("packed factors in reverse order",),
}
"""Models and numbers of ranks -> faults of the default run."""


@pytest.mark.parametrize(
    ("fault", "model", "tp"),
    [(fault, model, tp) for (model, tp), faults in EVERY_DAY.items() for fault in faults],
)
def test_the_module_of_a_fault_is_named(fault: str, model: str, tp: int) -> None:
    row = judge((fault, model, tp))
    assert row is not None
    shown = [row[command] for command in ("convert", "verify") if row[command] != NOT_ON_PATH]
    assert shown
    assert set(shown) == {NAMED}, row


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", TPS)
def test_all_is_as_recorded(fault: str, model: str, tp: int) -> None:
    recorded = {ROWS.key_of(row): row for row in ROWS.read()}.get((fault, model, tp))
    row = judge((fault, model, tp))
    assert (row is None) == (recorded is None)
    if row is not None and recorded is not None:
        assert (row["convert"], row["verify"]) == (recorded["convert"], recorded["verify"])


def test_the_recorded_faults_are_named() -> None:
    """Each on some model at every number of ranks; a neighbor is named for few of them."""
    rows = ROWS.read()
    for command in ("convert", "verify"):
        results = {
            fault.name: {row[command] for row in rows if row["fault"] == fault.name} for fault in FAULTS
        }
        shown = {name: found - {NOT_ON_PATH} for name, found in results.items() if found != {NOT_ON_PATH}}
        assert set().union(*shown.values()) <= {NAMED, NEIGHBOR}
        named = [name for name, found in shown.items() if found == {NAMED}]
        assert len(named) / len(shown) >= 28 / 30
    assert {(fault.name, tp) for fault in FAULTS for tp in TPS} == {(row["fault"], row["tp"]) for row in rows}
