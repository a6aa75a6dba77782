"""The directory that a conversion makes: whole or not at all, and never in place of anything else.

The files are built in a sibling ``OUT.partial-<pid>``, which takes the place of ``OUT`` by a rename when
all is done, and is removed when anything goes wrong.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardconv_runtime.errors import CheckpointError, ShardconvError
from shardconv_runtime.manifest import MANIFEST_NAME, PLAN_NAME
from shardconv_runtime.manifest import read as read_manifest


@dataclass(frozen=True, slots=True)
class Output:
    """A place where a converted directory may be put."""

    path: Path

    @classmethod
    def prepare(
        cls, out: str | os.PathLike[str], *, overwrite: bool, source: str | os.PathLike[str]
    ) -> Output:
        """Check that ``out`` may be made, without making it.

        Args:
            out: the directory to make.
            overwrite: whether a converted directory may be replaced.
            source: the model; ``out`` may not hold it.

        Raises:
            ShardconvError: it exists and is not empty, or cannot be written.
        """
        path = Path(out).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ShardconvError(f"OUT {out} is a file; name a directory that does not exist yet")
        if path.is_dir() and any(path.iterdir()):
            if not overwrite:
                raise ShardconvError(f"OUT {out} is not empty; name another directory, or pass --overwrite")
            _require_replaceable(path, Path(source).expanduser())
        _require_writable(path)
        return cls(path)

    @contextmanager
    def building(self) -> Iterator[Path]:
        """A fresh directory to fill; it takes the place of ``path`` when the block ends without error."""
        partial = self.path.with_name(f"{self.path.name}.partial-{os.getpid()}")
        parents = [parent for parent in self.path.parents if not parent.exists()]
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            _put(partial, self.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            _remove_empty(parents)
            raise


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put(partial: Path, path: Path) -> None:
    """Move ``partial`` to ``path``; what was there goes only once its successor is in place."""
    old = path.with_name(f"{path.name}.old-{os.getpid()}")
    if path.exists():
        path.rename(old)
    try:
        partial.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    fsync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_empty(made: list[Path]) -> None:
    for directory in made:
        try:
            directory.rmdir()
        except OSError:
            return


def _require_replaceable(path: Path, source: Path) -> None:
    """Only what shardconv wrote may be removed."""
    if source.exists() and source.resolve().is_relative_to(path.resolve()):
        raise ShardconvError(f"OUT {path} holds the model to convert; name another directory")
    if path.is_symlink() or not (path / MANIFEST_NAME).is_file():
        raise ShardconvError(
            f"OUT {path} was not written by shardconv, so it is not overwritten; name another directory"
        )
    try:
        known = {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in read_manifest(path).files)}
    except CheckpointError as error:
        raise ShardconvError(f"OUT {path} cannot be replaced: {error}; remove it yourself") from error
    strange = sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir() or file.is_symlink()
    )
    foreign = [name for name in strange if name not in known]
    if foreign:
        raise ShardconvError(
            f"OUT {path} holds {foreign[0]}, which shardconv did not write; move it away first"
        )


def _require_writable(path: Path) -> None:
    parent = path
    while not parent.exists():
        parent = parent.parent
    anchor = parent if parent != path else path.parent
    if not anchor.is_dir() or not os.access(anchor, os.W_OK | os.X_OK):
        raise ShardconvError(f"OUT {path} cannot be made: no permission to write in {anchor}")
