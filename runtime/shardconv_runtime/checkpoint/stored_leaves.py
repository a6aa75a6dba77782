"""The weight files of a model: checks that they are complete, and their tensors as lazy tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import CheckpointError, SourceError
from ..format.header import TORCH_NAME, StoredTensor, data_start, read_header
from ..hub.remote_files import RemoteFile, remote_header
from ..tensors.lazy_tensor import LazyTensor, stored
from .model_directory import Index
from .pickled import load_pickled, pickled_tensors

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
    """Return the byte where the tensors of a safetensors file begin, and the tensors in the order of their
    bytes.

    Raises:
        SourceError: the file is not a complete safetensors file, or cannot be read.
    """
    tensors = _header(file)[1]
    return data_start(num_bytes(file), tensors), tensors


def metadata_of(file: WeightFile) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file.

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
    """Return the size of a file, local or on the Hub."""
    return file.num_bytes if isinstance(file, RemoteFile) else file.stat().st_size


def stored_dtype(file: WeightFile) -> str | None:
    """Return the dtype that ``from_pretrained`` takes from a weight file if no config has one.

    The first floating-point tensor determines it, in the order in which the libraries list tensors:
    safetensors sorts by name, not in the order of the bytes. Formats of 8 bits and less are not dtypes of a
    model.

    Returns:
        The name of the dtype, for example ``"bfloat16"``; None if no tensor is floating-point.
    """
    if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
        _, tensors = header_of(file)
        found = [TORCH_NAME.get(tensor.dtype, "") for _, tensor in sorted(tensors.items())]
    else:
        found = [str(tensor.dtype).removeprefix("torch.") for tensor in load_pickled(file, "meta").values()]
    return next((name for name in found if name in ("float64", "float32", "bfloat16", "float16")), None)


# Names of tensors in checkpoints that were saved of a wrapped model: without the wrapper's part.
#
# ``torch.compile``, ``DistributedDataParallel``, FSDP, activation checkpointing and trainers put a model
# into their own module, or wrap modules inside of it. A state dict that is taken of the wrapper has
# names such as ``_orig_mod.lm_head.weight`` or
# ``model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight``.

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names of wrapped modules that no model uses for its own parts."""

_ORDINARY = "module"
"""The name in ``DistributedDataParallel``, which a model may use as well."""

_MOST_LEVELS = 4
"""Most levels of modules around a model, each of which has a name."""


def without_wrappers(names: Collection[str]) -> Iterator[Mapping[str, str]]:
    """Yield other names for all tensors of a checkpoint, the likeliest first.

    The caller finds out which of them belong to the model.

    Args:
        names: the names of the checkpoint.

    Yields:
        Name -> without the parts of wrappers. Two tensors never get one name.

    Raises:
        SourceError: it is a checkpoint of several models that are alike.
    """
    known = [dict.fromkeys(names, "")]  # only to compare
    for left_out in (_WRAPPERS, _WRAPPERS | {_ORDINARY}):
        found = {name: ".".join(p for p in name.split(".") if p not in left_out) for name in names}
        for _ in range(_MOST_LEVELS):
            if found not in known and any(old != new for old, new in found.items()):
                known.append(found)
                if len(set(found.values())) == len(found):
                    yield found
            parts: dict[str, set[str]] = {}
            for name in found.values():
                outermost, _, rest = name.partition(".")
                parts.setdefault(outermost, set()).add(rest)
            first, *others = sorted(parts, key=lambda part: -len(parts[part]))
            if others and all(parts[other] == parts[first] for other in others):
                raise SourceError(
                    f"the checkpoint has tensors of several models, whose names begin with {first}. and "
                    f"{', '.join(f'{other}.' for other in others)}; save only one of them"
                )
            found = {old: name.removeprefix(f"{first}.") for old, name in found.items()}


def wrapped_name(names: Collection[str]) -> str | None:
    """Return a name that shows that the checkpoint is one of a wrapped model; None if there is none."""
    return next((name for name in names if not _WRAPPERS.isdisjoint(name.split("."))), None)


def lazy_tensors(files: Iterable[WeightFile], index: Index | None = None) -> dict[str, LazyTensor]:
    """Return the tensors of safetensors or PyTorch files by their names.

    Only the pickle of a PyTorch file in the zip format is read. A file of the older format is read completely
    when the first of its tensors is needed.

    Args:
        files: the files of the tensors.
        index: says which of several files that hold a tensor is the one to take: a repository may add a file
            with some better tensors, and change only its index.

    Raises:
        SourceError: a file cannot be read, or several hold a tensor, and no index says which one counts.
    """
    found: dict[str, dict[str, LazyTensor]] = {}
    for file in files:
        if isinstance(file, RemoteFile):
            name_in_index = file.name
        else:
            name_in_index = (file if index is None else file.relative_to(index.path.parent)).as_posix()
        if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
            start, headers = header_of(file)
            tensors = {}
            for name, header in headers.items():
                if header.dtype not in TORCH_NAME:
                    raise SourceError(
                        f"{file}: {name} has the dtype {header.dtype}, which torch does not have"
                    )
                tensors[name] = stored(file, start, header)
        else:
            tensors = dict(pickled_tensors(file))
        for name, tensor in tensors.items():
            found.setdefault(name, {})[name_in_index] = tensor
    return {name: _chosen(name, held, index) for name, held in found.items()}


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
    """Return the metadata in the headers of the safetensors files among these, merged over all files.

    Raises:
        SourceError: a file cannot be read.
    """
    found: dict[str, str] = {}
    for file in files:
        if isinstance(file, RemoteFile) or file.suffix == ".safetensors":
            found.update(metadata_of(file))
    return found
