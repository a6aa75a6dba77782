"""Weight files that stay where they are, and are read by byte ranges; those on the Hub.

Requests to the Hub use the session, headers, offline mode and retries of the ``huggingface_hub`` client,
which lacks a function for reading a range of a file.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from ..errors import NetworkError, SourceError, brief
from ..format.header import StoredTensor, parse_header
from ..hub_options import Hub, again
from .hub_errors import FINAL, explain, has_timed_out, hub_failure
from .hub_time_limits import bounded

TRIES = 6
"""Consecutive requests for a range that receive no byte until an error is raised."""

TIMEOUT_S = 30.0
"""Seconds until a request that receives no byte fails."""

SILENT_TRIES = 3
"""Tries that time out until an error is raised: 90 s without a byte."""

FIRST_WAIT_S = 0.5
"""Wait before the second try; it doubles with each further one."""

_PATHS_AT_ONCE = 500
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class RemoteFile(ABC):
    """A file that is read over a network. It has the ``name`` and ``suffix`` of a ``Path``."""

    name: str
    """The name in the directory of the model."""
    num_bytes: int
    sha256: str
    """The sha256 of the bytes, in hex; empty if the service does not record it."""
    gap_bytes = 0
    """Gaps between needed bytes that are read too, since that costs less than another request."""

    @property
    def suffix(self) -> str:
        """Return ``".safetensors"``."""
        return self.name[self.name.rfind(".") :]

    @property
    @abstractmethod
    def identity(self) -> str:
        """Return text that changes when the bytes do."""

    @abstractmethod
    def reader(self) -> RangeReader:
        """Return a reader of its bytes."""

    def header(self) -> tuple[dict[str, str], dict[str, StoredTensor]]:
        """Return the metadata and the tensors of a safetensors file."""
        return remote_header(self)


class RangeReader(ABC):
    """Reads ranges of one file; thread-safe."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on, and request no others.

        After a broken connection only the missing bytes are requested again.
        """
        failures = silences = 0
        while len(into):
            count, problem = self.request(offset, into)
            into, offset = into[count:], offset + count
            if problem is None:
                continue
            failures, silences = (1, 0) if count else (failures + 1, silences)
            silences += has_timed_out(problem)
            if failures == TRIES or silences == SILENT_TRIES:
                raise SourceError(
                    f"{self._file}: byte {offset} cannot be read after {failures} tries "
                    f"({self.explained(problem)}); check the network, then {again()}"
                ) from problem
            time.sleep(FIRST_WAIT_S * 2 ** (failures - 1) * random.uniform(0.5, 1.0))

    def read(self, offset: int, count: int) -> bytearray:
        """Return ``count`` bytes from ``offset`` on."""
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return buffer

    @abstractmethod
    def request(self, offset: int, into: memoryview) -> tuple[int, Exception | None]:
        """Request bytes once; return the number of those received, and the error if a retry may help."""

    def explained(self, error: Exception) -> str:
        """Return the text of an error of a request."""
        return brief(error)


@dataclass(frozen=True, slots=True)
class RepositoryFile(RemoteFile):
    """A file at one commit of a repository."""

    repo_id: str
    commit: str
    name: str
    num_bytes: int
    sha256: str
    hub: Hub = field(compare=False, repr=False)

    @property
    def identity(self) -> str:
        """Return the hash, or the commit."""
        return self.sha256 or self.commit

    def reader(self) -> HubReader:
        """Return a reader of its bytes."""
        return HubReader(self)

    def __str__(self) -> str:
        return f"{self.repo_id}/{self.name} at {self.commit[:12]}"


def remote_files(
    repo_id: str, commit: str, names: Sequence[str], hub: Hub, *, must_exist: bool = True
) -> tuple[RepositoryFile, ...]:
    """Look up files of a repository without downloading them."""
    api = HfApi(token=hub.token)
    by_name: dict[str, RepoFile] = {}
    try:
        for start in range(0, len(names), _PATHS_AT_ONCE):
            some = list(names[start : start + _PATHS_AT_ONCE])
            with bounded():
                infos = api.get_paths_info(repo_id, some, revision=commit)
            by_name |= {info.path: info for info in infos if isinstance(info, RepoFile)}
    except Exception as error:
        raise hub_failure(explain(repo_id, hub.revision, error), error) from error
    missing = [name for name in names if name not in by_name]
    if missing and must_exist:
        raise SourceError(f"{repo_id} lacks {missing[0]} at {commit[:12]}; download the model again")
    return tuple(
        RepositoryFile(repo_id, commit, name, info.size, info.lfs.sha256 if info.lfs else "", hub)
        for name, info in ((name, by_name[name]) for name in names if name in by_name)
    )


DOWNLOAD_BYTES = 16 << 20
"""Bytes of one request for a file that is copied."""

DOWNLOAD_THREADS = 8


def download(file: RemoteFile, target: Path) -> None:
    """Copy a file to a disk, in parallel ranges."""
    reader = file.reader()

    def copy(offset: int) -> None:
        data = memoryview(reader.read(offset, min(DOWNLOAD_BYTES, file.num_bytes - offset)))
        while len(data):
            count = os.pwrite(handle, data, offset)
            data, offset = data[count:], offset + count

    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(DOWNLOAD_THREADS, "download") as pool:
            list(pool.map(copy, range(0, file.num_bytes, DOWNLOAD_BYTES)))
        os.fsync(handle)
    finally:
        os.close(handle)


@cache
def remote_header(file: RemoteFile) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and the tensors of a safetensors file, read with two requests."""
    reader = file.reader()

    def read(offset: int, count: int) -> bytes:
        return bytes(reader.read(offset, max(min(count, file.num_bytes - offset), 0)))

    return parse_header(read, file.num_bytes, str(file))


