"""The reports of commands with ``--json``, as plain values: numbers, texts, lists, and no notation to parse.

``docs/schemas/reports.json`` is made from these classes; ``json_text`` turns a value into JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A parameter of a kind of layer."""

    name: str
    """The name relative to the module."""
    dtype: str
    global_shape: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...], ...]
    """The shape on each rank of a stage."""
    is_partial: bool
    """Whether each rank holds a term, and the sum over ranks is the tensor."""


@dataclass(frozen=True, slots=True)
class OverrideReport:
    """An int attribute of a module that has another value on each rank, such as a number of heads."""

    attribute: str
    value: int
    """The value in the unsharded model."""
    local: tuple[int, ...]
    """The value on each rank."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Modules of the same treatment."""

    category: str
    """``column``, ``row``, ``vocab``, ``norm``, ``boundary`` ...; ``shard`` or ``partial`` for others."""
    modules: tuple[str, ...]
    """The names of all of them; empty text for the model itself."""
    rank_bytes: int
    """Bytes of all of them on the rank that holds most."""
    tensors: tuple[TensorReport, ...]
    overrides: tuple[OverrideReport, ...]


@dataclass(frozen=True, slots=True)
class ReplicatedTensorsReport:
    """Replicated parameters of one shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes of all of them."""


@dataclass(frozen=True, slots=True)
class ReplicatedReport:
    """Parameters that every rank holds, for one reason."""

    reason: str
    num_bytes: int
    tensors: tuple[ReplicatedTensorsReport, ...]


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """A collective of a forward pass, at the same port of several modules."""

    kind: str
    """``all_reduce``, ``all_gather`` or ``reduce_scatter``."""
    modules: tuple[str, ...]
    port: str
    count: int
    token_bytes: int
    """Bytes of the global tensors for each token, of all ``count`` together."""
    num_bytes: int
    """The same for the tokens of the report."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """A pipeline stage."""

    stage: int
    layers: tuple[int, ...]
    """The first and the last layer; empty if it has none."""
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on the rank that needs most, for one sequence of the report's tokens."""

    stages: tuple[int, ...]
    """The stages with these numbers; 0 without stages."""
    weights_bytes: int
    cache_bytes: int
    prefill_bytes: int
    """Peak of all other live tensors while the prompt is read."""
    logits_token_bytes: int
    """Bytes for each token whose logits are asked for."""


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """Whether a workload fits on a device."""

    device_bytes: int
    reserve_bytes: int
    context: int | None
    batch: int
    stage: int
    """The stage with the least free memory."""
    weights_bytes: int
    cache_bytes: int | None
    """Null without ``--context``, or if the memory could not be measured."""
    prefill_bytes: int | None
    total_bytes: int | None
    fits: bool | None
    cached_tokens: int | None
    """Tokens of one sequence that fit in addition to the weights."""


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """A number of ranks that ``--tp auto`` has tried."""

    tp: int
    is_chosen: bool
    fits: bool
    problem: str
    weights_bytes: int | None
    cache_bytes: int | None
    prefill_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class PredictedReport:
    """Times of a plan on a cluster. They are predicted, and were not measured."""

    cluster: str
    """Hosts x devices x device."""
    tp: int
    pp: int
    replicas: int
    """Copies of the model."""
    experts: str
    batch: int
    """Sequences of a replica."""
    context: int
    fits: bool | None
    problem: str
    """Why nothing was predicted; then the numbers are null."""
    prefill_s: float | None
    token_s: float | None
    tokens_per_s: float | None
    """Of one sequence."""
    device_tokens_per_s: float | None
    """Of all sequences of a replica, for each device."""
    collective_share: float | None
    """Part of the time of a token that is communication."""
    hosts_bytes: float | None
    """Bytes that a replica sends between hosts for a token of the batch."""
    step_s: float | None
    """A training step on the batch."""
    recomputed_step_s: float | None
    start_s: float | None
    is_fastest: bool
    """Whether no other choice for the cluster has a shorter time of a token."""
    has_most_tokens: bool
    """Whether no other choice for the cluster has more tokens per second."""
    errors: Mapping[str, float]
    """The largest error of most predictions that were compared, by kind, as a part of the measured time."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan in numbers."""

    model_class: str
    num_parameters: int
    dtype: str
    packed: tuple[str, ...]
    """Formats of quantized parameters."""
    tp: int
    pp: int
    mesh: tuple[int, ...]
    experts: str
    versions: Mapping[str, str]
    """The versions of torch and transformers that it was solved for."""
    total_bytes: int
    sharded_bytes: int
    rank_bytes: tuple[int, ...]
    """Bytes of the parameters of each rank, with stages of the ranks of each stage in turn."""
    tokens: int
    """Tokens of the forward pass of the report."""
    layers: tuple[LayerReport, ...]
    replicated: tuple[ReplicatedReport, ...]
    collectives: tuple[CollectiveReport, ...]
    stages: tuple[StageReport, ...]
    memory: tuple[MemoryReport, ...]
    """Empty if it could not be measured."""
    workload: WorkloadReport | None
    candidates: tuple[CandidateReport, ...]
    """With ``--tp auto`` and without ``--on``."""
    predictions: tuple[PredictedReport, ...]
    """With ``--on``: of the plan; with ``--tp auto``, of each choice for the cluster."""
    can_train: bool
    has_sequence_form: bool
    summed_gradients: tuple[str, ...]
    """Replicated parameters whose gradients are summed over the ranks."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileReport:
    """A file of a converted directory."""

    path: str
    num_bytes: int
    rank: int | None
    """The rank that reads it; null: every rank."""
    checksum: str


@dataclass(frozen=True, slots=True)
class NumericsReport:
    """How the ranks compare with the unsharded model."""

    worst: float
    """The largest difference, relative to the largest output."""
    tolerance: float
    dtype: str
    quantization: float | None
    """The largest difference of an output when the weights are not quantized, relative to the largest value;
    null: not measured."""


@dataclass(frozen=True, slots=True)
class WeightErrorReport:
    """How much a weight changed when it was quantized."""

    name: str
    error: float
    """The Frobenius norm of the dequantized weight minus the weight, divided by the weight's norm."""


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """A converted directory, or the directory of a stage."""

    directory: str
    source: str
    """The model that was converted."""
    revision: str | None
    tools: Mapping[str, str]
    """Versions of the programs that wrote it."""
    numerics: NumericsReport | None
    files: tuple[FileReport, ...]
    quantization_errors: tuple[WeightErrorReport, ...]
    """Of the weights that were quantized when they were converted, worst first."""


