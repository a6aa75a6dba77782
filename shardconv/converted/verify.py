"""Check that a converted directory is intact and, on request, that it equals its source and computes the
same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.errors import CheckpointError, DamagedError, OptionError, SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.converted_files import parts_of
from shardconv_runtime.files.fingerprint import check_code
from shardconv_runtime.files.manifest import MANIFEST_NAME
from shardconv_runtime.files.model_config import read_config
from shardconv_runtime.format.measured import Numerics
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.keywords import checked_keywords

from ..arguments import HUB_FIELDS
from ..reporting.progress import Progress, Silent
from ..reporting.report import numerics_text
from ..reporting.summary import human_bytes
from . import shards
from .derived_directory import require_trusted
from .file_checks import Contents, Findings, check, open_contents
from .replaced_documents import replace_document
from .shards import of_all_stages


@dataclass(frozen=True, slots=True)
class Verified:
    """The checks that a directory has passed."""

    num_files: int
    """Number of files, including manifest and plan."""
    num_bytes: int
    remarks: tuple[str, ...]
    """Differences that may be intended: other files in the directory, an overridden ``config.json``."""
    num_tensors: int | None = None
    """Number of tensors that were compared with the source; None if there was no comparison."""
    numerics: Numerics | None = None
    """How the simulated ranks compare with the unsharded model; None if they were not run."""


def damaged(directory: str, problems: Sequence[str], remarks: Sequence[str] = ()) -> DamagedError:
    """Return the error that lists all problems of a directory."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    message = f"{directory}: {count}; copy the directory again, or convert the model again"
    return DamagedError(message, problems, remarks)


