"""Reads what was converted for one number of ranks, as a folder in a repository of the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardconv_runtime.errors import CheckpointError
from shardconv_runtime.format import manifest
from shardconv_runtime.format.manifest import Manifest
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.hub.tp_folders import Folder

from ..converted.shards import of_all_stages


@dataclass(frozen=True, slots=True)
class Published:
    """One of the folders of a repository."""

    folder: Folder
    manifests: tuple[Manifest, ...]
    """Of its converted directories, one for each stage."""
    plan: Plan
    """Of all stages."""

    @property
    def path(self) -> str:
        """The path of the folder in the repository, for example ``tp-8``."""
        return self.folder.name

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first stage."""
        return self.manifests[0]


def published(directories: Sequence[Path]) -> Published:
    """Read what was converted for one number of ranks, from its directories, one for each stage.

    Raises:
        CheckpointError: if a manifest is malformed, or the stages are not those of one conversion.
        PlanError: if a plan is malformed.
    """
    manifests = tuple(manifest.read(directory) for directory in directories)
    plans = [manifest.read_plan(d, m) for d, m in zip(directories, manifests, strict=True)]
    stages = plans[0].stages
    count = 1 if stages is None else stages.count
    whole = set(map(of_all_stages, plans))
    if len(whole) > 1 or len(plans) != count:
        raise CheckpointError(f"{directories[0]} is one of {count} stages, which are pushed together")
    return Published(Folder(plans[0].tp, count), manifests, whole.pop())
