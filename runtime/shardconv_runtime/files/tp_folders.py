"""Converted directories of one model for several numbers of ranks: ``tp-2/``, ``tp-8/``, ``pp-2-tp-8/``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..comm.launchers import other_launcher
from ..errors import NotConvertedError, OptionError
from ..hub_options import is_command, option
from .manifest import MANIFEST_NAME
from .model_config import CONFIG
from .small_files import STAGE_DIRECTORY, VARIANT, stage_directory, staged_variant, variant_name


@dataclass(frozen=True, slots=True, order=True)
class Folder:
    """A conversion for one number of ranks."""

    tp: int
    stages: int = 1

    @classmethod
    def named(cls, name: str) -> Folder | None:
        """Return the folder of a name; None of others."""
        match = VARIANT.fullmatch(name)
        return None if match is None else cls(int(match[2]), int(match[1] or 1))

    @property
    def name(self) -> str:
        """Return the name: ``tp-8``, or ``pp-2-tp-8`` with a directory for each stage."""
        return variant_name(self.tp, self.stages)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the paths of its converted directories: itself, or one for each stage."""
        if self.stages == 1:
            return (self.name,)
        return tuple(f"{self.name}/{stage_directory(k, self.stages)}" for k in range(self.stages))


def folders(names: Iterable[str]) -> list[Folder]:
    """Return the folders that are complete, sorted by ranks and stages."""
    there = set(names)
    named = filter(None, {Folder.named(name.partition("/")[0]) for name in there})
    return sorted(f for f in named if all(f"{part}/{MANIFEST_NAME}" in there for part in f.parts))


def stages_for(where: str, names: Iterable[str], world_size: int) -> tuple[str, ...]:
    """Return the directories of the stages of a model for this many processes; none if it has no stages."""
    there = list(names)
    by_name = {folder.name: folder for folder in folders(there) if folder.stages > 1}
    variant = staged_variant(where, by_name, world_size)
    if variant is not None:
        return by_name[variant].parts
    directories = (name.removesuffix(f"/{MANIFEST_NAME}") for name in there)
    counts = {int(match[2]) for match in map(STAGE_DIRECTORY.fullmatch, directories) if match is not None}
    if len(counts) != 1:
        return ()
    (count,) = counts
    return tuple(stage_directory(k, count) for k in range(count))


def directories_for(where: str, names: Iterable[str], world_size: int) -> tuple[str, ...]:
    """Return the directories of a model for this many processes: one, or one for each stage.

    Returns:
        Their paths, with ``""`` for the directory or repository itself; none of an ordinary model.

    Raises:
        NotConvertedError: there is no model, or it was converted for other numbers of ranks.
    """
    there = set(names)
    if MANIFEST_NAME in there:
        return ("",)
    variant = variant_name(world_size)
    if f"{variant}/{MANIFEST_NAME}" in there:
        return (variant,)
    stages = stages_for(where, there, world_size)
    if not stages and (CONFIG not in there or folders(there)):
        raise NotConvertedError(nothing_for(where, there, world_size))
    return stages


def folder_in(where: str) -> tuple[str, Folder | None]:
    """Return the id of a repository and the folder of ``user/model/pp-2-tp-8``; None without a folder."""
    repo_id, _, last = where.rpartition("/")
    folder = Folder.named(last)
    return (where, None) if folder is None or "/" not in repo_id else (repo_id, folder)


def only(where: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the directories of the only model that was converted: one, or one for each stage.

    Returns:
        Their paths, such as ``"tp-8"``; empty for the directory or repository itself.
    """
    there = list(names)
    parts_of_folder = {folder.name: folder.parts for folder in folders(there)}
    at_root = ("",) if MANIFEST_NAME in there else stages_for(where, there, 0)
    if at_root:
        parts_of_folder = {"one outside of folders": at_root, **parts_of_folder}
    if len(parts_of_folder) == 1:
        return next(iter(parts_of_folder.values()))
    if not parts_of_folder:
        raise NotConvertedError(
            f"{where} holds no converted model; name the output of shardconv convert or push"
        )
    raise OptionError(
        f"{where} holds several converted models, {', '.join(parts_of_folder)}; choose with "
        f"{option('tp')}, or name the folder behind a slash"
    )


def nothing_for(where: str, names: Iterable[str], world_size: int) -> str:
    """Return the message that a directory or repository lacks a model for ``world_size`` ranks."""
    start = f"{where} holds no converted model for {world_size} rank{'s' if world_size > 1 else ''}"
    directories = folders(names)
    if not directories:
        return f"{start} or any other number; convert it" + (
            "" if is_command() else ", or pass plan= to load it as it is"
        )
    if is_command():
        plain = [str(folder.tp) for folder in directories if folder.stages == 1]
        advice = f"give one of these as {option('tp')}" if plain else "name the folder behind a slash"
        return f"{start}, but for {', '.join(plain or [folder.name for folder in directories])}; {advice}"
    counts = (f"{f.tp * f.stages}" + (f" ({f.stages} stages)" if f.stages > 1 else "") for f in directories)
    return f"{start}, but for {', '.join(counts)}; start as many processes" + (
        other_launcher() if world_size == 1 else ""
    )
