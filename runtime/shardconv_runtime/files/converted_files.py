"""The files of a converted directory: on this machine, or in an object store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MissingFileError
from ..hub_options import is_url
from ..storage.file_access import WeightFile, num_bytes
from .manifest import resolve
from .small_files import stage_directories

if TYPE_CHECKING:  # they import the client of the Hub
    from .object_stores import ObjectDirectory

_WEIGHTS = (".safetensors", ".tensors")
"""Ends of the names of files that are not copied from a store."""


@dataclass(frozen=True, slots=True)
class ConvertedFiles:
    """A converted directory, in which files are found by their paths."""

    directory: Path
    """Local, with all of its files, or copies of the small ones of those in a store."""
    objects: ObjectDirectory | None = None
    """The directory in an object store."""

    @property
    def name(self) -> str:
        """Return its path or its URL."""
        return str(self.directory) if self.objects is None else self.objects.url

    def file(self, path: str) -> WeightFile:
        """Return a file, which may not exist if it is on this machine.

        Raises:
            CheckpointError: a link leads out of the directory, or the store has no such file.
        """
        if self.objects is None or not is_weight_file(path):
            return resolve(self.directory, path)
        if path not in self.objects.objects:
            raise MissingFileError(f"{self.name}: {path} is missing")
        return self.objects.objects[path]

    def num_bytes(self, path: str) -> int:
        """Return the size of a file that exists."""
        return num_bytes(self.file(path))

    def weight_files(self) -> dict[str, int]:
        """Return the sizes of all files of tensors that are there, by path."""
        if self.objects is not None:
            sizes = {name: each.num_bytes for name, each in self.objects.objects.items()}
            return {name: size for name, size in sizes.items() if is_weight_file(name)}
        paths = (path for end in _WEIGHTS for path in self.directory.rglob(f"*{end}"))
        return {path.relative_to(self.directory).as_posix(): path.stat().st_size for path in paths}


def is_weight_file(name: str) -> bool:
    """Return whether a file in a store is read by ranges, and not copied."""
    return name.endswith(_WEIGHTS)


def parts_of(where: str | os.PathLike[str]) -> list[ConvertedFiles]:
    """Return the converted directory that is named, or the directories of its stages."""
    if is_url(where):
        from .object_stores import find_all_stored  # it imports the client of the Hub

        stored = find_all_stored(os.fspath(where), None)
        return [ConvertedFiles(directory, objects) for objects, directory in stored]
    path = Path(where).expanduser()
    return [ConvertedFiles(directory) for directory in stage_directories(path) or [path]]
