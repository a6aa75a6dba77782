"""A plan, and the files of a converted directory, as the records that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardconv_runtime.files.manifest import FileEntry, Manifest, quantization_errors
from shardconv_runtime.format.measured import Numerics, cache_bytes, prefill_bytes
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import Plan, global_shape, local_shape
from shardconv_runtime.format.stage_names import num_stages

from . import records
from .plan_lines import Workload, cached_tokens, fits, needs, parts, tightest, weight_bytes
from .report import TOKENS, unplanned, worst_first
from .summary import (
    LayerKind,
    all_notes,
    packed_methods,
    shown_stages,
    stage_bytes,
    summarize,
    summed_gradients,
)


def plan_record(
    plan: Plan,
    num_tokens: int = TOKENS,
    load: Workload | None = None,
    candidates: Sequence[records.CandidateReport] = (),
    predictions: Sequence[records.PredictedReport] = (),
) -> records.PlanReport:
    """Return a plan in numbers.

    Args:
        plan: any plan.
        num_tokens: length of the forward pass.
        load: a device, and a workload.
        candidates: numbers of ranks that were tried.
        predictions: predicted times on a cluster.
    """
    summary = summarize(plan)
    return records.PlanReport(
        model_class=plan.model.class_name.partition(":")[2],
        num_parameters=plan.model.num_parameters,
        dtype=plan.model.dtype,
        packed=packed_methods(plan),
        tp=plan.tp,
        pp=num_stages(plan),
        mesh=tuple(plan.mesh),
        experts=plan.experts,
        versions={"torch": plan.code.torch, "transformers": plan.code.transformers},
        total_bytes=summary.total_bytes,
        sharded_bytes=summary.sharded_bytes,
        rank_bytes=summary.rank_bytes,
        tokens=num_tokens,
        layers=tuple(_layer(plan, kind) for kind in summary.kinds),
        replicated=tuple(
            records.ReplicatedReport(
                group.reason,
                group.num_bytes,
                tuple(
                    records.ReplicatedTensorsReport(_expanded(pattern.split(", ")), shape, num_bytes)
                    for pattern, shape, num_bytes in group.tensors
                ),
            )
            for group in summary.replicated
        ),
        collectives=tuple(
            records.CollectiveReport(
                each.op,
                _expanded(each.names),
                each.port,
                each.count,
                each.token_bytes,
                each.token_bytes * num_tokens,
            )
            for each in summary.collectives
        ),
        stages=_stages(plan),
        memory=_memory(plan, num_tokens),
        workload=None if load is None else _workload(plan, load),
        candidates=tuple(candidates),
        predictions=tuple(predictions),
        can_train=plan.training is not None and not plan.inference_only,
        has_sequence_form=plan.training is not None and plan.training.sequence is not None,
        summed_gradients=_expanded(summed_gradients(plan)),
        notes=all_notes(plan),
    )


def _expanded(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return all names of patterns such as ``layers.{0..3}.mlp``."""
    return tuple(expand_all(list(patterns)))


def _layer(plan: Plan, kind: LayerKind) -> records.LayerReport:
    tensors = tuple(
        records.TensorReport(
            line.name,
            line.plan.dtype,
            global_shape(line.plan),
            tuple(local_shape(line.plan, plan.mesh, rank) for rank in range(plan.tp)),
            bool(line.plan.partial),
        )
        for line in kind.tensors
    )
    overrides = tuple(
        records.OverrideReport(each.attribute, each.value, tuple(each.local)) for each in kind.overrides
    )
    category = kind.category or unplanned(kind)
    return records.LayerReport(category, _expanded(kind.names), kind.rank_bytes, tensors, overrides)


def _stages(plan: Plan) -> tuple[records.StageReport, ...]:
    if plan.stages is None:
        return ()
    by_stage, layers = stage_bytes(plan), plan.stages.layers
    return tuple(
        records.StageReport(
            stage,
            tuple(layers[stage]) if layers[stage][0] <= layers[stage][1] else (),
            tuple(by_stage[stage]),
        )
        for stage in shown_stages(plan)
    )


def _memory(plan: Plan, num_tokens: int) -> tuple[records.MemoryReport, ...]:
    return tuple(
        records.MemoryReport(
            (stage,),
            weight_bytes(part),
            cache_bytes(part.memory, 1, num_tokens, num_tokens),
            prefill_bytes(part.memory, 1, num_tokens),
            part.memory.logits_token_bytes,
        )
        for stage, part in zip(shown_stages(plan), parts(plan), strict=True)
        if part.memory is not None
    )


def _workload(plan: Plan, load: Workload) -> records.WorkloadReport:
    worst = tightest(plan, load)
    stage = shown_stages(plan)[parts(plan).index(worst)]
    memory, needed = worst.memory, None
    if memory is not None and load.context is not None:
        needed = needs(worst, memory, load.batch, load.context)
    return records.WorkloadReport(
        load.device_bytes,
        load.reserve_bytes,
        load.context,
        load.batch,
        stage,
        weight_bytes(worst),
        None if needed is None else needed.cache,
        None if needed is None else needed.activations,
        None if needed is None else needed.total,
        fits(worst, load),
        None if memory is None else cached_tokens(worst, memory, load),
    )


def files_record(entries: Iterable[FileEntry]) -> tuple[records.FileReport, ...]:
    """Return the files of a manifest."""
    return tuple(records.FileReport(e.path, e.num_bytes, e.rank, e.checksum) for e in entries)


def errors_record(manifests: Iterable[Manifest]) -> tuple[records.WeightErrorReport, ...]:
    """Return the errors of weights that were quantized when they were converted, worst first."""
    errors = quantization_errors(manifests)
    return tuple(records.WeightErrorReport(name, error) for name, error in worst_first(errors))


def numerics_record(found: Numerics | None) -> records.NumericsReport | None:
    """Return the result of ``verify --numerics``."""
    if found is None:
        return None
    return records.NumericsReport(found.worst, found.tolerance, found.dtype, found.quantization)


def directory_record(directory: str, manifest: Manifest) -> records.DirectoryReport:
    """Return a converted directory with its files."""
    source = manifest.source
    return records.DirectoryReport(
        directory,
        source.name,
        source.revision,
        dict(manifest.tools),
        numerics_record(manifest.numerics),
        files_record(manifest.files),
        errors_record([manifest]),
    )
