"""The weight files of a model: checks that they are complete, and their tensors as lazy tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import CheckpointError, DamagedModelError, SourceError, UnsupportedError
from ..format.header import TORCH_NAME, StoredTensor, data_start, dtype_name
from ..storage.file_access import WeightFile, header, is_local, name_in, num_bytes
from .lazy_tensor import LazyTensor, stored
from .model_directory import Index
from .pickled_files import load_pickled, pickled_tensors


def validate(files: Iterable[WeightFile]) -> None:
    """Check that each safetensors file is complete, by its header and its size."""
    for file in files:
        if file.suffix == ".safetensors":
            header_of(file)


def header_of(file: WeightFile) -> tuple[int, dict[str, StoredTensor]]:
    """Return the byte where the tensors of a safetensors file begin, and the tensors in the order of their
    bytes.
    """
    tensors = _header(file)[1]
    return data_start(num_bytes(file), tensors), tensors


def metadata_of(file: WeightFile) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    return _header(file)[0]


def _header(file: WeightFile) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    try:
        return header(file)
    except CheckpointError as error:
        reason = str(error).removesuffix("; copy or convert it again")
        raise DamagedModelError(f"{reason}; download or copy it again") from error


def stored_dtype(file: WeightFile) -> str | None:
    """Return the dtype that ``from_pretrained`` takes from a weight file if no config has one.

    The first floating-point tensor determines it, in the order in which the libraries list tensors:
    safetensors sorts by name, not in the order of the bytes. Formats of 8 bits and less are not dtypes of a
    model.

    Returns:
        The name of the dtype, for example ``"bfloat16"``; None if no tensor is floating-point.
    """
    if is_local(file) and file.suffix != ".safetensors":
        dtypes = [dtype_name(tensor.dtype) for tensor in load_pickled(file, "meta").values()]
    else:
        _, tensors = header_of(file)
        dtypes = [TORCH_NAME.get(tensor.dtype, "") for _, tensor in sorted(tensors.items())]
    return next((name for name in dtypes if name in ("float64", "float32", "bfloat16", "float16")), None)


def lazy_tensors(files: Iterable[WeightFile], index: Index | None = None) -> dict[str, LazyTensor]:
    """Return the tensors of safetensors or PyTorch files by their names.

    Only the pickle of a PyTorch file in the zip format is read. A file of the older format is read completely
    when the first of its tensors is needed.
    """
    by_name: dict[str, dict[str, LazyTensor]] = {}
    for file in files:
        name_in_index = str(file) if index is None else name_in(index.path.parent, file)
        if is_local(file) and file.suffix != ".safetensors":
            tensors = dict(pickled_tensors(file))
        else:
            start, headers = header_of(file)
            tensors = {}
            for name, entry in headers.items():
                if entry.dtype not in TORCH_NAME:
                    raise UnsupportedError(
                        f"{file}: {name} has the dtype {entry.dtype}, which shardconv does not read; save "
                        "it in another one, or remove it if the model does not use it"
                    )
                tensors[name] = stored(file, start, entry)
        for name, tensor in tensors.items():
            by_name.setdefault(name, {})[name_in_index] = tensor
    return {name: _chosen(name, candidates, index) for name, candidates in by_name.items()}


def _chosen(name: str, held: Mapping[str, LazyTensor], index: Index | None) -> LazyTensor:
    """Return the tensor among those that files hold under one name."""
    named = "" if index is None else index.weight_map.get(name, "")
    if named in held:
        return held[named]
    if len(held) > 1:
        first, second = list(held)[:2]
        where = "an index of the files" if index is None else index.path
        raise SourceError(f"both {first} and {second} hold {name}; name one of them in {where}")
    return next(iter(held.values()))


def header_metadata(files: Iterable[WeightFile]) -> dict[str, str]:
    """Return the metadata in the headers of the safetensors files among these, merged over all files."""
    metadata: dict[str, str] = {}
    for file in files:
        if not is_local(file) or file.suffix == ".safetensors":
            metadata.update(metadata_of(file))
    return metadata
