"""Count the work of one rank in a call: operations, bytes and collectives, on its own model without data.

The model of rank 0 runs on the meta device, as for the memory (``simulation/memory_measurement.py``), at the
batch and the length that were asked for. Layers that are represented by others are left out, and counted.

Bytes are counted for operands and results, each once. A matrix of a stack that no row needs is not read: with
random rows, a stack of E matrices has E (1 - (1 - 1/E)^rows) that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from shardconv_runtime.format.plan import Plan
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..dim_analysis.rules import traits_of
from ..inputs.trace_inputs import TraceInputs
from ..simulation.layer_bypass import Bypass
from ..simulation.live_memory import LiveMemory, WeakTable
from ..simulation.memory_measurement import MeasuredRank, measure_on_rank
from ..simulation.memory_run import DECODER, Calls, Runner, Size, tensors_of
from ..simulation.rank_threads import MetaCommunicator
from ..tracing.identities import tensors_in

MAX_OPERATORS = 200_000
"""Most operators of a call; code that loops over tokens has more."""

_ENCODED, _ENCODER_OUTPUTS = "encoder_last_hidden_state", "encoder_outputs"
"""The output of a model with an encoder, and the argument as which ``generate`` passes it on."""
_LOOKUPS = ("aten.embedding", "aten.index", "aten.index_select", "aten.gather")
"""Operators that read only the elements that they return."""
_WRITES = ("aten.index_copy", "aten.index_put", "aten.scatter", "aten.copy")
"""Operators that write only the elements that they are given."""


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """An operator on local shapes."""

    kind: str
    """``product`` of matrices, ``attention``, ``other``; ``free`` if it moves nothing, such as a view."""
    dtype: str
    flops: float = 0
    num_bytes: float = 0
    elements: float = 0
    """Elements of the largest matrix of a product."""
    cache_bytes: float = 0
    """Bytes among ``num_bytes`` for a copy of the cache, which a cache in static memory does without."""


@dataclass(frozen=True, slots=True)
class CollectiveWork:
    """A collective of the plan."""

    op: str
    ranks: tuple[int, ...]
    num_bytes: int
    """Bytes of the full tensor: before a reduce_scatter, behind an all_gather."""


Event = OperatorWork | CollectiveWork


@dataclass(frozen=True, slots=True)
class CallWork:
    """The work of a rank in one call, in order."""

    events: tuple[tuple[Event, int], ...]
    """(event, the number of layers for which it counts)"""

    @property
    def flops(self) -> float:
        """Operations of products and attention."""
        return sum(count * event.flops for event, count in self.events if isinstance(event, OperatorWork))

    @property
    def num_bytes(self) -> float:
        """Bytes that operators read and write."""
        return sum(count * event.num_bytes for event, count in self.events if isinstance(event, OperatorWork))


@dataclass(frozen=True, slots=True)
class RankWork:
    """The work of a rank for a workload."""

    prefill: CallWork
    """Read the prompts, for the logits of the last token."""
    token: CallWork
    """One more token of each sequence."""
    forward: CallWork | None
    """The forward pass of a training step; None if the model is not trained."""


class _Recorder:
    """The events of the call that runs."""

    def __init__(self) -> None:
        self.events: list[tuple[Event, str]] = []
        self.place: Callable[[], str] = str

    def add(self, event: Event) -> None:
        """Record an event of the layer that runs."""
        self.events.append((event, self.place()))


class _CountingCommunicator(MetaCommunicator):
    """Record the collectives of rank 0."""

    def __init__(self, recorder: _Recorder, mesh: tuple[int, ...]) -> None:
        super().__init__(0, mesh)
        self._recorder = recorder

    def _sum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        self._note("all_reduce", axes, x.nbytes)
        return super()._sum(x, axes)

    def _sum_in_place(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        self._note("all_reduce", axes, x.nbytes)
        return super()._sum_in_place(x, axes)

    def _concatenate(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        self._note("all_gather", axes, x.nbytes * self.num_ranks(axes))
        return super()._concatenate(x, axes)

    def _reduce_scatter(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        self._note("reduce_scatter", axes, x.nbytes)
        return super()._reduce_scatter(x, axes)

    def _note(self, op: str, axes: tuple[int, ...], num_bytes: int) -> None:
        self._recorder.add(CollectiveWork(op, self.group(axes), num_bytes))


class _CountingMode(LiveMemory):  # type: ignore[no-untyped-call]
    """Record each operator of a call, in addition to its storages."""

    def __init__(self, recorder: _Recorder, cache: Mapping[str, Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorder = recorder
        self._flops: dict[Any, float] = {}
        self._cache: WeakTable[None] = WeakTable()
        for _, tensor in tensors_of(cache):
            self._cache[tensor.untyped_storage()] = None

    def ran(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """See ``LiveMemory``."""
        self._recorder.add(self._work(name, func, args, kwargs, result))

    def _work(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> OperatorWork:
        operands, results = tensors_in(args) + tensors_in(kwargs.values()), tensors_in((result,))
        base = name.rsplit(".", 1)[0].rstrip("_")
        of = next((t for t in (*results, *operands) if t.is_floating_point()), None)
        dtype = str(of.dtype if of is not None else torch.int64).removeprefix("torch.")
        memory = {id(t.untyped_storage()) for t in operands}
        is_new = any(id(t.untyped_storage()) not in memory for t in results)
        if not operands or not (is_new or func._schema.is_mutable):
            return OperatorWork("free", dtype)
        traits = traits_of(name)
        read, written = sum(map(_touched, operands)), sum(map(_touched, results))
        if base in _LOOKUPS:
            return OperatorWork("other", dtype, num_bytes=2 * written)
        if base in _WRITES and func._schema.is_mutable:
            return OperatorWork("other", dtype, num_bytes=2 * sum(map(_touched, operands[1:])))
        if not (traits.is_product or traits.is_attention):
            is_copy = any(t.untyped_storage() in self._cache for t in operands)
            return OperatorWork("other", dtype, 0, read + written, 0, read + written if is_copy else 0)
        matrices = sorted((t for t in operands if t.dim() > 1), key=lambda t: -t.numel())
        if traits.is_grouped:
            first, stack = operands[0], operands[1]
            share = _share_of_stack(stack.shape[0], first.shape[0]) if stack.dim() == 3 else 1.0
            read -= round((1 - share) * _touched(stack))
            flops = 2.0 * first.shape[-1] * results[0].numel()
            return OperatorWork("product", dtype, flops, read + written, share * stack.numel())
        flops = self._counted(func, args, kwargs)
        if traits.is_attention and (kwargs.get("is_causal") or True in args[5:6]):
            flops /= 2  # kernels leave out the pairs that the mask excludes
        kind = "attention" if traits.is_attention else "product"
        return OperatorWork(kind, dtype, flops, read + written, matrices[0].numel() if matrices else 0)

    def _counted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> float:
        """Return the operations that torch counts."""
        shapes = tuple(tuple(t.shape) for t in tensors_in(args) + tensors_in(kwargs.values()))
        key = func, shapes
        if key not in self._flops:
            with FlopCounterMode(display=False) as counter:
                func(*args, **kwargs)
            self._flops[key] = float(counter.get_total_flops())
        return self._flops[key]


def _touched(tensor: Tensor) -> int:
    """Return the bytes of the memory under a tensor's elements, each once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _share_of_stack(matrices: int, rows: int) -> float:
    return 1 - (1 - 1 / matrices) ** rows if matrices else 1.0


