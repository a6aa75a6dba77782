"""A converted directory to a repository of the Hub, as ``tp-N/`` beside those for other numbers of ranks.

``manifest.json`` comes with the last commit and makes the rest complete; where another content is replaced,
the old manifest goes first. Whatever interrupts a push, there is no manifest that speaks of other files, and
the same command goes on: what is in a commit is left, and what was uploaded without one the Hub knows.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shardconv_runtime.errors import CheckpointError, PlanError
from shardconv_runtime.format import manifest
from shardconv_runtime.format.manifest import MANIFEST_NAME, PLAN_NAME, FileEntry
from shardconv_runtime.hub.tp_folders import numbers

from ..reporting.progress import Advance, Progress, Silent
from ..verifying.directories.verify import verify
from .changes import Changes, Item, Tree, compare, is_there, makes_a_lie, new_bytes, text_item
from .published import Published

if TYPE_CHECKING:
    from .branch import Remote

COMMIT_FILES, COMMIT_BYTES = 100, 20 * 10**9
"""A commit is made after so many files, or so much; what is sent until then is not lost either."""

README = "README.md"
PICTURES = "shardconv"
"""The folder of the pictures."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push has done, or with ``dry_run`` would do."""

    repo_id: str
    path: str
    """Where the converted directory is in the repository, as ``tp-8``."""
    commit: str | None
    """Id of the last commit; None: there is no repository (``dry_run``)."""
    url: str
    sent: Mapping[str, int]
    """Sizes of the files that were not there, by their paths in the repository."""
    sent_bytes: int
    """Of those whose content was nowhere in the repository, which is what is sent."""
    there: Mapping[str, int]
    """Sizes of the files that were there."""
    deleted: tuple[str, ...]
    """Paths of files that were of another content of the same folder."""


