"""Manifests as JSON, with their own checksum."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from . import plan_json
from .json_writing import dump_document, write_text
from .manifest import FORMAT, MANIFEST_NAME, Manifest, loads


def dumps(manifest: Manifest) -> str:
    """The manifest as deterministic JSON, with its own checksum.

    Raises:
        CheckpointError: ``loads`` would refuse it.
    """
    plain = dump_document(replace(manifest, sha256=""), FORMAT)
    text = dump_document(replace(manifest, sha256=plan_json.sha256(plain)), FORMAT)
    loads(text)
    return text


def is_intact(text: str) -> bool:
    """Whether a manifest is byte for byte as ``dumps`` wrote it.

    Raises:
        CheckpointError: it is malformed.
    """
    return dumps(loads(text)) == text


def write(manifest: Manifest, directory: str | os.PathLike[str]) -> None:
    """Write the manifest of a directory atomically; the last step of a conversion."""
    write_text(Path(directory) / MANIFEST_NAME, dumps(manifest))