class _WorkRunner(Runner):
    """Run calls of one rank, and return their events."""

    def __init__(
        self, model: nn.Module, calls: Calls, counts: Mapping[str, int], recorder: _Recorder
    ) -> None:
        super().__init__(model, calls, counts)
        self._recorder = recorder
        recorder.place = self.place

    def run(self, arguments: Mapping[str, Any], cache: Mapping[str, Any]) -> tuple[CallWork, Any]:
        """Return the work of a call and its outputs."""
        self._recorder.events = []
        mode = _CountingMode(self._recorder, cache, MAX_OPERATORS, self.place, self.stored, self.memo)
        outputs = self.call(mode, arguments)
        events = tuple((event, self.count(place)) for event, place in self._recorder.events)
        return CallWork(events), outputs


def rank_work(
    plan: Plan,
    model: nn.Module,
    inputs: TraceInputs,
    bypassed: Mapping[str, Bypass],
    batch: int,
    context: int,
    stage: int | None = None,
) -> RankWork:
    """Return the work of rank 0 for a batch of sequences of one length.

    Args:
        plan: the plan of the model; layers are fused as it says.
        model: global, on meta; it is copied.
        inputs: inputs of its trace.
        bypassed: layers that are represented by others.
        batch: number of sequences.
        context: tokens of each prompt.
        stage: stage of the rank; None for a plan without stages.

    Raises:
        NotMeasured: if the model cannot be run on meta tensors.
    """
    recorder = _Recorder()
    comm = _CountingCommunicator(recorder, plan.mesh)

    def counted(rank: MeasuredRank, calls: Calls) -> RankWork:
        runner = _WorkRunner(rank.model, calls, rank.counts, recorder)
        size = Size(batch, 1, context) if calls.has_source else Size(batch, context)
        prefill, outputs = runner.run(calls.prompt(size), {})
        cache = calls.handed_back(outputs)
        token = runner.run(_next_token(calls, size, cache, outputs), cache)[0] if cache else prefill
        del outputs, cache
        forward = None
        if plan.training is not None:
            every = Size(batch, context, context) if calls.has_source else size
            forward = runner.run(calls.whole(every), {})[0]
        return RankWork(prefill, token, forward)

    return measure_on_rank(plan, model, inputs, bypassed, comm, stage, counted)


def _next_token(calls: Calls, size: Size, cache: Mapping[str, Any], outputs: Any) -> Mapping[str, Any]:
    """Return the arguments of the next call of ``generate``, which runs an encoder only once."""
    arguments = calls.next_token(size, cache)
    states = outputs.get(_ENCODED) if isinstance(outputs, Mapping) else None
    if states is None or _ENCODER_OUTPUTS not in calls.parameters:
        return arguments
    of_decoder = {DECODER, *cache}
    decoding = {name: x for name, x in arguments.items() if name in of_decoder or not isinstance(x, Tensor)}
    return {**decoding, _ENCODER_OUTPUTS: (states,)}


def without_fused(plan: Plan) -> Plan:
    """Return a plan whose layers multiply one by one, as outside of compiled code."""
    return replace(plan, fused=()) if plan.fused else plan


def hosts_bytes(work: CallWork, host_of: Callable[[int], int]) -> float:
    """Return the bytes that a group's rings send from one host to another in a call.

    A ring visits each host once, so as many of its links as there are hosts lead to another one.
    """
    total = 0.0
    for event, count in work.events:
        if isinstance(event, CollectiveWork):
            hosts = len({host_of(rank) for rank in event.ranks})
            if hosts > 1:
                total += count * hosts * sent_bytes(event)
    return total


def sent_bytes(work: CollectiveWork) -> float:
    """Return the bytes that each rank sends in a ring (Patarasuk and Yuan, 2009)."""
    ranks = len(work.ranks)
    rounds = 2 if work.op == "all_reduce" else 1
    return rounds * (ranks - 1) / ranks * work.num_bytes
