"""Whether a directory with an engine's files is intact, and fits the engine that is installed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.format import manifest as paths
from shardconv_runtime.format.header import TORCH_NAME, read_header
from shardconv_runtime.format.manifest import FileEntry

from ..reporting.progress import Progress, Silent
from ..verifying.directories.intact import checksums
from ..verifying.directories.verify import DamagedError
from . import state_manifest
from .state_manifest import StateManifest
from .vllm_package import installed_version

_SHARD = re.compile(r"model-rank-([0-9]+)-part-[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class VerifiedState:
    """The checks that a directory has passed."""

    num_files: int
    num_bytes: int
    remarks: tuple[str, ...]


def verify_state(out: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifiedState:
    """Check sizes, checksums, the signature of each rank's tensors, and the engine's version.

    Args:
        out: a directory that ``export_vllm`` wrote.
        progress: where to report to.

    Raises:
        DamagedError: with all problems; the installed engine is of another version than recorded, too.
        CheckpointError: ``out`` has no manifest that can be read.
    """
    directory = Path(out)
    found = state_manifest.read(directory)
    located, problems = _located(directory, found)
    with (progress or Silent()).bar("checksums", sum(entry.num_bytes for entry in located)) as advance:
        for entry, checksum in checksums(located, advance).items():
            if checksum != entry.checksum:
                problems.append(f"{entry.path}: {checksum} should be {entry.checksum}")
    if not problems:
        problems += _other_tensors(found, located)
    problems += _strays(directory, found)
    installed = installed_version()
    if installed not in (None, found.engine_version):
        problems.append(
            f"written for {found.engine} {found.engine_version}, and {installed} is installed: export again"
        )
    if problems:
        raise DamagedError(directory, problems)
    remarks = [] if installed else [f"{found.engine} is not installed: its version was not compared"]
    return VerifiedState(len(found.files) + 1, sum(entry.num_bytes for entry in found.files), tuple(remarks))


def _located(directory: Path, found: StateManifest) -> tuple[dict[FileEntry, Path], list[str]]:
    """Files of the right size, and the problems of the others."""
    located: dict[FileEntry, Path] = {}
    problems = []
    for entry in found.files:
        path = paths.resolve(directory, entry.path)
        if not path.is_file():
            problems.append(f"{entry.path}: is missing")
        elif path.stat().st_size != entry.num_bytes:
            problems.append(
                f"{entry.path}: has {path.stat().st_size} bytes and should have {entry.num_bytes}"
            )
        else:
            located[entry] = path
    return located, problems


def _other_tensors(found: StateManifest, located: Mapping[FileEntry, Path]) -> Iterator[str]:
    """Ranks whose files have other tensors than were recorded."""
    held: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {rank: [] for rank in range(found.tp)}
    for entry, path in located.items():
        if match := _SHARD.fullmatch(entry.path):
            try:
                _, tensors = read_header(path)
            except CheckpointError as error:
                yield f"{entry.path}: {error}"
                continue
            held[int(match[1])] += [(name, TORCH_NAME[t.dtype], t.shape) for name, t in tensors.items()]
    for rank, tensors_of_rank in held.items():
        if state_manifest.signature(tensors_of_rank) != found.signatures[rank]:
            yield f"rank {rank}: its files do not have the tensors that {found.engine} wants"


def _strays(directory: Path, found: StateManifest) -> Iterator[str]:
    """Files that the engine would read as well."""
    known = {entry.path for entry in found.files}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in known:
            yield f"{path.name}: the manifest does not name it; move it away"
