"""The converted directory that OUT is or contains, on this machine or on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardconv_runtime.errors import CheckpointError, SourceError

if TYPE_CHECKING:
    from shardconv_runtime.format.manifest import Manifest
    from shardconv_runtime.format.plan import Plan
    from shardconv_runtime.hub.fetch import Repository


@dataclass(frozen=True)
class Opened:
    """A converted directory, with its manifest and plan."""

    directory: Path
    """Of a repository: in the cache, with only these two files."""
    manifest: Manifest
    plan: Plan
    repository: Repository | None = None
    """The repository on the Hub that it comes from."""

    def check_sizes(self) -> None:
        """Check that every file exists and has its size.

        Raises:
            CheckpointError: a file is missing or has another size.
            SourceError: the Hub cannot be reached.
        """
        from shardconv_runtime.format import manifest

        if self.repository is None:
            for entry in self.manifest.files:
                reader = "every rank" if entry.rank is None else f"rank {entry.rank}"
                manifest.check_size(self.directory, entry, reader)
        else:
            self.repository.check_sizes(self.manifest.files)


def opened(out: str, tp: int | None, hub: Mapping[str, Any]) -> Opened:
    """The converted directory that OUT is or contains.

    Args:
        out: a directory, or the id of a repository.
        tp: number of ranks; None: any, if there is only one directory.
        hub: the fields of ``Hub``.

    Raises:
        SourceError: the repository cannot be read, or has no directory for ``tp`` ranks, or several.
        CheckpointError: there is no converted directory, or it is malformed.
        PlanError: the plan is malformed or of another version.
    """
    from shardconv_runtime.format import manifest

    repository = None
    if is_on_hub(out):
        from shardconv_runtime.hub.fetch import find
        from shardconv_runtime.hub.library_logging import without_hub_logging
        from shardconv_runtime.hub_options import Hub

        with without_hub_logging():
            repository, found = find(out, Hub(**hub), tp)
        directory = repository.directory
    else:
        directory = _local(Path(out), tp)
        found = manifest.read(directory)
    if tp not in (None, found.tp):
        raise CheckpointError(
            f"{out} is converted for {found.tp} ranks, not for {tp}; leave out --tp, or convert it again"
        )
    return Opened(directory, found, manifest.read_plan(directory, found), repository)


def adapter_plan(out: str) -> Plan | None:
    """The plan of a model with the adapter in a directory that ``adapt`` wrote; None of others.

    Raises:
        PlanError: the plan is malformed or of another version.
    """
    from shardconv_runtime.adapters.adapter_names import PLAN_NAME
    from shardconv_runtime.format.manifest import MANIFEST_NAME

    path = Path(out) / PLAN_NAME
    if not path.is_file() or (Path(out) / MANIFEST_NAME).is_file():
        return None
    from shardconv_runtime.format import plan_json

    return plan_json.read(path)


def opened_stages(out: str, tp: int | None, hub: Mapping[str, Any]) -> list[Opened]:
    """The converted directories of all stages in OUT, with the plan of all; else that which OUT is or has.

    Raises:
        ShardconvError: see ``opened``; or OUT has stages of several conversions.
    """
    from shardconv_runtime.format.manifest import stage_directories

    directories = [] if is_on_hub(out) else stage_directories(Path(out))
    if not directories:
        return [opened(out, tp, hub)]
    from ..converted.shards import of_all_stages

    found = [opened(str(directory), tp, hub) for directory in directories]
    found = [replace(each, plan=of_all_stages(each.plan)) for each in found]
    if any(each.plan != found[0].plan for each in found):
        raise CheckpointError(f"{out} has stages of several conversions; convert again")
    return found


def is_on_hub(out: str) -> bool:
    """Whether OUT is the id of a repository, ``user/name``, and not a path."""
    if "/" not in out or out.endswith(".json") or Path(out).exists():
        return False
    from shardconv_runtime.hub.access import looks_like_path

    return not looks_like_path(out)


def require_local(out: str) -> None:
    """Refuse the id of a repository, for a command that reads every byte.

    Raises:
        SourceError: ``out`` is one; says how to download it.
    """
    if is_on_hub(out):
        raise SourceError(
            f"no such directory: {out}; download a repository on the Hub first: hf download {out} "
            "--local-dir DIR, then give DIR or its tp-N/"
        )


def _local(path: Path, tp: int | None) -> Path:
    """The converted directory at or in ``path``."""
    from shardconv_runtime.format.manifest import MANIFEST_NAME, variant
    from shardconv_runtime.hub.tp_folders import only

    if tp is not None:
        return variant(path, tp)
    inner = [file.relative_to(path).as_posix() for file in path.glob(f"tp-*/{MANIFEST_NAME}")]
    return path / only(str(path), inner) if inner and not (path / MANIFEST_NAME).is_file() else path
