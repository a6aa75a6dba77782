"""Compare a converted directory with its source model, byte for byte.

The contents of each rank are computed again from the source, like the writer does, and copied by the same
code. Instead of writing, its sink reads the bytes in the directory and compares them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import numpy as np
from shardconv_runtime.checkpoint.checkpoint_weights import are_equal, lazy_weights
from shardconv_runtime.checkpoint.copying import PlacedTensor, plan_units, run
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.checkpoint.packed_plan import as_planned, flatten, shard
from shardconv_runtime.checkpoint.resolve import ModelSpec, resolve
from shardconv_runtime.errors import CheckpointError, DamagedError, SourceError
from shardconv_runtime.files.manifest import Manifest
from shardconv_runtime.files.small_files import small_files
from shardconv_runtime.format.plan import Plan, global_shape, parameter_plans
from shardconv_runtime.format.stored_layout import stored_plans, tensor_name
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.packed.formats import can_pack, quant_method
from shardconv_runtime.storage.file_access import is_local

from ..arguments import MEMORY
from ..quantizing import quantized_model
from ..reporting.progress import Progress
from ..writing.writer import copy_small_files
from . import shards
from .file_checks import one_line
from .file_spans import FileSpans, file_spans
from .shards import Converted


@dataclass(frozen=True, slots=True)
class Reference:
    """The model that a converted directory should contain."""

    spec: ModelSpec
    weights: Mapping[str, LazyTensor]
    """Global weights by name in the files, in the plan's dtypes."""
    problems: tuple[str, ...]
    """Problems of weights that are missing, not in the plan, or of another shape. They are not in
    ``weights``."""
    plain: Mapping[str, LazyTensor] | None = None
    """Global weights by FQN before they are quantized; None: they are not."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of ``compare``."""

    num_tensors: int
    """Number of global tensors that were compared."""
    problems: tuple[str, ...]
    """A problem for each tensor that differs."""


def read_reference(
    model: str | os.PathLike[str],
    plan: Plan,
    hub: Hub,
    *,
    trust_remote_code: bool,
    quantization: Mapping[str, Any] | None = None,
) -> Reference:
    """Find the weights of a model in the form of the plan.

    Args:
        plan: plan of the converted directory. The weights are cast to its dtypes.
        quantization: ``quantization_config`` of the converted directory; a model that is not stored in this
            format is quantized.
    """
    is_packed = any(entry.packing for entry in plan.parameters)
    spec = resolve(model, hub, trust_remote_code=trust_remote_code, need_weights=True)
    method = None if spec.quantization is None else quant_method(spec.quantization)
    stays_packed = is_packed and quantization is not None and method == quant_method(quantization)
    spec = replace(spec, dtype=plan.model.dtype, dequantize=method is not None and not stays_packed)
    found_weights = lazy_weights(spec)
    checkpoint, plain_weights = found_weights.tensors, None
    if is_packed and quantization is not None and not stays_packed and can_pack(quantization):
        plain = replace(spec, tied=found_weights.tied)
        with suppress(SourceError):  # other weights than the plan's: the comparison says what is missing
            checkpoint = quantized_model(plain, checkpoint, quantization).weights
            tensors = found_weights.tensors.items()
            plain_weights = {name: tensor for name, tensor in tensors if isinstance(tensor, LazyTensor)}
    _, stored = flatten(plan, checkpoint)
    weights: dict[str, LazyTensor] = {}
    problems = []
    for name, entry in stored_plans(plan).items():
        described = f"{list(global_shape(entry))} in the plan"
        if name not in stored:
            problems.append(f"{name}: is not in {model}, and {described}")
        elif stored[name].shape != global_shape(entry):
            problems.append(f"{name}: is {list(stored[name].shape)} in {model}, and {described}")
        else:
            weights[name] = as_planned(name, entry, stored[name])
    if spec.class_name != plan.model.class_name and len(weights) < len(stored) / 2:
        raise SourceError(
            f"{model} is a {spec.model_class.__name__}, and a {plan.model.class_name.rpartition(':')[2]} was "
            "converted; name the model that it was converted from"
        )
    problems += [
        f"{alias}: differs from {name} in {model}, and is the same tensor in the plan"
        for alias, name in plan.tied
        if alias in checkpoint and name in checkpoint and not are_equal(checkpoint[alias], checkpoint[name])
    ]
    # Tied tensors are planned under their first names only.
    entries = parameter_plans(plan)
    tied = set()
    for alias, name in plan.tied:
        packing = entries[name].packing
        tied |= {alias} if packing is None else {tensor_name(alias, t.name) for t in packing.tensors}
    planned = stored_plans(plan).keys() | tied
    problems += [f"{name}: is in {model}, and not in the plan" for name in stored if name not in planned]
    return Reference(spec, weights, tuple(problems), plain_weights)


