"""Directories that are something else than a transformers model: named, with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..format.manifest import MANIFEST_NAME, PLAN_NAME
from ..parallel.model_config import CONFIG
from .weight_files import LAYOUTS, index_of

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
"""Files -> what they are."""


def refuse_other_kinds(directory: Path, *, need_weights: bool) -> None:
    """Refuse what is no transformers model with weights of its own.

    Args:
        directory: local, with at least the small files.
        need_weights: it should have weights too.

    Raises:
        SourceError: says what it is, and what to do.
    """
    has_config = (directory / CONFIG).is_file()
    if need_weights and all((directory / name).is_file() for name in (MANIFEST_NAME, PLAN_NAME)):
        raise SourceError(
            f"{directory} is a converted directory; `shardconv reshard` converts it for another number of "
            "ranks, `shardconv merge` back to an ordinary checkpoint"
        )
    if (directory / "adapter_config.json").is_file() and (need_weights or not has_config):
        base = _json(directory / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise SourceError(
            f"{directory} holds a PEFT adapter of {base}, which would be left out; merge it first: "
            "PeftModel.from_pretrained(base, ADAPTER).merge_and_unload().save_pretrained(DIR); convert DIR"
        )
    if not has_config:
        _refuse_without_config(directory)
    _refuse_pointer(directory / CONFIG)
    if need_weights:
        known = {name for names in LAYOUTS for name in names}
        for file in sorted(directory.iterdir()):
            if file.name in known or file.suffix in (".safetensors", ".bin"):
                _refuse_pointer(file)
        if (index := index_of(directory)) is not None:
            for name in index.files:  # which may be in folders
                _refuse_pointer(directory / name)
        if not any((directory / name).is_file() for name in known):
            _refuse_other_weights(directory)


def remarks(directory: Path) -> list[str]:
    """Parts of a repository beside the model, which are not converted."""
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


def _refuse_without_config(directory: Path) -> None:
    if (directory / "model_index.json").is_file():
        parts = sorted(path.parent.name for path in directory.glob("*/config.json"))
        named = f", such as {directory / parts[0]}" if parts else ""
        raise SourceError(
            f"{directory} is a diffusers pipeline; name one of its parts that is a transformers model{named}"
        )
    _refuse_other_weights(directory)


def _refuse_other_weights(directory: Path) -> None:
    for pattern, kind in _OTHER_WEIGHTS.items():
        if found := next(directory.glob(pattern), None):
            raise SourceError(
                f"{directory} holds {kind} ({found.name}), which shardconv does not read; name the model in "
                "transformers' format, or load it with from_pretrained and save it with save_pretrained"
            )


def _refuse_pointer(file: Path) -> None:
    if not file.is_file() or file.stat().st_size > 1024:
        return
    if file.read_bytes().startswith(_LFS):
        raise SourceError(
            f"{file} is a pointer of Git LFS, not the file itself; run `git lfs pull` there, or `hf download`"
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
