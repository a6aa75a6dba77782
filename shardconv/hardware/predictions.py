"""Predict the times of a plan on a cluster: prefill, a token, a training step, a start.

Every number is predicted from counted work (``rank_work.py``) and the rates of a device (``cost_model.py``),
and comes with the error of such predictions in ``docs/hardware.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stage_names import num_stages

from ..reporting.plan_lines import Workload, bubble, crossing_bytes, fits, tightest, weight_bytes
from .cost_model import collective_seconds, eager_seconds, graph_seconds, message_seconds
from .machines import Cluster
from .rank_work import CollectiveWork, RankWork, hosts_bytes

BACKWARD = 2.0
"""Work of a backward pass divided by the work of the forward pass: the gradients of inputs and of weights."""
OPTIMIZER_PASSES = 7
"""Times that AdamW reads or writes a number for each parameter: the gradient, and the parameter and both
moments, which it writes, too."""
START_S = 8.0
"""Seconds of a start in addition to reading: imports and joining the other ranks (``docs/start.md``)."""
MICROBATCHES = 4
"""Microbatches for each stage in a training step."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of the ranks of a stage, with and without fused layers."""

    plain: RankWork
    fused: RankWork


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted seconds of a plan on a cluster for a workload, and numbers that follow from them."""

    devices: int
    """Devices of a copy of the model: ranks of all stages."""
    replicas: int
    """Copies of the model, which share the sequences."""
    batch: int
    """Sequences of a replica at a time."""
    prefill_s: float
    """Until the first token of all sequences of the batch."""
    token_s: float
    """For one more token of each sequence."""
    collective_share: float
    """Part of the time of a token that is collectives and messages between stages."""
    hosts_bytes: float
    """Bytes that a replica sends between hosts for each token of the batch."""
    step_s: float | None
    """A training step on the batch; None if the plan is for inference only."""
    recomputed_step_s: float | None
    """The same with activations that are computed again in the backward pass."""
    start_s: float
    fits: bool | None
    """Whether weights, cache and activations fit; None if that is not known."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one sequence."""
        return 1 / self.token_s

    @property
    def device_tokens_per_s(self) -> float:
        """Tokens per second of all sequences of a replica, for each device."""
        return self.batch / self.token_s / self.devices


def predict(
    plan: Plan, works: Sequence[StageWork], cluster: Cluster, load: Workload, replicas: int = 1
) -> Predicted:
    """Predict the times of a plan.

    Args:
        plan: the plan, with its stages.
        works: the work of a rank of each stage.
        cluster: where it runs: ranks of a stage are neighbors, and stages follow each other.
        load: the sequences of a replica.
        replicas: copies of the model on the cluster.
    """
    count, batch, context = num_stages(plan), load.batch, load.context or 1
    token = graph_seconds if not cluster.device.is_host else eager_seconds

    sends = _sends(plan, cluster, batch)
    prefill_sends = _sends(plan, cluster, batch * context)
    prefill_s = prefill_sends + sum(eager_seconds(work.plain.prefill, cluster).total_s for work in works)
    calls = [work.plain.token if cluster.device.is_host else work.fused.token for work in works]
    tokens = [token(call, cluster) for call in calls]
    token_s = sends + sum(seconds.total_s for seconds in tokens)
    collective_s = sends + sum(seconds.collective_s for seconds in tokens)
    rank_bytes = weight_bytes(tightest(plan, Workload(1)))
    steps = [
        _step(plan, works, cluster, prefill_sends, rank_bytes, replicas, recomputed=again)
        for again in (False, True)
    ]
    return Predicted(
        devices=plan.tp * count,
        replicas=replicas,
        batch=batch,
        prefill_s=prefill_s,
        token_s=token_s,
        collective_share=min(1.0, collective_s / token_s),
        hosts_bytes=sum(hosts_bytes(call, cluster.host_of) for call in calls),
        step_s=steps[0],
        recomputed_step_s=steps[1],
        start_s=_start(plan, cluster, rank_bytes, replicas),
        fits=fits(plan, load),
    )


def _sends(plan: Plan, cluster: Cluster, tokens: int) -> float:
    """Return the seconds of the messages between stages for some tokens; each rank sends to its neighbor."""
    if plan.stages is None:
        return 0.0
    device, seconds = cluster.device, 0.0
    for (source, target), token_bytes in crossing_bytes(plan).items():
        is_inside = cluster.host_of(source * plan.tp) == cluster.host_of(target * plan.tp)
        seconds += message_seconds(
            token_bytes * tokens, device.inside if is_inside else device.between, device
        )
    return seconds


def _step(
    plan: Plan,
    works: Sequence[StageWork],
    cluster: Cluster,
    sends: float,
    rank_bytes: int,
    replicas: int,
    *,
    recomputed: bool,
) -> float | None:
    """Return the seconds of a training step with AdamW; the slowest stage, and the wait for the others."""
    passes = 1 + BACKWARD + recomputed
    slowest = 0.0
    for work in works:
        if work.plain.forward is None:
            return None
        forward = eager_seconds(work.plain.forward, cluster)
        # Collectives of the backward pass are the adjoints of those before, once.
        device_s = passes * forward.compute_s + (2 + recomputed) * forward.collective_s
        host_s = passes * forward.host_s
        slowest = max(slowest, device_s + host_s if forward.is_host else max(device_s, host_s))
    count = num_stages(plan)
    waits = bubble(count, MICROBATCHES * count)
    # Replicas sum their gradients: the ranks with the same part of the model are one group.
    stride = plan.tp * count
    replicated = CollectiveWork("all_reduce", tuple(range(0, replicas * stride, stride)), rank_bytes)
    summed = collective_seconds(replicated, cluster)
    return (
        slowest / (1 - waits) + 2 * sends + summed + OPTIMIZER_PASSES * rank_bytes / cluster.device.bandwidth
    )


def _start(plan: Plan, cluster: Cluster, rank_bytes: int, replicas: int) -> float:
    """Return the seconds until the weights are on the devices, with the files of a host on its disk."""
    device = cluster.device
    ranks = plan.tp * num_stages(plan) * replicas
    # Replicas read the same files, which are in the page cache then.
    on_host = min(cluster.devices, ranks, plan.tp * num_stages(plan))
    return START_S + max(rank_bytes * on_host / device.disk_bandwidth, rank_bytes / device.host_bandwidth)
