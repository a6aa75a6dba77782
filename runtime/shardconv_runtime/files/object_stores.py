"""Directories in object stores, such as S3: their listing, copies of small files, and weights read by ranges.

The library obstore sends the requests. It takes credentials, the endpoint and the region from the usual
environment of each store. No text of its errors reaches a message: it may hold a signed address.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import (
    AccessError,
    MissingModelError,
    MissingPackageError,
    NetworkError,
    NotConvertedError,
    SourceError,
)
from ..hub_options import again
from .manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, check_listed_sizes, read
from .model_config import CONFIG
from .remote_files import TIMEOUT_S, RangeReader, RemoteFile
from .small_files import cache_directory, small_files, stage_of, variant_name
from .tp_folders import folders, nothing_for, only, stages_for

MOST_OBJECTS = 20_000
"""Most objects below the URL of a model: more are a bucket of many models."""

NUM_THREADS = 8
"""Concurrent downloads of small files."""

CHUNK_BYTES = 1 << 20
"""Bytes that are handed on at once while an answer arrives."""

_RETRIES = 3
"""Times that the library itself repeats a request that was answered with an error of the server."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")


@dataclass(frozen=True, slots=True)
class StoredObject(RemoteFile):
    """A file in an object store, with the bytes that it had when it was listed."""

    directory: str
    """The URL of the directory in which it was listed."""
    name: str
    num_bytes: int
    etag: str
    """The store's mark of its bytes; empty if it gives none."""
    sha256 = ""

    @property
    def identity(self) -> str:
        """Return the mark of the bytes."""
        return self.etag

    def reader(self) -> ObjectReader:
        """Return a reader of its bytes."""
        return ObjectReader(self)

    def read(self) -> bytes:
        """Return all of its bytes."""
        return bytes(self.reader().read(0, self.num_bytes))

    def __str__(self) -> str:
        return f"{self.directory}/{self.name}"


class ObjectReader(RangeReader):
    """Reads ranges of an object, all of the bytes that it had when it was listed."""

    _file: StoredObject

    def request(self, offset: int, into: memoryview) -> tuple[int, Exception | None]:
        """Request bytes once; return the number of those received, and the error if a retry may help."""
        file, received = self._file, 0
        options: dict[str, Any] = {"range": (offset, offset + len(into))}
        if file.etag:
            options["if_match"] = file.etag
        with _explained(str(file)):
            try:
                answer = _library().get(_store(file.directory), file.name, options=options)
                for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                    part = memoryview(chunk)
                    if received + len(part) > len(into):
                        raise SourceError(f"{file}: the store sends more bytes than were requested")
                    into[received : received + len(part)] = part
                    received += len(part)
            except Exception as error:
                if not _is_temporary(error):
                    raise
                return received, error
        return received, None if received == len(into) else EOFError("the answer was truncated")

    def explained(self, error: Exception) -> str:
        """Return the status or the kind of an error, without its own text."""
        return _reason(error)


@dataclass(frozen=True)
class ObjectDirectory:
    """A directory in an object store, as it was listed."""

    url: str
    objects: Mapping[str, StoredObject] = field(compare=False, repr=False)
    """Its files, also in folders, by their paths in it."""

    def inside(self, path: str) -> ObjectDirectory:
        """Return a directory in this one; itself for the empty path."""
        if not path:
            return self
        url, start = f"{self.url}/{path}", f"{path}/"
        inner = (
            StoredObject(url, name.removeprefix(start), each.num_bytes, each.etag)
            for name, each in self.objects.items()
            if name.startswith(start)
        )
        return ObjectDirectory(url, {each.name: each for each in inner})

    def local_copy(self, names: Iterable[str]) -> Path:
        """Return a directory of the cache with copies of small files, made once for their present bytes."""
        chosen = [self.objects[name] for name in sorted(set(names)) if name in self.objects]
        content = [self.url, *((each.name, each.num_bytes, each.etag) for each in chosen)]
        copy = cache_directory() / "objects" / sha256(json.dumps(content).encode()).hexdigest()[:32]
        if copy.is_dir():
            return copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".", dir=copy.parent))
        try:
            with ThreadPoolExecutor(NUM_THREADS, "download") as pool:
                for each, data in zip(chosen, pool.map(StoredObject.read, chosen), strict=True):
                    (unfinished / each.name).parent.mkdir(parents=True, exist_ok=True)
                    (unfinished / each.name).write_bytes(data)
            try:
                unfinished.rename(copy)
            except OSError:
                if not copy.is_dir():  # another rank was faster
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return copy

    def check_sizes(self, entries: Sequence[FileEntry]) -> None:
        """Check that files exist and have the sizes of the manifest."""
        sizes = {name: each.num_bytes for name, each in self.objects.items()}
        check_listed_sizes(f"{self.url}: ", sizes, entries, "copy the converted directory there again")


