"""Merge a converted directory into an ordinary checkpoint, byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.files.small_files import config_in_dtype
from shardconv_runtime.versions import tool_versions

from ..arguments import MAX_FILE_SIZE, MEMORY, parse_memory, parse_size
from ..converted import derived_directory
from ..converted.file_checks import require_intact
from ..converted.shards import Converted
from ..reporting.progress import Progress, Silent
from ..writing.durable import write_durably
from ..writing.job import LEAST_ALIGNMENT, target_file
from ..writing.outputs import Output, refuse_other_output
from ..writing.workspace import Claim

if TYPE_CHECKING:  # they import torch
    from ..writing.writer import AnyWorkspace
    from .saved_layout import CheckpointLayout

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"

_OWNER = "checkpoint"
"""All files are written by one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files of an export."""

    num_tensors: int
    num_files: int
    """Number of files of weights."""
    num_bytes: int
    """Bytes of tensors; for vLLM, of the largest rank."""
    is_complete: bool = True
    """Whether all files are written, and not only some ranks' files."""
    was_complete: bool = False
    """Whether an earlier run has written the same files, so that nothing was written."""


@in_default_modes
def merge(
    out: str | os.PathLike[str],
    hf_dir: str | os.PathLike[str],
    *,
    max_file_size: int | str = MAX_FILE_SIZE,
    memory: int | str = MEMORY,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a converted directory as an ordinary checkpoint, without loading the model into memory.

    Names, layout and division into files are the same as with ``save_pretrained``, and the bytes are copied
    from the shards. Before anything is written, ``merge`` checks that transformers would load this layout to
    the same parameters. To continue an interrupted run, call it again with the same arguments.

    Args:
        out: a converted directory, or its URL in an object store.
        hf_dir: directory to create, or its URL in an object store. It must not exist, be empty, or hold the
            unfinished files of an earlier run.
        max_file_size: maximum size of a file in bytes, or as text such as ``"5GB"``. A larger tensor gets
            its own file.
        memory: I/O buffer size in bytes, or as text.
        trust_remote_code: import the Python code in ``out``; necessary if its plan was made with it.
        progress: where to report progress.

    Raises:
        ShardconvError: the message names the problem and the remedy. ``hf_dir`` then has no
            ``config.json``.

    Example:
        >>> shardconv.merge("out/", "my-model/")
    """
    progress = progress or Silent()
    limit, budget = parse_size(max_file_size), parse_memory(memory)
    output = derived_directory.prepared_place(hf_dir, out, CONFIG_NAME)
    converted = derived_directory.read(out, trust_remote_code=trust_remote_code)
    progress.stage(f"finding the layout in which transformers saves {out}")

    # torch and transformers are imported once the arguments are known to be right.
    from shardconv_runtime.checkpoint.quantized import header_of_packed

    from ..writing.fill import fill
    from ..writing.finished import difference_of_files
    from .saved_layout import checkpoint_tensors, divided_into_files

    spec = derived_directory.spec_of(converted)
    tensors, num_parameters = checkpoint_tensors(converted, spec)
    layout = divided_into_files({**derived_directory.unused(converted), **tensors}, num_parameters, limit)
    job = {
        "merge": {"name": converted.manifest.source.name, **derived_directory.identity(converted)},
        "max_file_size": limit,
        "versions": tool_versions(),
    }
    header: Mapping[str, str] = {}
    if spec.quantization is not None:
        header = header_of_packed(spec.quantization, spec.name, layout.tensors, spec.dtype)
    files = []
    for path, names in layout.files.items():
        stored = {name: layout.tensors[name] for name in sorted(names)}
        declared = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
        metadata = {"format": "pt", **header}
        made = target_file(path, _OWNER, declared, metadata, stored.__getitem__, alignment=LEAST_ALIGNMENT)
        files.append(made)
    written = Exported(
        num_tensors=len(layout.tensors),
        num_files=len(layout.files),
        num_bytes=sum(tensor.num_bytes for tensor in layout.tensors.values()),
        was_complete=output.is_complete,
    )
    if output.is_complete:
        reason = difference_of_files(output.present, files, lambda to: _write_others(to, converted, layout))
        refuse_other_output("DST", output.name, reason, "name another directory")
        return written
    with output.opened(job, files, Claim({_OWNER}), progress.stage) as workspace:
        if workspace.is_finishing:
            workspace.finish_again()
        else:
            require_intact(out, progress)
            fill(workspace, memory=budget, progress=progress)
            with workspace.exclusive():
                if isinstance(output, Output):
                    derived_directory.require_nothing_new("DST", output.path)
                _finish(workspace, converted, layout)
    return written


def _finish(workspace: AnyWorkspace, found: Converted, layout: CheckpointLayout) -> None:
    """Move all files to ``hf_dir``. ``config.json`` is last, since nothing loads a directory without it."""
    assert workspace.checksums() is not None, "all of it was written"
    other_files = _write_others(workspace.path, found, layout)
    paths = [*layout.files, *(path for path in other_files if path != CONFIG_NAME)]
    workspace.finish([*paths, CONFIG_NAME], ())


def _write_others(directory: Path, found: Converted, layout: CheckpointLayout) -> list[str]:
    """Write the files that are not weights, and return their paths."""
    paths = [entry.path for entry in derived_directory.copy_small_files(found, directory)]
    config = directory / CONFIG_NAME
    write_durably(config, config_in_dtype(config.read_text(encoding="utf-8"), found.plan.model.dtype))
    if layout.index:
        text = json.dumps(layout.index, indent=2, sort_keys=True) + "\n"
        write_durably(directory / INDEX_NAME, text)
        paths.append(INDEX_NAME)
    return paths
