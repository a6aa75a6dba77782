"""Finds the smallest number of ranks that a model fits on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.format.plan import Plan

from .reporting.plan_lines import Needs, Workload, fits, needs, tightest, weight_bytes
from .reporting.summary import human_bytes, percent, summarize

MAX_TP = 64
"""More ranks are not tried."""

Solve = Callable[[int], Plan]


@dataclass(frozen=True, slots=True)
class TriedRanks:
    """A number of ranks that was tried."""

    tp: int
    plan: Plan | None
    problem: str = ""
    """Why there is no plan, or none that can be judged."""
    needs: Needs | None = None
    is_enough: bool = False


@dataclass(frozen=True, slots=True)
class FewestRanks:
    """The smallest number of ranks that is enough, and its neighbors."""

    plan: Plan
    """The plan of the chosen number."""
    chosen: TriedRanks
    candidates: tuple[TriedRanks, ...]
    """Ascending, with the chosen one among them."""


def smallest_tp(solve: Solve, load: Workload) -> FewestRanks:
    """Return the smallest number of ranks, a power of two, on which the workload fits."""
    trials = [_tried(solve, 1, load)]
    # Begin where weights that are sharded evenly fit.
    tp, free = 2, load.device_bytes - load.reserve_bytes
    while trials[0].needs is not None and tp < MAX_TP and trials[0].needs.weights > tp * free:
        tp *= 2
    while not trials[-1].is_enough and tp <= MAX_TP:
        trials.append(_tried(solve, tp, load))
        tp *= 2
    chosen = trials[-1]
    if chosen.plan is None or not chosen.is_enough:
        raise ShardconvError(_nothing_fits(trials, load))
    tried = {each.tp: each for each in trials}
    neighbors = [n for n in (chosen.tp // 2, chosen.tp, 2 * chosen.tp) if 1 <= n <= MAX_TP]
    return FewestRanks(chosen.plan, chosen, tuple(tried.get(n) or _tried(solve, n, load) for n in neighbors))


def _tried(solve: Solve, tp: int, load: Workload) -> TriedRanks:
    try:
        plan = solve(tp)
    except SolveError as error:
        return TriedRanks(tp, None, str(error))
    part = tightest(plan, load)
    if part.memory is None:
        problem = "its cache and activations could not be measured"
        return TriedRanks(tp, plan, problem)
    needed = needs(part, part.memory, load.batch, load.context or 1)
    return TriedRanks(tp, plan, needs=needed, is_enough=bool(fits(part, load)))


def require_fit(plan: Plan, load: Workload) -> None:
    """Raise ``ShardconvError`` if a rank of the plan needs more memory than the device has."""
    if fits(plan, load) is False:
        part = tightest(plan, load)
        needed = None if part.memory is None else needs(part, part.memory, load.batch, load.context or 1)
        raise ShardconvError(
            f"the model does not fit at tp {plan.tp}: a rank needs {_sizes(part, needed, load)}; give "
            "more ranks (--tp auto finds the fewest), a larger --device-memory, or a smaller --context, "
            "--batch or --reserve"
        )


def _nothing_fits(found: list[TriedRanks], load: Workload) -> str:
    last = found[-1]
    if last.needs is None or last.plan is None:
        return f"no tp can be chosen: at tp {last.tp} {last.problem}; give --tp a number"
    return (
        f"no tp up to {MAX_TP} fits: at tp {last.tp} a rank needs {_sizes(last.plan, last.needs, load)}; "
        "give a larger --device-memory, or a smaller --context, --batch or --reserve"
    )


def _sizes(part: Plan, needed: Needs | None, load: Workload) -> str:
    """Return what a rank needs and what it has, as text; the weights alone if the rest was not measured."""
    weights = human_bytes(weight_bytes(part) if needed is None else needed.weights)
    rest = "" if needed is None else f", {human_bytes(needed.cache)} of cache"
    rest += "" if needed is None else f", {human_bytes(needed.activations)} of activations"
    return f"{weights} of weights{rest}, but has {human_bytes(load.device_bytes - load.reserve_bytes)}"


HEAD = ("tp", "weights", "cache", "activations", "total", "collectives", "per token", "replicated")


def table(choice: FewestRanks) -> list[tuple[str, ...]]:
    """Return a row for each candidate, under ``HEAD``; the chosen one has a star."""
    rows: list[tuple[str, ...]] = [HEAD]
    for candidate in choice.candidates:
        star = "*" if candidate is choice.chosen else ""
        if candidate.plan is None or candidate.needs is None:
            rows.append((f"{star}{candidate.tp}", "no plan", *[""] * 6))
            continue
        needed, summary = candidate.needs, summarize(candidate.plan)
        sizes = map(human_bytes, (needed.weights, needed.cache, needed.activations, needed.total))
        count = sum(c.count for c in summary.collectives)
        moved = human_bytes(sum(c.token_bytes for c in summary.collectives))
        replicated = percent(sum(group.num_bytes for group in summary.replicated), summary.total_bytes)
        rows.append((f"{star}{candidate.tp}", *sizes, str(count), moved, replicated))
    return rows
