"""Folders and files of a repository on the Hub, and the changes that a push makes to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import MANIFEST_NAME, Manifest
from shardconv_runtime.files.tp_folders import Folder
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.storage.file_access import WeightFile, read_bytes

from ..converted.shards import of_all_stages


@dataclass(frozen=True, slots=True)
class Published:
    """One of the folders of a repository."""

    folder: Folder
    manifests: tuple[Manifest, ...]
    """Manifests of its converted directories, one for each stage."""
    plan: Plan
    """The plan of all stages."""

    @property
    def path(self) -> str:
        """The path of the folder in the repository, for example ``tp-8``."""
        return self.folder.name

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first stage."""
        return self.manifests[0]

    @property
    def quantization_errors(self) -> dict[str, float]:
        """Errors of the weights that were quantized when they were converted, by FQN."""
        return manifest.quantization_errors(self.manifests)


def published(directories: Sequence[Path]) -> Published:
    """Read a model that was converted for one number of ranks, from its directories, one for each stage."""
    manifests = tuple(manifest.read(directory) for directory in directories)
    plans = [manifest.read_plan(d, m) for d, m in zip(directories, manifests, strict=True)]
    stages = plans[0].stages
    count = 1 if stages is None else stages.count
    whole = set(map(of_all_stages, plans))
    if len(whole) > 1 or len(plans) != count:
        raise CheckpointError(f"{directories[0]} is one of {count} stages, which are pushed together")
    return Published(Folder(plans[0].tp, count), manifests, whole.pop())


@dataclass(frozen=True, slots=True)
class Item:
    """A file that the repository is to have."""

    path: str
    """The path in the repository."""
    content: WeightFile | bytes = field(repr=False)
    num_bytes: int
    sha256: str
    """sha256 (hex) of the content."""

    def blob_id(self) -> str:
        """Return the Hub's id of a small file with this content, which is read."""
        content = self.content if isinstance(self.content, bytes) else read_bytes(self.content)
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def text_item(path: str, text: str) -> Item:
    """Return a text file."""
    content = text.encode()
    return Item(path, content, len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in the repository."""

    num_bytes: int
    blob_id: str
    sha256: str | None
    """sha256 of a file in large-file storage; None: a small file, with ``blob_id`` of its content."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A branch of a repository at a commit."""

    commit: str | None
    """The id of the commit; None if the repository does not exist."""
    files: Mapping[str, HubFile]
    private: bool = False
    has_branch: bool = True
    """Whether the branch exists; if not, it will start at this commit."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a push."""

    send: tuple[Item, ...]
    """Files that are missing at their paths, or differ."""
    there: tuple[Item, ...]
    """Files that are already in place."""
    delete: tuple[str, ...]
    """Files in the folder of the converted directory that do not belong to it."""

    def __bool__(self) -> bool:
        return bool(self.send or self.delete)


def is_there(item: Item, tree: Tree) -> bool:
    """Return whether the repository has a file at its path, with its content."""
    remote = tree.files.get(item.path)
    if remote is None or remote.num_bytes != item.num_bytes:
        return False
    return remote.sha256 == item.sha256 if remote.sha256 else remote.blob_id == item.blob_id()


def compare(items: Sequence[Item], folder: str, tree: Tree) -> Changes:
    """Return the changes after which the repository has ``items``, and nothing else in ``folder``."""
    there = {item.path for item in items if is_there(item, tree)}
    paths = {item.path for item in items}
    return Changes(
        tuple(item for item in items if item.path not in there),
        tuple(item for item in items if item.path in there),
        tuple(path for path in tree.files if path.startswith(f"{folder}/") and path not in paths),
    )


def new_bytes(items: Iterable[Item], tree: Tree) -> int:
    """Return the bytes of the contents that the repository does not have under any path, each counted
    once."""
    stored_hashes = {file.sha256 for file in tree.files.values() if file.sha256}
    return sum({i.sha256: i.num_bytes for i in items if i.sha256 not in stored_hashes}.values())


def breaks_manifest(changes: Changes, folder: str, tree: Tree) -> bool:
    """Return whether the changes of other files would make the manifest in ``folder`` wrong."""
    manifest_path = f"{folder}/{MANIFEST_NAME}"
    inside = [i.path for i in changes.send if i.path.startswith(f"{folder}/") and i.path != manifest_path]
    return manifest_path in tree.files and bool(inside)
