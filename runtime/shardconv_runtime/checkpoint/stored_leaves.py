"""The tensors of weight files as lazy tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..errors import SourceError
from ..format.header import TORCH_NAME
from ..hub.remote_files import RemoteFile
from ..tensors.lazy_tensor import LazyTensor, stored
from .pickled import pickled_tensors
from .weight_files import Index, WeightFile, header_of, metadata_of


def lazy_tensors(files: Iterable[WeightFile], index: Index | None = None) -> dict[str, LazyTensor]:
    """The tensors of safetensors or PyTorch files by their names.

    Only the pickle of a PyTorch file in the zip format is read. A file of the older format is read completely
    when the first of its tensors is needed.

    Args:
        files: that hold the tensors.
        index: says which of several files that hold a tensor is the one to take: a repository may add a file
            with some better tensors, and change its index alone.

    Raises:
        SourceError: a file cannot be read, or several hold a tensor, and no index says which one counts.
    """
    found: dict[str, dict[str, LazyTensor]] = {}
    for file in files:
        if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
            tensors = _safetensors(file)
        else:
            tensors = iter(pickled_tensors(file))
        for tensor_name, tensor in tensors:
            found.setdefault(tensor_name, {})[_name(file, index)] = tensor
    return {name: _chosen(name, held, index) for name, held in found.items()}


def _name(file: WeightFile, index: Index | None) -> str:
    """The name by which an index may know a file."""
    if isinstance(file, RemoteFile):
        return file.name
    return (file if index is None else file.relative_to(index.path.parent)).as_posix()


def _chosen(name: str, held: Mapping[str, LazyTensor], index: Index | None) -> LazyTensor:
    """The tensor among those that files hold under one name."""
    named = "" if index is None else index.weight_map.get(name, "")
    if named in held:
        return held[named]
    if len(held) > 1:
        first, second = list(held)[:2]
        where = "an index of the files" if index is None else index.path
        raise SourceError(f"{first} holds {name}, and so does {second}; say in {where} which of them counts")
    return next(iter(held.values()))


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
