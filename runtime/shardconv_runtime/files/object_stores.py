"""Directories in object stores, such as S3: listings, copies of small files, and weights read by ranges."""

from __future__ import annotations

import json
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import MissingModelError, NotConvertedError, SourceError
from ..storage.remote_files import RangeReader, RemoteFile, download
from ..storage.store_client import client, explained, is_temporary, library, reason_of
from .manifest import MANIFEST_NAME, PLAN_NAME, FileEntry, Manifest, check_listed_sizes, read
from .small_files import cache_directory, small_files, stage_of
from .tp_folders import directories_for, folders, nothing_for, only, stages_for

MOST_OBJECTS = 20_000
"""Most objects below the URL of a model: more are a bucket of many models."""

NUM_THREADS = 8
"""Concurrent downloads of small files."""

CHUNK_BYTES = 1 << 20
"""Bytes that are handed on at once while an answer arrives."""


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
    gap_bytes = 1 << 17  # some milliseconds, as a request of many concurrent ones; and requests are billed

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
        with explained(str(file)):
            try:
                answer = library().get(client(file.directory), file.name, options=options)
                for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                    part = memoryview(chunk)
                    if received + len(part) > len(into):
                        raise SourceError(f"{file}: the store sends more bytes than were requested")
                    into[received : received + len(part)] = part
                    received += len(part)
            except Exception as error:
                if not is_temporary(error):
                    raise
                return received, error
        return received, None if received == len(into) else EOFError("the answer was truncated")

    def explained(self, error: Exception) -> str:
        """Return the status or the kind of an error, without its own text."""
        return reason_of(error)


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

    def download(self, name: str, target: Path) -> None:
        """Copy a file of any size to a disk."""
        download(self.objects[name], target)

    def check_sizes(self, entries: Sequence[FileEntry]) -> None:
        """Check that files exist and have the sizes of the manifest."""
        sizes = {name: each.num_bytes for name, each in self.objects.items()}
        check_listed_sizes(f"{self.url}: ", sizes, entries, "copy the converted directory there again")


def object_directory(url: str) -> ObjectDirectory:
    """List a directory of an object store.

    Raises:
        SourceError: it has no files, or cannot be listed.
    """
    directory = listed(url)
    if not directory.objects:
        raise MissingModelError(f"{directory.url} holds no files; check the bucket and the path")
    return directory


def listed(url: str) -> ObjectDirectory:
    """List a directory of an object store, which may be empty."""
    url = url.rstrip("/")
    objects: dict[str, StoredObject] = {}
    with explained(url):
        for some in library().list(client(url)):
            for each in some:
                mark = each["e_tag"] or ""
                if mark and not mark.endswith('"'):  # Azure lists it without quotes, and takes it with them
                    mark = f'"{mark}"'
                objects[each["path"]] = StoredObject(url, each["path"], each["size"], mark)
            if len(objects) > MOST_OBJECTS:
                raise SourceError(f"{url} holds more than {MOST_OBJECTS} objects; name the folder of a model")
    # Consoles of stores make an empty object for each folder, with the name of the folder.
    parents = {str(parent) for name in objects for parent in PurePosixPath(name).parents}
    objects = {n: each for n, each in objects.items() if n and (each.num_bytes or n not in parents)}
    return ObjectDirectory(url, objects)


def find_stored(url: str, world_size: int, rank: int = 0) -> tuple[ObjectDirectory, Path] | None:
    """Find a converted directory in an object store.

    Returns:
        The directory, and a local copy of its small files; None if there is an ordinary model.
    """
    root = object_directory(url)
    paths = directories_for(url, root.objects, world_size)
    if not paths:
        return None
    return with_small_files(root.inside(paths[stage_of(rank, world_size, len(paths))]))


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


def complete_manifests(url: str) -> list[Manifest]:
    """Return the manifest of a converted directory, or of all its stages; none until all are complete."""
    root = listed(url)
    paths = ("",) if MANIFEST_NAME in root.objects else stages_for(url, root.objects, 0)
    if any(posixpath.join(path, MANIFEST_NAME) not in root.objects for path in paths):
        return []
    return [read(root.inside(path).local_copy([MANIFEST_NAME])) for path in paths]


def with_small_files(directory: ObjectDirectory) -> tuple[ObjectDirectory, Path]:
    """Return a converted directory, and a local copy of its small files."""
    described = read(directory.local_copy([MANIFEST_NAME]))
    names = [entry.path for entry in small_files(described)]
    return directory, directory.local_copy([MANIFEST_NAME, PLAN_NAME, *names])


def beside(directory: ObjectDirectory, name: str) -> tuple[ObjectDirectory, Path]:
    """Return another directory in the same one."""
    return with_small_files(object_directory(f"{directory.url.rpartition('/')[0]}/{name}"))
