"""Objects of a directory in an object store that is written: records with conditions, files in parts."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardconv_runtime.errors import NetworkError, ShardconvError
from shardconv_runtime.files.manifest import PARTIAL
from shardconv_runtime.files.object_stores import ObjectDirectory, listed
from shardconv_runtime.hub_options import again
from shardconv_runtime.storage.store_client import (
    WRITE_RETRIES,
    client,
    explained,
    failure,
    library,
    status_of,
)

PART_BYTES = 8 << 20
"""Bytes of one request, for files of less than 80 GB. S3 takes parts of 5 MiB and more."""

MOST_PARTS = 10_000
"""Most parts of one file in S3."""

_UNMET = ("AlreadyExistsError", "PreconditionError", "NotFoundError", "FileNotFoundError")
"""Errors of the library for a write whose condition is not met."""

Version = Mapping[str, str]
"""The store's marks of an object's bytes."""


@dataclass(frozen=True, slots=True)
class Record:
    """A small object."""

    data: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """A directory in an object store that is written."""

    url: str

    def listed(self) -> ObjectDirectory:
        """Return its present objects."""
        return listed(self.url)

    def read(self, name: str) -> Record | None:
        """Return a small object; None if there is none."""
        try:
            answer = library().get(self._client, name)
            return Record(bytes(answer.bytes()), _version(answer.meta))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._error(name, error) from None  # its text may hold a signed address

    def replace(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """Write a small object if nobody has changed it since it was read.

        Stores without conditions write it in any case.

        Args:
            version: the version of the object that was read; None if there was none.

        Returns:
            The version that was written; None if somebody has changed it.
        """
        mode = "create" if version is None else dict(version)
        try:
            return _version(library().put(self._client, name, data, mode=mode, use_multipart=False))
        except Exception as error:
            if status_of(error) == 501 or type(error).__name__ == "NotImplementedError":
                return self.write(name, data)
            if type(error).__name__ not in _UNMET:
                raise self._error(name, error) from None  # its text may hold a signed address
        # If the answer to a write was lost, the library repeats it, and the condition is not met any more.
        current = self.read(name)
        return current.version if current is not None and current.data == data else None

    def write(self, name: str, data: bytes | Path) -> Version:
        """Write an object that is here; a long one in parts."""
        try:
            return _version(library().put(self._client, name, data, chunk_size=PART_BYTES))
        except Exception as error:
            raise self._error(name, error) from None  # its text may hold a signed address

    def require_writable(self) -> None:
        """Write an object and remove it, both of which every conversion does, so that a refusal comes first.

        It is in the folder of records, and a process that dies in between leaves it to the next one.
        """
        name = f"{PARTIAL}/check-{uuid.uuid4().hex}"
        self.write(name, b"")
        self.remove([name])

    def stream(self, name: str, parts: Iterator[memoryview], part_bytes: int, num_requests: int) -> str:
        """Write an object in parts of equal size, the last one shorter, and return its mark.

        If one cannot be sent or made, the upload is aborted. Nobody sees an object before it is complete.
        """
        try:
            result = library().put(
                self._client,
                name,
                parts,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=num_requests,
            )
        except FileNotFoundError:
            raise NetworkError(
                f"{self.url}/{name}: the upload is gone: the answer to its end was lost, or a rule of the "
                f"bucket removed it; {again()}, which continues"
            ) from None
        except Exception as error:
            raise self._error(name, error) from None  # its text may hold a signed address
        return _version(result).get("e_tag", "")

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects that are there."""
        some = list(names)
        with explained(self.url):
            if some:
                library().delete(self._client, some)

    @property
    def _client(self) -> Any:
        return client(self.url, WRITE_RETRIES)

    def _error(self, name: str, error: Exception) -> Exception:
        """Return the error to raise for one of the library."""
        return error if isinstance(error, ShardconvError) else failure(f"{self.url}/{name}", error)


def _version(result: Mapping[str, Any]) -> Version:
    return {mark: result[mark] for mark in ("e_tag", "version") if result[mark] is not None}
