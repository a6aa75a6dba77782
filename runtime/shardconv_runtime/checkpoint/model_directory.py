"""The directory of a model: its place, its kind, its ``config.json`` and its index of weights.

Nothing here imports torch, so that a wrong path or a broken file is an error at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DamagedModelError, MissingModelError, SourceError, UnsupportedError, brief
from ..files.manifest import MANIFEST_NAME, PLAN_NAME
from ..files.model_config import CONFIG, unsafe_entry
from ..hub_options import is_url, require_repo_id

LAYOUTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""(single file, index of several files), in the order in which transformers looks for them."""

_LFS = b"version https://git-lfs"
"""How a pointer file of Git LFS begins."""

_OTHER_WEIGHTS = {
    "*.gguf": "GGUF files",
    "*.h5": "weights of TensorFlow",
    "*.msgpack": "weights of Flax",
    "consolidated*": "weights in the layout of their authors' own code",
    "*.nemo": "a NeMo archive",
    "*.onnx": "an ONNX model",
}
"""Files -> their kinds, for messages."""


def model_directory(model: str | os.PathLike[str], *, need_weights: bool) -> Path | None:
    """Return the local directory of a model that can be converted; None if ``model`` is the id of a Hub
    repository, or a URL.
    """
    text = os.fspath(model)
    if is_url(text):
        return None
    path = Path(text).expanduser()
    if path.is_dir():
        refuse_other_kinds(path, need_weights=need_weights)
        read_config_json(path)
        if need_weights:
            weight_files(path)
        return path
    if path.exists():
        raise MissingModelError(
            f"{text} is a file; give the directory that holds config.json and the weights"
        )
    if path.is_symlink():
        raise MissingModelError(
            f"{text} is a link to {os.readlink(path)}, which does not exist; mend the link"
        )
    require_repo_id(text)
    return None


