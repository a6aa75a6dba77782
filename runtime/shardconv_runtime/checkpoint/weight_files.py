"""What the weight files of a model hold, and checks that they are complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError, SourceError
from ..format.header import TORCH_NAME, StoredTensor, data_start, read_header
from ..hub.remote_files import RemoteFile, remote_header
from .pickled import load_pickled

WeightFile = Path | RemoteFile


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
