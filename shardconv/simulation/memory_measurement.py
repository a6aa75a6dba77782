"""Measure the memory that a rank needs in addition to its weights, on its own model without data.

The runtime's code builds the model of rank 0, which has the largest share of everything. It runs on the meta
device at a few batches and lengths, and the bytes of its cache and of its live tensors become formulas.
Layers that are represented by others are left out, and counted.

The cache consists of the outputs of a call that are arguments of the next one. It is compared after a
decoding step at short and long lengths and for two batches: each tensor is constant, grows with each token,
or stops growing at a window. The moments of six runs (two batches, three lengths) are matched one by one, and
each becomes a polynomial; polynomials that are the largest at some size are kept. Code that loops over tokens
or chunks is run at smaller lengths. If code asks for values that depend on parameters, nothing is measured,
and a note in the plan says why.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import torch
from shardconv_runtime.format.measured import CacheTerm, LiveBytes, MemoryPlan, cache_bytes, moment_bytes
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.stage_names import absent_modules, is_inside, num_stages
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from shardconv_runtime.pp.stage_link import Crossing, StageLink, Transport
from shardconv_runtime.pp.stage_model import argument_names, keep_stage
from torch import Tensor, nn

from ..inputs.trace_inputs import TraceInputs
from ..tracing.identities import META
from .layer_bypass import Bypass, BypassedRank, bypass, planned_alike
from .memory_run import CachedTensor, Calls, Runner, Size
from .rank_threads import MetaCommunicator

T = TypeVar("T")
Points = Mapping[tuple[int, int], int]
"""(batch, length) -> bytes, for two batches and three lengths."""

_PROBES = tuple((batch, length) for batch in (1, 64) for length in (16, 128, 1024, 8192, 65536, 1 << 20))
"""Sizes at which formulas of moments are compared."""


def largest_moments(runs: Mapping[tuple[int, int], Sequence[int]]) -> tuple[LiveBytes, ...]:
    """Return the moments of a run that need most memory at some size.

    Args:
        runs: (batch, length) -> bytes at each moment, for two batches and three lengths. If the number of
            moments depends on the length (a loop over tokens), only the largest moment of each run is used.
    """
    if len({len(run) for run in runs.values()}) > 1:
        runs = {size: (max(run, default=0),) for size, run in runs.items()}
    moments = dict.fromkeys(zip(*runs.values(), strict=True))
    formulas = [live_bytes(dict(zip(runs, values, strict=True))) for values in moments]
    if not formulas:
        return (LiveBytes((0, 0, 0)),)
    largest = dict.fromkeys(max(formulas, key=lambda each: moment_bytes(each, *probe)) for probe in _PROBES)
    return tuple(largest)


def live_bytes(points: Points) -> LiveBytes:
    """Return the polynomial through these points; bytes and bytes per token are rounded up."""
    batches, lengths = (sorted({size[i] for size in points}) for i in range(2))
    low, high = batches
    each = {n: Fraction(points[high, n] - points[low, n], high - low) for n in lengths}
    other = {n: points[low, n] - low * each[n] for n in lengths}
    return LiveBytes(_quadratic(each), _quadratic(other))


def _quadratic(points: Mapping[int, Fraction]) -> tuple[int, int, int]:
    """Return the coefficients of 1, n and n * n through three points (Newton's form).

    A small fraction of n * n comes from code that pads to blocks, not from pairs of tokens. It is rounded to
    0, and the line goes through the outer points.
    """
    (x, a), (y, b), (z, c) = sorted(points.items())
    slope = (b - a) / (y - x)
    square = round(((c - b) / (z - y) - slope) / (z - x))
    linear = (c - a) / (z - x) - square * (x + z)
    return math.ceil(a - linear * x - square * x * x), math.ceil(linear), square


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of one tensor of a cache, by the number of tokens."""

    constant: int
    token_bytes: int
    window: int = 0
    """Number of tokens after which it stops growing; 0 if it never does."""


def growth(short: tuple[int, int, int], long: tuple[int, int, int]) -> Growth:
    """Return the formula of a tensor.

    Args:
        short: a length, and the bytes of the tensor at this length and at one token more.
        long: the same beyond any window.
    """
    first, last = short[2] - short[1], long[2] - long[1]
    constant = short[1] - first * short[0]
    if first > 0 and last == 0:
        return Growth(constant, first, -(-(long[1] - constant) // first))
    if first == last and long[1] == constant + first * long[0]:
        return Growth(constant, first)
    mean = -(-(long[1] - short[1]) // (long[0] - short[0]))  # it grows by blocks
    return Growth(max(short[1] - mean * short[0], 0), mean)


class UnansweredTransport(Transport):
    """Run one stage of a pipeline without the others: nothing is sent, and received values are only
    allocated."""

    may_miss_values = True  # a layer that is left out, and counted, passes on none itself

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        """Drop a value."""

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return memory for a value."""
        return torch.empty(tuple(shape), dtype=dtype, device=META)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Leave the results on the stage that computed them."""


def bypassed_on(plan: Plan, stage: int, bypassed: Mapping[str, Bypass]) -> dict[str, Bypass]:
    """Return the layers of one stage to leave out. The first layer of each kind on it represents them.

    Args:
        plan: a plan with stages.
        stage: number of the stage.
        bypassed: layers of all stages.
    """
    absent = absent_modules(plan, stage)
    shown_by: dict[str, str] = {}
    out: dict[str, Bypass] = {}
    for like in dict.fromkeys(how.like for how in bypassed.values()):
        if not is_inside(like, absent):
            shown_by[like] = like
    for fqn, how in bypassed.items():
        if is_inside(fqn, absent):
            continue
        if how.like in shown_by:
            out[fqn] = replace(how, like=shown_by[how.like])
        else:
            shown_by[how.like] = fqn
    return out


_SHORT = 6
"""Length of the shortest sequence whose cache is measured, shorter than windows."""
_LONG = (1 << 17, 1 << 15, 1 << 12, 1 << 9, 1 << 7, 1 << 5)
"""Lengths beyond windows. The first one that the model's code can run is used."""
_LONGEST_PROMPT = 1 << 15
_MAX_OPERATORS = 50_000
"""Most operators of the first run."""
_MORE_OPERATORS = 10_000
"""Longer runs may have twice as many operators as the first, and this many more for loops over chunks."""


class NotMeasured(Exception):
    """The model cannot be run without values."""


@dataclass(frozen=True, slots=True)
class MeasuredRank:
    """The model of one rank on meta, in which layers are bypassed that others represent."""

    model: nn.Module
    counts: Mapping[str, int]
    """FQN of a layer -> number of other layers that it represents."""
    buffer_bytes: int
    """Bytes of buffers that are not stored, which are memory in addition to the weights."""

    @classmethod
    def of(cls, model: nn.Module, bypassed: Mapping[str, Bypass], complete: nn.Module) -> MeasuredRank:
        """Return the rank of a model.

        Args:
            complete: a model with the same buffers and all layers.
        """
        stored = {id(tensor) for _, tensor in stored_tensors(complete)}
        buffer_bytes = sum(buffer.nbytes for buffer in complete.buffers() if id(buffer) not in stored)
        return cls(model, Counter(how.like for how in bypassed.values()), buffer_bytes)


def measure_on_rank(
    plan: Plan,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass],
    comm: MetaCommunicator,
    stage: int | None,
    measure: Callable[[MeasuredRank, Calls], T],
) -> T:
    """Measure the model of one rank on meta. Layers that are represented by others are bypassed.

    Args:
        plan: the plan of the model.
        model: global, on meta; it is copied.
        inputs: inputs of its trace.
        bypassed: layers that are represented by others.
        comm: the communicator of the rank.
        stage: stage of the rank; None for a plan without stages.
        measure: gets calls with tokens only, or if it raises an error, calls with all inputs of the trace.

    Raises:
        NotMeasured: ``measure`` has raised an error both times.
    """

    def measured(rank: MeasuredRank) -> T:
        problem: Exception | None = None
        for with_all in (False, True):
            calls = Calls(rank.model, inputs, with_all=with_all)
            try:
                return measure(rank, calls)
            except Exception as error:  # the model's code may raise anything
                problem = problem or error
        raise NotMeasured(f"{type(problem).__name__}: {problem}") from problem

    alike = planned_alike(plan, bypassed)
    if stage is None:
        rank = BypassedRank(plan, model, alike, comm)
        try:
            result = measured(MeasuredRank.of(rank.module, alike, model))
        except NotMeasured:
            if rank.is_exact:
                raise
        else:
            if rank.is_exact:
                return result
    names = argument_names(model, plan)
    local = parallelize(copy.deepcopy(model), plan, comm)
    if stage is not None:
        alike = bypassed_on(plan, stage, alike)
        link = StageLink(stage, num_stages(plan), UnansweredTransport())
        keep_stage(local, plan, link, 0, META, getattr(torch, plan.model.dtype), names)
    made = MeasuredRank.of(local, alike, local)
    bypass(local, alike)
    return measured(made)


def measure_memory(
    plan: Plan,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass],
    stage: int | None = None,
) -> MemoryPlan:
    """Return the bytes of caches and activations of rank 0.

    Args:
        plan: the plan of the model.
        model: global, on meta; it is copied.
        inputs: inputs of its trace.
        bypassed: layers that are represented by others.
        stage: stage whose rank is measured; None for a plan without stages.

    Raises:
        NotMeasured: if the model cannot be run on meta tensors.
    """

    def measured(rank: MeasuredRank, calls: Calls) -> MemoryPlan:
        runner = Runner(rank.model, calls, rank.counts)
        return replace(_Measurement(runner).memory(), buffer_bytes=rank.buffer_bytes)

    return measure_on_rank(plan, model, inputs, bypassed, MetaCommunicator(0, plan.mesh), stage, measured)


class _Measurement:
    """The runs of one model.

    Args:
        runner: the runner of its rank.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.has_source = runner.calls.has_source
        first = runner.prompt(self._size(2, _SHORT), _MAX_OPERATORS)
        self.max_operators = 2 * first.num_operators + _MORE_OPERATORS
        for length in _LONG:
            try:
                self.runner.prompt(self._size(2, length), self.max_operators)
            except Exception:  # the model's code fails at this length, or has too many operators
                continue
            self.longest = length
            break
        else:
            raise NotMeasured(f"its code runs for {_SHORT} tokens, not for {_LONG[-1]}")

    def memory(self) -> MemoryPlan:
        """Return all formulas."""
        cache = self._cache()
        longest = min(self.longest, _LONGEST_PROMPT)
        sizes = {
            (batch, length): self._size(batch, length)
            for batch in (1, 2)
            for length in (longest // 4, longest // 2, longest)
        }
        runs = {key: self.runner.prompt(size, self.max_operators) for key, size in sizes.items()}
        moments = largest_moments({key: run.live for key, run in runs.items()})
        # A tensor of the cache may be a view of a larger one until the next token is read. Then the larger
        # one counts.
        more = {}
        for key, size in sizes.items():
            counted = cache_bytes(cache, size.batch, size.length, size.source_length)
            more[key] = self.runner.kept_bytes(runs[key].cache) - counted
        if max(more.values()) > 0:
            extra = live_bytes(more)
            moments += tuple(
                LiveBytes(_sum(each.sequence, extra.sequence), _sum(each.once, extra.once))
                for each in moments
            )
        logits = max(run.logits_token_bytes for run in runs.values())
        return replace(cache, prefill=moments, logits_token_bytes=logits)

    def _size(self, batch: int, length: int) -> Size:
        """Return the size of a prompt, which goes to the encoder if there is one."""
        return Size(batch, 1, length) if self.has_source else Size(batch, length)

    def _cache(self) -> MemoryPlan:
        """Return the formulas of the cache."""
        source = _SHORT if self.has_source else 0
        short, more, long, longer = (
            self.runner.continued(Size(2, length, source), self.max_operators)
            for length in (_SHORT, _SHORT + 1, self.longest, self.longest + 1)
        )
        of_one = self.runner.continued(Size(1, _SHORT, source), self.max_operators)
        by_source = self._by_source(short) if self.has_source else {}
        terms: Counter[tuple[int, bool]] = Counter()
        constants: Counter[bool] = Counter()
        for path, held_tensor in long.items():
            a, b, c, d = (_bytes(run, path) for run in (short, more, long, longer))
            grown = growth((_SHORT, a, b), (self.longest, c, d))
            read = by_source.get(path, Growth(0, 0))
            is_fixed = _bytes(of_one, path) == a and not grown.token_bytes
            count = self.runner.count(held_tensor.place)
            constants[is_fixed] += count * (grown.constant - read.token_bytes * source)
            terms[grown.window, False] += count * grown.token_bytes
            terms[read.window, True] += count * read.token_bytes
        return MemoryPlan(
            prefill=(),
            cache=tuple(CacheTerm(n // 2, *kind) for kind, n in sorted(terms.items()) if n),
            sequence_bytes=constants[False] // 2,
            fixed_bytes=constants[True],
        )

    def _by_source(self, short: Mapping[str, CachedTensor]) -> dict[str, Growth]:
        """Return how the tensors grow with the tokens that the encoder reads."""
        more, long, longer = (
            self.runner.continued(Size(2, _SHORT, length), self.max_operators)
            for length in (_SHORT + 1, self.longest, self.longest + 1)
        )
        out = {}
        for path in long:
            a, b, c, d = (_bytes(run, path) for run in (short, more, long, longer))
            out[path] = growth((_SHORT, a, b), (self.longest, c, d))
        return out


def _bytes(run: Mapping[str, CachedTensor], path: str) -> int:
    return run[path].num_bytes if path in run else 0


def _sum(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
