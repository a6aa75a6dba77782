"""Runs a converted model on its own weights: all ranks as threads, against the unsharded model.

The ranks get the weights in their files; the unsharded model gets those of the source, or those that are
assembled from the files. Both run in float64, as in the check of a plan. Layers that do not fit in memory are
left out from the end, if others stand for them: they are bypassed on both sides.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from shardconv_runtime.checkpoint.model_spec import ModelSpec
from shardconv_runtime.errors import CheckpointError, ShardconvError, SolveError
from shardconv_runtime.format.block_scales import dequantized
from shardconv_runtime.format.name_patterns import compress, natural_key
from shardconv_runtime.format.plan import Plan, global_shape, local_shape, parameter_plans
from shardconv_runtime.format.stored_layout import SUFFIX, is_common
from shardconv_runtime.parallel.meta_model import build_model
from shardconv_runtime.tensors.copying import read_tensor
from shardconv_runtime.tensors.lazy_tensor import LazyTensor
from torch import Tensor

from ...converted.shards import Converted
from ...dim_analysis.rules import RULES
from ...reporting.progress import Progress
from ...reporting.report import human_bytes
from ...tracing.fold import fold
from ...tracing.inputs import trace_inputs
from ...tracing.tape import Tape, prefixes
from ..simulation.available_memory import available_bytes
from ..simulation.layer_bypass import Bypass, find_bypasses, planned_alike
from ..simulation.rank_simulation import Outcome, Simulation, Unprovable

ITEM_BYTES = 8
"""Of float64."""

MEMORY_SHARE = 0.75
"""Of the free memory that may be taken: the estimate is one."""

LIVE_ACTIVATIONS = 8
"""How many tensors of the largest kind are counted to live at once in each run."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How the simulated ranks compare with the unsharded model, on real weights."""

    worst: float
    """Largest difference of an output, relative to the largest value."""
    dtype: str
    """That both were run in."""
    left_out: tuple[str, ...]
    """Patterns of layers that were not run for want of memory; layers planned alike were."""


def run_numerics(
    converted: Converted, spec: ModelSpec, weights: Mapping[str, LazyTensor] | None, progress: Progress
) -> Numerics:
    """Compare the ranks of a converted model with the unsharded model.

    Args:
        converted: the weights of the ranks.
        spec: of the converted directory; only its config and its code are used.
        weights: global, of the unsharded model, by name in the files; by default those of ``converted``, put
            together.
        progress: told the stages.

    Raises:
        CheckpointError: the outputs differ, or the ranks fail.
        SolveError: the unsharded model cannot be traced or run.
        ShardconvError: there is not enough memory, or weights cannot be read.
    """
    plan, where = converted.plan, converted.directory
    progress.stage("tracing")
    model = build_model(spec.model_class, spec.config, getattr(torch, plan.model.dtype))
    inputs, tape = trace_inputs(model, RULES)
    alike = planned_alike(plan, find_bypasses(tape, fold(tape).representatives()))
    skipped = _what_does_not_fit(converted, tape, alike, int(available_bytes() * MEMORY_SHARE))
    left_out = compress(skipped)
    without = f" without {', '.join(left_out)}, for which there is not enough memory" if skipped else ""
    progress.stage(f"running the unsharded model and the ranks{without}")
    source = _StoredWeights(converted, converted.weights() if weights is None else weights)
    outcome = _run(Simulation(plan, model, inputs, skipped, source), converted)
    if not outcome.agrees:
        raise CheckpointError(
            f"{where}: simulated ranks differ from the unsharded model by {outcome.worst:.1e} of its largest "
            f"output (allowed: {outcome.tolerance:.0e}) on the real weights; compare the directory with "
            "--against MODEL, or convert the model again"
        )
    return Numerics(outcome.worst, str(outcome.dtype).removeprefix("torch."), left_out)


class _StoredWeights:
    """What is in files, read when it is needed."""

    def __init__(self, converted: Converted, weights: Mapping[str, LazyTensor]) -> None:
        self._converted = converted
        self._weights = weights
        self._blocks = {name: entry.block for name, entry in parameter_plans(converted.plan).items()}
        self._dtypes: dict[str, torch.dtype] = {}
        self._common: dict[str, Tensor] = {}

    def unsharded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of the unsharded model."""
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._common = {}
        return self._read(self._weights, self._dtypes)

    def local(self, rank: int) -> Mapping[str, Tensor]:
        """Those of a rank's files; what is common is read once."""
        tensors = self._converted.tensors
        if not self._common:
            gc.collect()  # the unsharded model is not needed any more
            self._common = self._read(tensors[None], self._dtypes.keys() & tensors[None].keys())
        return self._common | self._read(tensors[rank], self._dtypes.keys() & tensors[rank].keys())

    def _read(self, tensors: Mapping[str, LazyTensor], names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._read_one(tensors, name).to(self._dtypes[name]) for name in names}

    def _read_one(self, tensors: Mapping[str, LazyTensor], name: str) -> Tensor:
        """As the runtime would: values in float8 are multiplied with their factors."""
        block, values = self._blocks.get(name), read_tensor(tensors[name])
        if not block:
            return values
        dtype = getattr(torch, self._converted.plan.model.dtype)
        return dequantized(values, read_tensor(tensors[name + SUFFIX]), block, dtype)


def _run(simulation: Simulation, converted: Converted) -> Outcome:
    try:
        return simulation.run()
    except Unprovable as error:
        raise SolveError(
            f"{converted.directory}: its files are as they should be, but the unsharded model fails on its "
            f"own weights ({error}), so that the ranks cannot be compared with it; leave out --numerics"
        ) from error
    except SolveError as error:
        raise CheckpointError(f"{converted.directory}: {error}; convert the model again") from error


def _what_does_not_fit(
    converted: Converted, tape: Tape, layers: Mapping[str, Bypass], free_bytes: int
) -> dict[str, Bypass]:
    """The last of these layers, so many that the rest fits in memory.

    Raises:
        ShardconvError: the rest does not fit without any of them.
    """
    plan = converted.plan
    needed = dict.fromkeys(["", *sorted(layers, key=natural_key)], 0)
    for name, num_bytes in _needed_bytes(plan).items():
        needed[next((prefix for prefix in prefixes(name) if prefix in layers), "")] += num_bytes
    total = needed.pop("") + _activation_bytes(tape) * (plan.tp + 1)
    if total > free_bytes:
        raise ShardconvError(
            f"{converted.directory}: its files are as they should be, but to run the model in float64 takes "
            f"some {human_bytes(total)} of memory, even without the layers that others stand for, and "
            f"{human_bytes(free_bytes)} may be taken here; leave out --numerics, or use a larger machine"
        )
    kept = 0
    for num_bytes in needed.values():
        total += num_bytes
        if total > free_bytes:
            break
        kept += 1
    return {name: layers[name] for name in list(needed)[kept:]}


def _needed_bytes(plan: Plan) -> dict[str, int]:
    """What each weight takes: in the unsharded model or, if that is more, in all ranks together."""
    needed = {}
    for name, entry in parameter_plans(plan).items():
        shapes = [global_shape(entry)]
        if not is_common(entry):
            shapes = [local_shape(entry, plan.mesh, rank) for rank in range(plan.tp)]
        numel = max(sum(map(math.prod, shapes)), math.prod(global_shape(entry)))
        needed[name] = numel * ITEM_BYTES
    return needed


def _activation_bytes(tape: Tape) -> int:
    """An estimate for one run."""
    largest = max((math.prod(t.shape) for t in tape.tensors if t.kind == "value"), default=0)
    return largest * ITEM_BYTES * LIVE_ACTIVATIONS