def object_directory(url: str) -> ObjectDirectory:
    """List a directory of an object store.

    Raises:
        SourceError: it has no files, or cannot be listed.
    """
    url = url.rstrip("/")
    objects: dict[str, StoredObject] = {}
    with _explained(url):
        for some in _library().list(_store(url)):
            for each in some:
                objects[each["path"]] = StoredObject(url, each["path"], each["size"], each["e_tag"] or "")
            if len(objects) > MOST_OBJECTS:
                raise SourceError(f"{url} holds more than {MOST_OBJECTS} objects; name the folder of a model")
    # Consoles of stores make an empty object for each folder, with the name of the folder.
    parents = {str(parent) for name in objects for parent in PurePosixPath(name).parents}
    objects = {n: each for n, each in objects.items() if n and (each.num_bytes or n not in parents)}
    if not objects:
        raise MissingModelError(f"{url} holds no files; check the bucket and the path")
    return ObjectDirectory(url, objects)


def find_stored(url: str, world_size: int, rank: int = 0) -> tuple[ObjectDirectory, Path] | None:
    """Find a converted directory in an object store.

    Returns:
        The directory, and a local copy of its small files; None if there is an ordinary model.
    """
    root = object_directory(url)
    names = root.objects
    path = next(
        (p for p in ("", variant_name(world_size)) if posixpath.join(p, MANIFEST_NAME) in names), None
    )
    if path is None:
        stages = stages_for(url, names, world_size)
        if not stages and CONFIG in names and not folders(names):
            return None
        if not stages:
            raise NotConvertedError(nothing_for(url, names, world_size))
        path = stages[stage_of(rank, world_size, len(stages))]
    return with_small_files(root.inside(path))


def find_all_stored(url: str, tp: int | None) -> list[tuple[ObjectDirectory, Path]]:
    """Find a converted model in an object store, with the directories of all its stages."""
    root = object_directory(url)
    if tp is None or MANIFEST_NAME in root.objects:
        paths = only(url, root.objects)
    else:
        paths = next((folder.parts for folder in folders(root.objects) if folder.tp == tp), ())
    if not paths:
        raise NotConvertedError(nothing_for(url, root.objects, tp or 1))
    return [with_small_files(root.inside(path)) for path in paths]


def with_small_files(directory: ObjectDirectory) -> tuple[ObjectDirectory, Path]:
    """Return a converted directory, and a local copy of its small files."""
    described = read(directory.local_copy([MANIFEST_NAME]))
    names = [entry.path for entry in small_files(described)]
    return directory, directory.local_copy([MANIFEST_NAME, PLAN_NAME, *names])


def beside(directory: ObjectDirectory, name: str) -> tuple[ObjectDirectory, Path]:
    """Return another directory in the same one."""
    return with_small_files(object_directory(f"{directory.url.rpartition('/')[0]}/{name}"))


def _library() -> Any:
    try:
        import obstore  # an extra, which few need
    except ImportError as error:
        raise MissingPackageError(
            "URLs of object stores need the package obstore: pip install obstore"
        ) from error
    return obstore


