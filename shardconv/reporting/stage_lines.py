"""The stages of a plan: what each holds, what crosses the cuts, and how long stages wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

from shardconv_runtime.format.pipeline_stages import StagesPlan
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.staged_names import staged_modules

from .human_numbers import human_bytes
from .summary import item_bytes, stage_bytes

MICROBATCHES = (1, 4)
"""For each stage; schedules wait less the more there are."""


def crossing_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """(from, to) -> bytes for each token that a stage sends another, of global tensors."""
    found: dict[tuple[int, int], int] = {}
    for entry, _ in staged_modules(plan).values():
        for value in entry.sent:
            tensor = entry.items[value.item].tensor
            assert tensor is not None, "a plan was checked when it was read"
            num_bytes = value.per_token * item_bytes(tensor.dtype or plan.model.dtype)
            for stage in value.to:
                key = entry.stages[0], stage
                found[key] = found.get(key, 0) + num_bytes
    return found


def bubble(places: int, microbatches: int, per_process: int = 1) -> float:
    """The fraction of the time in which a process waits, if all stages take equally long.

    With GPipe and 1F1B each process has one stage, with an interleaved schedule several (Narayanan et al.,
    2021, https://arxiv.org/abs/2104.04473).

    Args:
        places: processes, one after another, among which the stages are divided.
        microbatches: of a step.
        per_process: stages of each process.
    """
    return (places - 1) / (per_process * microbatches + places - 1)


def layers_text(stages: StagesPlan, stage: int) -> str:
    """``layers 0 to 39``, of a stage."""
    first, last = stages.layers[stage]
    return f"layers {first} to {last}" if last > first else f"layer {first}" if last == first else "no layer"


def stage_lines(plan: Plan) -> Iterator[str]:
    """The section of the report; empty for a plan without stages."""
    stages = plan.stages
    if stages is None:
        return
    held = [max(ranks) for ranks in stage_bytes(plan)]
    mean = sum(held) / len(held)
    yield f"STAGES  {stages.count}, each of {plan.tp} rank{'s' if plan.tp > 1 else ''}"
    for stage in range(stages.count):
        layers = layers_text(stages, stage)
        share = f"{held[stage] / mean - 1:+.1%} of the mean" if mean else ""
        yield f"  stage {stage:<9}{layers:<22}{human_bytes(held[stage]):>12} per rank  {share}".rstrip()
    for (source, target), num_bytes in sorted(crossing_bytes(plan).items()):
        yield f"  sent           stage {source} to stage {target}: {human_bytes(num_bytes)} for each token"
    if stages.computed_again:
        yield f"  on each stage  {', '.join(stages.computed_again)}"
    for each in MICROBATCHES:
        count = each * stages.count
        yield f"  waiting        {bubble(stages.count, count):.1%} with {count} microbatches (GPipe, 1F1B)"
        for places, each_has in _divisions(stages.count):
            part = f"{places * plan.tp} processes of {each_has} stages"
            waits = bubble(places, count, each_has)
            yield f"  waiting        {waits:.1%} with {count} microbatches on {part} (interleaved)"


def _divisions(count: int) -> Iterator[tuple[int, int]]:
    """How stages can be divided among processes that have several: how many processes, and stages of each."""
    for per_process in range(2, count // 2 + 1):
        if count % per_process == 0:
            yield count // per_process, per_process
