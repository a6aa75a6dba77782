"""Runs the stages of a conversion one after another: resolve, solve, read, write."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shardconv_runtime.checkpoint.checkpoint_weights import lazy_weights, require_packed, select
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor, zeros
from shardconv_runtime.checkpoint.model_directory import remarks
from shardconv_runtime.checkpoint.packed_plan import flatten, grains_of, with_packed_notes
from shardconv_runtime.checkpoint.quantized import PackedWeight
from shardconv_runtime.checkpoint.resolve import ModelSpec, files_left_out, resolve
from shardconv_runtime.errors import OptionError, SourceError
from shardconv_runtime.files import fingerprint, manifest
from shardconv_runtime.files.manifest import MANIFEST_NAME
from shardconv_runtime.files.model_config import CONFIG
from shardconv_runtime.files.small_files import EXAMPLE_NAME, told_left_out
from shardconv_runtime.format.header import dtype_name
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.library_logging import without_library_logging
from shardconv_runtime.meta.meta_model import build_model, tied_names
from shardconv_runtime.packed.formats import quant_method, settings_of_scheme
from shardconv_runtime.parallel.build import stored_tensors
from shardconv_runtime.versions import tool_versions
from torch import nn

from .arguments import Quantizing, SolveOptions
from .inputs.example_inputs import Example, example_call, read_example
from .inputs.initial_weights import drawn_dtype, has_weights, initial_weights, initialized_source
from .passes import Inspect, ModelSolver, solve_plan
from .quantizing import QuantizedModel, quantized_model, tensors_for_ranks, with_quantization
from .reporting.progress import Progress
from .writing.outputs import AnyOutput, StageOutputs, WriteOptions, write_to
from .writing.writer import origin_of, with_example, write


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model that a user named, and how it is read."""

    model: Any
    """A directory, a Hub id, or a config."""
    hub: Hub
    dtype: str | None
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights to write, and the way to read them.

    Attributes:
        random_init: write the weights of a new model in place of the checkpoint's.
        seed: the seed of a new model.
        keep_unused: also write the tensors that the model does not use.
        stream: read files on the Hub from there, without a download.
        quantize: how weights are packed; None: they stay as they are.
    """

    random_init: bool
    seed: int
    keep_unused: bool
    stream: bool
    quantize: Quantizing | None


def convert_model(
    source: ModelSource,
    outputs: AnyOutput | StageOutputs,
    options: SolveOptions,
    weights: Weights,
    write_options: WriteOptions,
    example: Example | None,
    progress: Progress,
) -> Plan:
    """Convert a model into directories that were found free; see ``convert.convert``."""
    options = _with_example(options, example)
    progress.stage(f"reading {os.fspath(source.model)}")
    spec = resolve(
        source.model,
        source.hub,
        dtype=source.dtype,
        trust_remote_code=source.trust_remote_code,
        need_weights=not weights.random_init,
        # An output that is complete is only compared with the source: nothing is downloaded for that.
        stream=weights.stream or (outputs.is_complete and not source.hub.local_files_only),
    )
    if weights.quantize is not None and not weights.random_init:
        _require_unquantized(spec)
    if options.example is not None:
        example_call(options.example, spec.config)  # refused now, and not after the weights were found
    notes: list[str] = []
    stored_weights: Mapping[str, LazyTensor | PackedWeight]
    if weights.random_init:
        seed = weights.seed
        if has_weights(spec):
            progress.stage(f"the weights in {spec.name} are not read: those of a new model are written")
        origin = origin_of(replace(spec, dequantize=spec.quantization is not None))
        identity = {"initialised": {"seed": seed, "dtype": drawn_dtype(spec)}}
        origin = replace(
            origin, source=initialized_source(origin.source, seed), identity=identity, identify=None
        )
        progress.stage(f"recording the model's own initialization: seed {seed}, drawn in {drawn_dtype(spec)}")
        stored_weights = dict(initial_weights(spec, seed))
    else:
        origin = origin_of(spec)
        progress.stage("finding the weights in the checkpoint")
        notes += remarks(spec.directory) if spec.directory is not None else ()
        notes += told_left_out(files_left_out(spec))
        checkpoint = lazy_weights(spec, notes.append, with_unused=weights.keep_unused)
        origin = replace(origin, unused=checkpoint.unused)
        spec, stored_weights = replace(spec, tied=checkpoint.tied), checkpoint.tensors
    model: QuantizedModel | None = None
    if weights.quantize is not None:
        scheme, keep = weights.quantize.scheme, weights.quantize.keep
        progress.stage(f"choosing the weights to quantize: {scheme}")
        model = quantized_model(spec, stored_weights, settings_of_scheme(scheme, spec.dtype), keep)
        spec, stored_weights, origin = model.spec, model.weights, with_quantization(origin, model)
        notes += model.notes
    if options.example is not None:
        origin = with_example(origin, options.example, spec.config)
    for note in notes:
        progress.stage(f"note: {note}")
    solved = None if weights.random_init else _plan_of_complete(outputs, spec, options, notes)
    if solved is None:
        solved = solve_plan(spec, options, grains=grains_of(stored_weights), progress=progress.stage)
        solved = replace(solved, notes=(*solved.notes, *notes))
        solved, tensors = _with_packings(spec, solved, stored_weights)
    else:
        tensors = flatten(solved, select(spec, stored_weights, parameter_plans(solved).keys(), solved.tied))[
            1
        ]

    def write_one(own: Plan, held: Mapping[str, LazyTensor], output: AnyOutput, part: WriteOptions) -> bool:
        if model is not None and part.ranks is not None:
            held = tensors_for_ranks(model, own, held, part.ranks)
        return write(own, held, output, origin, part, progress)

    write_to(outputs, solved, tensors, write_options, write_one, progress.stage)
    return solved


def _require_unquantized(spec: ModelSpec) -> None:
    """Refuse to quantize weights that are quantized."""
    if spec.quantization is not None and not spec.dequantize:
        raise OptionError(
            f"{spec.name} is quantized already ({quant_method(spec.quantization)}); leave out --quantize, or "
            "pass --dtype to quantize the weights that it is dequantized to"
        )


def _plan_of_complete(
    outputs: AnyOutput | StageOutputs, spec: ModelSpec, options: SolveOptions, notes: Sequence[str]
) -> Plan | None:
    """Return the plan of an output that an earlier run has completed, if solving would give it again.

    It follows from the code, the versions, the config and the options. The output's other files are compared
    with the source in any case. None: the plan does not tell, or there is no such output.
    """
    if isinstance(outputs, StageOutputs) or not outputs.is_complete or options.example is not None:
        return None
    out = outputs.present.directory
    written = manifest.read(out)
    plan = manifest.read_plan(out, written)
    has_sequence_form = plan.training is not None and plan.training.sequence is not None
    is_same = (
        written.tools == tool_versions()
        and fingerprint.fingerprint(plan.code.sources) == plan.code.fingerprint
        and (plan.model.class_name, plan.model.dtype) == (spec.class_name, spec.dtype)
        and (plan.experts, has_sequence_form) == (options.experts, options.sequence_parallel)
        and plan.devices == options.devices
        and (bool(plan.proven_arguments) or not options.check)  # without any, it may not have been checked
        and set(notes) <= set(plan.notes)
        and not any(entry.packing for entry in plan.parameters)
        and not (out / EXAMPLE_NAME).exists()
        and _code_is_older_than(out / MANIFEST_NAME)
        and spec.directory is not None
        and filecmp.cmp(spec.directory / CONFIG, out / CONFIG, shallow=False)
    )
    return plan if is_same else None


def _code_is_older_than(path: Path) -> bool:
    """Return whether both packages are older than a file; a clone keeps its version when it is updated."""
    packages = (Path(__file__).parent, Path(fingerprint.__file__).parents[1])
    newest = max(file.stat().st_mtime_ns for package in packages for file in package.rglob("*.py"))
    return newest < path.stat().st_mtime_ns


def _with_example(options: SolveOptions, example: Example | None) -> SolveOptions:
    """Return the options with the example inputs that were given."""
    return options if example is None else replace(options, example=read_example(example))


def plan_model(
    source: ModelSource,
    options: SolveOptions,
    example: Example | None,
    progress: Progress,
    quantize: Quantizing | None = None,
) -> Plan:
    """Solve a model from its config, without weights; see ``convert.plan``."""
    options = _with_example(options, example)
    spec, built = _planned_spec(source)
    if quantize is not None:
        _require_unquantized(spec)
        built = build_model(spec.model_class, spec.config, getattr(torch, spec.dtype), spec.tied)
        tensors = {name: zeros(dtype_name(t.dtype), t.shape) for name, t in stored_tensors(built)}
        model = quantized_model(spec, tensors, settings_of_scheme(quantize.scheme, spec.dtype), quantize.keep)
        solved = solve_plan(model.spec, options, grains=grains_of(model.weights), progress=progress.stage)
        solved = replace(solved, notes=(*solved.notes, *model.notes))
        return _with_packings(model.spec, solved, model.weights)[0]
    _tell_if_quantized(spec, progress)
    return solve_plan(spec, options, progress=progress.stage, built=built)


class ModelPlanner:
    """The plans of a model for several options, from its config; it is read and traced once.

    Args:
        source: the model, of which only the config is read.
        example: the call to trace; None: inputs are made up.
        progress: where to report progress.
    """

    def __init__(self, source: ModelSource, example: Example | None, progress: Progress) -> None:
        spec, built = _planned_spec(source)
        _tell_if_quantized(spec, progress)
        self.progress = progress
        self._example = None if example is None else read_example(example)
        self._solver = ModelSolver(spec, progress=progress.stage, built=built)

    def plan(self, options: SolveOptions, inspect: Inspect | None = None) -> Plan:
        """Solve the model; see ``passes.ModelSolver``."""
        return self._solver.plan(replace(options, example=self._example), inspect)


def _planned_spec(source: ModelSource) -> tuple[ModelSpec, nn.Module | None]:
    """Return a model that is planned from its config, and that model on meta if it had to be built."""
    is_trusted = source.trust_remote_code
    spec = resolve(
        source.model, source.hub, dtype=source.dtype, trust_remote_code=is_trusted, need_weights=False
    )
    model: nn.Module | None = None
    if full := _with_files(spec, trust_remote_code=is_trusted):
        if not spec.dequantize:
            require_packed(full)
        model = build_model(spec.model_class, spec.config, getattr(torch, spec.dtype))
        if not tied_names(model):
            return spec, model
        spec = replace(spec, tied=_tied_in_files(full))
        return spec, model if spec.tied is None else None
    return spec, None


def _tell_if_quantized(spec: ModelSpec, progress: Progress) -> None:
    if spec.quantization is not None and not spec.dequantize:
        progress.stage("note: the checkpoint is quantized; its unquantized model is planned, with its bytes")


def plan_checkpoint(
    source: ModelSource, options: SolveOptions, example: Example | None, progress: Progress
) -> Plan:
    """Solve a model whose checkpoint is loaded with the plan, so that quantized weights stay packed in it."""
    is_trusted = source.trust_remote_code
    read = partial(
        resolve, source.model, source.hub, dtype=source.dtype, trust_remote_code=is_trusted, stream=True
    )
    spec = read(need_weights=False)
    if spec.quantization is None or spec.dequantize:  # no weights are packed
        return plan_model(source, options, example, progress)
    spec = read()
    options = _with_example(options, example)
    checkpoint = lazy_weights(spec)
    spec = replace(spec, tied=checkpoint.tied)
    solved = solve_plan(spec, options, grains=grains_of(checkpoint.tensors), progress=progress.stage)
    return _with_packings(spec, solved, checkpoint.tensors)[0]


def _with_packings(
    spec: ModelSpec, solved: Plan, weights: Mapping[str, LazyTensor | PackedWeight]
) -> tuple[Plan, dict[str, LazyTensor]]:
    """Return the plan with the packed form of quantized weights, and all tensors to store."""
    chosen = select(spec, weights, parameter_plans(solved).keys(), solved.tied)
    packed, tensors = flatten(solved, chosen)
    return with_packed_notes(packed, spec.quantization), tensors


def _with_files(spec: ModelSpec, *, trust_remote_code: bool) -> ModelSpec | None:
    """Return a model with the weight files next to its config; None without such files.

    A plan needs no weights. But if they exist, an untied head or the config of other weights is noticed now,
    and not when they are loaded.
    """
    if spec.directory is None or spec.revision is not None:
        return None
    try:
        return resolve(spec.directory, trust_remote_code=trust_remote_code)
    except SourceError:
        return None  # not all files are here; ``load`` with the plan compares the values


def _tied_in_files(spec: ModelSpec) -> Mapping[str, str] | None:
    """Return the parameters that are tied in weight files; None if the class and its config say it."""
    try:
        with without_library_logging():
            return lazy_weights(replace(spec, dequantize=spec.quantization is not None)).tied
    except SourceError:
        return None  # ``load`` with the plan compares the values
