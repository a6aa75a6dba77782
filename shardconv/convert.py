"""Converting and planning: arguments are checked here, and ``conversion.py`` does the work.

The work is imported when it begins: it imports torch and transformers, which takes seconds, and ``--help``
and every error of the arguments must come at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from shardconv_runtime.checkpoint.model_directory import model_directory
from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.format.plan import Plan
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
from .writing.outputs import WriteOptions, prepared

if TYPE_CHECKING:
    from .inputs.example_inputs import Example


@in_default_modes
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

    To continue an interrupted run, call it again with the same arguments.

    Args:
        model: directory or Hub id of a transformers model.
        out: directory to create. It must not exist, be empty, or hold the unfinished files of an earlier
            run, unless ``overwrite`` is set.
        tp: number of ranks.
        experts: how mixture-of-experts layers are sharded: ``"tp"`` shards each expert, ``"ep"`` gives
            complete experts to each rank.
        sequence_parallel: also make a form of the plan for ``load(..., sequence_parallel=True)``. It is an
            error if the model has no such form.
        pp: number of pipeline stages, each of which is sharded over ``tp`` ranks. ``out`` then has a
            converted directory for each stage with its layers.
        stages: first and last layer of each stage, for example ``"0-39,40-79"``; by default bytes and work
            are balanced.
        revision: branch, tag or commit on the Hub.
        cache_dir: directory of the Hub cache.
        local_files_only: use only the Hub cache.
        token: Hub token; by default the token of the Hub login.
        dtype: dtype of the parameters, for example ``"bfloat16"``; by default the dtype of the checkpoint.
        max_file_size: maximum size of a shard file in bytes, or as text such as ``"5GB"``. A larger tensor
            gets its own file.
        memory: I/O buffer size in bytes, or as text such as ``"512MiB"``.
        ranks: the ranks to write, or text such as ``"0-3,6"``; by default all. Several machines may write
            different ranks to one directory, and the last one completes it. Ranks of stages are counted
            through: the second of two stages of 8 has the ranks 8 to 15.
        stream: request only the necessary bytes from the Hub and cache none; if False, download the files
            to the cache. By default stream if ``ranks`` are given. Cached files are not downloaded again.
            Files other than safetensors are always downloaded.
        random_init: write the weights of a newly initialized model. ``model`` needs only a config.
        seed: seed of the initialization, by default 0. The same seed gives the same weights for any ``tp``.
        keep_unused: keep the tensors of the checkpoint that the model does not use, for example
            multi-token-prediction layers, in a file that no rank reads. ``merge`` writes them back.
        trust_remote_code: import the Python code of the repository.
        overwrite: replace ``out`` if it is a converted directory.
        check: simulate the ranks in float64 and check the plan before anything is written.
        example_inputs: a call of the model to trace and to check: its keyword arguments, a function that
            returns them for a config, or a file. A Python file defines ``example_inputs(config)``; a
            safetensors file has the tensors by name. ``out`` keeps the example.
        progress: where to report progress.

    Returns:
        The plan, as in ``out/plan.json``.

    Raises:
        ShardconvError: the message names the problem and the remedy. ``out`` then contains only
            ``.partial``, from which the next run continues, or its earlier content.

    Example:
        >>> plan = shardconv.convert("my-model/", "out/", tp=2)
    """
    options = SolveOptions(tp, experts, sequence_parallel, check, measure=True, pp=pp, stages=stages)
    require_seed(seed, random_init=random_init)
    write_options = WriteOptions(parse_size(max_file_size), parse_memory(memory), parse_ranks(ranks, tp * pp))
    model_directory(model, need_weights=not random_init)  # a wrong path is an error at once
    outputs = prepared(out, pp, overwrite=overwrite, source=model, options=write_options, tp=tp)

    from .conversion import ModelSource, Weights, convert_model

    weights = Weights(random_init, seed or 0, keep_unused, ranks is not None if stream is None else stream)
    source = ModelSource(model, Hub(revision, cache_dir, local_files_only, token), dtype, trust_remote_code)
    return convert_model(
        source, outputs, options, weights, write_options, example_inputs, progress or Silent()
    )


@in_default_modes
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
    """Solve a model for ``tp`` ranks from its config, without weights.

    Args:
        model: a directory, a Hub id or a transformers config object. If a directory has weights, tied ones
            are compared.
        tp: number of ranks.
        experts: how mixture-of-experts layers are sharded: ``"tp"`` shards each expert, ``"ep"`` gives
            complete experts to each rank.
        sequence_parallel: also make a form of the plan for ``load(..., sequence_parallel=True)``. It is an
            error if the model has no such form.
        revision: branch, tag or commit on the Hub.
        cache_dir: directory of the Hub cache.
        local_files_only: use only the Hub cache.
        token: Hub token; by default the token of the Hub login.
        dtype: dtype of the parameters; by default the dtype in the config.
        trust_remote_code: import the Python code of the repository.
        pp: number of pipeline stages, each of which is sharded over ``tp`` ranks.
        stages: first and last layer of each stage, for example ``"0-39,40-79"``; by default bytes and work
            are balanced.
        check: simulate the ranks and check the plan, as ``convert`` does.
        example_inputs: a call of the model to trace, see ``convert``.
        progress: where to report progress.

    Raises:
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> plan = shardconv.plan(transformers.AutoConfig.from_pretrained("my-model/"), tp=8)
    """
    options = SolveOptions(tp, experts, sequence_parallel, check, measure=True, pp=pp, stages=stages)
    if isinstance(model, (str, os.PathLike)):
        model_directory(model, need_weights=False)

    from .conversion import ModelSource, plan_model

    source = ModelSource(model, Hub(revision, cache_dir, local_files_only, token), dtype, trust_remote_code)
    return plan_model(source, options, example_inputs, progress or Silent())
