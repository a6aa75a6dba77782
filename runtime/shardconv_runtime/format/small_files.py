"""The files of a converted directory other than weights: config, tokenizer, the model's own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..errors import CheckpointError
from .manifest import MANIFEST_NAME, UNUSED_NAME, FileEntry, Manifest, resolve, sha256_checksum

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
)
"""Files of a model's directory that are copied along with its weights, as glob patterns."""

_DTYPE_KEYS = ("dtype", "torch_dtype")

COPIED_CODE = ("*.py",)
"""Copied too where the model runs its repository's code."""


def files_to_copy(directory: Path, *, code: bool) -> list[Path]:
    """The files to copy from a model's directory along with its weights; relative paths, sorted.

    Args:
        directory: of an ordinary model.
        code: it runs its repository's code.
    """
    patterns = COPIED + (COPIED_CODE if code else ())
    found = {file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}
    return sorted(file.relative_to(directory) for file in found)


def entry_of(directory: Path, path: Path) -> FileEntry:
    """The entry in a manifest of a file other than a shard; ``path`` is relative to the directory."""
    file = directory / path
    return FileEntry(path.as_posix(), file.stat().st_size, sha256_checksum(file))


def small_files(manifest: Manifest) -> list[FileEntry]:
    """The files other than weights."""
    files = (entry for entry in manifest.files if entry.path != UNUSED_NAME)
    return [entry for entry in files if not entry.path.endswith(".safetensors")]


def copy_small_files(directory: Path, manifest: Manifest, target: Path) -> list[FileEntry]:
    """Copy the files other than weights.

    Args:
        directory: a converted directory.
        manifest: of it.
        target: directory to copy to.

    Returns:
        The entries of the copies, for a manifest.

    Raises:
        CheckpointError: a file was changed since it was written.
        OSError: it cannot be read or written.
    """
    return _copied(directory, small_files(manifest), target)


def copy_unused(directory: Path, manifest: Manifest, target: Path) -> list[FileEntry]:
    """Copy what the model does not use, where there is such a file; see ``copy_small_files``."""
    return _copied(directory, [entry for entry in manifest.files if entry.path == UNUSED_NAME], target)


def _copied(directory: Path, entries: list[FileEntry], target: Path) -> list[FileEntry]:
    for entry in entries:
        copy = target / entry.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(resolve(directory, entry.path), copy)
        if sha256_checksum(copy) != entry.checksum:
            raise CheckpointError(
                f"{directory}: {entry.path} was changed since it was written (its sha256 is not that "
                f"in {MANIFEST_NAME}); restore it, or convert the model again"
            )
    return entries


def plain_config(text: str) -> str:
    """The ``config.json`` of weights that were dequantized: without its quantization configs."""
    config = json.loads(text)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.pop("quantization_config", None)
    return json.dumps(config, indent=2) + "\n"


def config_in_dtype(text: str, dtype: str) -> str:
    """The ``config.json`` of weights that were cast; unchanged where it says nothing of a dtype."""
    config = json.loads(text)
    said = [config.get(key) for key in _DTYPE_KEYS if config.get(key) is not None]
    if not said or set(said) == {dtype}:
        return text
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _DTYPE_KEYS:
            if part.get(key) in said:
                part[key] = dtype
    return json.dumps(config, indent=2) + "\n"