@dataclass(frozen=True, slots=True)
class InspectReport:
    """The report of ``inspect``."""

    plan: PlanReport
    directories: tuple[DirectoryReport, ...]
    """One for each stage; none for a plan file or an adapter."""


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The report of ``convert``, ``reshard`` and ``adapt``."""

    directory: str
    is_complete: bool
    """False after a part (``--ranks``), while others are missing."""
    was_complete: bool
    """Whether an earlier run had written it, so that nothing was written."""
    plan: PlanReport
    files: tuple[FileReport, ...]
    """Empty until it is complete."""
    quantization_errors: tuple[WeightErrorReport, ...]
    """Of the weights that were quantized when they were converted, worst first; empty as ``files``."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The report of ``verify``; with problems, the exit code is 3."""

    directory: str
    is_intact: bool
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    num_files: int | None
    """Null if there are problems."""
    num_bytes: int | None
    num_tensors: int | None
    """Tensors that were compared with the source; null without ``--against``."""
    numerics: NumericsReport | None


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The report of ``export``."""

    output: str
    format: str
    num_tensors: int | None
    """Null for the formats that are one text."""
    num_files: int
    num_bytes: int
    """Bytes of tensors (of a rank for vLLM), or of the text."""
    is_complete: bool
    was_complete: bool


@dataclass(frozen=True, slots=True)
class SizedFileReport:
    """A file of a repository."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PushReport:
    """The report of ``push``."""

    repository: str
    path: str
    url: str
    commit: str | None
    is_dry_run: bool
    sent: tuple[SizedFileReport, ...]
    """Files that are missing in the repository, or differ."""
    sent_bytes: int
    in_place: tuple[SizedFileReport, ...]
    deleted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuReport:
    """A GPU of this machine."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EnvReport:
    """The report of ``env``."""

    python: str
    platform: str
    num_cpus: int
    memory_bytes: int
    packages: Mapping[str, str | None]
    """Versions of packages; null for those that are not installed."""
    backends: tuple[str, ...]
    """Backends of torch.distributed."""
    cuda: str | None
    """The version of CUDA that torch was built for."""
    nccl: str | None
    gpus: tuple[GpuReport, ...]
    variables: Mapping[str, str]
    """Environment variables that change how the libraries work; no tokens."""


REPORTS: Mapping[str, type] = {
    "plan": PlanReport,
    "convert": WrittenReport,
    "inspect": InspectReport,
    "verify": VerifyReport,
    "reshard": WrittenReport,
    "export": ExportReport,
    "adapt": WrittenReport,
    "push": PushReport,
    "env": EnvReport,
}
"""The report of each command."""


def json_text(report: Any) -> str:
    """Return a report as one JSON object."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
