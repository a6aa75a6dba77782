"""What a rank needs in memory, and what fits on a device, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardconv_runtime.format.measured import LiveBytes, MemoryPlan
from shardconv_runtime.format.memory_sizes import moment_bytes, prefill_bytes
from shardconv_runtime.format.plan import Plan

from .fits import MAX_TOKENS, Workload, cached_tokens, needs, parts, sequences, tightest, weight_bytes
from .human_numbers import human_bytes
from .summary import shown_stages

_CANNOT_BE_MEASURED = "cache and activations could not be measured; the notes say why"


def memory_lines(plan: Plan, num_tokens: int) -> Iterator[str]:
    """The section of the report; empty where nothing was measured."""
    for title, part in memory_parts(plan):
        assert part.memory is not None
        yield f"MEMORY  {title}"
        yield _line("weights", human_bytes(weight_bytes(part)))
        for head, texts in memory_facts(part.memory, num_tokens):
            for index, text in enumerate(texts):
                yield _line("" if index else head, text)


def memory_parts(plan: Plan) -> list[tuple[str, Plan]]:
    """(whose ranks, the plan of these) for what was measured: stages that need the same are said once."""
    if plan.stages is None:
        return [("of each rank", plan)] if plan.memory is not None else []
    alike: dict[tuple[MemoryPlan, int], list[tuple[int, Plan]]] = {}
    for stage, part in zip(shown_stages(plan), parts(plan), strict=True):
        if part.memory is not None:
            alike.setdefault((part.memory, weight_bytes(part)), []).append((stage, part))
    return [
        (
            f"of each rank of stage{'s' if len(same) > 1 else ''} {', '.join(str(k) for k, _ in same)}",
            same[0][1],
        )
        for same in alike.values()
    ]


def memory_facts(memory: MemoryPlan, num_tokens: int) -> list[tuple[str, list[str]]]:
    """(what, texts about it) for the cache, the prefill of a prompt and the logits."""
    moment = max(
        memory.prefill, key=lambda each: moment_bytes(each, 1, num_tokens), default=LiveBytes((0, 0, 0))
    )
    prefill = human_bytes(prefill_bytes(memory, 1, num_tokens))
    found = [
        ("cache", _cache_texts(memory) or ["none"]),
        (
            "prefill",
            [f"{prefill} for a prompt of {num_tokens:,} tokens", *_moment_texts(moment)],
        ),
        ("logits", [f"{human_bytes(memory.logits_token_bytes)} for each token whose logits are asked for"]),
    ]
    return [fact for fact in found if fact[0] != "logits" or memory.logits_token_bytes]


def _cache_texts(memory: MemoryPlan) -> list[str]:
    texts = []
    for term in memory.cache:
        tokens = f"each of the last {term.window:,} tokens" if term.window else "each token"
        reader = " that the encoder reads" if term.source else ""
        texts.append(f"{human_bytes(term.token_bytes)} for {tokens}{reader}")
    if memory.sequence_bytes:
        texts.append(f"{human_bytes(memory.sequence_bytes)} for each sequence")
    return texts


def _moment_texts(moment: LiveBytes) -> list[str]:
    """Its coefficients for one sequence."""
    _, token, pair = (a + b for a, b in zip(moment.sequence, moment.once, strict=True))
    texts = [f"{human_bytes(token)} for each token"] if token > 0 else []
    return texts + ([f"{human_bytes(pair)} for each pair of tokens (scores, masks)"] if pair > 0 else [])


def device_lines(plan: Plan, load: Workload) -> Iterator[str]:
    """The section about a device."""
    reserve = human_bytes(load.reserve_bytes)
    yield f"DEVICE  {human_bytes(load.device_bytes)}, of which {reserve} are kept free"
    for head, text in device_facts(plan, load):
        yield _line(head, text)


def device_facts(plan: Plan, load: Workload) -> Iterator[tuple[str, str]]:
    """(what, text) for each thing that can be said about the device."""
    if plan.stages is not None:
        worst = tightest(plan, load)
        yield "stage", f"{shown_stages(plan)[parts(plan).index(worst)]} has least left:"
        plan = worst
    memory = plan.memory
    free = load.device_bytes - load.reserve_bytes - weight_bytes(plan)
    if free < 0:
        yield "weights", f"do not fit: {human_bytes(-free)} too much"
        return
    yield "weights", f"fit, and leave {human_bytes(free)}"
    if memory is None:
        yield "cache", _CANNOT_BE_MEASURED
        return
    most = _counted(cached_tokens(plan, memory, load))
    yield "cache", f"{most} tokens of a sequence fit beside the weights"
    if load.context is None:
        return
    needed = needs(plan, memory, load.batch, load.context)
    left = load.device_bytes - load.reserve_bytes - needed.total
    what, fit, verb = ("a sequence", "fits, and leaves", "is")
    if load.batch > 1:
        what, fit, verb = (f"{load.batch:,} sequences", "fit, and leave", "are")
    verdict = f"{fit} {human_bytes(left)}" if left >= 0 else f"{verb} {human_bytes(-left)} too much"
    yield "context", f"{what} of {load.context:,} tokens {verdict}"
    yield "", f"{human_bytes(needed.cache)} of cache, {human_bytes(needed.activations)} of activations"
    most = _counted(sequences(plan, memory, load))
    yield "batch", f"{most} sequences of {load.context:,} tokens fit, if prompts are read one after another"


def _counted(count: int) -> str:
    return f"more than {count:,}" if count >= MAX_TOKENS else f"{count:,}"


def _line(head: str, text: str) -> str:
    return f"  {head:<15}{text}"


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A table whose cells stand to the right; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip()
