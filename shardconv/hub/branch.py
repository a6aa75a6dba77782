"""A branch of a repository on the Hub, which ``push`` reads and changes.

Files go through ``HfApi.create_commit``: ``upload_large_folder`` is not in every version of the client. It
asks the Hub which contents it lacks, uploads these (through Xet or plain HTTP), and commits.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from shardconv_runtime.errors import OptionError, ShardconvError, SourceError
from shardconv_runtime.hub_options import option
from shardconv_runtime.storage.hub_errors import explain, hub_error, hub_failure, is_temporary
from shardconv_runtime.storage.hub_time_limits import bounded
from shardconv_runtime.storage.remote_files import RemoteFile

from ..reporting.progress import Advance
from .published import HubFile, Item, Tree

Value = TypeVar("Value")

TRIES = 4
"""The number of tries of a call that the client does not repeat itself."""
FIRST_WAIT_S = 1.0
"""Seconds to wait after the first try; doubled after each further one."""
THREADS = 4
"""Files that are sent at the same time."""
SAMPLE_BYTES = 512
"""First bytes of a file, by which the Hub decides where it stores the file."""
BUFFER_BYTES = 8 << 20
"""Bytes of one request to an object store."""
MAIN = "main"


@dataclass
class _Addition(CommitOperationAdd):
    """A file to send that reports its progress as it is read; Xet reads files itself, without progress."""

    advance: Advance = field(default=lambda num_bytes: None, repr=False, kw_only=True)
    remote: RemoteFile | None = field(default=None, repr=False, kw_only=True)
    """The content, if it is in an object store."""

    def __post_init__(self) -> None:
        """Take the size and the first bytes of a remote file; of a stream, the client would read all."""
        super().__post_init__()
        if self.remote is not None:
            info, size = self.upload_info, self.remote.num_bytes
            info.size, info.sample = size, bytes(self.remote.reader().read(0, min(SAMPLE_BYTES, size)))
            # A stream, since Xet sends files and bytes that are here only; the client sends it over HTTP.
            self.path_or_fileobj = io.BufferedReader(_RemoteBytes(self.remote), BUFFER_BYTES)

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        """Open the content; the client passes ``with_tqdm`` when it sends it."""
        advance = self.advance if with_tqdm else lambda num_bytes: None
        if self.remote is not None:
            with _ReportingFile(_RemoteBytes(self.remote), BUFFER_BYTES, advance) as file:
                yield file
        elif with_tqdm and isinstance(self.path_or_fileobj, str):
            with _ReportingFile(io.FileIO(self.path_or_fileobj), io.DEFAULT_BUFFER_SIZE, advance) as file:
                yield file
        else:
            with super().as_file() as file:
                yield file


class _RemoteBytes(io.RawIOBase):
    """The bytes of a file in an object store, read by ranges and sent without a copy here; to be buffered."""

    def __init__(self, file: RemoteFile) -> None:
        self._reader, self._num_bytes, self._position = file.reader(), file.num_bytes, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a byte, and return its number."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read the next bytes, and return their number: 0 at the end."""
        into = memoryview(buffer).cast("B")[: max(0, self._num_bytes - self._position)]
        self._reader.read_into(self._position, into)
        self._position += len(into)
        return len(into)


class _ReportingFile(io.BufferedReader):
    """A file that reports the bytes read from it; bytes that are read again are not reported again."""

    def __init__(self, raw: io.RawIOBase, buffer_bytes: int, advance: Advance) -> None:
        super().__init__(raw, buffer_bytes)
        self._advance, self._furthest = advance, 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read, and report the progress."""
        data = super().read(size)
        if self.tell() > self._furthest:
            self._advance(self.tell() - self._furthest)
            self._furthest = self.tell()
        return data


class Meter:
    """A counter of the bytes of files that are sent, which reports them once, however often an upload is
    repeated.
    """

    def __init__(self, advance: Advance) -> None:
        self._advance, self._lock = advance, threading.Lock()
        self._now = self._furthest = 0

    def begin(self) -> None:
        """Begin to send the files, from their start."""
        self._now = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that were sent."""
        with self._lock:
            self._now += num_bytes
            if self._now > self._furthest:
                self._advance(self._now - self._furthest)
                self._furthest = self._now

    def end(self, total_bytes: int) -> None:
        """Count the rest, which the Hub already had."""
        self.add(total_bytes - self._now)


