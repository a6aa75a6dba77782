"""The output directory, which never replaces anything that shardconv did not write."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv_runtime.errors import CheckpointError, ShardconvError
from shardconv_runtime.format.manifest import MANIFEST_NAME, PLAN_NAME, rank_directory
from shardconv_runtime.format.manifest import read as read_manifest

from .job import PARTIAL, is_placed, known_files, read_state
from .workspace import refuse_if_busy


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How much of a converted directory is written, and with which buffers."""

    max_file_size: int
    """Bytes of tensors after which a new file is begun."""
    memory: int
    """I/O buffer size in bytes."""
    ranks: Collection[int] | None = None
    """The ranks to write, of stages counted through; None: all."""

    def of_stage(self, stage: int, tp: int) -> WriteOptions | None:
        """Those of a stage of ``tp`` ranks; None if none of its ranks are written."""
        if self.ranks is None:
            return self
        own = [rank - stage * tp for rank in self.ranks if rank // tp == stage]
        return replace(self, ranks=own) if own else None

    def owners(self, tp: int) -> set[str] | None:
        """Directories of the ranks to write; None: all."""
        return None if self.ranks is None else {rank_directory(rank, tp) for rank in self.ranks}


@dataclass(frozen=True, slots=True)
class Output:
    """A directory that may be written."""

    path: Path
    overwrite: bool
    """Whether a converted directory may be replaced."""

    @classmethod
    def prepare(
        cls,
        out: str | os.PathLike[str],
        *,
        overwrite: bool,
        source: str | os.PathLike[str],
        owners: Collection[str] | None = None,
    ) -> Output:
        """Check that ``out`` may be written, without creating it.

        Args:
            out: the directory to write. It may hold the unfinished output of an earlier run.
            overwrite: whether a converted directory may be replaced.
            source: the model; it may not be in ``out``.
            owners: the owners to write, see ``workspace``; None: all.

        Raises:
            ShardconvError: ``out`` is not empty, cannot be written, or is being written by another process.
        """
        path = Path(out).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ShardconvError(f"OUT {out} is a file; name a directory that does not exist yet")
        if path.is_dir() and any(file.name != PARTIAL for file in path.iterdir()):
            if not overwrite and not _is_being_finished(path):
                raise ShardconvError(f"OUT {out} is not empty; name another directory, or pass --overwrite")
            _require_replaceable(path, Path(source).expanduser())
        parent = path
        while not parent.exists():
            parent = parent.parent
        anchor = parent if parent != path else path.parent
        if not anchor.is_dir() or not os.access(anchor, os.W_OK | os.X_OK):
            raise ShardconvError(f"OUT {path} cannot be created: no permission to write in {anchor}")
        refuse_if_busy(path, owners)
        return cls(path, overwrite)

    def require_free(self) -> None:
        """Check again, after the plan was made.

        Raises:
            ShardconvError: another process wrote a converted directory meanwhile, which may not be replaced.
        """
        is_complete = (self.path / MANIFEST_NAME).is_file() and not _is_being_finished(self.path)
        if is_complete and not self.overwrite:
            raise ShardconvError(
                f"OUT {self.path} was written by another process meanwhile; name another directory, "
                "or pass --overwrite"
            )

    def replaced(self) -> list[str]:
        """Files of the converted directory that is replaced; the last one makes it complete.

        Raises:
            ShardconvError: as ``require_free``.
        """
        self.require_free()
        if not (self.path / MANIFEST_NAME).is_file():
            return []
        return [*(entry.path for entry in read_manifest(self.path).files), PLAN_NAME, MANIFEST_NAME]


def _is_being_finished(path: Path) -> bool:
    """Whether a run that was interrupted while it moved files to ``path`` can be finished."""
    state = read_state(path / PARTIAL)
    if state is None or state.moves is None:
        return False
    return not (path / MANIFEST_NAME).is_file() or is_placed(path, state.moves)


def _require_replaceable(path: Path, source: Path) -> None:
    """Require that shardconv wrote every file in ``path``."""
    if source.exists() and source.resolve().is_relative_to(path.resolve()):
        raise ShardconvError(f"OUT {path} holds the model to convert; name another directory")
    known = known_files(path)
    if path.is_symlink() or not (known or (path / MANIFEST_NAME).is_file()):
        raise ShardconvError(
            f"OUT {path} was not written by shardconv, so it is not overwritten; name another directory"
        )
    try:
        if (path / MANIFEST_NAME).is_file():
            known |= {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in read_manifest(path).files)}
    except CheckpointError as error:
        raise ShardconvError(f"OUT {path} cannot be replaced: {error}; remove it yourself") from error
    names = sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir() or file.is_symlink()
    )
    unknown = [name for name in names if name not in known and name.split("/")[0] != PARTIAL]
    if unknown:
        raise ShardconvError(
            f"OUT {path} holds {unknown[0]}, which shardconv did not write; move it away first"
        )
