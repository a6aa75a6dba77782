"""The files of an engine's ranks: their manifest, and the check that they are intact and fit the engine."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardconv_runtime.errors import CheckpointError, DamagedError
from shardconv_runtime.files import manifest as paths
from shardconv_runtime.files.checksums import checksums
from shardconv_runtime.files.manifest import MANIFEST_NAME, FileEntry, Source
from shardconv_runtime.format.header import TORCH_NAME, read_header
from shardconv_runtime.format.typed_json import (
    MalformedError,
    decode,
    dump_document,
    load_document,
    read_text,
)

from ..converted.verify import damaged
from ..reporting.progress import Progress, Silent
from .vllm_calls import installed_version

# The manifest of a directory with an engine's files: their names, their checksums, and the engine.
#
#     DIR/manifest.json
#     DIR/model-rank-0-part-0.safetensors ...
#     DIR/config.json ...
#
# It is written last, so that a directory that has one is complete.

FORMAT = "shardconv.engine_state"
VERSION = 2

Signature = Iterable[tuple[str, str, tuple[int, ...]]]
"""Name, dtype (torch's name) and local shape of tensors."""


@dataclass(frozen=True, slots=True)
class StateManifest:
    """All files of a directory with an engine's files."""

    tp: int
    engine: str
    engine_version: str
    """Version of the engine whose loader was recorded."""
    platform: str
    """The platform for which the engine chose its parameters, such as ``"cpu"``."""
    dtype: str
    """Default dtype of the parameters, to be given to the engine."""
    signatures: tuple[str, ...]
    """``signature`` of the tensors of each rank."""
    source: Source
    tools: Mapping[str, str]
    """Versions of the programs that wrote it, by name."""
    files: tuple[FileEntry, ...]
    """The files, sorted by path; the files of a rank have its number in their names."""
    sha256: str = ""
    """sha256 (hex) of this document without the field."""
    version: int = field(default=VERSION, kw_only=True)


def signature(tensors: Signature) -> str:
    """Return the sha256 (hex) of the names, dtypes and shapes of tensors, in any order."""
    text = json.dumps(sorted([name, dtype, list(shape)] for name, dtype, shape in tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def dumps(manifest: StateManifest) -> str:
    """Return the manifest as deterministic JSON, with its own checksum."""
    plain = dump_document(replace(manifest, sha256=""), FORMAT)
    return dump_document(replace(manifest, sha256=hashlib.sha256(plain.encode()).hexdigest()), FORMAT)


def is_engine_state(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory has a manifest of this kind."""
    try:
        document = decode(read_text(Path(directory) / MANIFEST_NAME))
    except MalformedError:
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def read(directory: str | os.PathLike[str]) -> StateManifest:
    """Read the manifest."""
    try:
        text = read_text(Path(directory) / MANIFEST_NAME)
        state = load_document(StateManifest, text, FORMAT, VERSION)
    except MalformedError as error:
        raise DamagedError(f"{os.fspath(directory)}: {MANIFEST_NAME}: {error}; export it again") from error
    if dumps(state) != text:
        raise DamagedError(
            f"{os.fspath(directory)}: {MANIFEST_NAME} was changed since it was written; export it again"
        )
    return state


_SHARD = re.compile(r"model-rank-([0-9]+)-part-[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class VerifiedState:
    """The checks that a directory has passed."""

    num_files: int
    num_bytes: int
    remarks: tuple[str, ...]


def verify_state(out: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifiedState:
    """Check sizes, checksums, the signature of each rank's tensors, and the engine's version."""
    directory = Path(out)
    state = read(directory)
    located: dict[FileEntry, Path] = {}
    problems = []
    for entry in state.files:
        path = paths.resolve(directory, entry.path)
        if not path.is_file():
            problems.append(f"{entry.path}: is missing")
        elif path.stat().st_size != entry.num_bytes:
            problems.append(
                f"{entry.path}: has {path.stat().st_size} bytes and should have {entry.num_bytes}"
            )
        else:
            located[entry] = path
    with (progress or Silent()).bar("checksums", sum(entry.num_bytes for entry in located)) as advance:
        for entry, checksum in checksums(located, advance).items():
            if checksum != entry.checksum:
                problem = f"is damaged: its checksum is {checksum} and should be {entry.checksum}"
                problems.append(f"{entry.path}: {problem}")
    if not problems:
        problems += _other_tensors(state, located)
    # The engine would read other files of weights as well.
    named = {entry.path for entry in state.files}
    strays = [path.name for path in sorted(directory.glob("*.safetensors")) if path.name not in named]
    problems += [f"{name}: the manifest does not name it; move it away" for name in strays]
    installed = installed_version()
    if installed not in (None, state.engine_version):
        problems.append(
            f"written for {state.engine} {state.engine_version}, and {installed} is installed: export again"
        )
    if problems:
        raise damaged(str(directory), problems)
    remarks = [] if installed else [f"{state.engine} is not installed: its version was not compared"]
    return VerifiedState(len(state.files) + 1, sum(entry.num_bytes for entry in state.files), tuple(remarks))


def _other_tensors(found: StateManifest, located: Mapping[FileEntry, Path]) -> Iterator[str]:
    """Yield the ranks whose files have other tensors than were recorded."""
    by_rank: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {rank: [] for rank in range(found.tp)}
    for entry, path in located.items():
        if match := _SHARD.fullmatch(entry.path):
            try:
                _, tensors = read_header(path)
            except CheckpointError as error:
                yield f"{entry.path}: {error}"
                continue
            by_rank[int(match[1])] += [(name, TORCH_NAME[t.dtype], t.shape) for name, t in tensors.items()]
    for rank, tensors_of_rank in by_rank.items():
        if signature(tensors_of_rank) != found.signatures[rank]:
            yield f"rank {rank}: its files do not have the tensors that {found.engine} wants"
