"""Writes a model as the files from which vLLM's ranks start: ``--load-format sharded_state``.

    DIR/model-rank-0-part-0.safetensors     the tensors of rank 0, by vLLM's names
    DIR/model-rank-1-part-0.safetensors
    DIR/config.json, tokenizer ...
    DIR/manifest.json

The installed vLLM determines the names, and the tensors that are fused, padded or repeated: its own loader
runs, and its copies are recorded (``vllm_state``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.errors import OptionError, OutputExistsError
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.keywords import checked_keywords

from ..arguments import (
    HUB_FIELDS,
    WRITING_FIELDS,
    Writing,
    parse_memory,
    parse_ranks,
    parse_size,
    require_tp,
)
from ..converted.derived_directory import require_on_disk
from ..reporting.progress import Progress, Silent
from ..writing.outputs import Output, WriteOptions
from . import vllm_state
from .merge import Exported
from .state_files import is_engine_state
from .vllm_calls import require_vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class StateExport(Exported):
    """The files for vLLM that were written; all ranks have as many tensors."""

    dtype: str
    """The dtype to give to vLLM."""
    version: str
    """Version of vLLM."""
    platform: str
    """The platform for which vLLM chose its parameters."""


@in_default_modes
@checked_keywords({**HUB_FIELDS, **WRITING_FIELDS})
def export_vllm(
    model: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    tp: int,
    *,
    hub: Hub | None = None,
    dtype: str | None = None,
    writing: Writing | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> StateExport:
    """Write the tensors of each rank of the installed vLLM, without a GPU.

    The model classes and the loader of vLLM run once per rank on tensors without memory. Their copies are
    recorded and then carried out. To continue an interrupted run, call it again with the same arguments.

    Args:
        model: directory or Hub id of an ordinary checkpoint, or a converted directory for any tp.
        directory: directory to create. It must not exist, be empty, or hold the unfinished files of an
            earlier run.
        tp: number of vLLM ranks.
        hub: how the Hub is reached: ``Hub(revision=..., cache_dir=..., local_files_only=..., token=...)``.
        dtype: dtype of the parameters, for example ``"bfloat16"``; by default vLLM chooses.
        writing: which files are written, and how: ``Writing(ranks=..., max_file_size=..., ...)``. It cannot
            replace a directory.
        trust_remote_code: import the Python code of the model.
        progress: where to report progress.

    Raises:
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> shardconv.export_vllm("my-model/", "state/", tp=2)
    """
    require_tp(tp)
    require_on_disk(directory, "vllm")
    version = require_vllm()
    writing = writing or Writing()
    if writing.overwrite:
        raise OptionError("files of an inference engine are not replaced: name a new directory")
    options = WriteOptions(
        parse_size(writing.max_file_size), parse_memory(writing.memory), parse_ranks(writing.ranks, tp)
    )
    output = Output.prepare(directory, overwrite=False, source=model, owners=options.owners(tp))
    if output.is_complete and not is_engine_state(output.path):
        raise OutputExistsError(f"DST {directory} is not empty; name another directory")
    progress = progress or Silent()

    progress.stage(f"reading {os.fspath(model)}")
    with vllm_state.started() as recorder:
        # Imports torch, while the process of the recorder imports vLLM.
        from .vllm_files import engine_source, sizes_of, target_files, write_state

        stream = writing.stream
        if stream is None:
            stream = writing.ranks is not None or output.is_complete
        source = engine_source(model, hub or Hub(), trust_remote_code=trust_remote_code, stream=stream)
        ranks = options.ranks if options.ranks is not None else range(tp)
        progress.stage(
            f"recording the loader of vLLM {version} for {len(ranks)} rank{'s' * (len(ranks) > 1)}"
        )
        state = recorder.recorded_state(
            source.name,
            source.directory,
            source.tensors,
            tp,
            ranks=ranks,
            dtype=dtype,
            trust_remote_code=source.trust_remote_code,
        )
    files = target_files(state, options.max_file_size)
    is_complete = write_state(source, state, version, files, output, options, progress)
    return StateExport(
        num_tensors=len(state.declared[0]),
        num_files=len(files),
        num_bytes=max(sum(sizes_of(declared).values()) for declared in state.declared),
        is_complete=is_complete,
        was_complete=output.is_complete,
        dtype=state.dtype,
        version=version,
        platform=state.platform,
    )