def push(
    out: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Pushed:
    """Publish a converted directory in a repository of the Hub.

    The directory is verified first, and never changed. Run again after an interruption, it goes on.

    Args:
        out: a converted directory.
        repo_id: the repository, as ``user/name``; it is made if there is none.
        private: make it private.
        revision: a branch, which is made if there is none; None: ``main``.
        token: of an account that may write; None: that of the login.
        dry_run: change nothing, only say what would be done.
        progress: where to report to.

    Raises:
        DamagedError: the directory is not as it should be; nothing was sent.
        CheckpointError: it is no converted directory.
        SourceError: the Hub refuses, or cannot be reached.

    Example:
        >>> print(shardconv.push("out/", "user/model-tp").url)
    """
    from .branch import Remote

    progress, directory = progress or Silent(), Path(out)
    remote = Remote(repo_id, revision, token)
    manifest.read(directory)
    if not dry_run:
        remote.require_login()
    for remark in verify(directory, progress=progress).remarks:
        progress.stage(f"remark: {remark}")
    work = _Push(directory, remote, progress)
    tree = remote.tree()
    changes = work.changes(tree)
    if changes and not dry_run:
        remote.make(tree, private)
        commit: str | None = work.carry_out()
    else:
        commit = tree.commit
    return work.summary(changes, tree, commit)


def describe(pushed: Pushed, dry_run: bool) -> list[str]:
    """What ``push`` did, in lines for a person."""
    from ..reporting.report import human_bytes

    if not pushed.sent and not pushed.deleted:
        return [f"{pushed.url}: {pushed.path} is there already, nothing was sent"]
    amount = f"{human_bytes(pushed.sent_bytes)} to send, {len(pushed.there)} files are there"
    if dry_run:
        lines = [f"would send    {path}  {human_bytes(size)}" for path, size in pushed.sent.items()]
        lines += [f"is there      {path}  {human_bytes(size)}" for path, size in pushed.there.items()]
        lines += [f"would delete  {path}" for path in pushed.deleted]
        return [*lines, f"{pushed.url}: {len(pushed.sent)} files, {amount}"]
    done = f"{len(pushed.sent)} files, {human_bytes(pushed.sent_bytes)}"
    return [f"{pushed.url}: {pushed.path} is published ({done}; {len(pushed.there)} files were there)"]


class _Push:
    """One directory and one branch.

    Args:
        directory: a converted directory that was verified.
        remote: the branch.
        progress: where to report to.
    """

    def __init__(self, directory: Path, remote: Remote, progress: Progress) -> None:
        self._directory, self._remote, self._progress = directory, remote, progress
        found = manifest.read(directory)
        self._folder = f"tp-{found.tp}"
        self._own = Published(self._folder, found, manifest.read_plan(directory, found))
        self._items = self._directory_items()
        self._drawn: dict[str, str] = {}

    def changes(self, tree: Tree) -> Changes:
        """What is to be done, if this is what is there."""
        return compare([*self._items, *self._around(tree)], self._folder, tree)

    def carry_out(self) -> str:
        """Do it; the id of the last commit."""
        tree = self._remote.tree()
        self._remove_manifest()
        last = {f"{self._folder}/{name}" for name in (MANIFEST_NAME, PLAN_NAME)}
        early = [i for i in self._items if i.path not in last and not is_there(i, tree)]
        if early:
            with self._progress.bar("sending", sum(i.num_bytes for i in early)) as advance:
                for number, group in enumerate(_groups(early), start=1):
                    self._send(f"Files of {self._folder}, part {number}", group, advance)
        self._progress.stage("completing the repository")
        return self._remote.patiently(self._complete)

    def _send(self, title: str, items: Sequence[Item], advance: Advance) -> None:
        """A commit of files that say nothing without their manifest."""
        from .branch import Meter

        meter = Meter(advance)
        self._remote.patiently(lambda: self._remote.commit(title, items, meter=meter))

    def _remove_manifest(self) -> None:
        """Before files change that it speaks of."""

        def remove() -> None:
            tree = self._remote.tree()
            if makes_a_lie(compare(self._items, self._folder, tree), self._folder, tree):
                path = f"{self._folder}/{MANIFEST_NAME}"
                title = f"{self._folder} is being replaced"
                self._remote.commit(title, [], [path], parent=tree.commit)

        self._remote.patiently(remove)

    def _complete(self) -> str:
        """The last commit: manifest, plan, and what is outside of the folder."""
        tree = self._remote.tree()
        changes = self.changes(tree)
        if not changes:  # the answer to an earlier try was lost
            return str(tree.commit)
        title = f"{self._folder} of {self._own.manifest.source.name}"
        return self._remote.commit(title, changes.send, changes.delete, parent=tree.commit)

    def summary(self, changes: Changes, tree: Tree, commit: str | None) -> Pushed:
        """What was done."""
        return Pushed(
            self._remote.repo_id,
            self._folder,
            commit,
            self._remote.url,
            {item.path: item.num_bytes for item in changes.send},
            new_bytes(changes.send, tree),
            {item.path: item.num_bytes for item in changes.there},
            changes.delete,
        )

    def _directory_items(self) -> list[Item]:
        """Every file of the directory, the manifest last."""
        from .hashes import sha256s

        entries = self._own.manifest.files
        kinds = {entry.path: entry.checksum.split(":") for entry in entries}
        recorded = {path: digest for path, (kind, digest) in kinds.items() if kind == "sha256"}
        sizes = {e.path: e.num_bytes for e in entries}
        sizes |= {name: (self._directory / name).stat().st_size for name in (PLAN_NAME, MANIFEST_NAME)}
        unknown = {path: size for path, size in sizes.items() if path not in recorded}
        digests = recorded | sha256s(self._directory, unknown, self._progress)
        return [
            Item(f"{self._folder}/{path}", self._directory / path, size, digests[path])
            for path, size in sizes.items()
        ]

    def _around(self, tree: Tree) -> list[Item]:
        """The files outside of the folder, if this is what is there."""
        from .card import model_card
        from .readme import merged

        small = {f"{self._folder}/{entry.path}" for entry in self._own.manifest.files if _is_small(entry)}
        copies = [_at_root(item) for item in self._items if item.path in small]
        variants = sorted([self._own, *self._others(tree)], key=lambda v: int(v.path[3:]))
        existing = self._remote.text(README, tree)
        card = merged(existing, model_card(self._remote.repo_id, variants, self._base_card))
        return [*copies, text_item(README, card), *map(self._picture, variants)]

    def _picture(self, variant: Published) -> Item:
        """Of a plan, drawn once."""
        from .picture import picture

        digest = variant.manifest.plan_sha256
        if digest not in self._drawn:
            self._drawn[digest] = picture(variant.plan)
        return text_item(f"{PICTURES}/{variant.path}.svg", self._drawn[digest])

    @cached_property
    def _base_card(self) -> str | None:
        """The README.md of the model that was converted, where that is on the Hub."""
        source = self._own.manifest.source
        return self._remote.card_of(source.name, source.revision) if "/" in source.name else None

    def _others(self, tree: Tree) -> Iterator[Published]:
        """The converted directories for other numbers of ranks that are complete."""
        for folder in (f"tp-{number}" for number in numbers(tree.files)):
            if folder != self._folder:
                found = self._read(folder, tree)
                if found is not None:
                    yield found

    def _read(self, folder: str, tree: Tree) -> Published | None:
        with tempfile.TemporaryDirectory() as directory:
            for name in (MANIFEST_NAME, PLAN_NAME):
                text = self._remote.text(f"{folder}/{name}", tree)
                if text is not None:
                    (Path(directory) / name).write_text(text, encoding="utf-8")
            try:
                found = manifest.read(directory)
                return Published(folder, found, manifest.read_plan(directory, found))
            except (CheckpointError, PlanError):
                self._progress.stage(f"{folder} of the repository cannot be read; the card leaves it out")
                return None


def _is_small(entry: FileEntry) -> bool:
    """Whether a file of the directory is copied to the root, for tokenizers and configs to be found there."""
    return "/" not in entry.path and not entry.path.endswith((".safetensors", ".py"))


def _at_root(item: Item) -> Item:
    return dataclasses.replace(item, path=item.path.partition("/")[2])


def _groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Files that come in one commit."""
    group: list[Item] = []
    for item in items:
        if group and (len(group) >= COMMIT_FILES or sum(i.num_bytes for i in group) >= COMMIT_BYTES):
            yield group
            group = []
        group.append(item)
    if group:
        yield group
