"""The manifest of a directory with an engine's files: what they are, for which engine, and their checksums.

    DIR/manifest.json
    DIR/model-rank-0-part-0.safetensors ...
    DIR/config.json ...

It is written last, so that a directory that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.format.manifest import MANIFEST_NAME, FileEntry, Source
from shardconv_runtime.format.typed_json import (
    MalformedError,
    decode,
    dump_document,
    load_document,
    read_text,
)

FORMAT = "shardconv.engine_state"
VERSION = 1

Signature = Iterable[tuple[str, str, tuple[int, ...]]]
"""Name, dtype (torch's name) and local shape of tensors."""


@dataclass(frozen=True, slots=True)
class StateManifest:
    """All files of such a directory."""

    tp: int
    engine: str
    engine_version: str
    """Whose loader was recorded."""
    platform: str
    """For which the engine chose its parameters, as ``"cpu"``."""
    dtype: str
    """Default dtype of the parameters, to be given to the engine."""
    signatures: tuple[str, ...]
    """For each rank, ``signature`` of its tensors."""
    source: Source
    tools: Mapping[str, str]
    """Versions of the programs that wrote it, by name."""
    files: tuple[FileEntry, ...]
    """Sorted by path; a rank's files have its number in their names."""
    sha256: str = ""
    """Of this document without the field, in hex."""
    version: int = field(default=VERSION, kw_only=True)


def signature(tensors: Signature) -> str:
    """sha256 (hex) of the names, dtypes and shapes of tensors, in any order."""
    text = json.dumps(sorted([name, dtype, list(shape)] for name, dtype, shape in tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def dumps(manifest: StateManifest) -> str:
    """The manifest as deterministic JSON, with its own checksum."""
    plain = dump_document(replace(manifest, sha256=""), FORMAT)
    return dump_document(replace(manifest, sha256=hashlib.sha256(plain.encode()).hexdigest()), FORMAT)


def is_engine_state(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has a manifest of this kind."""
    try:
        found = decode(read_text(Path(directory) / MANIFEST_NAME))
    except MalformedError:
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def read(directory: str | os.PathLike[str]) -> StateManifest:
    """Read the manifest.

    Raises:
        CheckpointError: it is missing, malformed, or was changed.
    """
    try:
        text = read_text(Path(directory) / MANIFEST_NAME)
        found = load_document(StateManifest, text, FORMAT, VERSION)
    except MalformedError as error:
        raise CheckpointError(f"{os.fspath(directory)}: {MANIFEST_NAME}: {error}; export it again") from error
    if dumps(found) != text:
        raise CheckpointError(
            f"{os.fspath(directory)}: {MANIFEST_NAME} was changed since it was written; export it again"
        )
    return found
