"""``benchmarks/training.py`` with tiny sizes: ranks send and keep what the shape of the model says."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked, run_python, run_script

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "training.py"
TIMEOUT_S = 1200
TP = 2
LAYERS, HIDDEN, VOCAB, TOKENS = 2, 64, 256, 2 * 64
ITEM_BYTES = 4
STATES = TOKENS * HIDDEN * ITEM_BYTES
LOGITS = TOKENS * VOCAB * ITEM_BYTES
STATISTICS = TOKENS * 3 * 4 * TP
"""Of the loss: three float32 numbers of each token and rank, instead of the full logits."""
BLOCKS = 2 * LAYERS + 1
INDICES = 24
"""Bytes of a token that losses keep beside logits: its label, masks, its largest logit and its sum."""

SHARDED = "sequence parallel, loss from shards"
AGAIN = f"{SHARDED}, gathered again"
OURS = ("plain", "loss from shards", "sequence parallel", SHARDED, AGAIN)
Rows = dict[str, dict[str, Any]]
Sent = dict[str, dict[str, list[int]]]


@pytest.fixture(
    scope="module", params=[OURS, pytest.param((*OURS, "transformers"), id="all", marks=pytest.mark.slow)]
)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What rank 0 measured, by name of the model."""
    if "transformers" in request.param and not find_spec("accelerate"):
        pytest.skip("transformers' own tensor parallelism needs accelerate")
    root = tmp_path_factory.mktemp("training")
    argv = [str(SCRIPT), "--small", "--directory", str(root), "--json", str(root / "json")]
    argv += ["--markdown", str(root / "tables"), "--variants", *request.param]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run_forked(run_with_forked_commands, argv=argv, env=env, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    tables = (root / "tables").read_text()
    assert tables in done.stdout
    assert tables.count("| cuda | float32 | 2 | no GPU was available |") == 2
    found = json.loads((root / "json").read_text())
    for row in found:
        assert all(rank["sent"] == row["ranks"][0]["sent"] for rank in row["ranks"]), row["model"]
    return {row["model"]: row["ranks"][0] for row in found}


def run_with_forked_commands() -> None:
    """The script, whose own commands import torch and transformers no more than it does."""
    subprocess.run = run_python  # type: ignore[assignment]
    run_script(SCRIPT)


def sent(forward: dict[str, list[int]], backward: dict[str, list[int]]) -> Sent:
    """As a row has it: payload bytes by direction and collective."""
    none: dict[str, list[int]] = {"all_reduce": [], "all_gather": [], "reduce_scatter": []}
    return {"forward": none | forward, "backward": none | backward}


@pytest.mark.parametrize(("name", "logits"), [("plain", LOGITS), ("loss from shards", STATISTICS)])
def test_a_block_sums_its_result_forward_and_its_gradient_backward(
    rows: Rows, name: str, logits: int
) -> None:
    states = [STATES] * BLOCKS
    wanted = sent({"all_reduce": states, "all_gather": [logits]}, {"all_reduce": states})
    assert rows[name]["sent"] == wanted


@pytest.mark.parametrize(
    ("name", "logits"),
    [("sequence parallel", LOGITS), (SHARDED, STATISTICS)],
)
def test_sequence_parallelism_gathers_and_scatters_instead_and_sums_gradients_of_norms(
    rows: Rows, name: str, logits: int
) -> None:
    states = [STATES] * BLOCKS
    assert rows[name]["sent"] == sent(
        {"all_gather": [*states, logits], "reduce_scatter": states},
        {"all_reduce": [HIDDEN * ITEM_BYTES] * BLOCKS, "all_gather": states, "reduce_scatter": states},
    )


def test_what_is_gathered_again_is_kept_in_parts(rows: Rows) -> None:
    """In front of each block, but for the last gather, behind the layers."""
    once, again = rows[SHARDED], rows[AGAIN]
    assert once["saved_bytes"] - again["saved_bytes"] == 2 * LAYERS * STATES * (TP - 1) // TP
    assert again["peak_bytes"] < once["peak_bytes"]
    assert again["sent"]["forward"] == once["sent"]["forward"]
    more = once["sent"]["backward"]["all_gather"] + [STATES] * 2 * LAYERS
    assert again["sent"]["backward"] == {**once["sent"]["backward"], "all_gather": more}
    assert rows[f"{AGAIN}, recomputed"]["sent"] == rows[f"{SHARDED}, recomputed"]["sent"]


@pytest.mark.parametrize("name", OURS)
def test_recomputation_sends_more_in_the_backward_pass_alone(rows: Rows, name: str) -> None:
    once, again = rows[name]["sent"], rows[f"{name}, recomputed"]["sent"]
    assert again["forward"] == once["forward"]
    for kind, sizes in once["backward"].items():
        more = again["backward"][kind][:]
        for size in sizes:
            more.remove(size)
        assert set(more) <= {STATES}
        assert len(more) <= 2 * len(sizes)
    assert sum(map(sum, again["backward"].values())) > sum(map(sum, once["backward"].values()))


def test_split_activations_are_those_around_the_norms(rows: Rows) -> None:
    """Of each norm its input and what it normalised, ``[B, S, H]``, and a number of each token."""
    saved = rows["plain"]["saved_bytes"] - rows["sequence parallel"]["saved_bytes"]
    assert saved == BLOCKS * (2 * HIDDEN + 1) * TOKENS * ITEM_BYTES * (TP - 1) // TP


@pytest.mark.parametrize("name", ["", "sequence parallel, "])
def test_a_loss_from_shards_keeps_a_part_of_the_logits(rows: Rows, name: str) -> None:
    full = rows[name.removesuffix(", ") or "plain"]["saved_bytes"]
    saved = full - rows[f"{name}loss from shards"]["saved_bytes"]
    assert abs(saved - LOGITS * (TP - 1) // TP) <= INDICES * TOKENS


def test_peaks_are_above_what_is_kept(rows: Rows) -> None:
    for name, row in rows.items():
        assert row["peak_bytes"] > row["saved_bytes"], name
        if name in OURS:
            assert row["peak_bytes"] < rows["unsharded model"]["peak_bytes"], name
            assert rows[f"{name}, recomputed"]["saved_bytes"] < row["saved_bytes"] / 2, name


def test_gradients_are_those_of_the_unsharded_model(rows: Rows) -> None:
    assert rows["unsharded model"]["gradient_difference"] == 0
    for name, row in rows.items():
        assert row["gradient_difference"] < 1e-5, name
        assert row["loss"] == pytest.approx(rows["unsharded model"]["loss"], rel=1e-5), name
