"""The directories of the stages that a process has beside its first one."""

from __future__ import annotations

from dataclasses import replace

from ..errors import CheckpointError
from ..format import manifest
from ..format.small_files import stage_directory
from ..format.staged_names import num_stages, stages_of
from ..hub.fetch import beside
from .building import CheckedSource


def with_further(found: CheckedSource, per_process: int) -> CheckedSource:
    """The directory of a process's first stage with those of its others, beside it.

    Args:
        found: of the first stage; an ordinary model has no others.
        per_process: how many stages a process has.

    Raises:
        CheckpointError: one is missing, or of another conversion.
        SourceError: one cannot be downloaded.
    """
    stages = found.plan.stages
    if found.checkpoint is not None or stages is None or stages.own is None:
        return found
    numbers = stages_of(found.plan, stages.own, num_stages(found.plan) // per_process)[1:]
    return replace(found, more=tuple(_beside(found, number) for number in numbers))


def _beside(found: CheckedSource, stage: int) -> CheckedSource:
    name, repository = stage_directory(stage, num_stages(found.plan)), found.repository
    if repository is None:
        directory = found.directory.parent / name
        described = manifest.read(directory)
    else:
        repository, described = beside(repository, name)
        directory = repository.directory
    other = CheckedSource(directory, described, manifest.read_plan(directory, described), repository)
    if other.common_manifest.plan_sha256 != found.common_manifest.plan_sha256:
        raise CheckpointError(
            f"{directory} and {found.directory} are of two conversions; copy or convert the model again"
        )
    return other
