"""Plans with predictions: of one number of ranks, and of all ways to divide a cluster.

It imports torch, as planning does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.format.dims import axes_of, size
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.stage_names import num_stages
from torch import nn

from ..arguments import HostLinks, SolveOptions
from ..conversion import ModelPlanner
from ..inputs.trace_inputs import TraceInputs
from ..planning.solve import MAX_REPLICATED
from ..reporting.plan_lines import Workload
from ..reporting.summary import seconds_text
from ..simulation.layer_bypass import Bypass
from ..simulation.memory_measurement import NotMeasured
from .machines import Cluster
from .predictions import Predicted, StageWork, predict
from .rank_work import rank_work, without_fused

MIN_FREE = 0.1
"""Part of a device's memory that is kept for caches and activations when weights are laid out."""


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan, and its prediction on a cluster."""

    plan: Plan
    options: SolveOptions
    """The options that it is solved for."""
    predicted: Predicted | None
    problem: str = ""
    """Why nothing could be predicted."""
    usual: Predicted | None = None
    """The prediction of the plan that knows no devices and links, if this one is another and faster."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to divide the devices of a cluster."""

    tp: int
    pp: int
    replicas: int
    experts: str
    priced: PricedPlan | None
    problem: str = ""
    """Why there is no plan, or no prediction."""

    @property
    def predicted(self) -> Predicted | None:
        """The prediction, if there is one."""
        return self.priced.predicted if self.priced is not None else None


@dataclass(frozen=True, slots=True)
class Choices:
    """All choices for a cluster, and the best."""

    choices: tuple[Choice, ...]
    fastest: Choice
    """The one with the shortest time of a token; a prefill decides between equals."""
    most: Choice
    """The one with the most tokens per second of all devices."""


def priced_plan(
    planner: ModelPlanner,
    options: SolveOptions,
    cluster: Cluster,
    load: Workload,
    *,
    replicas: int = 1,
) -> PricedPlan:
    """Plan a model from its config, and predict its times.

    Up to three plans are solved: the usual one; one with fewer collectives, if the usual one has more of them
    to shard more of the model; and one that knows the links between hosts, if the ranks of a stage are on
    several. The one with the shortest time of a token is returned. Only this one is checked.

    Args:
        planner: makes the plans of the model.
        options: the options that it is solved for.
        cluster: the devices; the plan uses the first ``tp`` times ``pp``.
        load: the sequences of one copy of the model.
        replicas: copies of the model on the cluster.

    Raises:
        ShardconvError: there is no plan.
    """
    links = host_links(cluster, options.tp, load)

    def priced(solved_for: SolveOptions) -> PricedPlan:
        return _priced(planner, solved_for, cluster, load, replicas)

    usual_options = replace(options, check=False)
    known = replace(usual_options, devices=_described(cluster, load))
    fewest = priced(replace(known, fewest_collectives=True))
    if options.tp > 1 and _replicated(fewest.plan) > MAX_REPLICATED:
        usual = priced(usual_options)
        candidates = [usual, fewest]
    else:  # the two are the same plan
        usual = replace(fewest, plan=replace(fewest.plan, devices=""), options=usual_options)
        candidates = [usual]
    if links is not None:
        candidates.append(priced(replace(known, links=links)))
    best = min(candidates, key=_order)
    result = priced(replace(best.options, check=True)) if options.check else best
    return result if best is usual else replace(result, usual=usual.predicted)


def options_for(
    planner: ModelPlanner, options: SolveOptions, cluster: Cluster, load: Workload
) -> SolveOptions:
    """Return the options with which a model has the plan with the shortest predicted time of a token."""
    progress = planner.progress
    progress.stage(f"predicting times on {cluster.name}")
    best = priced_plan(planner, replace(options, check=False), cluster, load)
    if best.predicted is None:
        progress.stage(f"no times could be predicted, so the plan is for any devices: {best.problem}")
    elif best.usual is None:
        progress.stage(f"on {cluster.name}, no other plan is predicted to be faster than the usual one")
    else:
        token, usual = (seconds_text(each.token_s) for each in (best.predicted, best.usual))
        progress.stage(f"the plan is for {cluster.name}: {token} a token; the usual one takes {usual}")
    return replace(best.options, check=options.check)


def _described(cluster: Cluster, load: Workload) -> str:
    """Return the devices and the calls that decide a plan."""
    return f"{cluster.name}, batch {load.batch}, context {load.context or 1}"


def _replicated(plan: Plan) -> float:
    """Return the fraction of the elements of matrices that every rank holds."""
    entries = parameter_plans(plan).values()
    matrices = [(math.prod(map(size, x.dims)), any(map(axes_of, x.dims))) for x in entries if len(x.dims) > 1]
    total = sum(numel for numel, _ in matrices)
    return sum(numel for numel, is_sharded in matrices if not is_sharded) / max(1, total)


