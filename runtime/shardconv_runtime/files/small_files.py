"""The files of a converted directory other than weights: config, tokenizer, the model's own code."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointError, DamagedError
from .manifest import (
    MANIFEST_NAME,
    UNUSED_NAME,
    FileEntry,
    Manifest,
    is_reserved,
    path_problem,
    resolve,
    sha256_checksum,
)

# Converted directories of one model in one folder: for other numbers of ranks, and for its stages.
#
# model/
#   tp-8/  tp-16/                   converted directories
#   pp-2-tp-8/
#     stage-00000-of-00002/ ...     one for each stage

STAGE_DIRECTORY = re.compile(r"stage-([0-9]{5})-of-([0-9]{5})")
VARIANT = re.compile(r"(?:pp-([1-9][0-9]{0,4})-)?tp-([1-9][0-9]{0,4})")
"""A folder next to those for other numbers of ranks: ``tp-8``, or ``pp-2-tp-8`` with stages."""


def variant(path: Path, world_size: int) -> Path:
    """Return the converted directory for this number of ranks: itself, ``tp-N/`` or ``pp-P-tp-N/`` in it."""
    inner = path / variant_name(world_size)
    if (path / MANIFEST_NAME).is_file() or not path.is_dir():
        return path
    if (inner / MANIFEST_NAME).is_file():
        return inner
    staged = staged_variant(str(path), (entry.name for entry in path.iterdir()), world_size)
    return path if staged is None else path / staged


def variant_name(tp: int, stages: int = 1) -> str:
    """Return the name of the folder of a model for ``tp`` ranks, of each stage if there are several."""
    return f"pp-{stages}-tp-{tp}" if stages > 1 else f"tp-{tp}"


def staged_variant(where: str, folders: Iterable[str], world_size: int) -> str | None:
    """Return the folder with stages for this number of ranks in all; None if there is none."""
    variants = set()
    for match in filter(None, map(VARIANT.fullmatch, folders)):
        if match[1] is not None and int(match[1]) * int(match[2]) == world_size:
            variants.add(match[0])
    if len(variants) > 1:
        raise CheckpointError(
            f"{where} holds several models for {world_size} ranks, {', '.join(sorted(variants))}; name one "
            "of them behind a slash"
        )
    return variants.pop() if variants else None


def stage_directory(stage: int, count: int) -> str:
    """Return the name of a stage's directory, such as ``stage-00000-of-00002``."""
    return f"stage-{stage:05d}-of-{count:05d}"


def stages_in(path: Path) -> int:
    """Return the number of stages of the directories in a directory; 0 if it has none."""
    if (path / MANIFEST_NAME).is_file() or not path.is_dir():
        return 0
    matches = (STAGE_DIRECTORY.fullmatch(entry.name) for entry in path.iterdir())
    counts = {int(match[2]) for match in matches if match is not None}
    if len(counts) > 1:
        raise DamagedError(
            f"{path} has stages of several conversions: of {min(counts)} and of {max(counts)} stages"
        )
    return counts.pop() if counts else 0


def stage_directories(path: Path) -> list[Path]:
    """Return the directories of the stages in a directory, in order, even if missing; none without stages."""
    count = stages_in(path)
    return [path / stage_directory(stage, count) for stage in range(count)]


def of_stage_of(path: Path, rank: int, world_size: int) -> Path:
    """Return the directory of a rank's stage in a directory of stages; otherwise the path itself."""
    count = stages_in(path)
    return path / stage_directory(stage_of(rank, world_size, count), count) if count else path


def stage_of(rank: int, world_size: int, count: int) -> int:
    """Return the stage of a rank among all processes; the last one for those beyond."""
    return min(rank // max(1, world_size // count), count - 1)


EXAMPLE_NAME = "example-inputs.tensors"
"""A safetensors file: the example of a call that the user gave. A model that is solved again is called so."""

_DTYPE_KEYS = ("dtype", "torch_dtype")

SMALL_BYTES = 64 * 2**20
"""Files of at most this many bytes are copied along with the weights, tokenizers and licenses of any size."""

ALL_BYTES, MOST_FILES = 2**30, 1000
"""Bytes and number of all copied files; files beyond are left out, those in folders and the largest first."""

_ANY_SIZE = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "LICENSE*", EXAMPLE_NAME)
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.distcp", "*.ot"),
    *(
        "*.pdparams",
        "*.h5",
        "*.msgpack",
        "*.gguf",
        "*.ggml",
        "*.onnx",
        "*.onnx_data",
        "*.nemo",
        "*.tflite",
        "*.mlmodel",
    ),
    *("*.engine", "*.zip", "*.tar", "*.gz"),
)
"""Weights, optimizer states and archives, which are no part of a model without its weights, or are unsafe."""

_OTHER_MODELS = (MANIFEST_NAME, "trainer_state.json")
"""Files of folders that are converted directories, or checkpoints of the training of this model."""


@dataclass(frozen=True)
class ChosenFiles:
    """The files of a model's directory that are copied along with its weights, and those that are not."""

    copied: tuple[str, ...]
    """Paths in the directory, sorted."""
    left_out: Mapping[str, str]
    """Path -> why it is not copied. Hidden files and folders, and indices of weights, are not named."""


