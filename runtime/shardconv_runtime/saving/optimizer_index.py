"""``optimizer.json``: the contents of an optimizer's checkpoint except its tensors.

Parameters have FQNs and global shapes, so that the file does not depend on the ranks. It is written last: a
directory that has it is complete.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DamagedError, MissingFileError
from ..format.header import dtype_name
from ..format.typed_json import MalformedError, dump_document, load_document, read_text, write_text

VERSION = 1
FORMAT = "shardconv.optimizer"
INDEX_NAME = "optimizer.json"

_TENSOR = "tensor:"
"""Prefix of the kind of a number that is a tensor without dims."""

_REMEDY = "copy the directory again, or resume from another checkpoint"


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A hyperparameter, or a number of a parameter's state, as text that restores it exactly."""

    kind: str
    """``none``, ``bool``, ``int``, ``float``, ``str``, ``tuple``, ``list``, or ``tensor:`` and a dtype."""
    text: str = ""
    items: tuple[StoredValue, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter."""

    name: str
    shape: tuple[int, ...]
    """Global."""
    tensors: Mapping[str, str]
    """Dtype of each tensor of this shape, by its key in the optimizer's state; the checkpoint has it under
    ``tensor_name``."""
    scalars: Mapping[str, StoredValue]
    has_own_dtypes: bool = False
    """Whether a tensor had another dtype than the parameter; if not, they follow the parameter's dtype."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group."""

    names: tuple[str, ...]
    hyperparameters: Mapping[str, StoredValue]


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of the checkpoint."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerIndex:
    """The index of a checkpoint."""

    optimizer: str
    """Name of its class."""
    groups: tuple[ParameterGroup, ...]
    parameters: tuple[ParameterState, ...]
    """Parameters with state, in the order of the plan."""
    files: tuple[StateFile, ...] = ()
    """All files but the index itself."""
    version: int = VERSION


def tensor_name(parameter: str, key: str) -> str:
    """Return the name of a state's tensor in the checkpoint."""
    return f"state.{parameter}.{key}"


def write_index(index: OptimizerIndex, directory: Path) -> None:
    """Write the index of a directory atomically."""
    write_text(directory / INDEX_NAME, dump_document(index, FORMAT))


def read_index(directory: Path) -> OptimizerIndex:
    """Read the index of a directory and check that its files exist."""
    path = directory / INDEX_NAME
    if not path.is_file():
        raise MissingFileError(
            f"{directory} lacks {INDEX_NAME}: shardconv_runtime.save_optimizer did not write it; name a "
            "directory that it wrote"
        )
    try:
        index = load_document(OptimizerIndex, read_text(path), FORMAT, VERSION)
    except MalformedError as error:
        raise DamagedError(f"{path}: {error}; {_REMEDY}") from error
    for entry in index.files:
        file = directory / entry.path
        num_bytes = file.stat().st_size if file.is_file() else None
        if num_bytes != entry.num_bytes:
            what = "is missing" if num_bytes is None else f"has {num_bytes} bytes, not {entry.num_bytes}"
            raise DamagedError(f"{directory}: {entry.path} {what}; {_REMEDY}")
    return index


def to_value(thing: Any) -> StoredValue | None:
    """Return a value as text; None if its kind cannot be stored."""
    if thing is None:
        return StoredValue("none")
    if isinstance(thing, Tensor):
        is_number = thing.dim() == 0 and not thing.is_complex()
        return StoredValue(_TENSOR + dtype_name(thing.dtype), repr(thing.item())) if is_number else None
    if type(thing) in (bool, int, float, str):
        return StoredValue(type(thing).__name__, repr(thing))
    if type(thing) in (tuple, list):
        items = [to_value(item) for item in thing]
        storable = tuple(item for item in items if item is not None)
        return StoredValue(type(thing).__name__, items=storable) if len(storable) == len(items) else None
    return None


def from_value(value: StoredValue) -> Any:
    """Return the value that ``to_value`` stored; tensors are on the CPU."""
    try:
        return _from_value(value)
    except (ValueError, SyntaxError, TypeError, AttributeError) as error:
        raise DamagedError(f"{value.text[:80]!r} is not of kind {value.kind[:80]}; {_REMEDY}") from error


def _from_value(value: StoredValue) -> Any:
    if value.kind == "none":
        return None
    if value.kind in ("tuple", "list"):
        items = [_from_value(item) for item in value.items]
        return tuple(items) if value.kind == "tuple" else items
    if value.kind == "float":
        return float(value.text)
    if value.kind in ("bool", "int", "str"):
        return ast.literal_eval(value.text)
    if not value.kind.startswith(_TENSOR):
        raise ValueError
    dtype: torch.dtype = getattr(torch, value.kind.removeprefix(_TENSOR))
    number = float(value.text) if dtype.is_floating_point else ast.literal_eval(value.text)
    return torch.tensor(number, dtype=dtype)
