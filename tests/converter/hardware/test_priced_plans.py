"""Predictions of plans, and the choice among all ways to divide a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.hub_options import Hub
from small_models import hand_plan, small_config
from test_cost_model import DEVICE

from shardconv.arguments import SolveOptions
from shardconv.conversion import ModelPlanner, ModelSource
from shardconv.hardware.cost_model import collective_seconds
from shardconv.hardware.machines import Cluster, parse_cluster
from shardconv.hardware.predicted_lines import choices_text, predicted_lines
from shardconv.hardware.predictions import OPTIMIZER_PASSES, START_S, Predicted, StageWork, predict
from shardconv.hardware.priced_plans import PricedPlan, all_choices, priced_plan
from shardconv.hardware.rank_work import CallWork, CollectiveWork, OperatorWork, RankWork
from shardconv.reporting.plan_lines import Workload, weight_bytes
from shardconv.reporting.progress import Silent
from shardconv.reporting.summary import seconds_text

CLUSTER = Cluster(2, 2, DEVICE)
PLAN = hand_plan(small_config(), 2)


def call(num_bytes: float) -> CallWork:
    """A call that moves bytes."""
    return CallWork(((OperatorWork("other", "float32", num_bytes=num_bytes), 1),))


def test_times_follow_from_the_work_of_a_rank() -> None:
    work = RankWork(call(1e7), call(1e6), call(2e7))
    predicted = predict(PLAN, [StageWork(work, work)], CLUSTER, Workload(10**9, 0, 8, 4), replicas=2)
    assert predicted.prefill_s == pytest.approx(1e7 / 1e9)
    assert predicted.token_s == pytest.approx(1e6 / 1e9 + DEVICE.kernel_s)
    assert predicted.device_tokens_per_s == pytest.approx(4 / predicted.token_s / 2)
    # The replicas of a rank are on two hosts, and sum its gradients.
    weights = weight_bytes(PLAN)
    summed = collective_seconds(CollectiveWork("all_reduce", (0, 2), weights), CLUSTER)
    updated = OPTIMIZER_PASSES * weights / 1e9
    assert predicted.step_s == pytest.approx(3 * 2e7 / 1e9 + summed + updated)
    assert predicted.recomputed_step_s == pytest.approx(4 * 2e7 / 1e9 + summed + updated)
    assert predicted.start_s == pytest.approx(START_S + 2 * weights / 1e9)


def priced(token_s: float, load: Workload, devices: int, replicas: int, fits: bool = True) -> PricedPlan:
    predicted = Predicted(devices, replicas, load.batch, 1.0, token_s, 0.0, 0.0, None, None, 9.0, fits)
    return PricedPlan(PLAN, SolveOptions(2), predicted)


def test_the_best_choices_are_those_that_fit() -> None:
    """More stages are tried only where fewer do not fit."""
    asked: list[tuple[int, int, str, int]] = []

    def solve(tp: int, pp: int, experts: str, load: Workload, replicas: int) -> PricedPlan:
        if experts == "ep":
            raise SolveError("there are no experts")
        asked.append((tp, pp, experts, load.batch))
        return priced(1.0 / tp + 0.2 * pp, load, tp * pp, replicas, fits=tp * pp > 1)

    choices = all_choices(solve, CLUSTER, Workload(10**9, 0, 8, 5), ("tp", "ep"))
    assert asked == [(1, 1, "tp", 2), (1, 2, "tp", 3), (2, 1, "tp", 3), (4, 1, "tp", 5)]
    assert (choices.fastest.tp, choices.most.tp) == (4, 4)
    text = choices_text(choices, CLUSTER, Workload(10**9, 0, 8, 5))
    assert "CHOICES  for 2x2xD, 5 x 8 tokens; predicted, not measured" in text
    assert [line.split()[0] for line in text.splitlines()[2:6]] == ["1", "1", "2", "LT"]


def test_a_workload_that_fits_nowhere_is_refused() -> None:
    def solve(tp: int, pp: int, experts: str, load: Workload, replicas: int) -> PricedPlan:
        if tp == 4:
            raise SolveError("four will not do")
        return priced(1.0, load, tp * pp, replicas, fits=False)

    message = "no way to divide 2x2xD fits the workload: it does not fit; four will not do; give more devices"
    with pytest.raises(ShardconvError, match=message):
        all_choices(solve, CLUSTER, Workload(1, 0, 8, 1), ("tp",))


@pytest.mark.parametrize(("seconds", "text"), [(1.5e-5, "15 us"), (1.709e-3, "1.71 ms"), (12.34, "12.3 s")])
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_cluster_is_a_value() -> None:
    assert replace(CLUSTER, hosts=1).name == "1x2xD"


@pytest.mark.usefixtures("solved_anew")
def test_a_plan_for_a_cluster_has_fewer_collectives_where_they_take_longer(tmp_path: Path) -> None:
    """One key/value head for two ranks: each has a half and they gather it, or each computes all of it."""
    config = transformers.Gemma3TextConfig(
        hidden_size=72, intermediate_size=432, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
        num_hidden_layers=2, vocab_size=512, architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    source = ModelSource(tmp_path, Hub(), "float32", False)
    load, planner = Workload(10**9, 0, 64, 1), ModelPlanner(source, None, Silent())
    cluster = parse_cluster("2xH100")
    chosen = priced_plan(planner, SolveOptions(2), cluster, load)
    gathered = {
        name for module in chosen.plan.modules for step in module.outputs if step.op == "all_gather"
        for name in module.names
    }  # fmt: skip
    assert gathered == {"lm_head"}
    assert chosen.plan.proven_arguments
    assert chosen.predicted is not None
    assert chosen.usual is not None
    assert chosen.predicted.token_s < chosen.usual.token_s
    assert chosen.plan.devices == "1x2xH100, batch 1, context 64"
    told = "\n".join(predicted_lines(chosen.predicted, cluster, load, chosen.usual))
    assert f"the usual one takes {seconds_text(chosen.usual.token_s)} a token" in told
