"""Export a converted directory as a sharded checkpoint of torch (DCP), which transformers reads, too.

    DIR/shard-00001-model-00001-of-00002.safetensors    the shards of rank 0
    DIR/shard-00001-model-00002-of-00002.safetensors
    DIR/shard-00002-model-00001-of-00001.safetensors    the shards of rank 1
    DIR/config.json ...

A tensor consists of **chunks**, boxes that cover each of its elements once. A file has at most one chunk of a
tensor, and its metadata has the global position of the chunk's first element. A reader assembles its tensors
from chunks, for any number of ranks and any sharding.

This is the format of ``HuggingFaceStorageWriter(save_distributed=True)`` in torch 2.8 and newer. It is not
documented; see torch/distributed/checkpoint/hf_storage.py, _hf_utils.py and filesystem.py.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from shardconv_runtime.checkpoint import lazy_tensor as lazy
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor, Shape
from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.errors import OptionError, ShardconvError
from shardconv_runtime.files.manifest import PARTIAL
from shardconv_runtime.files.shard_files import grouped
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import ParameterPlan
from shardconv_runtime.format.slices import Range, ranges
from shardconv_runtime.format.stored_layout import is_common, stored_plans
from shardconv_runtime.versions import tool_versions

from ..arguments import MAX_FILE_SIZE, MEMORY, parse_memory, parse_size
from ..converted import derived_directory, shards
from ..converted.derived_directory import gathered, is_interleaved
from ..converted.file_checks import require_intact
from ..converted.shards import Converted, OwnedPart
from ..reporting.progress import Progress, Silent
from ..writing.durable import fsync
from ..writing.job import TargetFile, read_state, target_file
from ..writing.outputs import Output, refuse_other_output
from ..writing.workspace import Claim, opened, refuse_if_busy
from .merge import Exported

FORMATS = ("dcp",)

MAX_CHUNKS = 8
"""Most chunks of a tensor in the files of a rank, which then has at least as many files. Some readers open
all files at once."""

_OWNER = "export"
"""All files are written by one process."""

_SHARD_NAME = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
"""Names by which transformers recognizes such a directory."""

_MAX_NUMBER = 99_999
"""The largest number of five digits."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor."""

    offsets: Shape
    """Position of its first element in the global tensor."""
    tensor: LazyTensor


@in_default_modes
def export(
    out: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    format: str = "dcp",
    *,
    max_file_size: int | str = MAX_FILE_SIZE,
    memory: int | str = MEMORY,
    progress: Progress | None = None,
) -> Exported:
    """Write a converted directory in another sharded format.

    ``torch.distributed.checkpoint.load`` reads ``"dcp"`` with a ``HuggingFaceStorageReader``, into plain
    tensors or DTensors of any placement. ``from_pretrained`` of transformers reads it as well. It has the
    names of ``model.state_dict()``, including tied ones. Packed parameters are their stored tensors. The
    files of a rank hold its shards, and elements that several ranks hold are written once. To continue an
    interrupted run, call it again with the same arguments.

    Args:
        out: a converted directory; no code in it runs.
        directory: directory to create. It must not exist, be empty, or hold the unfinished files of an
            earlier run.
        format: ``"dcp"``.
        max_file_size: maximum size of a file in bytes, or as text such as ``"5GB"``. A larger chunk gets
            its own file.
        memory: I/O buffer size in bytes, or as text.
        progress: where to report progress.

    Raises:
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> shardconv.export("out/", "sharded/", format="dcp")
        >>> reader = torch.distributed.checkpoint.HuggingFaceStorageReader("sharded/")
        >>> torch.distributed.checkpoint.load(model.state_dict(), storage_reader=reader)
    """
    if format not in FORMATS:
        raise OptionError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    limit, budget = parse_size(max_file_size), parse_memory(memory)
    derived_directory.require_on_disk(directory, format)
    path = Path(directory).expanduser()
    state = read_state(path / PARTIAL)
    if state is not None and "export" in state.job and state.moves is None:
        # An earlier run died after it had created the empty last shard, before anything was moved.
        refuse_if_busy(path)
        for file in path.iterdir():
            if _SHARD_NAME.fullmatch(file.name) and file.stat().st_size == 0:
                file.unlink()
    output = derived_directory.prepare("DST", directory, out, "shard-*.safetensors")
    converted = shards.read(out)
    if not output.is_complete:
        require_intact(out, progress or Silent())
    # Chunks by rank and name. A tied tensor is there under each of its names.
    chunks: dict[int, dict[str, list[Chunk]]] = {}
    aliases: dict[str, list[str]] = {}
    for alias, name in converted.plan.tied:
        aliases.setdefault(name, []).append(alias)
    for name, entry in stored_plans(converted.plan).items():
        for rank, chunk in _chunks_of(converted, name, entry).items():
            chunks.setdefault(rank, {}).update(dict.fromkeys([name, *aliases.get(name, ())], chunk))
    files = [file for rank in sorted(chunks) for file in _files_of(rank, chunks[rank], limit)]
    _write(converted, files, output, {"max_file_size": limit, "export": format}, budget, progress or Silent())
    tensors = {name for chunk in chunks.values() for name in chunk}
    num_bytes = sum(c.tensor.num_bytes for chunk in chunks.values() for many in chunk.values() for c in many)
    return Exported(
        num_tensors=len(tensors), num_files=len(files), num_bytes=num_bytes, was_complete=output.is_complete
    )


