"""Converted directories of one model beside each other: for other numbers of ranks, and for its stages.

model/
  tp-8/  tp-16/                   converted directories
  pp-2-tp-8/
    stage-00000-of-00002/ ...     one for each stage
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError
from .manifest import MANIFEST_NAME

STAGE_DIRECTORY = re.compile(r"stage-([0-9]{5})-of-([0-9]{5})")
VARIANT = re.compile(r"(?:pp-([1-9][0-9]{0,4})-)?tp-([1-9][0-9]{0,4})")
"""A folder beside those for other numbers of ranks: ``tp-8``, or ``pp-2-tp-8`` with directories of stages."""


def variant(path: Path, world_size: int) -> Path:
    """What was converted for so many ranks in a directory: itself, or its ``tp-N/`` or else ``pp-P-tp-N/``.

    Raises:
        CheckpointError: several with stages are for as many ranks.
    """
    inner = path / variant_name(world_size)
    if (path / MANIFEST_NAME).is_file() or not path.is_dir():
        return path
    if (inner / MANIFEST_NAME).is_file():
        return inner
    staged = staged_variant(str(path), (entry.name for entry in path.iterdir()), world_size)
    return path if staged is None else path / staged


def variant_name(tp: int, stages: int = 1) -> str:
    """The name of the folder of a model for ``tp`` ranks, of each stage if there are several."""
    return f"pp-{stages}-tp-{tp}" if stages > 1 else f"tp-{tp}"


def staged_variant(where: str, folders: Iterable[str], world_size: int) -> str | None:
    """That of the folders which has stages for so many ranks in all; None if there is none.

    Raises:
        CheckpointError: there are several in ``where``.
    """
    found = set()
    for match in filter(None, map(VARIANT.fullmatch, folders)):
        if match[1] is not None and int(match[1]) * int(match[2]) == world_size:
            found.add(match[0])
    if len(found) > 1:
        raise CheckpointError(
            f"{where} holds several models for {world_size} ranks, {', '.join(sorted(found))}; name one of "
            "them behind a slash"
        )
    return found.pop() if found else None


def stage_directory(stage: int, count: int) -> str:
    """``stage-00000-of-00002``, a converted directory of its own."""
    return f"stage-{stage:05d}-of-{count:05d}"


def stages_in(path: Path) -> int:
    """How many stages the directories in a directory are of; 0 if it has none.

    Raises:
        CheckpointError: they are of several numbers of stages.
    """
    if (path / MANIFEST_NAME).is_file() or not path.is_dir():
        return 0
    found = (STAGE_DIRECTORY.fullmatch(entry.name) for entry in path.iterdir())
    counts = {int(match[2]) for match in found if match is not None}
    if len(counts) > 1:
        raise CheckpointError(
            f"{path} has stages of several conversions: of {min(counts)} and of {max(counts)} stages"
        )
    return counts.pop() if counts else 0


def stage_directories(path: Path) -> list[Path]:
    """The directories of the stages in a directory, in order, there or missing; none if it holds no stages.

    Raises:
        CheckpointError: they are of several numbers of stages.
    """
    count = stages_in(path)
    return [path / stage_directory(stage, count) for stage in range(count)]


def of_stage_of(path: Path, rank: int, world_size: int) -> Path:
    """The converted directory of the stage of a rank, in a directory of several stages; else the path itself.

    Args:
        path: of a directory.
        rank: among all processes.
        world_size: number of processes.
    """
    count = stages_in(path)
    return path / stage_directory(stage_of(rank, world_size, count), count) if count else path


def stage_of(rank: int, world_size: int, count: int) -> int:
    """The stage of a rank among all processes; the last one for those beyond."""
    return min(rank // max(1, world_size // count), count - 1)
