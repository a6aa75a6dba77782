"""Run a converted model on its own weights: all ranks as threads, in lockstep with the unsharded model.

The ranks get the weights in their files. The unsharded model gets the weights of the source, or weights that
are assembled from the files. Every layer runs. Weights are read when an operator needs them, so a model of
any size runs in the memory of its largest parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.checkpoint.quantized import rows_of
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import CheckpointError, ShardconvError, SolveError
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.format.measured import Numerics
from shardconv_runtime.format.plan import Packing, global_shape, module_plans, parameter_plans
from shardconv_runtime.format.slices import Range
from shardconv_runtime.format.stored_layout import tensor_name
from shardconv_runtime.loading.packed_models import held_part
from shardconv_runtime.packed.formats import check_values, dequantize
from shardconv_runtime.packed.stored_weights import WeightSlice
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.parallel.meta_model import build_model
from torch import Tensor, nn

from ..dim_analysis.rules import RULES
from ..inputs.example_inputs import stored_example
from ..inputs.trace_inputs import TraceInputs, trace_inputs
from ..reporting.progress import Progress
from ..reporting.summary import human_bytes
from ..simulation.available_memory import available_bytes
from ..simulation.model_runs import PRECISIONS, Precision, largest_difference, outputs_of
from ..simulation.module_comparison import ModuleComparison
from ..simulation.rank_simulation import Simulation, Unprovable, with_module
from ..simulation.streamed_weights import (
    FileWeights,
    RecentReads,
    TooLargeToRead,
    computed,
    computed_rows,
    largest_read,
)
from ..tracing.tape import Tape, reads_and_writes
from .shards import Converted


def dequantized_rows(
    name: str, packing: Packing, stored: Mapping[str, LazyTensor], held: WeightSlice, dtype: str
) -> LazyTensor:
    """Make a weight that is dequantized when it is read. Stacks are dequantized matrix by matrix.

    Args:
        name: name of the parameter, for messages.
        packing: how it is stored.
        stored: its stored tensors, which are local if ``held`` is a part.
        held: the part of the weight.
        dtype: dtype of the weight.
    """

    def compute(span: Range) -> Tensor:
        part = held.rows(*span)
        read = {t.name: read_tensor(rows_of(stored[t.name], t, span)) for t in packing.tensors}
        check_values(packing, read, part, name)
        return dequantize(packing, read, part, getattr(torch, dtype))

    shape = held.local_shape
    if any(dim.of == 0 and dim.step != 1 for tensor in packing.tensors for dim in tensor.dims):
        return computed(name, dtype, shape, lambda: compute((0, shape[0])))
    return computed_rows(name, dtype, shape, compute)


MEMORY_SHARE = 0.75
"""Fraction of the free memory to use, since the need is only estimated."""

LIVE_ACTIVATIONS = 8
"""Number of tensors of the largest kind that are assumed to be alive in each run."""

COPIES = 2
"""Number of tensors as large as the largest weight that are assumed to be alive: the one that an operator
reads, and a copy that code makes of it."""

KEPT_BYTES = 1 << 28
"""Most bytes of recently read weights that are kept."""


def run_numerics(
    converted: Converted, spec: ModelSpec, weights: Mapping[str, LazyTensor] | None, progress: Progress
) -> Numerics:
    """Compare the ranks of a converted model with the unsharded model.

    Args:
        converted: the weights of the ranks.
        spec: the spec of the converted directory. Only its config and its code are used.
        weights: global weights of the unsharded model, by name in the files. By default, they are assembled
            from ``converted``.
        progress: where to report progress.

    Raises:
        CheckpointError: if the outputs differ, or the ranks fail. The message names the first module that
            differs.
        SolveError: if the unsharded model cannot be traced or run.
        ShardconvError: if there is not enough memory, or weights cannot be read.
    """
    progress.stage("tracing")
    plan = converted.plan
    model = build_model(spec.model_class, spec.config, getattr(torch, plan.model.dtype), dict(plan.tied))
    inputs, tape = trace_inputs(model, RULES, example=stored_example(spec.directory))
    sources = _Sources(converted)
    unsharded = sources.usable(converted.weights() if weights is None else weights)
    runs = _Runs(converted, model, inputs, tape, unsharded, sources.of_ranks())
    precision, worst = runs.compare(progress)
    return Numerics(
        worst=worst,
        tolerance=precision.tolerance,
        dtype=dtype_name(precision.dtype),
        inputs={name: tuple(tensor.shape) for name, tensor in sorted(inputs.tensors.items())},
    )


class _Sources:
    """The weights in files, in the form in which the runtime gives them to a model."""

    def __init__(self, converted: Converted) -> None:
        self._converted = converted
        self._entries = parameter_plans(converted.plan)

    def usable(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Return the weights of the unsharded model. Packed ones are dequantized when they are read."""
        return self._usable(tensors, None)

    def of_ranks(self) -> list[dict[str, LazyTensor]]:
        """Return the weights of each rank."""
        tensors = self._converted.tensors
        return [
            self._usable({**tensors[None], **tensors[rank]}, rank) for rank in range(self._converted.plan.tp)
        ]

    def _usable(self, tensors: Mapping[str, LazyTensor], rank: int | None) -> dict[str, LazyTensor]:
        found = {}
        for name, entry in self._entries.items():
            if entry.packing is None:
                if name in tensors:
                    found[name] = tensors[name]
                continue
            names = {t.name: tensor_name(name, t.name) for t in entry.packing.tensors}
            if all(stored in tensors for stored in names.values()):
                parts = {part: tensors[stored] for part, stored in names.items()}
                plan = self._converted.plan
                held = (
                    WeightSlice.whole(global_shape(entry))
                    if rank is None
                    else held_part(entry, plan.mesh, rank)
                )
                found[name] = dequantized_rows(name, entry.packing, parts, held, entry.dtype)
        return found


