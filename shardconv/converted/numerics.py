"""Run a converted model on its own weights: all ranks as threads, in lockstep with the unsharded model.

The ranks get the weights in their files. The unsharded model gets the weights of the source, or weights that
are assembled from the files. Every layer runs. Weights are read when an operator needs them, so a model of
any size runs in the memory of its largest parameter.
"""

from __future__ import annotations

import copy
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
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.packed.formats import check_values, dequantize
from shardconv_runtime.packed.stored_weights import WeightSlice
from shardconv_runtime.parallel.build import parallelize
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
    """Make a weight that is dequantized when it is read. Stacks are dequantized matrix by matrix."""

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
    converted: Converted,
    spec: ModelSpec,
    weights: Mapping[str, LazyTensor] | None,
    progress: Progress,
    plain: Mapping[str, LazyTensor] | None = None,
) -> Numerics:
    """Compare the ranks of a converted model with the unsharded model.

    Args:
        weights: global weights of the source, by their names in files; None: the files have them.
        plain: global weights of the source by FQN, before they are quantized; the outputs with them are
            compared as well.
    """
    progress.stage("tracing")
    plan = converted.plan
    model = build_model(spec.model_class, spec.config, getattr(torch, plan.model.dtype), dict(plan.tied))
    inputs, tape = trace_inputs(model, RULES, example=stored_example(spec.directory))
    unsharded = _dequantized(converted, converted.weights() if weights is None else weights)
    stored = converted.tensors
    ranks = [_dequantized(converted, {**stored[None], **stored[rank]}, rank) for rank in range(plan.tp)]
    runs = _Runs(converted, model, inputs, tape, unsharded, ranks, plain)
    precision, worst, quantization = runs.compare(progress)
    return Numerics(
        worst=worst,
        tolerance=precision.tolerance,
        dtype=dtype_name(precision.dtype),
        inputs={name: tuple(tensor.shape) for name, tensor in sorted(inputs.tensors.items())},
        quantization=quantization,
    )


def _dequantized(
    converted: Converted, tensors: Mapping[str, LazyTensor], rank: int | None = None
) -> dict[str, LazyTensor]:
    """Return the weights of a rank, or of the unsharded model, dequantized when they are read."""
    weights = {}
    for name, entry in parameter_plans(converted.plan).items():
        if entry.packing is None:
            if name in tensors:
                weights[name] = tensors[name]
            continue
        names = {t.name: tensor_name(name, t.name) for t in entry.packing.tensors}
        if all(stored in tensors for stored in names.values()):
            parts = {part: tensors[stored] for part, stored in names.items()}
            whole = WeightSlice.whole(global_shape(entry))
            part_of_rank = whole if rank is None else held_part(entry, converted.plan.mesh, rank)
            weights[name] = dequantized_rows(name, entry.packing, parts, part_of_rank, entry.dtype)
    return weights


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
    plain: Mapping[str, LazyTensor] | None

    def compare(self, progress: Progress) -> tuple[Precision, float, float | None]:
        """Run in the best precision for which there is memory, and that the model supports."""
        problem: TooLargeToRead | Unprovable | None = None
        for precision in PRECISIONS:
            try:
                return precision, *self._compare_in(precision, progress)
            except (TooLargeToRead, Unprovable) as error:
                # A traceback would keep the weights in memory.
                problem = problem or error.with_traceback(None)
        where = f"{self.converted.files.name}: its files are as they should be, but"
        if isinstance(problem, Unprovable):
            raise SolveError(
                f"{where} the unsharded model fails on its own weights ({problem}), so that the ranks cannot "
                "be compared with it; leave out --numerics"
            ) from problem
        raise ShardconvError(f"{where} {problem}; leave out --numerics, or use a larger machine") from problem

    def _compare_in(self, precision: Precision, progress: Progress) -> tuple[float, float | None]:
        plan, num_bytes = self.converted.plan, sum(tensor.num_bytes for tensor in self.unsharded.values())
        reads = self._reads(precision)
        comparison = ModuleComparison(plan, module_plans(plan), precision)
        with progress.bar(f"running all ranks in {dtype_name(precision.dtype)}", num_bytes) as advance:
            weights = FileWeights(self.unsharded, self.ranks, reads, advance)
            want, ranks = Simulation(plan, self.model, weights, precision).in_lockstep(
                comparison, parallelize, lambda model: outputs_of(model, self.inputs, precision)
            )
        if not all(t.isfinite().any() for t in want if t.numel()):
            raise Unprovable("an output has no finite value")
        worst = max(math.inf if outputs is None else largest_difference(outputs, want) for outputs in ranks)
        if worst <= precision.tolerance:
            return worst, self._of_quantization(want, precision, reads, progress)
        problem = (
            f"simulated ranks differ from the unsharded model by {worst:.1e} of its largest output (allowed: "
            f"{precision.tolerance:.0e}) on the real weights"
        )
        if comparison.failure is not None:
            problem = "the plan failed when its ranks were simulated"
        raise CheckpointError(
            f"{self.converted.files.name}: {with_module(problem, comparison.found)}; compare the directory "
            "with --against MODEL, or convert the model again"
        )

    def _of_quantization(
        self, want: list[Tensor], precision: Precision, reads: RecentReads, progress: Progress
    ) -> float | None:
        """Return the largest difference between the model's outputs and those with plain weights."""
        if self.plain is None:
            return None
        num_bytes = sum(tensor.num_bytes for tensor in self.plain.values())
        with progress.bar("running the model without quantization", num_bytes) as advance:
            weights = FileWeights(self.plain, (), reads, advance)
            model = weights.put_into(copy.deepcopy(self.model).to(precision.dtype), None, precision.dtype)
            return largest_difference(want, outputs_of(model, self.inputs, precision))

    def _reads(self, precision: Precision) -> RecentReads:
        """Return a reader that keeps as many weights as fit in the free memory."""
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
