"""The stages, called one after another: resolve, solve, read, write.

The stages are imported when they are called: they import torch and transformers, which takes
seconds, and ``--help`` and every error of the arguments must come at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardconv_runtime.errors import SourceError
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.hub_options import Hub

from .arguments import (
    MAX_FILE_SIZE,
    MEMORY,
    SolveOptions,
    parse_memory,
    parse_ranks,
    parse_size,
    require_seed,
)
from .reporting.progress import Progress, Silent
from .writing.outputs import Output, WriteOptions, prepared, write_to

if TYPE_CHECKING:
    from shardconv_runtime.checkpoint.checkpoint_weights import CheckpointWeights
    from shardconv_runtime.checkpoint.quantized import PackedWeight
    from shardconv_runtime.checkpoint.resolve import ModelSpec
    from shardconv_runtime.tensors.lazy_tensor import LazyTensor

    from .inputs.example_inputs import Example
    from .writing.writer import Origin


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tp: int,
    *,
    experts: str = "tp",
    sequence_parallel: bool = False,
    pp: int = 1,
    stages: str = "",
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    dtype: str | None = None,
    max_file_size: int | str = MAX_FILE_SIZE,
    memory: int | str = MEMORY,
    ranks: Collection[int] | str | None = None,
    stream: bool | None = None,
    random_init: bool = False,
    seed: int | None = None,
    keep_unused: bool = False,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    check: bool = True,
    example_inputs: Example | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Solve a model for ``tp`` ranks and write its shards and its plan to ``out``.

    A run that was killed, or failed because the disk was full, is continued by the same call.

    Args:
        model: directory or Hub id of a transformers model.
        out: directory to make; it must not exist, be empty, or hold the unfinished files of an earlier run,
            unless ``overwrite``.
        tp: number of ranks.
        experts: how mixture-of-experts layers are sharded: ``"tp"``, inside of each expert, or ``"ep"``,
            whole experts on each rank.
        sequence_parallel: solve as well for activations that are sharded over the sequence between the
            parallel blocks, for ``load(..., sequence_parallel=True)``; refused if the model has no such form.
        pp: number of stages of a pipeline, each of which is sharded over ``tp`` ranks. ``out`` then has a
            converted directory for each stage, with its layers alone.
        stages: first and last layer of each stage, as ``"0-39,40-79"``; by default their bytes and work are
            balanced.
        revision, cache_dir, local_files_only, token: how to download from the Hub.
        dtype: of the parameters, as ``"bfloat16"``; by default that of the checkpoint.
        max_file_size: bytes of a shard file, or text as ``"5GB"``; a tensor is never split.
        memory: I/O buffer size in bytes, or text as ``"512MiB"``.
        ranks: the ranks to write, or text as ``"0-3,6"``; by default all. Several machines may write
            different ranks to one directory; the last one completes it. Those of stages are counted through:
            of two stages of 8, the second one has the ranks 8 to 15.
        stream: request the needed bytes of a Hub repository only, and keep none in the cache; if False,
            download its files to the cache. By default stream if ``ranks`` are given. Cached files are not
            downloaded again, and files that are not safetensors are always downloaded.
        random_init: write the weights of a newly initialized model, to be trained from scratch: ``model``
            needs a config only, and its weights are not read.
        seed: of the initialization, by default 0; the same seed gives the same weights for any ``tp``.
        keep_unused: carry along the tensors of the checkpoint that the model does not use, such as layers
            that predict further tokens, in a file that no rank reads. ``merge`` gives them back.
        trust_remote_code: import the repository's own Python code.
        overwrite: replace ``out`` if it is a converted directory, and nothing else.
        check: check the plan on numbers (ranks simulated in float64) before anything is written.
        example_inputs: a call of the model to trace and to check, for a model whose inputs cannot be made up:
            its keyword arguments, a function that returns them for a config, or a file. A Python file defines
            ``example_inputs(config)``; a safetensors file has the tensors by name. ``out`` keeps the example.
        progress: where to report to.

    Returns:
        The plan, as in ``out/plan.json``.

    Raises:
        ShardconvError: the message has the problem and the remedy. ``out`` is unchanged, but for its
            ``.partial``, from which the next run continues.

    Example:
        >>> plan = shardconv.convert("my-model/", "out/", tp=2)
    """
    progress = progress or Silent()
    options = SolveOptions(tp, experts, sequence_parallel, check, measure=True, pp=pp, stages=stages)
    options = _with_example(options, example_inputs)
    require_seed(seed, random_init=random_init)
    write_options = WriteOptions(parse_size(max_file_size), parse_memory(memory), parse_ranks(ranks, tp * pp))

    outputs = prepared(out, pp, overwrite=overwrite, source=model, options=write_options, tp=tp)

    from shardconv_runtime.checkpoint.checkpoint_weights import select
    from shardconv_runtime.checkpoint.packed_plan import flatten, steps_of, with_packed_notes
    from shardconv_runtime.checkpoint.resolve import resolve

    from .inputs.example_inputs import example_call
    from .pipeline.stages import solve_plan
    from .writing.writer import with_example, write

    progress.stage(f"reading {os.fspath(model)}")
    hub = Hub(revision, cache_dir, local_files_only, token)
    spec = resolve(
        model,
        hub,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        need_weights=not random_init,
        stream=ranks is not None if stream is None else stream,
    )
    example = options.example
    if example is not None:
        example_call(example, spec.config)  # refused now, and not after the weights were found
    remarks: list[str] = []
    found: Mapping[str, LazyTensor | PackedWeight]
    if random_init:
        origin, found = _initialized(spec, seed or 0, progress)
    else:
        origin, checkpoint = _read(spec, progress, remarks.append, keep_unused)
        spec, found = replace(spec, tied=checkpoint.tied), checkpoint.tensors
    if example is not None:
        origin = with_example(origin, example, spec.config)
    for remark in remarks:
        progress.stage(f"note: {remark}")
    solved: Plan = solve_plan(spec, options, steps=steps_of(found), progress=progress.stage)
    solved = replace(solved, notes=(*solved.notes, *remarks))
    solved, weights = flatten(solved, select(spec, found, parameter_plans(solved).keys(), solved.tied))
    solved = with_packed_notes(solved, spec.quantization)

    def write_one(own: Plan, held: Mapping[str, LazyTensor], output: Output, part: WriteOptions) -> bool:
        return write(own, held, output, origin, part, progress)

    write_to(outputs, solved, weights, origin.source, write_options, write_one, progress.stage)
    return solved