def host_links(cluster: Cluster, tp: int, load: Workload) -> HostLinks | None:
    """Return the links between the hosts of a stage's ranks; None if they are on one host.

    Raises:
        ShardconvError: they do not fill their hosts.
    """
    if tp <= cluster.devices:
        return None
    if tp % cluster.devices:
        raise SolveError(
            f"tp {tp} does not fill hosts of {cluster.devices} devices; give a multiple of {cluster.devices}"
        )
    device, hosts = cluster.device, tp // cluster.devices
    reserve = load.reserve_bytes + MIN_FREE * load.device_bytes
    return HostLinks(
        hosts=hosts,
        bandwidth=min(device.inside.bandwidth, cluster.devices * device.between.bandwidth),
        latency_s=2 * math.ceil(math.log2(hosts)) * device.between.latency_s,
        memory_bandwidth=device.bandwidth,
        flops=max(device.flops.values()),
        tokens=load.batch,
        weight_bytes=int(load.device_bytes - reserve),
    )


def _order(priced: PricedPlan) -> tuple[bool, float]:
    """Return the order of plans: those that fit, then the shortest time of a token."""
    predicted = priced.predicted
    return (True, math.inf) if predicted is None else (predicted.fits is not True, predicted.token_s)


def _priced(
    planner: ModelPlanner, options: SolveOptions, cluster: Cluster, load: Workload, replicas: int
) -> PricedPlan:
    """Plan a model, and predict its times."""
    works: list[StageWork] = []
    problem = ""

    def inspect(plan: Plan, built: nn.Module, inputs: TraceInputs, bypassed: Mapping[str, Bypass]) -> None:
        nonlocal problem
        stages: list[int | None] = [None] if plan.stages is None else list(range(num_stages(plan)))
        batch, context = load.batch, load.context or 1
        try:
            for stage in stages:
                plain = rank_work(without_fused(plan), built, inputs, bypassed, batch, context, stage)
                fused = plain
                if plan.fused and not cluster.device.is_host:
                    fused = rank_work(plan, built, inputs, bypassed, batch, context, stage)
                works.append(StageWork(plain, fused))
        except NotMeasured as error:
            problem = f"the work of a rank could not be counted: {error}"

    plan = planner.plan(options, inspect)
    if problem:
        return PricedPlan(plan, options, None, problem)
    return PricedPlan(plan, options, predict(plan, works, cluster, load, replicas))


def all_choices(
    solve: Callable[[int, int, str, Workload, int], PricedPlan],
    cluster: Cluster,
    load: Workload,
    experts: tuple[str, ...],
) -> Choices:
    """Return the choices of tp, pp and replicas that use all devices, with the best of those that fit.

    Args:
        solve: (tp, pp, experts, the sequences of a replica, replicas) -> the plan and its prediction.
        cluster: the devices.
        load: the sequences of all replicas together.
        experts: ways to shard experts; others than the first are left out if the model has no plan for them.

    Raises:
        ShardconvError: no choice fits.
    """
    choices: list[Choice] = []
    count, modes = cluster.num_devices, list(experts)
    for tp in _divisors(count):
        if tp > cluster.devices and tp % cluster.devices:
            continue  # ranks would share a host with those of another copy
        for mode in tuple(modes) if tp > 1 else experts[:1]:
            for pp in _divisors(count // tp):
                replicas = count // tp // pp
                share = replace(load, batch=math.ceil(load.batch / replicas))
                choice = _choice(solve, tp, pp, replicas, mode, share)
                if choice.priced is None and mode != experts[0]:
                    modes.remove(mode)  # the model has no experts
                    break
                choices.append(choice)
                # Stages wait for each other, so that more of them than fit serve no purpose.
                if choice.predicted is not None and choice.predicted.fits:
                    break
    fitting = [choice for choice in choices if choice.predicted is not None and choice.predicted.fits]
    if not fitting:
        reasons = dict.fromkeys(choice.problem or "it does not fit" for choice in choices)
        raise ShardconvError(
            f"no way to divide {cluster.name} fits the workload: {'; '.join(reasons)}; give more devices, or "
            "a smaller --context or --batch"
        )
    return Choices(tuple(choices), min(fitting, key=_latency), max(fitting, key=_throughput))


def _choice(
    solve: Callable[[int, int, str, Workload, int], PricedPlan],
    tp: int,
    pp: int,
    replicas: int,
    experts: str,
    load: Workload,
) -> Choice:
    try:
        priced = solve(tp, pp, experts, load, replicas)
    except SolveError as error:
        return Choice(tp, pp, replicas, experts, None, str(error))
    return Choice(tp, pp, replicas, experts, priced, priced.problem)


def _latency(choice: Choice) -> tuple[float, float]:
    assert choice.predicted is not None
    return choice.predicted.token_s, choice.predicted.prefill_s


def _throughput(choice: Choice) -> float:
    assert choice.predicted is not None
    return choice.predicted.device_tokens_per_s


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]
