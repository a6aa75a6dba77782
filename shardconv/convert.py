"""Converting and planning: arguments are checked here, and ``conversion.py`` does the work.

The work is imported when it begins: it imports torch and transformers, which takes seconds, and ``--help``
and every error of the arguments must come at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardconv_runtime.checkpoint.model_directory import model_directory
from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.errors import OptionError, SourceError
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.keywords import Moved, checked_keywords

from .arguments import (
    HUB_FIELDS,
    WRITING_FIELDS,
    OnCluster,
    Quantizing,
    RandomInit,
    SolveOptions,
    Writing,
    on_cluster,
    parse_memory,
    parse_ranks,
    parse_size,
    quantizing,
)
from .hardware.machines import Cluster, parse_cluster
from .reporting.plan_lines import Workload
from .reporting.progress import Progress, Silent
from .writing.outputs import WriteOptions, prepared

if TYPE_CHECKING:
    from .inputs.example_inputs import Example


@in_default_modes
@checked_keywords({**HUB_FIELDS, **WRITING_FIELDS, "seed": Moved("random_init", RandomInit, needs=True)})
def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tp: int,
    *,
    experts: str = "tp",
    sequence_parallel: bool = False,
    pp: int = 1,
    stages: str = "",
    hub: Hub | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    random_init: bool | RandomInit = False,
    quantize: str | Quantizing | None = None,
    keep_unused: bool = False,
    check: bool = True,
    example_inputs: Example | None = None,
    on: str | OnCluster | None = None,
    writing: Writing | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Solve a model for ``tp`` ranks and write its shards and its plan to ``out``.

    To continue an interrupted run, call it again with the same arguments.

    Args:
        model: directory, Hub id or URL in an object store of a transformers model.
        out: directory to create, or its URL in an object store. It must not exist, be empty, or hold the
            unfinished files of an earlier run, unless ``writing`` says ``overwrite``.
        tp: number of ranks.
        experts: how mixture-of-experts layers are sharded: ``"tp"`` shards each expert, ``"ep"`` gives
            complete experts to each rank.
        sequence_parallel: also make a form of the plan for ``load(..., sequence_parallel=True)``. It is an
            error if the model has no such form.
        pp: number of pipeline stages, each of which is sharded over ``tp`` ranks. ``out`` then has a
            converted directory for each stage with its layers.
        stages: first and last layer of each stage, for example ``"0-39,40-79"``; by default bytes and work
            are balanced.
        hub: how the Hub is reached: ``Hub(revision=..., cache_dir=..., local_files_only=..., token=...)``.
        dtype: dtype of the parameters, for example ``"bfloat16"``; by default the dtype of the checkpoint.
        trust_remote_code: import the Python code of the repository.
        random_init: write the weights of a newly initialized model: True, or ``RandomInit(seed=...)``.
            ``model`` needs only a config.
        quantize: scheme in which weights of linear layers and experts are packed while they are copied:
            ``"fp8"``, ``"nf4"``, ``"w4a16"`` or another one of ``arguments.SCHEMES``, or
            ``Quantizing(scheme, keep=...)``. For any ``tp`` the stored tensors are equal to the ones that the
            format's library makes of the unsharded model.
        keep_unused: keep the tensors of the checkpoint that the model does not use, for example
            multi-token-prediction layers, in a file that no rank reads. ``export`` writes them back.
        check: simulate the ranks in float64 and check the plan before anything is written.
        example_inputs: a call of the model to trace and to check: its keyword arguments, a function that
            returns them for a config, or a file. A Python file defines ``example_inputs(config)``; a
            safetensors file has the tensors by name. ``out`` keeps the example.
        on: the devices, such as ``"2x8xH100"``, or ``OnCluster("2x8xH100", batch=32, context=8192)``. The
            plan with the shortest predicted time of a token is used, see ``docs/hardware.md``; by default the
            plan does not depend on devices.
        writing: which files are written, and how: ``Writing(ranks=..., max_file_size=..., ...)``.
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
    writing = writing or Writing()
    packing = quantizing(quantize)
    where = _cluster(on, options, packing)
    initial = random_init if isinstance(random_init, RandomInit) else RandomInit()
    draws = bool(random_init)
    write_options = WriteOptions(
        parse_size(writing.max_file_size), parse_memory(writing.memory), parse_ranks(writing.ranks, tp * pp)
    )
    model_directory(model, need_weights=not draws)  # a wrong path is an error at once
    settings = {"tp": tp, "pp": pp, "experts": experts, "sequence_parallel": sequence_parallel}
    if dtype is not None:
        settings["dtype"] = dtype.removeprefix("torch.")
    outputs = prepared(
        out, pp, overwrite=writing.overwrite, source=model, options=write_options, settings=settings
    )

    from .conversion import ModelPlanner, ModelSource, Weights, convert_model

    stream = writing.ranks is not None if writing.stream is None else writing.stream
    weights = Weights(draws, initial.seed, keep_unused, stream, packing)
    source = ModelSource(model, hub or Hub(), dtype, trust_remote_code)
    progress = progress or Silent()
    if where is not None:
        from .hardware.priced_plans import options_for

        options = options_for(ModelPlanner(source, example_inputs, progress), options, *where)
    return convert_model(source, outputs, options, weights, write_options, example_inputs, progress)


@in_default_modes
@checked_keywords(HUB_FIELDS)
def plan(
    model: str | os.PathLike[str] | Any,
    tp: int,
    *,
    experts: str = "tp",
    sequence_parallel: bool = False,
    hub: Hub | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    pp: int = 1,
    stages: str = "",
    quantize: str | Quantizing | None = None,
    check: bool = False,
    example_inputs: Example | None = None,
    on: str | OnCluster | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Solve a model for ``tp`` ranks from its config, without weights.

    Args:
        model: a directory, a Hub id, a transformers config object, or a model in memory, also on meta. If a
            directory has weights, tied ones are compared.
        tp: number of ranks.
        experts: how mixture-of-experts layers are sharded: ``"tp"`` shards each expert, ``"ep"`` gives
            complete experts to each rank.
        sequence_parallel: also make a form of the plan for ``load(..., sequence_parallel=True)``. It is an
            error if the model has no such form.
        hub: how the Hub is reached: ``Hub(revision=..., cache_dir=..., local_files_only=..., token=...)``.
        dtype: dtype of the parameters; by default the dtype in the config.
        trust_remote_code: import the Python code of the repository.
        pp: number of pipeline stages, each of which is sharded over ``tp`` ranks.
        stages: first and last layer of each stage, for example ``"0-39,40-79"``; by default bytes and work
            are balanced.
        quantize: scheme in which weights would be packed, see ``convert``. The bytes in the plan are those.
        check: simulate the ranks and check the plan, as ``convert`` does.
        example_inputs: a call of the model to trace, see ``convert``. A module that is not of transformers
            needs one.
        on: the devices that the plan is for, see ``convert``.
        progress: where to report progress.

    Raises:
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> plan = shardconv.plan(transformers.AutoConfig.from_pretrained("my-model/"), tp=8)
    """
    options = SolveOptions(tp, experts, sequence_parallel, check, measure=True, pp=pp, stages=stages)
    packing = quantizing(quantize)
    where = _cluster(on, options, packing)
    if isinstance(model, (str, os.PathLike)):
        model_directory(model, need_weights=False)
    else:
        _require_model(model, example_inputs)

    from .conversion import ModelPlanner, ModelSource, plan_model

    source = ModelSource(model, hub or Hub(), dtype, trust_remote_code)
    progress = progress or Silent()
    if where is not None:
        from .hardware.priced_plans import options_for

        planner = ModelPlanner(source, example_inputs, progress)
        return planner.plan(options_for(planner, options, *where))
    return plan_model(source, options, example_inputs, progress, packing)


