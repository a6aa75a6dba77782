"""Copies of converted directories in object stores on the disk of a host, which its ranks share.

    CACHE/objects/DIGEST/rank-00000-of-00008/...    complete files of a directory, as it was listed
    CACHE/objects/DIGEST/....lock                   held by the process that downloads a file

The digest is of the URL and of the store's marks of all files, so a directory that was written again is
copied again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from ..errors import SourceError
from ..hub_options import again
from .manifest import PARTIAL, FileEntry
from .object_stores import ObjectDirectory, beside

NUM_FILES = 2
"""Files that a process downloads at once, each by parallel ranges."""


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """A converted directory in an object store, and its copy on a disk, which may lack files."""

    objects: ObjectDirectory
    directory: Path
    """The directory of its copy, with the small files."""
    cache_dir: Path

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Download the files that the copy lacks, or wait for the process that does."""
        with ThreadPoolExecutor(NUM_FILES, "download") as pool:
            list(pool.map(lambda entry: self._fetch(entry.path), entries))

    def check_sizes(self, entries: Sequence[FileEntry]) -> None:
        """Check that files exist in the store and have the sizes of the manifest; download none."""
        self.objects.check_sizes(entries)

    def beside(self, name: str) -> StoredCopy:
        """Return the copy of another directory in the same one."""
        return copy_of(*beside(self.objects, name), self.cache_dir)

    def _fetch(self, path: str) -> None:
        target = self.directory / path
        if target.is_file():
            return
        partial = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # The system releases it when the process ends.
            with WeakFileLock(target.with_name(f"{target.name}.lock")):
                if not target.is_file():
                    self.objects.download(path, partial)
                    partial.replace(target)
        except SourceError:
            raise
        except OSError as error:
            raise SourceError(
                f"{target} cannot be written ({error.strerror or error}); correct that, or name another "
                f"cache_dir, then {again()}"
            ) from error


def copy_of(objects: ObjectDirectory, small_files: Path, cache_dir: str | os.PathLike[str]) -> StoredCopy:
    """Return the copy of a directory below ``cache_dir``, with its small files.

    Args:
        small_files: a local directory with the manifest and the other small files.
    """
    listed = (each for each in objects.objects.values() if not each.name.startswith(f"{PARTIAL}/"))
    files = sorted((each.name, each.num_bytes, each.etag) for each in listed)
    digest = sha256(json.dumps([objects.url, *files]).encode()).hexdigest()[:32]
    root = Path(cache_dir).expanduser()
    copy = StoredCopy(objects, root / "objects" / digest, root)
    for path in small_files.rglob("*"):
        name = path.relative_to(small_files)
        if path.is_file() and not (copy.directory / name).is_file():
            target = copy.directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}.part")
            shutil.copyfile(path, partial)
            partial.replace(target)
    return copy