def choose_files(sizes: Mapping[str, int], *, code: bool) -> ChosenFiles:
    """Choose the files to copy along with the weights: everything small that is not weights.

    A list of names would lose files that tokenizers and processors of other models have.
    """
    other_models = {str(PurePosixPath(path).parent) for path in sizes if _name(path) in _OTHER_MODELS} - {"."}
    chosen: list[str] = []
    left_out: dict[str, str] = {}
    names: dict[str, str] = {}
    for path in sorted(sizes):
        folders = {str(folder) for folder in PurePosixPath(path).parents}
        if any(part.startswith(".") or part == "__pycache__" for part in path.split("/")):
            continue
        if path.endswith(".index.json") and _is_any(path.removesuffix(".index.json"), _WEIGHTS):
            continue
        if folders & other_models:
            left_out[path] = "of another checkpoint"
        elif _is_any(path, _WEIGHTS):
            left_out[path] = "weights or an archive"
        elif path.endswith(".py") and not code:
            left_out[path] = "code that the model does not run"
        elif path == "README.md":
            left_out[path] = "the model's card"
        elif path_problem(path) or is_reserved(path) or names.setdefault(path.casefold(), path) != path:
            left_out[path] = "a name that a converted directory cannot have"
        elif sizes[path] > SMALL_BYTES and not _is_any(path, _ANY_SIZE):
            left_out[path] = f"{sizes[path] / 2**20:.0f} MiB"
        else:
            chosen.append(path)
    total = 0
    copied: list[str] = []
    for path in sorted(chosen, key=lambda path: ("/" in path, sizes[path])):
        total += sizes[path]
        if (total > ALL_BYTES or len(copied) == MOST_FILES) and not _is_any(path, _ANY_SIZE):
            left_out[path] = f"beyond {ALL_BYTES // 2**20} MiB or {MOST_FILES} files"
        else:
            copied.append(path)
    return ChosenFiles(tuple(sorted(copied)), left_out)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _is_any(path: str, patterns: Collection[str]) -> bool:
    """Return whether the name of a file matches one of the patterns."""
    return any(fnmatchcase(_name(path), pattern) for pattern in patterns)


def sizes_in(directory: Path) -> dict[str, int]:
    """Return the sizes of the files in a directory and its folders, except hidden folders, by path."""
    sizes = {}
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(folder, name) for name in names):
            if file.is_file():
                sizes[file.relative_to(directory).as_posix()] = file.stat().st_size
    return sizes


def files_to_copy(directory: Path, *, code: bool) -> list[Path]:
    """Return the files to copy from a model's directory along with its weights; relative paths, sorted."""
    return sorted(map(Path, choose_files(sizes_in(directory), code=code).copied))


def told_left_out(left_out: Mapping[str, str]) -> list[str]:
    """Return a note about files that are not copied; none without any."""
    if not left_out:
        return []
    named = [f"{path} ({why})" for path, why in islice(left_out.items(), _NAMED)]
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    return [f"files that are not copied: {', '.join(named)}{more}"]


_NAMED = 6


CACHE_VARIABLE = "SHARDCONV_CACHE"
"""The environment variable with the directory of the cache; by default ``~/.cache/shardconv``."""


def cache_directory() -> Path:
    """Return the directory of shardconv's cache."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shardconv"


def entry_of(directory: Path, path: Path) -> FileEntry:
    """Return the entry in a manifest of a file other than a shard; ``path`` is relative to the directory."""
    file = directory / path
    return FileEntry(path.as_posix(), file.stat().st_size, sha256_checksum(file))


def small_files(manifest: Manifest) -> list[FileEntry]:
    """Return the files other than weights."""
    files = (entry for entry in manifest.files if entry.path != UNUSED_NAME)
    return [entry for entry in files if not entry.path.endswith(".safetensors")]


def copy_small_files(directory: Path, manifest: Manifest, target: Path) -> list[FileEntry]:
    """Copy the files other than weights.

    Returns:
        The entries of the copies, for a manifest.
    """
    return _copied(directory, small_files(manifest), target)


def copy_unused(directory: Path, manifest: Manifest, target: Path) -> list[FileEntry]:
    """Copy the file of unused tensors if there is one; see ``copy_small_files``."""
    return _copied(directory, [entry for entry in manifest.files if entry.path == UNUSED_NAME], target)


def _copied(directory: Path, entries: list[FileEntry], target: Path) -> list[FileEntry]:
    for entry in entries:
        copy = target / entry.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(resolve(directory, entry.path), copy)
        if sha256_checksum(copy) != entry.checksum:
            raise DamagedError(
                f"{directory}: {entry.path} was changed since it was written (its sha256 is not that "
                f"in {MANIFEST_NAME}); restore it, or convert the model again"
            )
    return entries


def plain_config(text: str) -> str:
    """Return the ``config.json`` of weights that were dequantized: without its quantization configs."""
    config = json.loads(text)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.pop("quantization_config", None)
    return json.dumps(config, indent=2) + "\n"


def config_with_quantization(text: str, settings: Mapping[str, Any], parts: Iterable[str]) -> str:
    """Return the ``config.json`` of weights that were quantized.

    Args:
        settings: the ``quantization_config``.
        parts: keys of the configs of a model's parts. They get the model's dtype if they have none, as when
            transformers loads and saves the model.
    """
    config = json.loads(text)
    said = {key: config[key] for key in _DTYPE_KEYS if config.get(key) is not None}
    for part in parts:
        if isinstance(config.get(part), dict) and not any(config[part].get(key) for key in _DTYPE_KEYS):
            config[part] |= said
    return json.dumps({**config, "quantization_config": settings}, indent=2) + "\n"


def config_in_dtype(text: str, dtype: str) -> str:
    """Return the ``config.json`` of weights that were cast; unchanged if it has no dtype."""
    config = json.loads(text)
    said = [config.get(key) for key in _DTYPE_KEYS if config.get(key) is not None]
    if not said or set(said) == {dtype}:
        return text
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _DTYPE_KEYS:
            if part.get(key) in said:
                part[key] = dtype
    return json.dumps(config, indent=2) + "\n"
