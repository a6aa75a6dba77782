"""The tensors of weight files as lazy tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import SourceError
from ..format.header import TORCH_NAME
from ..hub.remote_files import RemoteFile
from ..tensors.lazy_tensor import LazyTensor, stored
from .pickled import pickled_tensors
from .weight_files import WeightFile, header_of, metadata_of


def lazy_tensors(files: Iterable[WeightFile]) -> dict[str, LazyTensor]:
    """The tensors of safetensors or PyTorch files by their names.

    Only the pickle of a PyTorch file in the zip format is read. A file of the older format is read completely
    when the first of its tensors is needed.

    Raises:
        SourceError: a file cannot be read, or two files hold the same tensor.
    """
    found: dict[str, LazyTensor] = {}
    for file in files:
        if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
            tensors = _safetensors(file)
        else:
            tensors = iter(pickled_tensors(file))
        for name, tensor in tensors:
            if name in found:
                raise SourceError(f"{file} holds {name}, and so does another file; remove one of them")
            found[name] = tensor
    return found


def _safetensors(file: WeightFile) -> Iterator[tuple[str, LazyTensor]]:
    start, tensors = header_of(file)
    for name, tensor in tensors.items():
        if tensor.dtype not in TORCH_NAME:
            raise SourceError(f"{file}: {name} is of dtype {tensor.dtype}, which torch does not have")
        yield name, stored(file, start, tensor)


def header_metadata(files: Iterable[WeightFile]) -> dict[str, str]:
    """The metadata in the headers of the safetensors files among these, those of all files together.

    Raises:
        SourceError: a file cannot be read.
    """
    found: dict[str, str] = {}
    for file in files:
        if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
            found.update(metadata_of(file))
    return found
