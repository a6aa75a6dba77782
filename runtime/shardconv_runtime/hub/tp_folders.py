"""Converted directories of one model for several numbers of ranks: ``tp-2/``, ``tp-8/`` and so on."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import SourceError
from ..format.manifest import MANIFEST_NAME, stage_directory
from ..wording import is_command, option

_STAGE = re.compile(rf"stage-[0-9]{{5}}-of-([0-9]{{5}})/{re.escape(MANIFEST_NAME)}")
_FOLDER = re.compile(rf"tp-([1-9][0-9]*)/{re.escape(MANIFEST_NAME)}")


def numbers(names: Iterable[str]) -> list[int]:
    """The numbers of ranks that have a folder, sorted.

    Args:
        names: of all files.
    """
    return sorted(int(match[1]) for match in map(_FOLDER.fullmatch, names) if match)


def of_stage(names: Iterable[str], rank: int, world_size: int) -> str | None:
    """The folder of the stage of a rank, ``stage-00000-of-00002/``; None without folders of stages.

    Args:
        names: of all files.
        rank: among all processes.
        world_size: number of processes.
    """
    counts = {int(match[1]) for match in map(_STAGE.fullmatch, names) if match}
    if len(counts) != 1:
        return None
    (count,) = counts
    return stage_directory(min(rank // max(1, world_size // count), count - 1), count) + "/"


def only(where: str, names: Iterable[str]) -> str:
    """The folder of the only converted directory.

    Args:
        where: for errors.
        names: of all files, relative to the directory or repository.

    Returns:
        The folder, such as ``"tp-8/"``; empty for the directory or repository itself.

    Raises:
        SourceError: several converted directories exist, or none.
    """
    found = list(names)
    folders = [f"tp-{number}/" for number in numbers(found)]
    if MANIFEST_NAME in found:
        folders.insert(0, "")
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise SourceError(f"{where} holds no converted model; name the output of shardconv convert or push")
    named = ", ".join(folder.rstrip("/") or "one outside of folders" for folder in folders)
    raise SourceError(f"{where} holds several converted models, {named}; choose with {option('tp')}")


def nothing_for(where: str, names: Iterable[str], world_size: int) -> str:
    """The message that a directory or repository lacks a model for ``world_size`` ranks."""
    start = f"{where} holds no converted model for {world_size} rank{'s' if world_size > 1 else ''}"
    found = numbers(names)
    if not found:
        return f"{start} or any other number; convert it" + (
            "" if is_command() else ", or pass plan= to load it as it is"
        )
    advice = f"give one of these as {option('tp')}" if is_command() else "start as many processes"
    return f"{start}, but for {', '.join(map(str, found))}; {advice}"
