"""Push a converted directory to a repository of the Hub, as ``tp-N/`` next to other numbers of ranks.

One that holds stages becomes ``pp-P-tp-N/``, with their directories. ``manifest.json``, of each stage, is in
the last commit and makes the directory complete; before other content is replaced, the old ones are removed.
So an interrupted push never leaves a manifest that lists other files, and the same command continues it:
files that were committed or uploaded are not sent again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.files import manifest
from shardconv_runtime.files.converted_files import parts_of

from ..converted.verify import verify
from ..reporting.progress import Progress, Silent
from ..reporting.summary import human_bytes
from .published import new_bytes, published


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of a push, or with ``dry_run`` of one that was not made."""

    repo_id: str
    path: str
    """Folder of the converted directory in the repository, as ``tp-8``."""
    commit: str | None
    """Id of the last commit; None: the repository does not exist (``dry_run``)."""
    url: str
    sent: Mapping[str, int]
    """Path in the repository -> size, of files that were missing or differed."""
    sent_bytes: int
    """Bytes of the contents that the repository did not have under any path; only these are sent."""
    there: Mapping[str, int]
    """Path -> size, of files that were already in place."""
    deleted: tuple[str, ...]
    """Paths in the same folder that do not belong to the directory."""


@in_default_modes
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

    The directory is verified first. To continue an interrupted push, call it again with the same arguments.

    Args:
        out: a converted directory, or its URL in an object store, whose files are read by ranges.
        repo_id: the repository, for example ``user/name``; created if it does not exist.
        private: make the repository private.
        revision: a branch, created if it does not exist; by default ``main``.
        token: token with write access; by default the token of the Hub login.
        dry_run: change nothing, and only return the planned changes.
        progress: where to report progress.

    Raises:
        DamagedError: if the directory is damaged; nothing was sent.
        CheckpointError: if ``out`` is not a converted directory.
        SourceError: if the Hub rejects the request or cannot be reached.

    Example:
        >>> print(shardconv.push("out/", "user/model-tp").url)
    """
    progress, parts = progress or Silent(), parts_of(out)
    for part in parts:
        manifest.read(part.directory)

    # The Hub client is imported once the directory is known to be a converted one.
    from .branch import Remote
    from .pushing import Pushing

    remote = Remote(repo_id, revision, token)
    if not dry_run:
        remote.require_login()
    for remark in verify(out, progress=progress).remarks:
        progress.stage(f"remark: {remark}")
    work = Pushing(parts, published([part.directory for part in parts]), remote, progress)
    tree = remote.tree()
    changes = work.changes(tree)
    if changes and not dry_run:
        remote.make(tree, private)
        commit: str | None = work.carry_out()
    else:
        commit = tree.commit
    return Pushed(
        remote.repo_id,
        work.own.path,
        commit,
        remote.url,
        {item.path: item.num_bytes for item in changes.send},
        new_bytes(changes.send, tree),
        {item.path: item.num_bytes for item in changes.there},
        changes.delete,
    )


def describe(pushed: Pushed, dry_run: bool) -> list[str]:
    """Return the result of ``push`` as lines to print."""
    if not pushed.sent and not pushed.deleted:
        return [f"{pushed.url}: {pushed.path} is up to date, nothing was sent"]
    amount = f"{human_bytes(pushed.sent_bytes)} to send, {len(pushed.there)} files are in place"
    if dry_run:
        lines = [f"would send    {path}  {human_bytes(size)}" for path, size in pushed.sent.items()]
        lines += [f"in place      {path}  {human_bytes(size)}" for path, size in pushed.there.items()]
        lines += [f"would delete  {path}" for path in pushed.deleted]
        return [*lines, f"{pushed.url}: {len(pushed.sent)} files, {amount}"]
    done = f"{len(pushed.sent)} files, {human_bytes(pushed.sent_bytes)}"
    return [f"{pushed.url}: {pushed.path} is published ({done}; {len(pushed.there)} files were in place)"]
