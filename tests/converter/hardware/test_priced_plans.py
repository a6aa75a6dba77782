"""Predictions of plans, and the choice among all ways to divide a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardconv_runtime.errors import ShardconvError, SolveError
from small_models import hand_plan, small_config
from test_cost_model import DEVICE

from shardconv.hardware.cost_model import collective_seconds
from shardconv.hardware.machines import Cluster
from shardconv.hardware.predicted_lines import choices_text, seconds_text
from shardconv.hardware.predictions import OPTIMIZER_PASSES, START_S, Predicted, StageWork, predict
from shardconv.hardware.priced_plans import PricedPlan, all_choices
from shardconv.hardware.rank_work import CallWork, CollectiveWork, OperatorWork, RankWork
from shardconv.reporting.plan_lines import Workload, weight_bytes

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
    return PricedPlan(PLAN, predicted)


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