class Remote:
    """A branch of a repository on the Hub; neither needs to exist yet."""

    def __init__(self, repo_id: str, revision: str | None, token: str | None) -> None:
        self.repo_id, self.revision = repo_id, revision
        self._token = token or get_token()
        try:
            validate_repo_id(repo_id)
            is_id = repo_id.count("/") == 1
        except HFValidationError:
            is_id = False
        if not is_id:
            raise OptionError(f"{repo_id} is not the id of a repository; give it as user/name")
        if revision is not None and re.fullmatch(r"[0-9a-f]{40}|refs/.*", revision):
            raise SourceError(
                f"{revision} is a commit or a ref, not a branch; give the name of a branch, old or new, as "
                f"{option('revision')}"
            )
        self._api = HfApi(token=self._token or False, library_name="shardconv")
        self._texts: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The web page of the branch."""
        branch = f"/tree/{self.revision}" if self.revision not in (None, MAIN) else ""
        return f"{self._api.endpoint}/{self.repo_id}{branch}"

    def require_login(self) -> None:
        """Require a token."""
        if not self._token:
            raise SourceError(
                f"not logged in, which a push to {self.repo_id} needs; run hf auth login, or pass "
                f"{option('token')}"
            )

    def tree(self) -> Tree:
        """List the branch as it is now."""

        def listed() -> Tree:
            try:
                info = self._api.repo_info(self.repo_id, revision=self.revision)
                has_branch = True
            except RepositoryNotFoundError:
                return Tree(None, {}, has_branch=False)
            except RevisionNotFoundError:
                info, has_branch = self._api.repo_info(self.repo_id), False
            files = {}
            for entry in self._api.list_repo_tree(self.repo_id, recursive=True, revision=info.sha):
                if isinstance(entry, RepoFile):
                    sha256 = entry.lfs.sha256 if entry.lfs else None
                    files[entry.path] = HubFile(entry.size, entry.blob_id, sha256)
            return Tree(info.sha, files, bool(info.private), has_branch)

        return self.patiently(listed)

    def text(self, path: str, tree: Tree) -> str | None:
        """Read a text file; None if there is none."""
        if path not in tree.files:
            return None
        content = tree.files[path].blob_id

        def read() -> str:
            return self._read(self.repo_id, path, tree.commit)

        if content not in self._texts:
            self._texts[content] = self.patiently(read)
        return self._texts[content]

    def card_of(self, model: str, revision: str | None) -> str | None:
        """Return the README.md of another repository; None if it has none, or it cannot be read."""
        try:
            with bounded():
                return self._read(model, "README.md", revision)
        except Exception as error:  # the client raises various errors for a missing file
            if hub_error(error) is None and not isinstance(error, SourceError | OSError | ValueError):
                raise
            return None

    def _read(self, repo_id: str, path: str, revision: str | None) -> str:
        with tempfile.TemporaryDirectory() as directory:
            file = self._api.hf_hub_download(repo_id, path, revision=revision, local_dir=directory)
            try:
                return Path(file).read_bytes().decode()  # keeps line ends as they are
            except UnicodeDecodeError as error:
                raise SourceError(f"{path} of {repo_id} is not UTF-8 text; correct it there") from error

    def make(self, tree: Tree, private: bool) -> None:
        """Create the repository and the branch if they do not exist."""
        if tree.commit is None:
            self.patiently(lambda: self._api.create_repo(self.repo_id, private=private, exist_ok=True))
        elif private and not tree.private:
            raise OptionError(
                f"{self.repo_id} exists and is public; make it private in its settings, or leave out "
                f"{option('private')}"
            )
        branch = self.revision
        if branch is not None and not tree.has_branch:
            self.patiently(lambda: self._api.create_branch(self.repo_id, branch=branch, exist_ok=True))

    def commit(
        self,
        title: str,
        items: Sequence[Item],
        delete: Sequence[str] = (),
        *,
        parent: str | None = None,
        meter: Meter | None = None,
    ) -> str:
        """Send files and commit them, and return the id of the commit; errors are not retried here."""
        meter = meter or Meter(lambda num_bytes: None)
        meter.begin()
        deletions = [CommitOperationDelete(path, is_folder=False) for path in delete]
        additions = []
        for item in items:
            if isinstance(item.content, bytes | Path):
                addition = _Addition(item.path, item.content, advance=meter.add)
            else:
                addition = _Addition(item.path, b"", advance=meter.add, remote=item.content)
            addition.upload_info.sha256 = bytes.fromhex(item.sha256)  # otherwise the client computes it again
            additions.append(addition)
        try:
            done = self._api.create_commit(
                self.repo_id,
                [*deletions, *additions],
                commit_message=title,
                revision=self.revision,
                parent_commit=parent,
                num_threads=THREADS,
            )
        except ShardconvError:  # of the store that is read
            raise
        except (ValueError, RuntimeError, OSError) as error:  # of the client, of Xet, or of a local file
            if hub_error(error) is not None or getattr(error, "filename", None):
                raise
            raise hub_failure(self._explained(error), error) from error
        meter.end(sum(item.num_bytes for item in items))
        return str(done.oid)

    def patiently(self, call: Callable[[], Value]) -> Value:
        """Make a call, and repeat it after temporary errors; errors of the client become ``SourceError``.

        A server that accepts a request and never answers is not asked again.
        """
        wait = FIRST_WAIT_S
        for tries_left in reversed(range(TRIES)):
            try:
                with bounded():
                    return call()
            except SourceError:  # was already retried
                raise
            except Exception as error:
                if tries_left and is_temporary(error):
                    time.sleep(wait)
                    wait *= 2
                    continue
                if hub_error(error) is None:
                    raise
                raise hub_failure(self._explained(error), error) from error
        raise AssertionError("the last try returns or raises")

    def _explained(self, error: Exception) -> str:
        text = explain(self.repo_id, self.revision, error, writing=True)
        return text.replace(self._token, "***") if self._token else text