@dataclass(frozen=True)
class _Runs:
    """The unsharded model and the ranks of a converted model, on their weights."""

    converted: Converted
    model: nn.Module
    """The unsharded model, on meta."""
    inputs: TraceInputs
    tape: Tape
    unsharded: Mapping[str, LazyTensor]
    ranks: Sequence[Mapping[str, LazyTensor]]

    def compare(self, progress: Progress) -> tuple[Precision, float]:
        """Run in the best precision for which there is memory, and that the model supports.

        Returns:
            The precision, and the largest difference of an output, relative to its largest value.

        Raises:
            CheckpointError: if the outputs differ, or the ranks fail.
            SolveError: if the unsharded model cannot be run.
            ShardconvError: if there is not enough memory.
        """
        problem: TooLargeToRead | Unprovable | None = None
        for precision in PRECISIONS:
            try:
                return precision, self._compare_in(precision, progress)
            except (TooLargeToRead, Unprovable) as error:
                problem = problem or error.with_traceback(
                    None
                )  # a traceback would keep the weights in memory
        where = f"{self.converted.directory}: its files are as they should be, but"
        if isinstance(problem, Unprovable):
            raise SolveError(
                f"{where} the unsharded model fails on its own weights ({problem}), so that the ranks cannot "
                "be compared with it; leave out --numerics"
            ) from problem
        raise ShardconvError(f"{where} {problem}; leave out --numerics, or use a larger machine") from problem

    def _compare_in(self, precision: Precision, progress: Progress) -> float:
        plan, num_bytes = self.converted.plan, sum(tensor.num_bytes for tensor in self.unsharded.values())
        reads = self._reads(precision)
        comparison = ModuleComparison(plan, module_plans(plan), precision.tolerance)
        with progress.bar(f"running all ranks in {dtype_name(precision.dtype)}", num_bytes) as advance:
            weights = FileWeights(self.unsharded, self.ranks, reads, advance)
            want, ranks = Simulation(plan, self.model, weights, precision).in_lockstep(
                comparison, parallelize, lambda model: outputs_of(model, self.inputs, precision)
            )
        if not all(t.isfinite().any() for t in want if t.numel()):
            raise Unprovable("an output has no finite value")
        where = self.converted.directory
        first = comparison.first or comparison.failure
        if comparison.failure is not None:
            problem = with_module("the plan failed when its ranks were simulated", first)
            raise CheckpointError(f"{where}: {problem}; convert the model again")
        worst = max(largest_difference(outputs, want) for outputs in ranks if outputs is not None)
        if not worst <= precision.tolerance:
            problem = with_module(
                f"simulated ranks differ from the unsharded model by {worst:.1e} of its largest output "
                f"(allowed: {precision.tolerance:.0e}) on the real weights",
                first,
            )
            raise CheckpointError(
                f"{where}: {problem}; compare the directory with --against MODEL, or convert the model again"
            )
        return worst

    def _reads(self, precision: Precision) -> RecentReads:
        """Return a reader that keeps as many weights as fit in the free memory.

        Raises:
            TooLargeToRead: if the largest weight does not fit.
        """
        activations = _activation_bytes(self.tape, precision) * (self.converted.plan.tp + 1)
        free = int(available_bytes() * MEMORY_SHARE)
        largest, name = max((largest_read(t, precision.dtype), name) for name, t in self.unsharded.items())
        if activations + COPIES * largest > free:
            needed = human_bytes(activations + COPIES * largest)
            raise TooLargeToRead(
                f"to run it in {dtype_name(precision.dtype)} takes some {needed} of memory, for {name} "
                f"and for activations, and {human_bytes(free)} may be taken here"
            )
        room = (free - activations) // COPIES
        return RecentReads(min(KEPT_BYTES, room), room)


def _activation_bytes(tape: Tape, precision: Precision) -> int:
    """Estimate the bytes of activations of one run, without tensors that are computed only from weights."""
    weights = {tid for tid, info in enumerate(tape.tensors) if info.kind in ("parameter", "buffer")}
    for event in tape.events:
        inputs, outputs = reads_and_writes(event)
        if inputs and weights.issuperset(inputs):
            weights.update(outputs)
    shapes = (info.shape for tid, info in enumerate(tape.tensors) if tid not in weights)
    return max(map(math.prod, shapes), default=0) * precision.dtype.itemsize * LIVE_ACTIVATIONS