def shard_name(rank: int, index: int, count: int) -> str:
    """Return the name of file ``index`` (from 0) of ``count`` of a rank."""
    return f"shard-{rank + 1:05d}-model-{index + 1:05d}-of-{count:05d}.safetensors"


def metadata_of(chunks: Mapping[str, Chunk]) -> dict[str, str]:
    """Return the metadata of a file with these chunks."""
    info = {name: {"saved_offsets": list(chunk.offsets)} for name, chunk in chunks.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}


def _chunks_of(found: Converted, name: str, entry: ParameterPlan) -> dict[int, list[Chunk]]:
    """Return the chunks of a tensor by rank: each range that a rank holds, unless there are too many."""
    if is_common(entry):
        tensor = found.tensors[None][name]
        return {0: [Chunk((0,) * len(tensor.shape), tensor)]}
    parts = list(found.parts(name, entry))
    if max(math.prod(map(len, part.ranges)) for part in parts) > MAX_CHUNKS:
        return _even_chunks(name, found.weight(name, entry), found.plan.tp)
    return {part.rank: list(_boxes(part)) for part in parts}


def _boxes(part: OwnedPart) -> Iterator[Chunk]:
    """Yield the part of a rank in boxes that are contiguous in the global tensor."""
    for box in product(*map(_local_and_global, part.ranges)):
        tensor = part.tensor
        for dim, (local, _) in enumerate(box):
            tensor = lazy.take(tensor, dim, (local,))
        yield Chunk(tuple(start for _, (start, _) in box), tensor)


def _local_and_global(positions: Sequence[Range]) -> Iterator[tuple[Range, Range]]:
    done = 0
    for start, stop in positions:
        yield (done, done + stop - start), (start, stop)
        done += stop - start


def _even_chunks(name: str, tensor: LazyTensor, tp: int) -> dict[int, list[Chunk]]:
    """Divide the first dim of a global tensor into one chunk for each rank.

    The files of a rank then contain other elements than the rank holds. transformers does the same with
    tensors that it has sharded in strides.
    """
    if is_interleaved(tensor):
        tensor = gathered(name, tensor)
    rows, rest = Leaf(tensor.shape[0], (0,)), (0,) * (len(tensor.shape) - 1)
    return {
        rank: [Chunk((start, *rest), lazy.take(tensor, 0, ((start, stop),)))]
        for rank in range(tp)
        for start, stop in ranges(rows, (tp,), rank)
    }


def _files_of(rank: int, chunks: Mapping[str, Sequence[Chunk]], limit: int) -> list[TargetFile]:
    """Return the files of a rank: first chunks of all tensors, then second chunks, and so on."""
    contents: list[dict[str, Chunk]] = []
    for index in range(max(map(len, chunks.values()))):
        of_index = {name: many[index] for name, many in chunks.items() if index < len(many)}
        parts = grouped({name: chunk.tensor.num_bytes for name, chunk in of_index.items()}, limit)
        contents += [{name: of_index[name] for name in names} for names in parts]
    if max(rank + 1, len(contents)) > _MAX_NUMBER:
        raise ShardconvError(
            f"rank {rank} would have {len(contents)} files, and their names have five digits for the number "
            "of each; allow larger files (--max-file-size)"
        )
    names = (shard_name(rank, index, len(contents)) for index in range(len(contents)))
    files = []
    for path, of_index in zip(names, contents, strict=True):
        tensors = {name: chunk.tensor for name, chunk in of_index.items()}
        declared = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        files.append(target_file(path, _OWNER, declared, metadata_of(of_index), tensors.__getitem__))
    return files


def _write(
    found: Converted,
    files: Sequence[TargetFile],
    output: Output,
    options: Mapping[str, object],
    memory: int,
    progress: Progress,
) -> None:
    from ..writing.fill import fill  # these import torch, which most errors do not need
    from ..writing.finished import difference_of_files

    if output.is_complete:
        reason = difference_of_files(
            output.present, files, lambda to: derived_directory.copy_small_files(found, to)
        )
        refuse_other_output("DST", output.path, reason, "name another directory")
        return
    source = {"name": found.manifest.source.name, **derived_directory.identity(found)}
    job = {"source": source, **options, "versions": tool_versions()}
    with opened(output.path, job, files, Claim({_OWNER}), tell=progress.stage) as workspace:
        if workspace.is_finishing:
            workspace.finish_again()
            return
        fill(workspace, memory=memory, progress=progress)
        with workspace.exclusive():
            derived_directory.require_nothing_new("DST", output.path)
            assert workspace.checksums() is not None, "all of it was written"
            small = [entry.path for entry in derived_directory.copy_small_files(found, workspace.path)]
            names = [file.path for file in workspace.files]
            # Readers of this format do not notice missing shards, and leave the elements uninitialized. But
            # they open every file, and fail at an empty one in place of the last shard.
            last = workspace.out / names[-1]
            last.touch()
            fsync(last.parent)
            workspace.finish([*small, *names], ())