def read_config_json(directory: Path) -> dict[str, Any]:
    """Return ``config.json`` as it was written."""
    path = directory / CONFIG
    if not path.is_file():
        raise MissingModelError(f"no config.json in {directory}; name the directory of a transformers model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedModelError(f"{path} cannot be read as JSON: {brief(error)}; restore the file") from error
    if not isinstance(raw, dict):
        raise DamagedModelError(f"{path} does not hold a JSON object; restore the file")
    if problem := unsafe_entry(raw):
        raise SourceError(f"{path}: {problem}; remove it")
    return raw


@dataclass(frozen=True, slots=True)
class Index:
    """An index of several weight files."""

    path: Path
    weight_map: Mapping[str, str]
    """Tensor -> the file that holds it, relative to the directory."""
    metadata: Mapping[str, Any]

    @property
    def files(self) -> tuple[str, ...]:
        """Return their names, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the files that hold the weights."""
    for single, index in LAYOUTS:
        if (directory / single).is_file():
            return (directory / single,)
        if (directory / index).is_file():
            files = tuple(directory / name for name in _read_index(directory / index).files)
            for file in files:
                if not file.is_file():
                    raise DamagedModelError(f"{file}, named by {index}, is missing; download it")
            return files
    if (directory / ".metadata").is_file():
        raise SourceError(
            f"{directory} holds a checkpoint of torch.distributed.checkpoint (.distcp), with the names of "
            "the program that wrote it; let that write safetensors with transformers' names, see "
            "docs/integrations.md"
        )
    names = " or ".join(single for single, _ in LAYOUTS)
    raise MissingModelError(f"no weights in {directory}: expected {names} (or their index); download them")


def index_of(directory: Path) -> Index | None:
    """Return the index of a model's weight files; None if it has one file, or none."""
    for single, index in LAYOUTS:
        if (directory / single).is_file():
            return None
        if (directory / index).is_file():
            return _read_index(directory / index)
    return None


def wanted_weights(directory: Path) -> tuple[str, ...]:
    """Return the weight files to download for a repository whose indices are in ``directory``."""
    for single, index in LAYOUTS:
        if (directory / index).is_file():
            return (single, *_read_index(directory / index).files)
    return tuple(single for single, _ in LAYOUTS)


def _read_index(index: Path) -> Index:
    """Return an index; each of its names must be a file in the directory, or in a folder of it."""
    try:
        read = json.loads(index.read_text(encoding="utf-8"))
        weight_index = Index(index, dict(read["weight_map"].items()), dict(read.get("metadata") or {}))
        names = weight_index.files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedModelError(f"{index} is not an index of weights; download or copy it again") from error
    for name in names:
        parts = name.split("/") if isinstance(name, str) and "\\" not in name else [""]
        if any(part in ("", ".", "..") for part in parts) or Path(name).is_absolute():
            raise DamagedModelError(f"{index} names {name!r}, which is not a file of its directory")
    if not names:
        raise DamagedModelError(f"{index} names no files; download or copy it again")
    return weight_index


def refuse_other_kinds(directory: Path, *, need_weights: bool) -> None:
    """Refuse a directory that is not a transformers model with its own weights.

    Args:
        directory: local, with at least the small files.
    """
    has_config = (directory / CONFIG).is_file()
    if need_weights and all((directory / name).is_file() for name in (MANIFEST_NAME, PLAN_NAME)):
        raise SourceError(
            f"{directory} is a converted directory; `shardconv reshard` converts it for another number of "
            "ranks, `shardconv export --format hf` back to an ordinary checkpoint"
        )
    if (directory / "adapter_config.json").is_file() and (need_weights or not has_config):
        base = _json(directory / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise SourceError(
            f"{directory} holds a PEFT adapter of {base}, which would be left out; merge it first: "
            "PeftModel.from_pretrained(base, ADAPTER).merge_and_unload().save_pretrained(DIR); convert DIR"
        )
    if not has_config:
        if (directory / "model_index.json").is_file():
            parts = sorted(path.parent.name for path in directory.glob("*/config.json"))
            named = f", such as {directory / parts[0]}" if parts else ""
            raise UnsupportedError(
                f"{directory} is a diffusers pipeline; name one of its parts that is a transformers "
                f"model{named}"
            )
        _refuse_other_weights(directory)
    _refuse_pointer(directory / CONFIG)
    if need_weights:
        layout_names = {name for names in LAYOUTS for name in names}
        for file in sorted(directory.iterdir()):
            if file.name in layout_names or file.suffix in (".safetensors", ".bin"):
                _refuse_pointer(file)
        if (index := index_of(directory)) is not None:
            for name in index.files:  # which may be in folders
                _refuse_pointer(directory / name)
        if not any((directory / name).is_file() for name in layout_names):
            _refuse_other_weights(directory)


def remarks(directory: Path) -> list[str]:
    """Return remarks about parts of a repository that are not converted."""
    path = directory / "modules.json"  # of sentence-transformers
    if not path.is_file():
        return []
    listed = _json(path)
    rest = [str(part.get("type", "")).rpartition(".")[2] for part in listed if isinstance(part, dict)][1:]
    if not rest:
        return []
    return [
        f"the repository is one of sentence-transformers; the model was converted, and its other modules "
        f"({', '.join(rest)}) were not: apply them to the model's output"
    ]


def _refuse_other_weights(directory: Path) -> None:
    for pattern, kind in _OTHER_WEIGHTS.items():
        if other_file := next(directory.glob(pattern), None):
            raise UnsupportedError(
                f"{directory} holds {kind} ({other_file.name}), which shardconv does not read; name the "
                "model in transformers' format, or load it with from_pretrained and save it with "
                "save_pretrained"
            )


def _refuse_pointer(file: Path) -> None:
    if not file.is_file() or file.stat().st_size > 1024:
        return
    if file.read_bytes().startswith(_LFS):
        raise DamagedModelError(
            f"{file} is a pointer of Git LFS, not the file itself; run `git lfs pull` there, or `hf download`"
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
