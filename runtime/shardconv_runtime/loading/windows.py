"""Tensors that a file holds as they are wanted: they are mapped, and nothing is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SourceError
from ..parallel.shared_storage import tensor_at
from ..tensors.boxes import is_run, move_of
from ..tensors.lazy_tensor import FileLeaf, LazyTensor, item_bytes
from .reading import map_file


class Windows:
    """Private, writable mappings of local files, each made once; writing to one changes no file."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._given: dict[FileLeaf, list[tuple[int, int]]] = {}

    def window(self, tensor: LazyTensor) -> Tensor | None:
        """The tensor, of its shape and dtype, on the CPU; None if its elements have to be gathered, cast,
        computed or fetched, or another window has some of them.

        Raises:
            SourceError: the file cannot be mapped.
        """
        if len(tensor.pieces) != 1 or tensor.is_cast:
            return None
        (piece,) = tensor.pieces
        leaf, size = piece.leaf, item_bytes(tensor.dtype)
        if not isinstance(leaf, FileLeaf) or not isinstance(leaf.path, Path):
            return None
        begin = leaf.offset + piece.offset * size
        end = begin + tensor.num_bytes
        if begin % size or not is_run(move_of(tensor, piece, 0, 0).dims):
            return None
        others = self._given.setdefault(leaf, [])
        if any(begin < other_end and other_begin < end for other_begin, other_end in others):
            return None
        others.append((begin, end))
        dtype = getattr(torch, tensor.dtype)
        return tensor_at(self._file(leaf.path), begin, tensor.num_bytes, dtype, tensor.shape)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = map_file(path, path.stat().st_size)
            except OSError as error:
                raise SourceError(
                    f"{path}: cannot be mapped into memory ({error}); check that nobody changes it"
                ) from error
        return self._files[path]
