"""A directory in an object store that a conversion writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from shardconv_runtime.errors import OptionError, OutputExistsError
from shardconv_runtime.files.converted_files import ConvertedFiles, is_weight_file
from shardconv_runtime.files.manifest import MANIFEST_NAME, PARTIAL, PLAN_NAME
from shardconv_runtime.files.manifest import read as read_manifest
from shardconv_runtime.files.object_stores import listed, with_small_files

from .job import Job, TargetFile
from .store_objects import StoreDirectory
from .store_workspace import StoredWorkspace, opened_in_store, read_job
from .workspace import Claim


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """A directory in an object store that may be written, like ``Output``."""

    url: str
    overwrite: bool
    stored: ConvertedFiles | None = None
    """The complete directory that is there. Without ``overwrite``, it is only compared."""
    last: str = MANIFEST_NAME
    """The file that makes it complete."""

    @property
    def name(self) -> str:
        """Return its name in messages."""
        return self.url

    @property
    def is_complete(self) -> bool:
        """Return whether an earlier run has completed it."""
        return self.stored is not None and not self.overwrite

    @property
    def present(self) -> ConvertedFiles:
        """Return the files of an output that is complete."""
        assert self.stored is not None
        return self.stored

    def opened(
        self, job: Job, files: Sequence[TargetFile], claim: Claim, tell: Callable[[str], None]
    ) -> AbstractContextManager[StoredWorkspace]:
        """Claim owners, and continue the job that was begun, or begin."""
        return opened_in_store(self.url, job, files, claim, self.replaced(), self.last, tell=tell)

    def replaced(self) -> list[str]:
        """Return the files of the converted directory that is replaced."""
        if self.last not in listed(self.url).objects:
            return []
        if not self.overwrite:
            raise OutputExistsError(
                f"DST {self.url} was written by another process meanwhile; name another URL, or pass "
                "--overwrite"
            )
        manifest = read_manifest(with_small_files(listed(self.url))[1])
        return [MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in manifest.files)]

    @classmethod
    def prepare(
        cls, url: str, *, overwrite: bool, source: str | os.PathLike[str], last: str = MANIFEST_NAME
    ) -> StoredOutput:
        """Check that a directory may and can be written, or that it is complete already.

        No process can be seen that writes the same owners: the last one takes their place.

        Args:
            last: the file that makes it complete. A directory of another kind than a converted one is never
                replaced.
        """
        if (os.fspath(source).rstrip("/") + "/").startswith(url + "/"):
            raise OptionError(f"DST {url} holds the model to convert; name another directory")
        there = listed(url)
        names = {name for name in there.objects if name.split("/")[0] != PARTIAL}
        job = read_job(StoreDirectory(url))
        written = set() if job is None else {*job[0].paths, *job[0].old}
        if last != MANIFEST_NAME and last in names:
            files = ConvertedFiles(
                there.local_copy(name for name in names if not is_weight_file(name)), there
            )
            return cls(url, overwrite, files, last)
        if MANIFEST_NAME in names and last == MANIFEST_NAME:
            objects, directory = with_small_files(there)
            if not overwrite:
                return cls(url, overwrite, ConvertedFiles(directory, objects))
            manifest = read_manifest(directory)
            written |= {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in manifest.files)}
        elif names and job is None:
            raise OutputExistsError(
                f"DST {url} is not empty, and has no {last} of an earlier conversion; name another directory"
            )
        if strangers := sorted(names - written):
            raise OutputExistsError(
                f"DST {url} holds {strangers[0]}, which shardconv did not write; move it away first"
            )
        StoreDirectory(url).require_writable()
        return cls(url, overwrite, last=last)