class HubReader(RangeReader):
    """Reads ranges of a file on the Hub.

    The repository redirects to the address of the bytes, which expires. It is requested once, and again when
    it has expired.
    """

    _file: RepositoryFile

    def __init__(self, file: RepositoryFile) -> None:
        super().__init__(file)
        self._lock = threading.Lock()
        self._known: _Address | None = None

    def request(self, offset: int, into: memoryview) -> tuple[int, Exception | None]:
        """Request bytes once; return the number of those received, and the error if a retry may help."""
        received = 0
        try:
            address = self._address()
            byte_range = f"bytes={offset}-{offset + len(into) - 1}"
            with get_session().stream(
                "GET", address.url, headers={**address.headers, "Range": byte_range}, timeout=TIMEOUT_S
            ) as response:
                self._require(response, address, offset, len(into))
                for chunk in response.iter_bytes():
                    if received + len(chunk) > len(into):
                        raise SourceError(f"{self._file}: the server sends more bytes than were requested")
                    into[received : received + len(chunk)] = chunk
                    received += len(chunk)
            return received, None if received == len(into) else EOFError("the answer was truncated")
        except SourceError:
            raise
        except FINAL as error:
            text = explain(self._file.repo_id, self._file.commit, error)
            raise hub_failure(text, error) from error
        except Exception as error:  # the HTTP library differs between versions of the client
            return received, error

    def _require(self, response: Any, address: _Address, offset: int, count: int) -> None:
        """Refuse an answer other than the requested range."""
        status = response.status_code
        if status == 206:
            content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if content_range is None or tuple(map(int, content_range.groups())) != (
                offset,
                offset + count - 1,
                self._file.num_bytes,
            ):
                raise SourceError(
                    f"{self._file}: requested {count} bytes from {offset} on of {self._file.num_bytes}, the "
                    f"server answers with {response.headers.get('Content-Range')}; download the full model"
                )
            return
        if status == 200:
            if (offset, count) == (0, self._file.num_bytes):
                return
            raise SourceError(f"{self._file}: the server does not send ranges; download the full model")
        if address.expires and status in (401, 403, 404, 410):
            with self._lock:
                self._known = None  # request another one
            raise ConnectionError(f"its address has expired, status {status}")
        if status in _TRANSIENT:
            raise ConnectionError(f"status {status}")
        hf_raise_for_status(response)
        raise NetworkError(f"{self._file}: the server answers with status {status}")

    def _address(self) -> _Address:
        """Return the address of the bytes, cached until it expires."""
        with self._lock:
            if self._known is None:
                file = self._file
                url = hf_hub_url(file.repo_id, file.name, revision=file.commit)
                metadata = get_hf_file_metadata(url, token=file.hub.token, timeout=TIMEOUT_S)
                if metadata.size != file.num_bytes:
                    raise SourceError(
                        f"{file} has {metadata.size} bytes, and had {file.num_bytes}; {again()}"
                    )
                moved = metadata.location != url
                headers = dict(build_hf_headers(token=file.hub.token))
                if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
                    headers.pop("authorization", None)
                self._known = _Address(metadata.location, {**headers, "Accept-Encoding": "identity"}, moved)
            return self._known


@dataclass(frozen=True, slots=True)
class _Address:
    """The address of a file's bytes."""

    url: str
    headers: Mapping[str, str]
    expires: bool