@cache
def _store(url: str) -> Any:
    """Return the library's client of a directory, which keeps its connections."""
    _library()
    from obstore.store import from_url

    options: dict[str, Any] = {}
    if url.startswith("s3") and "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ:
        options["credential_provider"] = _profile()
    with _explained(url):
        return from_url(
            url,
            # Plain http is for an endpoint that the user has named so. There is no limit for a whole answer.
            client_options={
                "allow_http": True,
                "connect_timeout": f"{TIMEOUT_S:.0f}s",
                "read_timeout": f"{TIMEOUT_S:.0f}s",
                "timeout": "3600s",
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=4 * TIMEOUT_S)},
            **options,
        )


def _profile() -> Any:
    """Return credentials of ``AWS_PROFILE``, which the library itself does not read."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingPackageError(
            "AWS_PROFILE is set, and profiles need the package boto3: pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    return Boto3CredentialProvider()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise errors of the library as our own within this context."""
    try:
        yield
    except (SourceError, MissingPackageError):
        raise
    except Exception as error:
        raise _failure(what, error) from None  # its text may hold a signed address


def _failure(what: str, error: Exception) -> Exception:
    """Return the error to raise for one of the library: one line with the remedy."""
    kind, status, code = type(error).__name__, _status(error), _code(error)
    if kind == "InvalidPathError":
        return SourceError(f"{what} has an object with an empty part in its name (//); rename or remove it")
    if kind == "PreconditionError":
        return SourceError(f"{what} was replaced while it was read; {again()} when nobody writes there")
    if code == "NoSuchBucket":
        return MissingModelError(f"{what}: there is no such bucket; check its name, and the endpoint")
    if isinstance(error, FileNotFoundError) or status == 404:
        return MissingModelError(f"{what} is not there; check the bucket and the path")
    if (
        code in ("PermanentRedirect", "AuthorizationHeaderMalformed")
        or status in (301, 307)
        or _reason(error) == _REDIRECT
    ):
        return AccessError(f"{what}: the bucket is in another region; set AWS_REGION to it")
    if code in ("ExpiredToken", "ExpiredTokenException", "RequestExpired"):
        return AccessError(f"{what}: the credentials have expired; renew them, then {again()}")
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return AccessError(
            f"{what}: the store refuses access ({_reason(error)}); check the credentials in the environment "
            "(for a public S3 bucket set AWS_SKIP_SIGNATURE=true)"
        )
    if status is None and not _is_temporary(error):
        return SourceError(f"{what} cannot be read ({_reason(error)}); check the URL and the environment")
    return NetworkError(
        f"{what}: the store cannot be reached ({_reason(error)}); check the network, then {again()}"
    )


def _status(error: Exception) -> int | None:
    match = _STATUS.search(str(error))
    return None if match is None else int(match[1])


def _code(error: Exception) -> str:
    match = _CODE.search(str(error))
    return "" if match is None else match[1]


def _reason(error: Exception) -> str:
    """Return what an error says without addresses: the status, the store's code, or the kind."""
    if isinstance(error, EOFError):
        return str(error)
    status, code = _status(error), _code(error)
    if status is not None:
        return f"status {status}{f', {code}' if code else ''}"
    text = str(error).partition("\n")[0].casefold()
    for sign, reason in _SIGNS.items():
        if sign in text:
            return reason
    return type(error).__name__


_REDIRECT = "a redirect"
_SIGNS = {
    "timed out": "timed out",
    "redirect without location": _REDIRECT,
    "error sending request": "no connection",
    "body error": "the connection was lost",
    "http error": "the connection was lost",
    "metadata": "no credentials were found",
    "credential": "no credentials were found",
}
"""Parts of texts of the library -> what they mean."""


def _is_temporary(error: Exception) -> bool:
    """Return whether another try may help."""
    status = _status(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return _reason(error) in ("timed out", "no connection", "the connection was lost")