def compare(converted: Converted, reference: Reference, progress: Progress) -> Comparison:
    """Compare every byte of every rank's shard of every tensor."""
    spans = file_spans(converted, reference.weights)
    if converted.files.objects is None:
        _compare_files(converted.plan, spans, reference.weights, progress)
    else:
        from .store_comparison import compare_objects  # it imports the client of the Hub

        compare_objects(converted, spans, reference.weights, progress)
    problems = [*reference.problems, *spans.problems(converted.plan, reference.spec.name)]
    return Comparison(len(reference.weights), tuple(problems))


def _compare_files(
    plan: Plan, spans: FileSpans, weights: Mapping[str, LazyTensor], progress: Progress
) -> None:
    """Compare files on this machine."""
    with _Comparer(spans) as comparer, progress.bar("comparing", spans.num_bytes) as advance:
        units = plan_units(comparer.placed(plan, weights), MEMORY)
        run(units, lambda: _Sink(comparer, spans), lambda unit, sink: advance(sink.num_bytes))


def compare_small_files(found: Manifest, spec: ModelSpec) -> list[str]:
    """Return remarks on files without weights that differ from the source's."""
    with TemporaryDirectory() as scratch:
        theirs = {entry.path: entry.checksum for entry in copy_small_files(spec, Path(scratch))}
    ours = {entry.path: entry.checksum for entry in small_files(found)}
    remarks = []
    for path in sorted(ours.keys() | theirs.keys()):
        if path not in theirs:
            remarks.append(f"{path}: is not in {spec.name}")
        elif path not in ours:
            remarks.append(f"{path}: is in {spec.name} and not here")
        elif ours[path] != theirs[path]:
            remarks.append(f"{path}: differs from that of {spec.name}")
    return remarks


class _Comparer:
    """The open files of a directory on this machine."""

    def __init__(self, spans: FileSpans) -> None:
        self._spans = spans
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()
        self._buffers = threading.local()

    def __enter__(self) -> _Comparer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def placed(self, plan: Plan, weights: Mapping[str, LazyTensor]) -> Iterator[PlacedTensor]:
        """Yield the tensors that should be at each span."""
        parameters = stored_plans(plan)
        for index, spans in enumerate(self._spans.files):
            for span in spans:
                expected = shard(parameters[span.name], weights[span.name], plan.mesh, span.rank or 0)
                assert expected.shape == span.shape, "converted.read has checked it"
                yield PlacedTensor(expected, index, span.begin)

    def difference(self, index: int, offset: int, data: memoryview) -> int | None:
        """Return the first byte of a file, from ``offset`` on, that differs from ``data``; None if all are
        equal."""
        stored = self._read(index, offset, len(data))
        expected = np.frombuffer(data, np.uint8)
        if np.array_equal(stored, expected):
            return None
        return offset + int(np.argmax(stored != expected))

    def _read(self, index: int, offset: int, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        buffer: np.ndarray[Any, np.dtype[np.uint8]] | None = getattr(self._buffers, "held", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers.held = np.empty(num_bytes, np.uint8)
        into = buffer[:num_bytes].data
        path = self._spans.files[index][0].path
        assert is_local(path)
        while len(into):
            try:
                count = os.preadv(self._handle(index, path), [into], offset)
            except OSError as error:
                raise DamagedError(f"{path} cannot be read at byte {offset} ({error.strerror})") from error
            if count == 0:
                raise DamagedError(f"{path} has no byte {offset}: it was cut off since its header was read")
            into, offset = into[count:], offset + count
        return buffer[:num_bytes]

    def _handle(self, index: int, path: Path) -> int:
        with self._lock:
            if index not in self._handles:
                self._handles[index] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._handles[index]


@dataclass
class _Sink:
    """Compare the bytes of one unit."""

    comparer: _Comparer
    spans: FileSpans
    num_bytes: int = 0

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Compare data with the file."""
        self.num_bytes += len(data)
        difference = self.comparer.difference(file, offset, data)
        if difference is not None:
            self.spans.note(file, difference)


def add_differences(
    directory: str | os.PathLike[str],
    reference: Reference,
    problems: list[str],
    remarks: list[str],
    progress: Progress,
) -> int | None:
    """Add the differences, and return the number of tensors that were compared.

    If there are problems already, files that cannot be read are not added as others.
    """
    try:
        opened = shards.read_stages(directory, may_be_damaged=True)
        compared = [compare(each, reference, progress) for each in opened]
    except (CheckpointError, SourceError) as error:
        if not problems:
            raise
        remarks.append(one_line(f"not compared with {reference.spec.name}: {error}"))
        return None
    problems.extend(map(one_line, dict.fromkeys(line for each in compared for line in each.problems)))
    for each in opened:
        remarks.extend(map(one_line, compare_small_files(each.manifest, reference.spec)))
    return compared[0].num_tensors