def _with_example(options: SolveOptions, example: Example | None) -> SolveOptions:
    """The options with the example inputs that were given."""
    if example is None:
        return options
    from .inputs.example_inputs import read_example

    return replace(options, example=read_example(example))


def _read(
    spec: ModelSpec, progress: Progress, tell: Callable[[str], object], keep_unused: bool
) -> tuple[Origin, CheckpointWeights]:
    """The weights of a checkpoint, and where they come from; ``tell`` is called with remarks."""
    from shardconv_runtime.checkpoint.checkpoint_weights import lazy_weights
    from shardconv_runtime.checkpoint.other_kinds import remarks

    from .writing.writer import origin_of

    origin = origin_of(spec)
    progress.stage("finding the weights in the checkpoint")
    for remark in remarks(spec.directory) if spec.directory is not None else ():
        tell(remark)
    found = lazy_weights(spec, tell, with_unused=keep_unused)
    return replace(origin, unused=found.unused), found


def _initialized(
    spec: ModelSpec, seed: int, progress: Progress
) -> tuple[Origin, dict[str, LazyTensor | PackedWeight]]:
    """The weights of a new model, and where they come from."""
    from .initializing.initial_weights import drawn_dtype, has_weights, initial_weights, initialized_source
    from .writing.writer import origin_of

    if has_weights(spec):
        progress.stage(f"the weights in {spec.name} are not read: those of a new model are written")
    origin = origin_of(replace(spec, dequantize=spec.quantization is not None))
    identity = {"initialised": {"seed": seed, "dtype": drawn_dtype(spec)}}
    origin = replace(origin, source=initialized_source(origin.source, seed), identity=identity, identify=None)
    progress.stage(f"recording the model's own initialization: seed {seed}, drawn in {drawn_dtype(spec)}")
    return origin, dict(initial_weights(spec, seed))


def plan(
    model: str | os.PathLike[str] | Any,
    tp: int,
    *,
    experts: str = "tp",
    sequence_parallel: bool = False,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    pp: int = 1,
    stages: str = "",
    check: bool = False,
    example_inputs: Example | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Solve a model for ``tp`` ranks from its config alone; no weights are read or needed.

    Args:
        model: a directory, a Hub id or a transformers config object. Of weights in a directory, those that
            the config ties are compared.
        tp: number of ranks.
        experts: how mixture-of-experts layers are sharded: ``"tp"``, inside of each expert, or ``"ep"``,
            whole experts on each rank.
        sequence_parallel: solve as well for activations that are sharded over the sequence between the
            parallel blocks, for ``load(..., sequence_parallel=True)``; refused if the model has no such form.
        revision, cache_dir, local_files_only, token: how to download from the Hub.
        dtype: of the parameters; by default what the config says.
        trust_remote_code: import the repository's own Python code.
        pp: number of stages of a pipeline, each of which is sharded over ``tp`` ranks.
        stages: first and last layer of each stage, as ``"0-39,40-79"``; by default their bytes and work are
            balanced.
        check: check the plan on numbers too, as ``convert`` does.
        example_inputs: a call of the model to trace, see ``convert``.
        progress: where to report to.

    Raises:
        ShardconvError: the message has the problem and the remedy.

    Example:
        >>> plan = shardconv.plan(transformers.AutoConfig.from_pretrained("my-model/"), tp=8)
    """
    options = SolveOptions(tp, experts, sequence_parallel, check, measure=True, pp=pp, stages=stages)
    options = _with_example(options, example_inputs)

    from shardconv_runtime.checkpoint.resolve import resolve

    from .pipeline.stages import solve_plan

    hub = Hub(revision, cache_dir, local_files_only, token)
    spec = resolve(model, hub, dtype=dtype, trust_remote_code=trust_remote_code, need_weights=False)
    if spec.directory is not None and spec.revision is None:
        spec = replace(spec, tied=_tied_in_files(spec, trust_remote_code=trust_remote_code))
    solved: Plan = solve_plan(spec, options, progress=(progress or Silent()).stage)
    return solved


def _tied_in_files(spec: ModelSpec, *, trust_remote_code: bool) -> Mapping[str, str] | None:
    """What weight files beside the config say of parameters that the class ties; None where there are none.

    A plan needs no weights. But where they are, a head of its own is seen now, and not when they are loaded.
    """
    import torch
    from shardconv_runtime.checkpoint.checkpoint_weights import lazy_weights
    from shardconv_runtime.checkpoint.resolve import resolve
    from shardconv_runtime.hub.hub_errors import without_library_logging
    from shardconv_runtime.parallel.meta_model import build_model, tied_names

    assert spec.directory is not None, "asked of models in directories"
    if not tied_names(build_model(spec.model_class, spec.config, getattr(torch, spec.dtype))):
        return None
    try:
        full = resolve(spec.directory, dtype=spec.dtype, trust_remote_code=trust_remote_code)
        with without_library_logging():
            return lazy_weights(full).tied
    except SourceError:
        return None  # not all files are here; who loads by the plan compares the values