def _cluster(
    on: str | OnCluster | None, options: SolveOptions, packing: Quantizing | None
) -> tuple[Cluster, Workload] | None:
    """Return the devices that a plan is for, and the calls; None: it is for any."""
    where = on_cluster(on)
    if where is None:
        return None
    if packing is not None:
        raise OptionError("times of packed weights are not predicted; leave out --quantize or --on")
    cluster = parse_cluster(where.cluster, where.hardware)
    cluster.require(options.tp * options.pp)
    return cluster, Workload(cluster.device.memory_bytes, context=where.context, batch=where.batch)


def plan_to_load(
    model: Any,
    tp: int,
    *,
    hub: Hub,
    trust_remote_code: bool,
    example_inputs: Example | None,
    **settings: Any,
) -> Plan:
    """Solve a model that the runtime is about to load; quantized weights keep the form of their checkpoint.

    Args:
        settings: further arguments of ``plan``.
    """
    if not isinstance(model, (str, os.PathLike)):
        return plan(model, tp, example_inputs=example_inputs, **settings)

    from .conversion import ModelSource, plan_checkpoint

    options = SolveOptions(tp, measure=True, **settings)
    source = ModelSource(model, hub, None, trust_remote_code)
    return plan_checkpoint(source, options, example_inputs, Silent())


def _require_model(model: Any, example_inputs: Example | None) -> None:
    """Refuse an object that is neither a model nor a config."""
    from torch import nn  # takes a second, and a model in memory has imported it
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(model, nn.Module):
        if not isinstance(model, PreTrainedModel) and example_inputs is None:
            raise SourceError(
                f"{type(model).__name__} is not a model of transformers, so its inputs are not known; pass "
                "example_inputs=, the keyword arguments of a call, for example "
                'example_inputs={"x": torch.randn(2, 16)}'
            )
    elif not isinstance(model, PreTrainedConfig):
        raise SourceError(
            f"a {type(model).__name__} is no model; pass a directory, a Hub id, a config object of "
            "transformers, or an nn.Module"
        )
