"""Opens the converted directory that OUT is or contains, on this machine or on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardconv_runtime.adapters.adapter_names import PLAN_NAME
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.manifest import MANIFEST_NAME, check_size, read_plan
from shardconv_runtime.format.manifest import read as read_manifest
from shardconv_runtime.format.small_files import stage_directories, variant
from shardconv_runtime.hub.tp_folders import folder_in, folders, only
from shardconv_runtime.hub_options import Hub, looks_like_path

from ..converted.shards import of_all_stages

if TYPE_CHECKING:
    from shardconv_runtime.format.manifest import Manifest
    from shardconv_runtime.format.plan import Plan
    from shardconv_runtime.hub.fetch import Repository


@dataclass(frozen=True)
class Opened:
    """A converted directory, with its manifest and plan."""

    directory: Path
    """The directory; for a repository, a directory in the cache that has only these two files."""
    manifest: Manifest
    plan: Plan
    repository: Repository | None = None
    """The repository on the Hub that it comes from."""

    def check_sizes(self) -> None:
        """Check that every file exists and has its size.

        Raises:
            CheckpointError: if a file is missing or has another size.
            SourceError: if the Hub cannot be reached.
        """
        if self.repository is None:
            for entry in self.manifest.files:
                reader = "every rank" if entry.rank is None else f"rank {entry.rank}"
                check_size(self.directory, entry, reader)
        else:
            self.repository.check_sizes(self.manifest.files)


def opened(out: str, tp: int | None, hub: Mapping[str, Any]) -> list[Opened]:
    """Open the converted directory that OUT is or contains, or the directories of all its stages. Each gets
    the plan of all stages.

    Args:
        out: a directory, or the id of a repository.
        tp: number of ranks; None: any, if there is only one directory.
        hub: the fields of ``Hub``.

    Raises:
        SourceError: if the repository cannot be read, or has no directory for ``tp`` ranks, or several.
        CheckpointError: if there is no converted directory, or it is malformed, or has stages of several
            conversions.
        PlanError: if the plan is malformed or of another version.
    """
    if is_on_hub(out):
        # The Hub client is slow to import, and a local directory does not need it.
        from shardconv_runtime.hub.fetch import find_all
        from shardconv_runtime.hub.hub_errors import without_hub_logging

        with without_hub_logging():
            found = find_all(out, Hub(**hub), tp)
        parts = [Opened(r.directory, m, read_plan(r.directory, m), r) for r, m in found]
    else:
        directories = _directories(Path(out), tp)
        manifests = [read_manifest(directory) for directory in directories]
        parts = [Opened(d, m, read_plan(d, m)) for d, m in zip(directories, manifests, strict=True)]
    if (number := parts[0].manifest.tp) != tp and tp is not None:
        raise CheckpointError(
            f"{out} is converted for {number} ranks, not for {tp}; leave out --tp, or convert it again"
        )
    if len(parts) > 1:
        parts = [replace(each, plan=of_all_stages(each.plan)) for each in parts]
    if any(each.plan != parts[0].plan for each in parts):
        raise CheckpointError(f"{out} has stages of several conversions; convert again")
    return parts


def adapter_plan(out: str) -> Plan | None:
    """Read the plan of a model with the adapter in a directory that ``adapt`` wrote; None for others.

    Raises:
        PlanError: if the plan is malformed or of another version.
    """
    path = Path(out) / PLAN_NAME
    if not path.is_file() or (Path(out) / MANIFEST_NAME).is_file():
        return None

    return plan_json.read(path)


def is_on_hub(out: str) -> bool:
    """Return whether OUT is the id of a repository, ``user/name``, and not a path."""
    if "/" not in out or out.endswith(".json") or Path(out).exists():
        return False
    return not looks_like_path(folder_in(out)[0])


def require_local(out: str) -> None:
    """Refuse the id of a repository, for a command that reads every byte.

    Raises:
        SourceError: if ``out`` is one; the message says how to download it.
    """
    if is_on_hub(out):
        raise SourceError(
            f"no such directory: {out}; download a repository on the Hub first: hf download {out} "
            "--local-dir DIR, then give DIR or its tp-N/"
        )


def _directories(path: Path, tp: int | None) -> list[Path]:
    """Return the converted directories in ``path``, or itself."""
    if tp is not None:
        path = variant(path, tp)
    elif not (path / MANIFEST_NAME).is_file():
        files = chain(path.glob(f"tp-*/{MANIFEST_NAME}"), path.glob(f"pp-*/stage-*/{MANIFEST_NAME}"))
        inner = [file.relative_to(path).as_posix() for file in files]
        if folders(inner):
            return [path / part for part in only(str(path), inner)]
    return stage_directories(path) or [path]
