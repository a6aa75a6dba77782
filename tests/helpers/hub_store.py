"""What the Hub of the tests holds: contents by their sha256, repositories, branches, commits."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".h5", ".npz", ".zip", ".tar.gz")
"""Names that the ``.gitattributes`` of a new repository sends to large-file storage."""
LFS_BYTES = 10 * 2**20
"""Larger files go there whatever they are called."""
CHUNK_BYTES = 2**20

GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)


def is_lfs(path: str, num_bytes: int, sample: bytes) -> bool:
    """Whether a file goes to large-file storage: by its name, its size, or a zero byte in its first bytes."""
    return num_bytes > 0 and (path.endswith(LFS_SUFFIXES) or num_bytes > LFS_BYTES or b"\0" in sample)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a commit."""

    sha256: str
    num_bytes: int
    oid: str
    """Of the git object, in hex; for a file in large-file storage, of its pointer."""
    lfs: bool

    @property
    def etag(self) -> str:
        """What names its content in answers: the sha256 for large files, else the git object."""
        return self.sha256 if self.lfs else self.oid


@dataclass(frozen=True, slots=True)
class Commit:
    """An immutable snapshot."""

    oid: str
    title: str
    parent: str | None
    date: str
    files: Mapping[str, File] = field(repr=False)
    """By path, sorted."""


class Blobs:
    """Contents in files that are named by their sha256.

    Args:
        directory: where; it is made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._names = iter(range(2**62))
        self._lock = threading.Lock()

    def __contains__(self, sha256: object) -> bool:
        return isinstance(sha256, str) and self.path(sha256).is_file()

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in os.scandir(self.directory) if len(entry.name) == 64)

    def path(self, sha256: str) -> Path:
        """The file of a content; it may be damaged by a test."""
        return self.directory / sha256

    def open(self, sha256: str) -> BinaryIO:
        """Read a content."""
        return self.path(sha256).open("rb")

    def read(self, sha256: str) -> bytes:
        """A whole content."""
        return self.path(sha256).read_bytes()

    def scratch(self) -> Path:
        """The name of a new file in the directory, to be written and then given to ``adopt``."""
        with self._lock:
            return self.directory / f"{next(self._names)}.new"

    def adopt(self, file: Path) -> str:
        """Take a file of ``scratch`` as a content; its sha256."""
        sha256 = digest(file)
        file.replace(self.path(sha256))
        return sha256

    def put(self, content: bytes | Path) -> str:
        """Take bytes, or a copy of a file; the sha256."""
        file = self.scratch()
        if isinstance(content, Path):
            shutil.copyfile(content, file)
        else:
            file.write_bytes(content)
        return self.adopt(file)


def digest(file: Path) -> str:
    """The sha256 of a file, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def git_oid(content: bytes) -> str:
    """What git calls a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """A repository: branches, and all commits that were ever made."""

    repo_id: str
    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The user or organisation before the slash."""
        return self.repo_id.split("/")[0]

    def at(self, revision: str) -> Commit | None:
        """The commit of a branch or of a (shortened) commit id."""
        oid = self.branches.get(revision.removeprefix("refs/heads/"), revision)
        found = [commit for name, commit in self.commits.items() if len(oid) >= 7 and name.startswith(oid)]
        return found[0] if len(found) == 1 else None

    def add(self, branch: str, title: str, files: Mapping[str, File]) -> Commit:
        """Commit a snapshot to a branch, which is made if there is none."""
        parent, date = self.branches.get(branch), datetime.now(UTC)
        listing = "".join(f"{path} {files[path].oid}\n" for path in sorted(files))
        text = f"{self.repo_id} {parent} {title} {date} {len(self.commits)}\n{listing}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        stamp = date.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        commit = Commit(oid, title, parent, stamp, {path: files[path] for path in sorted(files)})
        self.commits[oid] = commit
        self.branches[branch] = oid
        return commit

    def history(self, branch: str = "main") -> list[Commit]:
        """The commits of a branch, the last one first."""
        commits, oid = [], self.branches.get(branch)
        while oid is not None:
            commits.append(self.commits[oid])
            oid = commits[-1].parent
        return commits


class Store:
    """All repositories and their contents.

    Args:
        directory: where the contents lie.
    """

    def __init__(self, directory: Path) -> None:
        self.blobs = Blobs(directory)
        self.repos: dict[str, Repo] = {}
        self.lock = threading.RLock()
        """Held while a repository is changed."""

    def create(self, repo_id: str, private: bool = False, gated: bool = False) -> Repo:
        """A new repository; as on the Hub it has a first commit with ``.gitattributes``."""
        with self.lock:
            repo = self.repos[repo_id] = Repo(repo_id, private, gated)
            first = self.file(".gitattributes", GIT_ATTRIBUTES.encode())
            repo.add("main", "initial commit", {".gitattributes": first})
            return repo

    def file(self, path: str, content: bytes | Path) -> File:
        """Take a content that is to be at a path."""
        sha256 = self.blobs.put(content)
        num_bytes = self.blobs.path(sha256).stat().st_size
        with self.blobs.open(sha256) as opened:
            lfs = is_lfs(path, num_bytes, opened.read(512))
        return self.lfs_file(sha256, num_bytes) if lfs else self.regular_file(sha256)

    def lfs_file(self, sha256: str, num_bytes: int) -> File:
        """A file in large-file storage, whose content is there."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {num_bytes}\n"
        return File(sha256, num_bytes, git_oid(pointer.encode()), lfs=True)

    def regular_file(self, sha256: str) -> File:
        """A file in git, whose content is there."""
        content = self.blobs.read(sha256)
        return File(sha256, len(content), git_oid(content), lfs=False)

    def add(
        self, repo_id: str, files: Mapping[str, bytes | Path], private: bool, gated: bool, branch: str
    ) -> Commit:
        """Commit ``files`` to a repository, which is created if there is none."""
        made = {path: self.file(path, content) for path, content in files.items()}
        with self.lock:
            repo = self.repos.get(repo_id) or self.create(repo_id, private, gated)
            repo.branches.setdefault(branch, repo.branches["main"])
            before = repo.commits[repo.branches[branch]].files
            return repo.add(branch, "add files", {**before, **made})


def files_below(directory: Path) -> dict[str, bytes | Path]:
    """The files of a directory by their paths in it, with ``/``."""
    return {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}


def folders_of(paths: Iterable[str]) -> set[str]:
    """All folders that hold one of ``paths``."""
    return {"/".join(parts[:n]) for parts in (p.split("/") for p in paths) for n in range(1, len(parts))}
