"""The weight files of a model directory, and checks that they are complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, SourceError
from ..format.header import TORCH_NAME, StoredTensor, data_start, read_header
from ..hub.remote_files import RemoteFile, remote_header
from .pickled import load_pickled

WeightFile = Path | RemoteFile

LAYOUTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""(single file, index of several files), in the order in which transformers looks for them."""


@dataclass(frozen=True, slots=True)
class Index:
    """An index of several weight files."""

    path: Path
    weight_map: Mapping[str, str]
    """Tensor -> the file that holds it, relative to the directory."""
    metadata: Mapping[str, Any]

    @property
    def files(self) -> tuple[str, ...]:
        """Their names, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The files that hold the weights.

    Raises:
        SourceError: the directory has none, or an index names a file that is missing.
    """
    for single, index in LAYOUTS:
        if (directory / single).is_file():
            return (directory / single,)
        if (directory / index).is_file():
            files = tuple(directory / name for name in _read_index(directory / index).files)
            for file in files:
                if not file.is_file():
                    raise SourceError(f"{file}, named by {index}, is missing; download it")
            return files
    if (directory / ".metadata").is_file():
        raise SourceError(
            f"{directory} holds a checkpoint of torch.distributed.checkpoint (.distcp), with the names of "
            "the program that wrote it; let that write safetensors with transformers' names, see "
            "docs/integrations.md"
        )
    names = " or ".join(single for single, _ in LAYOUTS)
    raise SourceError(f"no weights in {directory}: expected {names} (or their index); download them")


def index_of(directory: Path) -> Index | None:
    """The index of a model's weight files; None if it has one file, or none.

    Raises:
        SourceError: it cannot be read.
    """
    for single, index in LAYOUTS:
        if (directory / single).is_file():
            return None
        if (directory / index).is_file():
            return _read_index(directory / index)
    return None


def wanted_weights(directory: Path) -> tuple[str, ...]:
    """The weight files to download for a repository whose indices are in ``directory``."""
    for single, index in LAYOUTS:
        if (directory / index).is_file():
            return (single, *_read_index(directory / index).files)
    return tuple(single for single, _ in LAYOUTS)


def validate(files: Iterable[WeightFile]) -> None:
    """Check that each safetensors file is complete, by its header and its size.

    Raises:
        SourceError: a file is truncated or corrupt.
    """
    for file in files:
        if file.suffix == ".safetensors":
            header_of(file)


def header_of(file: WeightFile) -> tuple[int, dict[str, StoredTensor]]:
    """The byte where the tensors of a safetensors file begin, and the tensors in the order of their bytes.

    Raises:
        SourceError: the file is not a complete safetensors file, or cannot be read.
    """
    tensors = _header(file)[1]
    return data_start(num_bytes(file), tensors), tensors


def metadata_of(file: WeightFile) -> dict[str, str]:
    """The metadata in the header of a safetensors file.

    Raises:
        SourceError: see ``header_of``.
    """
    return _header(file)[0]


def _header(file: WeightFile) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    try:
        return remote_header(file) if isinstance(file, RemoteFile) else read_header(file)
    except CheckpointError as error:
        reason = str(error).removesuffix("; copy or convert it again")
        raise SourceError(f"{reason}; download or copy it again") from error


def num_bytes(file: WeightFile) -> int:
    """Size of a file, local or on the Hub."""
    return file.num_bytes if isinstance(file, RemoteFile) else file.stat().st_size


def stored_dtype(file: WeightFile) -> str | None:
    """The dtype that ``from_pretrained`` takes from a weight file where no config says one.

    It is that of the first floating-point tensor, in the order in which the libraries list them: safetensors
    by name, which is not the order of the bytes. Formats of 8 bits and less are no dtypes of a model.

    Returns:
        Its name, such as ``"bfloat16"``; None if there is none.
    """
    if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
        _, tensors = header_of(file)
        found = [TORCH_NAME.get(tensor.dtype, "") for _, tensor in sorted(tensors.items())]
    else:
        found = [str(tensor.dtype).removeprefix("torch.") for tensor in load_pickled(file, "meta").values()]
    return next((name for name in found if name in ("float64", "float32", "bfloat16", "float16")), None)


def _read_index(index: Path) -> Index:
    """An index; each of its names must be a file in the directory, or in a folder of it."""
    try:
        read = json.loads(index.read_text(encoding="utf-8"))
        found = Index(index, dict(read["weight_map"].items()), dict(read.get("metadata") or {}))
        names = found.files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} is not an index of weights; download or copy it again") from error
    for name in names:
        parts = name.split("/") if isinstance(name, str) and "\\" not in name else [""]
        if any(part in ("", ".", "..") for part in parts) or Path(name).is_absolute():
            raise SourceError(f"{index} names {name!r}, which is not a file of its directory")
    if not names:
        raise SourceError(f"{index} names no files; download or copy it again")
    return found
