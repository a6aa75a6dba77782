"""What a push has to change in a repository: the files that are to be there, compared with those that are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardconv_runtime.format.manifest import MANIFEST_NAME


@dataclass(frozen=True, slots=True)
class Item:
    """A file that is to be in the repository."""

    path: str
    """In the repository."""
    content: Path | bytes = field(repr=False)
    num_bytes: int
    sha256: str
    """Of the content, in hex."""

    def blob_id(self) -> str:
        """What the Hub calls a small file with this content; reads it."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def text_item(path: str, text: str) -> Item:
    """A file with some text."""
    content = text.encode()
    return Item(path, content, len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file that is in the repository."""

    num_bytes: int
    blob_id: str
    sha256: str | None
    """Of a file in large-file storage; None: it is a small file, and ``blob_id`` is of its content."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A repository at a commit."""

    commit: str | None
    """None: there is no repository."""
    files: Mapping[str, HubFile]
    private: bool = False
    has_branch: bool = True
    """False: the branch is yet to be made, from this commit."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be done."""

    send: tuple[Item, ...]
    """Files that are not at their paths."""
    there: tuple[Item, ...]
    """Files that are."""
    delete: tuple[str, ...]
    """Files of the converted directory's folder that are not part of it."""

    def __bool__(self) -> bool:
        return bool(self.send or self.delete)


def is_there(item: Item, tree: Tree) -> bool:
    """Whether a file is at its path, with its content."""
    found = tree.files.get(item.path)
    if found is None or found.num_bytes != item.num_bytes:
        return False
    return found.sha256 == item.sha256 if found.sha256 else found.blob_id == item.blob_id()


def compare(items: Sequence[Item], folder: str, tree: Tree) -> Changes:
    """What is to be done so that ``items`` are in the repository, and nothing else is in ``folder``."""
    there = {item.path for item in items if is_there(item, tree)}
    wanted = {item.path for item in items}
    return Changes(
        tuple(item for item in items if item.path not in there),
        tuple(item for item in items if item.path in there),
        tuple(path for path in tree.files if path.startswith(f"{folder}/") and path not in wanted),
    )


def new_bytes(items: Iterable[Item], tree: Tree) -> int:
    """Bytes of those files whose content is nowhere in the repository, each content once."""
    known = {file.sha256 for file in tree.files.values() if file.sha256}
    return sum({i.sha256: i.num_bytes for i in items if i.sha256 not in known}.values())


def makes_a_lie(changes: Changes, folder: str, tree: Tree) -> bool:
    """Whether the manifest that is in ``folder`` would speak of files that are changed under it."""
    inside = [item.path for item in changes.send if item.path.startswith(f"{folder}/")]
    return f"{folder}/{MANIFEST_NAME}" in tree.files and bool(inside)
