"""A converted directory in a repository of the Hub, whose manifest and plan were fetched."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from ..format.manifest import Manifest, read_plan
from ..format.plan import Plan
from ..hub.access import looks_like_path
from ..hub.fetch import Repository, find
from ..hub.tp_folders import folder_in
from ..hub_options import Hub


def find_converted(
    path: str, hub: Hub, rank: int, world_size: int
) -> tuple[Path, Manifest, Plan, Repository]:
    """Directory, manifest and plan for ``world_size`` ranks in a repository, and the repository; of several
    stages, those of the stage of ``rank``.

    Raises:
        CheckpointError: ``path`` cannot be the id of a repository.
        SourceError: it cannot be reached, or has no directory for so many ranks.
    """
    if Path(path).expanduser().exists() or "/" not in path or looks_like_path(folder_in(path)[0]):
        raise CheckpointError(
            f"{path}: no such directory; give the directory that `shardconv convert` wrote, or the id of a "
            "repository on the Hub"
        )
    repository, found = find(path, hub, world_size, rank)
    return repository.directory, found, read_plan(repository.directory, found), repository
