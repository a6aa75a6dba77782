"""The steps of a push: files that differ are sent, in commits of which the last one has the manifests."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from posixpath import join

from huggingface_hub import cached_assets_path, constants
from shardconv_runtime.errors import CheckpointError, PlanError
from shardconv_runtime.files.checksums import sha256_of_file
from shardconv_runtime.files.converted_files import ConvertedFiles
from shardconv_runtime.files.manifest import MANIFEST_NAME, PLAN_NAME
from shardconv_runtime.files.tp_folders import Folder, folders
from shardconv_runtime.format.typed_json import write_text
from shardconv_runtime.storage.file_access import WeightFile, num_bytes, stamp

from ..reporting.picture import picture
from ..reporting.progress import Progress
from .branch import Meter, Remote
from .card import merged, model_card
from .published import (
    Changes,
    Item,
    Published,
    Tree,
    breaks_manifest,
    compare,
    is_there,
    published,
    text_item,
)

THREADS = 4


def sha256s(directory: str, files: Mapping[str, WeightFile], progress: Progress) -> dict[str, str]:
    """Return the sha256 (hex) of some files of a directory or a URL, by their paths in it."""
    cache = _HashCache(directory)
    missing = {path: file for path, file in files.items() if cache.get(path, file) is None}
    if missing:
        with progress.bar("sha256", sum(map(num_bytes, missing.values()))) as advance:
            lock = threading.Lock()

            def read(path: str) -> None:
                digest = sha256_of_file(missing[path])
                with lock:
                    cache.put(path, missing[path], digest)
                    advance(num_bytes(missing[path]))

            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(read, missing))
    return {path: cache.get(path, file) or sha256_of_file(file) for path, file in files.items()}


class _HashCache:
    """Hashes of the files of a directory, cached for further pushes.

    The cache is in the folder of the Hub client's cache, not in the directory. A file is read again if its
    size, modification time or inode changed, or in an object store the mark of its bytes.
    """

    def __init__(self, directory: str) -> None:
        name = hashlib.sha256(directory.encode(errors="surrogateescape")).hexdigest()[:32]
        cache = Path(constants.HF_ASSETS_CACHE)
        folder = cached_assets_path("shardconv", "push", "sha256", assets_dir=cache)
        self._file = folder / f"{name}.json"
        self._entries: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads(self._file.read_text())
            self._entries = rows if isinstance(rows, dict) else {}

    def get(self, path: str, file: WeightFile) -> str | None:
        """Return the sha256, unless the file changed since it was read."""
        entry = self._entries.get(path)
        if not isinstance(entry, list) or entry[:-1] != stamp(file):
            return None
        return str(entry[-1])

    def put(self, path: str, file: WeightFile, sha256: str) -> None:
        """Cache a hash; in memory only, if the cache cannot be written."""
        self._entries[path] = [*stamp(file), sha256]
        with contextlib.suppress(OSError):
            write_text(self._file, json.dumps(self._entries))


COMMIT_FILES, COMMIT_BYTES = 100, 20 * 10**9
"""Most files and bytes in one commit; files that were uploaded before a failed commit are not lost either."""

README = "README.md"
PICTURES = "shardconv"
"""Folder of the pictures."""


class Pushing:
    """The push of one directory to one branch."""

    def __init__(
        self, parts: Sequence[ConvertedFiles], own: Published, remote: Remote, progress: Progress
    ) -> None:
        self._remote, self._progress = remote, progress
        self.own, self._folder = own, own.path
        # Every file of the directory, the manifest of each stage after its others.
        recorded: dict[str, str] = {}
        files: dict[str, WeightFile] = {}
        for part, place, described in zip(parts, self.own.folder.parts, self.own.manifests, strict=True):
            start = place.removeprefix(self._folder).lstrip("/")
            for entry in described.files:
                path, (kind, digest) = join(start, entry.path), entry.checksum.split(":")
                files[path] = part.file(entry.path)
                if kind == "sha256":
                    recorded[path] = digest
            files |= {join(start, name): part.file(name) for name in (PLAN_NAME, MANIFEST_NAME)}
        unknown = {path: file for path, file in files.items() if path not in recorded}
        where = parts[0].name if parts[0].objects is not None else str(parts[0].directory.resolve())
        digests = recorded | sha256s(where, unknown, self._progress)
        self._items = [
            Item(f"{self._folder}/{path}", file, num_bytes(file), digests[path])
            for path, file in files.items()
        ]
        self._drawn: dict[str, str] = {}

    def changes(self, tree: Tree) -> Changes:
        """Return the changes to make, given the current files."""
        # Libraries look for tokenizers and configs at the root, outside of the folder.
        first = self.own.folder.parts[0]
        small = {
            f"{first}/{entry.path}"
            for entry in self.own.manifest.files
            if "/" not in entry.path and not entry.path.endswith((".safetensors", ".py"))
        }
        items = [
            dataclasses.replace(item, path=item.path.rpartition("/")[2])
            for item in self._items
            if item.path in small
        ]
        # Other numbers of ranks have separate, complete converted directories.
        read = [self._read(folder, tree) for folder in folders(tree.files) if folder != self.own.folder]
        variants = sorted([self.own, *(pushed for pushed in read if pushed)], key=lambda v: v.folder)
        existing = self._remote.text(README, tree)
        card = merged(existing, model_card(self._remote.repo_id, variants, self._base_card))
        items.append(text_item(README, card))
        for variant in variants:
            digest = variant.manifest.plan_sha256  # of stages, the first one's
            if digest not in self._drawn:
                self._drawn[digest] = picture(variant.plan)
            items.append(text_item(f"{PICTURES}/{variant.path}.svg", self._drawn[digest]))
        return compare([*self._items, *items], self._folder, tree)

    def carry_out(self) -> str:
        """Make the changes, and return the id of the last commit."""
        tree = self._remote.tree()
        self._remove_manifest()
        last = {f"{part}/{name}" for part in self.own.folder.parts for name in (MANIFEST_NAME, PLAN_NAME)}
        early = [i for i in self._items if i.path not in last and not is_there(i, tree)]
        if early:
            with self._progress.bar("sending", sum(i.num_bytes for i in early)) as advance:
                groups: list[list[Item]] = [[]]
                for item in early:
                    group_bytes = sum(i.num_bytes for i in groups[-1])
                    if len(groups[-1]) >= COMMIT_FILES or group_bytes >= COMMIT_BYTES:
                        groups.append([])
                    groups[-1].append(item)
                for number, group in enumerate(groups, start=1):
                    title, meter = f"Files of {self._folder}, part {number}", Meter(advance)
                    self._remote.patiently(partial(self._remote.commit, title, group, meter=meter))
        self._progress.stage("completing the repository")

        def complete() -> str:
            """Make the last commit: manifest, plan, and the files outside of the folder."""
            tree = self._remote.tree()
            changes = self.changes(tree)
            if not changes:  # an earlier commit succeeded, but its answer was lost
                return str(tree.commit)
            title = f"{self._folder} of {self.own.manifest.source.name}"
            return self._remote.commit(title, changes.send, changes.delete, parent=tree.commit)

        return self._remote.patiently(complete)

    def _remove_manifest(self) -> None:
        """Remove the manifests before files change that they list."""

        def remove() -> None:
            tree = self._remote.tree()
            parts = self.own.folder.parts
            if any(breaks_manifest(compare(self._items, part, tree), part, tree) for part in parts):
                there = [path for part in parts if (path := f"{part}/{MANIFEST_NAME}") in tree.files]
                title = f"{self._folder} is being replaced"
                self._remote.commit(title, [], there, parent=tree.commit)

        self._remote.patiently(remove)

    @cached_property
    def _base_card(self) -> str | None:
        """The README.md of the converted model, if that is on the Hub."""
        source = self.own.manifest.source
        return self._remote.card_of(source.name, source.revision) if "/" in source.name else None

    def _read(self, folder: Folder, tree: Tree) -> Published | None:
        """Read a complete converted directory of the repository; None if it cannot be read."""
        with tempfile.TemporaryDirectory() as directory:
            parts = [Path(directory) / part for part in folder.parts]
            for path, part in zip(parts, folder.parts, strict=True):
                path.mkdir(parents=True)
                for name in (MANIFEST_NAME, PLAN_NAME):
                    text = self._remote.text(f"{part}/{name}", tree)
                    if text is not None:
                        (path / name).write_text(text, encoding="utf-8")
            try:
                return published(parts)
            except (CheckpointError, PlanError):
                self._progress.stage(
                    f"{folder.name} of the repository cannot be read; the card leaves it out"
                )
                return None
