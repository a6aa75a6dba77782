"""The sha256 of the files of a converted directory, cached for further pushes.

The cache lies with that of the Hub client, not in the directory. A file is read again if its size,
modification time or inode changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import cached_assets_path, constants
from shardconv_runtime.format.manifest import sha256_of
from shardconv_runtime.format.typed_json import write_text

from ..reporting.progress import Progress

THREADS = 4


def sha256s(directory: Path, paths: Mapping[str, int], progress: Progress) -> dict[str, str]:
    """The sha256 (hex) of some files of a directory, by their paths in it.

    Args:
        directory: a converted directory.
        paths: sizes by path.
        progress: reports the bytes that are read.
    """
    known = _HashCache(directory)
    missing = [path for path in paths if known.get(path) is None]
    if missing:
        with progress.bar("sha256", sum(paths[path] for path in missing)) as advance:
            lock = threading.Lock()

            def read(path: str) -> None:
                digest = sha256_of(directory / path)
                with lock:
                    known.put(path, digest)
                    advance(paths[path])

            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(read, missing))
    return {path: known.get(path) or sha256_of(directory / path) for path in paths}


class _HashCache:
    """Cached hashes of the files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
        cache = Path(constants.HF_ASSETS_CACHE)
        folder = cached_assets_path("shardconv", "push", "sha256", assets_dir=cache)
        self._file = folder / f"{name}.json"
        self._entries: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._file.read_text())
            self._entries = found if isinstance(found, dict) else {}

    def get(self, path: str) -> str | None:
        """The sha256, unless the file changed since it was read."""
        entry = self._entries.get(path)
        if not isinstance(entry, list) or entry[:-1] != self._identity(path):
            return None
        return str(entry[-1])

    def put(self, path: str, sha256: str) -> None:
        """Cache a hash; in memory only, if the cache cannot be written."""
        self._entries[path] = [*self._identity(path), sha256]
        with contextlib.suppress(OSError):
            write_text(self._file, json.dumps(self._entries))

    def _identity(self, path: str) -> list[object]:
        stats = (self._directory / path).stat()
        return [stats.st_size, stats.st_mtime_ns, stats.st_ino]
