"""What a rank of a plan needs on a device, and what fits there beside its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardconv_runtime.format.measured import MemoryPlan, cache_bytes, prefill_bytes
from shardconv_runtime.format.plan import Plan, local_shape
from shardconv_runtime.format.stage_part import of_stage
from shardconv_runtime.format.stored_layout import stored_plans

from .summary import item_bytes, shown_stages

RESERVE = 2 * 10**9
"""Default bytes that are kept free on a device: for the driver, libraries and memory that is lost between
tensors."""
MAX_TOKENS = 2**40
"""More tokens are not counted."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A device, and what it is to do."""

    device_bytes: int
    reserve_bytes: int = RESERVE
    """Kept free."""
    context: int | None = None
    """Tokens of each sequence; of both the encoder and the decoder, where there are two."""
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on the rank that needs most."""

    weights: int
    """In memory, with the buffers that no file holds."""
    cache: int
    activations: int
    """Of the prefill of the whole batch, beside the cache."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.activations


def parts(plan: Plan) -> list[Plan]:
    """A plan for each stage that a plan is about, with what was measured of it; without stages, the plan."""
    stages = plan.stages
    if stages is None:
        return [plan]
    memory = stages.memory or (None,) * stages.count
    return [replace(of_stage(plan, k), stages=None, memory=memory[k]) for k in shown_stages(plan)]


def tightest(plan: Plan, load: Workload) -> Plan:
    """That of ``parts`` on whose ranks least is left."""

    def left(part: Plan) -> int:
        if part.memory is None:
            return -weight_bytes(part)
        return -needs(part, part.memory, load.batch, load.context or 1).total

    return min(parts(plan), key=left)


def weight_bytes(plan: Plan) -> int:
    """Bytes of the weights in the memory of the rank that has most; packed ones stay packed."""
    total = plan.memory.buffer_bytes if plan.memory else 0
    for entry in stored_plans(plan).values():
        total += math.prod(local_shape(entry, plan.mesh, 0)) * item_bytes(entry.dtype)
    return total


def needs(plan: Plan, memory: MemoryPlan, batch: int, length: int) -> Needs:
    """What sequences of one length need, prompt and all.

    Args:
        plan: any plan.
        memory: of the plan.
        batch: number of sequences.
        length: tokens of each.
    """
    return Needs(
        weights=weight_bytes(plan),
        cache=cache_bytes(memory, batch, length, length),
        activations=prefill_bytes(memory, batch, length),
    )


def fits(plan: Plan, memory: MemoryPlan, load: Workload) -> bool:
    """Whether a rank can do this; without a context, whether it can hold the weights and one token."""
    needed = needs(plan, memory, load.batch, load.context or 1)
    return needed.total + load.reserve_bytes <= load.device_bytes


def cached_tokens(plan: Plan, memory: MemoryPlan, load: Workload) -> int:
    """Most tokens of one sequence whose cache fits beside the weights; at most ``MAX_TOKENS``."""
    free = load.device_bytes - load.reserve_bytes - weight_bytes(plan)
    return _largest(lambda length: cache_bytes(memory, 1, length, length) <= free)


def sequences(plan: Plan, memory: MemoryPlan, load: Workload) -> int:
    """Most sequences of the context that fit, prompts read one after another; at most ``MAX_TOKENS``."""
    length = load.context or 1
    free = load.device_bytes - load.reserve_bytes - weight_bytes(plan) - prefill_bytes(memory, 1, length)
    return _largest(lambda batch: cache_bytes(memory, batch, length, length) <= free)


def _largest(is_possible: Callable[[int], bool]) -> int:
    """The largest number up to ``MAX_TOKENS`` for which this is so; 0 if there is none."""
    if is_possible(MAX_TOKENS):
        return MAX_TOKENS
    low, high = 0, MAX_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return low