@in_default_modes
@checked_keywords(HUB_FIELDS)
def verify(
    out: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    numerics: bool = False,
    *,
    hub: Hub | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Verified:
    """Check a converted directory.

    It checks that every file of the manifest exists with its size and checksum, that plan and manifest are
    unchanged, that each shard holds the tensors in the plan, and that there are no other files with
    tensors. For a directory of stages, each stage is checked.

    Args:
        out: a converted directory, or the directory of all stages; or its URL in an object store, whose
            files are read by ranges.
        against: directory or Hub id of the original model. Every byte of every rank's tensors is compared,
            cast as the plan says.
        numerics: run all ranks in this process on their real weights and compare them with the unsharded
            model. This needs about the memory of the largest weight. The result is written to the manifest.
            If ``against`` is not quantized and ``out`` is, the outputs of both are compared, too.
        hub: how the Hub is reached: ``Hub(revision=..., cache_dir=..., local_files_only=..., token=...)``.
        trust_remote_code: import the Python code of ``against`` and, for ``numerics``, of ``out``.
        progress: where to report progress.

    Raises:
        DamagedError: if the directory is damaged; the message lists all problems.
        CheckpointError: if ``out`` is not a converted directory, or its ranks compute different results.
        ShardconvError: if ``against`` cannot be read, or the model cannot run here.

    Example:
        >>> shardconv.verify("out/", against="my-model/").num_tensors
        291
    """
    progress, directory = progress or Silent(), os.fspath(out)
    hub = hub or Hub()
    hub_options = [field.name for field in fields(hub) if getattr(hub, field.name)]
    if against is None and hub_options:
        raise OptionError(
            f"{hub_options[0]} says how to read a model to compare with, and none is named; add "
            "--against MODEL"
        )
    parts = [open_contents(part) for part in parts_of(out)]
    plan = parts[0].plan and of_all_stages(parts[0].plan)
    # Errors that would otherwise come up after hours of reading come first.
    if plan is not None and (numerics or against is not None):
        require_trusted(directory, plan, trust_remote_code=trust_remote_code)
        if numerics:
            check_code(plan)
    reference = None
    if against is not None:
        from shardconv_runtime.checkpoint.quantized import quantization_of

        # Comparing and running import torch and transformers, which are not needed for checksums.
        from ..inputs.initial_weights import is_initialized
        from .source_comparison import add_differences, read_reference

        source = parts[0].manifest.source
        if is_initialized(source):
            raise OptionError(
                f"{directory} is {source.name}: there is no checkpoint to compare it with; leave out "
                "--against, the checksums are verified without it"
            )
        if plan is not None:
            progress.stage(f"reading {os.fspath(against)}")
            reference = read_reference(
                against,
                plan,
                hub,
                trust_remote_code=trust_remote_code,
                quantization=quantization_of(read_config(parts[0].files.directory, parts[0].manifest, plan)),
            )
    results = _checked(directory, parts, progress)
    problems, remarks, num_tensors = list(results.problems), list(results.remarks), None
    if reference is not None:
        num_tensors = add_differences(out, reference, problems, remarks, progress)
    elif against is not None:
        remarks.append(f"not compared with {against}, since the plan cannot be used")
    if problems and numerics:
        remarks.append("the ranks were not run, since there are problems")
    if problems:
        raise damaged(directory, problems, remarks)
    outcome = None
    if numerics:
        from shardconv_runtime.checkpoint.resolve import resolve

        from .numerics import run_numerics

        try:
            spec = resolve(parts[0].files.directory, trust_remote_code=trust_remote_code, need_weights=False)
            weights = None if reference is None else reference.weights
            plain = None if reference is None else reference.plain
            outcome = run_numerics(shards.read(directory), spec, weights, progress, plain)
        except CheckpointError:
            for part in parts:  # the ranks differ now, so an earlier result is removed
                if part.manifest.numerics is not None:
                    _record(part, None)
            raise
        remarks += [remark for part in parts for remark in _record(part, outcome)]
    return Verified(results.num_files, results.num_bytes, tuple(remarks), num_tensors, outcome)


def _checked(directory: str, parts: Sequence[Contents], progress: Progress) -> Findings:
    """Check a directory, or the directories of all stages, whose names are in front of their problems."""
    results = [check(part, progress) for part in parts]
    if len(parts) == 1:
        return results[0]
    problems, remarks = (
        [
            f"{part.files.name.rpartition('/')[2]}: {line}"
            for part, each in zip(parts, results, strict=True)
            for line in getattr(each, kind)
        ]
        for kind in ("problems", "remarks")
    )
    if len({part.plan and of_all_stages(part.plan) for part in parts}) > 1:
        problems.append(f"{directory} has stages of several conversions, or of damaged plans")
    counts = sum(each.num_files for each in results), sum(each.num_bytes for each in results)
    return Findings(tuple(problems), tuple(remarks), *counts)


def describe(out: str | os.PathLike[str], found: Verified, against: str | None) -> list[str]:
    """Return the results of ``verify`` as lines of text."""
    size = human_bytes(found.num_bytes)
    lines = [f"{os.fspath(out)}: {found.num_files} files, {size}: all checksums match"]
    if found.num_tensors is not None:
        lines.append(f"all {found.num_tensors} tensors equal those of {against}, byte for byte")
    if found.numerics is not None:
        lines.append(numerics_text(found.numerics))
    return [*lines, *(f"remark: {remark}" for remark in found.remarks)]


def _record(part: Contents, outcome: Numerics | None) -> list[str]:
    """Write a result to the manifest of the files that it was measured on. Return remarks if this is not
    possible."""
    directory, verified = part.files.directory, part.manifest
    path = directory / MANIFEST_NAME
    if path.is_symlink():
        return [f"the result was not written to {MANIFEST_NAME}, which is a link (to a cache of the Hub?)"]
    if manifest.read(directory) != verified:
        return [f"the result was not written to {MANIFEST_NAME}, which has changed meanwhile"]
    try:
        replace_document(part.files, MANIFEST_NAME, manifest.dumps(replace(verified, numerics=outcome)))
    except SourceError as error:  # of a store
        return [f"the result was not written to {MANIFEST_NAME}: {error}"]
    except OSError as error:
        return [f"the result was not written to {MANIFEST_NAME} ({error.strerror})"]
    return []
