"""Predictions as text and as records; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..reporting.plan_lines import Workload, aligned
from ..reporting.records import PredictedReport
from ..reporting.summary import human_bytes, seconds_text
from .machines import Cluster

if TYPE_CHECKING:
    from .predictions import Predicted
    from .priced_plans import Choice, Choices

ERRORS = {"prefill": 0.4, "token": 0.35, "training": 0.55, "start": 0.5}
"""The largest error of most rows in ``docs/hardware.md``, as a part of the measured time, by kind."""


def predicted_lines(
    predicted: Predicted, cluster: Cluster, load: Workload, usual: Predicted | None = None
) -> Iterator[str]:
    """Yield the section of the report about one plan on a cluster.

    Args:
        predicted: the prediction.
        cluster: where it runs.
        load: the sequences of a copy of the model.
        usual: the prediction of the plan that is solved without devices and links, if it is another one.
    """
    yield f"PREDICTED  on {cluster.name}, not measured; in brackets the known error"
    sequences = f"{load.batch:,} sequence{'s' if load.batch > 1 else ''} of {load.context or 1:,} tokens"
    yield _line("prefill", seconds_text(predicted.prefill_s), "prefill", sequences)
    yield _line(
        "token",
        seconds_text(predicted.token_s),
        "token",
        f"{predicted.tokens_per_s:,.0f} tokens/s of a sequence, "
        f"{predicted.device_tokens_per_s:,.0f} of a device",
    )
    shares = f"{predicted.collective_share:.0%} of a token"
    if predicted.hosts_bytes:
        shares += f", {human_bytes(predicted.hosts_bytes)} between hosts"
    yield f"  {'communication':<15}{shares}"
    if usual is not None:
        before = f"{seconds_text(usual.token_s)} a token"
        if usual.hosts_bytes:
            before += f" and {human_bytes(usual.hosts_bytes)} between hosts"
        yield f"  {'plan':<15}is for this cluster; the usual one takes {before}"
    if predicted.step_s is not None and predicted.recomputed_step_s is not None:
        again = f"{seconds_text(predicted.recomputed_step_s)} with activations computed again"
        yield _line("training step", seconds_text(predicted.step_s), "training", again)
    yield _line("start", seconds_text(predicted.start_s), "start", "weights from the disk of the host")


def _line(head: str, time: str, kind: str, rest: str) -> str:
    return f"  {head:<15}{time:>9} (±{ERRORS[kind]:.0%})  {rest}"


HEAD = ("", "tp", "pp", "replicas", "experts", "fits", "prefill", "token", "tokens/s", "a device's", "start")


def choices_text(choices: Choices, cluster: Cluster, load: Workload) -> str:
    """Return the table of all choices for a cluster."""
    workload = f"{load.batch:,} x {load.context or 1:,} tokens"
    lines = [
        f"CHOICES  for {cluster.name}, {workload}; predicted, not measured "
        f"(prefill ±{ERRORS['prefill']:.0%}, token ±{ERRORS['token']:.0%})",
        *aligned([HEAD, *(_row(choice, choices) for choice in choices.choices)]),
        "  L: the shortest time of a token; T: the most tokens per second",
    ]
    lines += [f"  tp {c.tp}, pp {c.pp}: {c.problem}" for c in choices.choices if c.problem]
    return "\n".join(lines) + "\n\n"


def _row(choice: Choice, choices: Choices) -> tuple[str, ...]:
    best = "L" * (choice is choices.fastest) + "T" * (choice is choices.most)
    start = (best, str(choice.tp), str(choice.pp), str(choice.replicas), choice.experts)
    predicted = choice.predicted
    if predicted is None:
        return (*start, "no plan" if choice.priced is None else "?", *[""] * 5)
    return (
        *start,
        {True: "yes", False: "no", None: "?"}[predicted.fits],
        seconds_text(predicted.prefill_s),
        seconds_text(predicted.token_s),
        f"{predicted.tokens_per_s:,.0f}",
        f"{predicted.device_tokens_per_s:,.0f}",
        seconds_text(predicted.start_s),
    )


def predicted_record(
    choice: Choice, cluster: Cluster, load: Workload, best: Sequence[Choice | None] = (None, None)
) -> PredictedReport:
    """Return a choice as a record.

    Args:
        choice: a choice, or a plan as the only one.
        cluster: where it runs.
        load: the workload of all replicas.
        best: the fastest choice, and the one with most tokens.
    """
    predicted = choice.predicted
    return PredictedReport(
        cluster=cluster.name,
        tp=choice.tp,
        pp=choice.pp,
        replicas=choice.replicas,
        experts=choice.experts,
        batch=load.batch if predicted is None else predicted.batch,
        context=load.context or 1,
        fits=None if predicted is None else predicted.fits,
        problem=choice.problem,
        prefill_s=None if predicted is None else predicted.prefill_s,
        token_s=None if predicted is None else predicted.token_s,
        tokens_per_s=None if predicted is None else predicted.tokens_per_s,
        device_tokens_per_s=None if predicted is None else predicted.device_tokens_per_s,
        collective_share=None if predicted is None else predicted.collective_share,
        hosts_bytes=None if predicted is None else predicted.hosts_bytes,
        step_s=None if predicted is None else predicted.step_s,
        recomputed_step_s=None if predicted is None else predicted.recomputed_step_s,
        start_s=None if predicted is None else predicted.start_s,
        is_fastest=choice is best[0],
        has_most_tokens=choice is best[1],
        errors=ERRORS,
    )
