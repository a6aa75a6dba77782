"""Converting and planning: arguments are checked here, and ``conversion.py`` does the work.

The work is imported when it begins: it imports torch and transformers, which takes seconds, and ``--help``
and every error of the arguments must come at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from shardconv_runtime.checkpoint.model_directory import model_directory
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.parallel.default_modes import in_default_modes

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
    options = SolveOptions(tp, experts, sequence_parallel, check, measure=True, pp=pp, stages=stages)
    require_seed(seed, random_init=random_init)
    write_options = WriteOptions(parse_size(max_file_size), parse_memory(memory), parse_ranks(ranks, tp * pp))
    model_directory(model, need_weights=not random_init)  # a wrong path is an error at once
    outputs = prepared(out, pp, overwrite=overwrite, source=model, options=write_options, tp=tp)

    from .conversion import Weights, converted

    weights = Weights(random_init, seed or 0, keep_unused, ranks is not None if stream is None else stream)
    hub = Hub(revision, cache_dir, local_files_only, token)
    return converted(
        model,
        outputs,
        hub,
        options,
        weights,
        write_options,
        example_inputs,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        progress=progress or Silent(),
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
    if isinstance(model, (str, os.PathLike)):
        model_directory(model, need_weights=False)

    from .conversion import planned

    hub = Hub(revision, cache_dir, local_files_only, token)
    return planned(
        model,
        hub,
        options,
        example_inputs,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        progress=progress or Silent(),
    )
