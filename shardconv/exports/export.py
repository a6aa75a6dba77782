"""Write a model in the format of another program: an ordinary checkpoint, DCP, or vLLM's files."""

from __future__ import annotations

import os
from typing import Any

from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.errors import OptionError

from ..reporting.progress import Progress
from . import export_dcp
from .export_vllm import export_vllm
from .merge import Exported, merge

FORMATS = ("hf", "dcp", "vllm")


@in_default_modes
def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    format: str = "dcp",
    *,
    tp: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Exported:
    """Write a model in the format of another program, without loading it into memory.

    ``"hf"`` writes an ordinary checkpoint, as ``save_pretrained`` would, with the bytes of the shards.
    ``"dcp"`` writes sharded safetensors for ``torch.distributed.checkpoint``, which ``from_pretrained``
    reads, too. ``"vllm"`` writes the files from which vLLM's ranks start. To continue an interrupted run,
    call it again with the same arguments.

    Args:
        src: a converted directory; for ``"vllm"``, also an ordinary model, local or on the Hub.
        dst: directory to create. It must not exist, be empty, or hold the unfinished files of an earlier
            run. If it holds the complete files of the same call, nothing is written.
        format: ``"hf"``, ``"dcp"`` or ``"vllm"``.
        tp: number of ranks of vLLM.
        progress: where to report progress.
        options: ``max_file_size`` and ``memory``, see ``convert``; for ``"hf"`` and ``"vllm"`` also
            ``trust_remote_code``; for ``"vllm"`` also the options of ``export_vllm``.

    Returns:
        The numbers of tensors, files and bytes.

    Raises:
        OptionError: the format does not exist, or has no such option.
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> shardconv.export("out/", "my-model/", format="hf")
    """
    if format not in FORMATS:
        raise OptionError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if (tp is None) == (format == "vllm"):
        problem = "needs tp: the number of ranks of vLLM" if tp is None else "has no tp; leave it out"
        raise OptionError(f"the format {format!r} {problem}")
    if format == "hf":
        return merge(src, dst, progress=progress, **options)
    if format == "dcp":
        return export_dcp.export(src, dst, progress=progress, **options)
    assert tp is not None
    return export_vllm(src, dst, tp, progress=progress, **options)
