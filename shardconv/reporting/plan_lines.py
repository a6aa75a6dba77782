"""Lines of text about a plan: memory of a rank, fit on a device, pipeline stages, fused layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardconv_runtime.format.header import item_bytes
from shardconv_runtime.format.measured import LiveBytes, MemoryPlan, cache_bytes, moment_bytes, prefill_bytes
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.pipeline_stages import StagesPlan
from shardconv_runtime.format.plan import Plan, local_shape
from shardconv_runtime.format.plan_json import of_stage
from shardconv_runtime.format.stage_names import staged_modules
from shardconv_runtime.format.stored_layout import stored_plans

from .summary import human_bytes, shown_stages, stage_bytes

RESERVE = 2 * 10**9
"""Default bytes that are kept free on a device: for the driver, libraries and memory that is lost between
tensors."""
MAX_TOKENS = 2**40
"""More tokens are not counted."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A device, and the sequences that it has to hold."""

    device_bytes: int
    reserve_bytes: int = RESERVE
    """Bytes that are kept free."""
    context: int | None = None
    """Tokens of each sequence; of both the encoder and the decoder, if there are two."""
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on the rank that needs most."""

    weights: int
    """Bytes of the weights in memory, with the buffers that no file holds."""
    cache: int
    activations: int
    """Bytes for the prefill of the whole batch, in addition to the cache."""

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.weights + self.cache + self.activations


def parts(plan: Plan) -> list[Plan]:
    """Return a plan for each stage of a plan, with the measured memory of the stage; without stages, the
    plan."""
    stages = plan.stages
    if stages is None:
        return [plan]
    memory = stages.memory or (None,) * stages.count
    return [replace(of_stage(plan, k), stages=None, memory=memory[k]) for k in shown_stages(plan)]


def tightest(plan: Plan, load: Workload) -> Plan:
    """Return the one of ``parts`` on whose ranks least is left."""

    def left(part: Plan) -> int:
        if part.memory is None:
            return -weight_bytes(part)
        return -needs(part, part.memory, load.batch, load.context or 1).total

    return min(parts(plan), key=left)


def weight_bytes(plan: Plan) -> int:
    """Return the bytes of the weights in the memory of the rank that has most; packed ones stay packed."""
    total = plan.memory.buffer_bytes if plan.memory else 0
    for entry in stored_plans(plan).values():
        total += math.prod(local_shape(entry, plan.mesh, 0)) * item_bytes(entry.dtype)
    return total


def needs(plan: Plan, memory: MemoryPlan, batch: int, length: int) -> Needs:
    """Return the bytes for sequences of one length, whose prompts may be that long."""
    return Needs(
        weights=weight_bytes(plan),
        cache=cache_bytes(memory, batch, length, length),
        activations=prefill_bytes(memory, batch, length),
    )


def fits(plan: Plan, load: Workload) -> bool | None:
    """Return whether each rank can do this; without a context, whether it can hold the weights and one token.

    None: the weights fit, and the rest could not be measured.
    """
    worst = tightest(plan, load)
    free = load.device_bytes - load.reserve_bytes
    if worst.memory is None:
        return None if weight_bytes(worst) <= free else False
    return needs(worst, worst.memory, load.batch, load.context or 1).total <= free


def cached_tokens(plan: Plan, memory: MemoryPlan, load: Workload) -> int:
    """Return the most tokens of one sequence whose cache fits next to the weights, up to ``MAX_TOKENS``."""
    free = load.device_bytes - load.reserve_bytes - weight_bytes(plan)
    return _largest(lambda length: cache_bytes(memory, 1, length, length) <= free)


def sequences(plan: Plan, memory: MemoryPlan, load: Workload) -> int:
    """Return the most sequences of the context that fit, prompts read one after another, up to
    ``MAX_TOKENS``."""
    length = load.context or 1
    free = load.device_bytes - load.reserve_bytes - weight_bytes(plan) - prefill_bytes(memory, 1, length)
    return _largest(lambda batch: cache_bytes(memory, batch, length, length) <= free)


def _largest(is_possible: Callable[[int], bool]) -> int:
    """Return the largest number up to ``MAX_TOKENS`` for which this is so; 0 if there is none."""
    if is_possible(MAX_TOKENS):
        return MAX_TOKENS
    low, high = 0, MAX_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return low


def fused_lines(plan: Plan) -> list[str]:
    """Return a line for each fused entry: the modules, the members, how many products become how many."""
    lines = []
    for entry in plan.fused:
        members = entry.members
        count = len(expand_all(members[0]))
        where = ", ".join(pattern.rpartition(".")[0] or "(the model)" for pattern in members[0])
        names = " + ".join(patterns[0].rpartition(".")[2] for patterns in members)
        lines.append(f"{where}: {names} ({count * len(members)} products become {count})")
    return lines


MICROBATCHES = (1, 4)
"""Numbers of microbatches for each stage; schedules wait less the more there are."""


def crossing_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """Return the bytes for each token that a stage sends another, of global tensors, by (from, to)."""
    bytes_of_crossing: dict[tuple[int, int], int] = {}
    for entry, _ in staged_modules(plan).values():
        for value in entry.sent:
            tensor = entry.items[value.item].tensor
            assert tensor is not None, "a plan was checked when it was read"
            num_bytes = value.per_token * item_bytes(tensor.dtype or plan.model.dtype)
            for stage in value.to:
                key = entry.stages[0], stage
                bytes_of_crossing[key] = bytes_of_crossing.get(key, 0) + num_bytes
    return bytes_of_crossing


def bubble(places: int, microbatches: int, per_process: int = 1) -> float:
    """Return the fraction of the time in which a process waits, if all stages take equally long.

    With GPipe and 1F1B each process has one stage, with an interleaved schedule several (Narayanan et al.,
    2021, https://arxiv.org/abs/2104.04473).
    """
    return (places - 1) / (per_process * microbatches + places - 1)


def layers_text(stages: StagesPlan, stage: int) -> str:
    """Return the layers of a stage as text, such as ``layers 0 to 39``."""
    first, last = stages.layers[stage]
    return f"layers {first} to {last}" if last > first else f"layer {first}" if last == first else "no layer"


def stage_lines(plan: Plan) -> Iterator[str]:
    """Yield the section of the report about stages; nothing for a plan without stages."""
    stages = plan.stages
    if stages is None:
        return
    largest = [max(ranks) for ranks in stage_bytes(plan)]
    mean = sum(largest) / len(largest)
    yield f"STAGES  {stages.count}, with {plan.tp} rank{'s' if plan.tp > 1 else ''} each"
    for stage in range(stages.count):
        layers = layers_text(stages, stage)
        share = f"{largest[stage] / mean - 1:+.1%} from the mean" if mean else ""
        yield f"  stage {stage:<9}{layers:<22}{human_bytes(largest[stage]):>12} per rank  {share}".rstrip()
    for (source, target), num_bytes in sorted(crossing_bytes(plan).items()):
        yield f"  sent           stage {source} to stage {target}: {human_bytes(num_bytes)} per token"
    if stages.computed_again:
        yield f"  recomputed     {', '.join(stages.computed_again)} (on each stage)"
    for each in MICROBATCHES:
        count = each * stages.count
        yield f"  idle           {bubble(stages.count, count):.1%} with {count} microbatches (GPipe, 1F1B)"
        # Stages can be divided among processes that have several.
        for each_has in (n for n in range(2, stages.count // 2 + 1) if stages.count % n == 0):
            places = stages.count // each_has
            part = f"{places * plan.tp} processes with {each_has} stages each"
            waits = bubble(places, count, each_has)
            yield f"  idle           {waits:.1%} with {count} microbatches on {part} (interleaved)"


_CANNOT_BE_MEASURED = "cache and activations could not be measured; see the notes"


def memory_lines(plan: Plan, num_tokens: int) -> Iterator[str]:
    """Yield the section of the report about memory; nothing if nothing was measured."""
    for title, part in memory_parts(plan):
        assert part.memory is not None
        yield f"MEMORY  {title}"
        yield _line("weights", human_bytes(weight_bytes(part)))
        for head, texts in memory_facts(part.memory, num_tokens):
            for index, text in enumerate(texts):
                yield _line("" if index else head, text)


def memory_parts(plan: Plan) -> list[tuple[str, Plan]]:
    """Return (label of the ranks, plan) for each measured stage; stages with equal needs are merged."""
    if plan.stages is None:
        return [("per rank", plan)] if plan.memory is not None else []
    alike: dict[tuple[MemoryPlan, int], list[tuple[int, Plan]]] = {}
    for stage, part in zip(shown_stages(plan), parts(plan), strict=True):
        if part.memory is not None:
            alike.setdefault((part.memory, weight_bytes(part)), []).append((stage, part))
    return [
        (
            f"per rank of stage{'s' if len(same) > 1 else ''} {', '.join(str(k) for k, _ in same)}",
            same[0][1],
        )
        for same in alike.values()
    ]


def memory_facts(memory: MemoryPlan, num_tokens: int) -> list[tuple[str, list[str]]]:
    """Return (heading, texts) for the cache, the prefill of a prompt and the logits."""
    moment = max(
        memory.prefill, key=lambda each: moment_bytes(each, 1, num_tokens), default=LiveBytes((0, 0, 0))
    )
    prefill = [f"{human_bytes(prefill_bytes(memory, 1, num_tokens))} for a prompt of {num_tokens:,} tokens"]
    _, token, pair = (a + b for a, b in zip(moment.sequence, moment.once, strict=True))
    if token > 0:
        prefill.append(f"{human_bytes(token)} per token")
    if pair > 0:
        prefill.append(f"{human_bytes(pair)} per pair of tokens (scores, masks)")
    cache = []
    for term in memory.cache:
        tokens = "encoder token" if term.source else "token"
        window = f", at most {term.window:,} tokens" if term.window else ""
        cache.append(f"{human_bytes(term.token_bytes)} per {tokens}{window}")
    if memory.sequence_bytes:
        cache.append(f"{human_bytes(memory.sequence_bytes)} per sequence")
    facts = [("cache", cache or ["none"]), ("prefill", prefill)]
    if memory.logits_token_bytes:
        logits = f"{human_bytes(memory.logits_token_bytes)} per token with logits"
        facts.append(("logits", [logits]))
    return facts


def device_lines(plan: Plan, load: Workload) -> Iterator[str]:
    """Yield the section of the report about a device."""
    reserve = human_bytes(load.reserve_bytes)
    yield f"DEVICE  {human_bytes(load.device_bytes)}, of which {reserve} are reserved"
    for head, text in device_facts(plan, load):
        yield _line(head, text)


def device_facts(plan: Plan, load: Workload) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) for each fact about the device."""
    if plan.stages is not None:
        worst = tightest(plan, load)
        yield "stage", f"{shown_stages(plan)[parts(plan).index(worst)]} has the least free memory:"
        plan = worst
    memory = plan.memory
    free = load.device_bytes - load.reserve_bytes - weight_bytes(plan)
    if free < 0:
        yield "weights", f"do not fit; {human_bytes(-free)} too large"
        return
    yield "weights", f"fit; {human_bytes(free)} left"
    if memory is None:
        yield "cache", _CANNOT_BE_MEASURED
        return
    most = _counted(cached_tokens(plan, memory, load))
    yield "cache", f"{most} tokens of one sequence fit in addition to the weights"
    if load.context is None:
        return
    needed = needs(plan, memory, load.batch, load.context)
    left = load.device_bytes - load.reserve_bytes - needed.total
    what, fit, no_fit = ("a sequence", "fits", "does not fit")
    if load.batch > 1:
        what, fit, no_fit = (f"{load.batch:,} sequences", "fit", "do not fit")
    left_text, over = f"{human_bytes(left)} left", f"{human_bytes(-left)} too large"
    verdict = f"{fit}; {left_text}" if left >= 0 else f"{no_fit}; {over}"
    yield "context", f"{what} of {load.context:,} tokens {verdict}"
    yield "", f"{human_bytes(needed.cache)} of cache, {human_bytes(needed.activations)} of activations"
    most = _counted(sequences(plan, memory, load))
    yield "batch", f"{most} sequences of {load.context:,} tokens fit, if prompts are processed one at a time"


def _counted(count: int) -> str:
    return f"more than {count:,}" if count >= MAX_TOKENS else f"{count:,}"


def _line(head: str, text: str) -> str:
    return f"  {head:<15}{text}"


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table whose cells stand to the right; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip()
