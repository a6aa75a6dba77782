"""Find the problems of the files of a converted directory, one line for each.

The manifest lists the files with their sizes and checksums, and the plan lists the tensors in each rank's
files. No path outside of the directory is read, and no tensor is loaded.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from shardconv_runtime.errors import (
    CheckpointError,
    DamagedError,
    MissingFileError,
    NotConvertedError,
    PlanError,
)
from shardconv_runtime.files import manifest
from shardconv_runtime.files.checksums import checksums
from shardconv_runtime.files.converted_files import ConvertedFiles, parts_of
from shardconv_runtime.files.manifest import MANIFEST_NAME, PARTIAL, PLAN_NAME, FileEntry, Manifest
from shardconv_runtime.format.header import STORED_NAME, StoredTensor
from shardconv_runtime.format.plan import ParameterPlan, Plan, local_shape
from shardconv_runtime.format.stored_layout import is_common, layout_sha256, stored_plans
from shardconv_runtime.format.typed_json import MalformedError, read_text
from shardconv_runtime.storage.file_access import WeightFile, header, is_local, num_bytes

from ..reporting.progress import Advance, Progress

SHARD = ".safetensors"

MAX_PROBLEMS = 1000
"""Most problems of tensors that are listed, since there may be one for each tensor and rank."""

SHOWN = 3
"""Number of other files that are named."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The manifest and the plan of a converted directory."""

    files: ConvertedFiles
    manifest: Manifest
    plan: Plan | None
    """None if it cannot be read, or is not the plan that the files were written for."""
    problems: tuple[str, ...]
    """Problems of the manifest and the plan."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of a check."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    """Harmless files that are not part of the converted model."""
    num_files: int
    """Number of files, including manifest and plan."""
    num_bytes: int


def open_contents(files: ConvertedFiles) -> Contents:
    """Read the manifest and the plan."""
    directory = files.directory
    try:
        stored_manifest = manifest.read(directory)
        is_intact = manifest.is_intact(read_text(manifest.resolve(directory, MANIFEST_NAME)))
    except NotConvertedError:
        raise
    except (MalformedError, CheckpointError) as error:
        remedy = "" if ";" in str(error) else "; copy the directory again, or convert the model again"
        raise CheckpointError(f"{error}{remedy}") from error
    problems = [] if is_intact else [f"{MANIFEST_NAME}: was changed since it was written, by its sha256"]
    try:
        plan = manifest.read_plan(directory, stored_manifest)
    except (CheckpointError, PlanError) as error:
        reason = str(error).removeprefix(f"{directory}: ")
        reason = reason if reason.startswith(PLAN_NAME) else f"{PLAN_NAME}: {reason}"
        return Contents(files, stored_manifest, None, (*problems, reason))
    return Contents(files, stored_manifest, plan, tuple(problems))


def check(contents: Contents, progress: Progress) -> Findings:
    """Check every file."""
    files = _Files(contents)
    files.look_for()
    total = sum(entry.num_bytes for entry in files.located)
    with progress.bar("checksums", total) as advance:
        files.measure(advance)
    files.read_headers()
    ordered = [files.problems[e.path] for e in contents.manifest.files if e.path in files.problems]
    tensors = (
        list(islice(_tensor_problems(contents, files), MAX_PROBLEMS)) if contents.plan is not None else []
    )
    strays, remarks = _others(contents)
    documents = [contents.files.directory / name for name in (MANIFEST_NAME, PLAN_NAME)]
    num_bytes = sum(entry.num_bytes for entry in contents.manifest.files)
    num_bytes += sum(path.stat().st_size for path in documents if path.is_file())
    return Findings(
        tuple(map(one_line, [*contents.problems, *ordered, *tensors, *strays])),
        tuple(map(one_line, remarks)),
        len(contents.manifest.files) + 2,
        num_bytes,
    )


def require_intact(out: str | os.PathLike[str], progress: Progress) -> None:
    """Compare the checksums of the shards in a directory, with all stages, before their bytes are copied on.

    Raises:
        DamagedError: files are missing or differ from those that were written.
    """
    for part in parts_of(out):
        contents = open_contents(part)
        shards_only = tuple(filter(is_shard, contents.manifest.files))
        files = _Files(replace(contents, manifest=replace(contents.manifest, files=shards_only)))
        files.look_for()
        with progress.bar("checksums", sum(entry.num_bytes for entry in files.located)) as advance:
            files.measure(advance)
        if problems := [one_line(text) for text in files.problems.values()]:
            raise DamagedError(
                f"{part.name}: {problems[0]}; copy the directory again, or convert the model again", problems
            )


def one_line(text: str) -> str:
    """Return a text, which may quote names from files, as one line without control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def is_shard(entry: FileEntry) -> bool:
    """Return whether a file holds tensors."""
    return entry.path.endswith(SHARD)


@dataclass
class _Files:
    """The files of the manifest, and the first problem of each, by path."""

    contents: Contents
    problems: dict[str, str] = field(default_factory=dict)
    located: dict[FileEntry, WeightFile] = field(default_factory=dict)
    """Paths of files with the right size."""
    headers: dict[str, Mapping[str, StoredTensor]] = field(default_factory=dict)

    def look_for(self) -> None:
        """Find the files. Missing files and files of the wrong size are not read."""
        for entry in self.contents.manifest.files:
            try:
                path = self.contents.files.file(entry.path)
                size = _local_size(path) if is_local(path) else num_bytes(path)
            except CheckpointError as error:
                where = self.contents.files.name
                self._problem(entry, str(error).removeprefix(f"{where}: {entry.path} "))
                continue
            if size == entry.num_bytes:
                self.located[entry] = path
            else:
                self._damage(entry, path, f"has {size:,} bytes and should have {entry.num_bytes:,}")

    def measure(self, advance: Advance) -> None:
        """Compare the checksums."""
        for entry, checksum in checksums(self.located, advance).items():
            if isinstance(checksum, CheckpointError):
                self._problem(entry, str(checksum))
            elif checksum != entry.checksum:
                kind, _, digest = checksum.partition(":")
                expected = entry.checksum.partition(":")[2]
                problem = f"is damaged: its checksum ({kind}) is {digest} and should be {expected}"
                self._damage(entry, self.located[entry], problem)

    def read_headers(self) -> None:
        """Read the headers of the shards that match the manifest."""
        plan, tp = self.contents.plan, self.contents.manifest.tp
        layout = "" if plan is None else layout_sha256(plan)
        for entry, path in self.located.items():
            if plan is not None and is_shard(entry) and entry.path not in self.problems:
                try:
                    self.headers[entry.path] = manifest.check_shard(path, entry.rank, tp, layout)
                except CheckpointError as error:
                    self._problem(entry, str(error).removeprefix(f"{path}: "))

    def _problem(self, entry: FileEntry, what: str) -> None:
        self.problems[entry.path] = f"{entry.path}: {what}"

    def _damage(self, entry: FileEntry, path: WeightFile, what: str) -> None:
        """Note a problem, and if the header says so, where the file belongs."""
        self._problem(entry, what + (_origin(path, entry, self.contents) if is_shard(entry) else ""))


def _local_size(path: Path) -> int:
    """Return the size of a file that should be there."""
    try:
        stats = path.stat()
    except FileNotFoundError as error:
        raise MissingFileError("is missing") from error
    except OSError as error:
        raise DamagedError(f"cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(stats.st_mode):
        raise CheckpointError("is not a file")
    return stats.st_size


def _origin(path: WeightFile, entry: FileEntry, contents: Contents) -> str:
    """Return where a shard belongs by its own header, if that is elsewhere."""
    try:
        metadata, _ = header(path)
    except CheckpointError:
        return ""
    layout = "" if contents.plan is None else layout_sha256(contents.plan)
    expected = manifest.shard_metadata(entry.rank, contents.manifest.tp, layout)
    rank, tp, its_layout = (str(metadata.get(f"shardconv.{key}"))[:64] for key in ("rank", "tp", "layout"))
    if (rank, tp) != (expected["shardconv.rank"], expected["shardconv.tp"]):
        owner = "common/" if rank == "common" else f"rank {rank}"
        return f"; by its header it belongs to {owner} of {tp} ranks: it was swapped"
    if layout and its_layout != layout:
        return "; by its header it belongs to another conversion: it was swapped"
    return ""


def _tensor_problems(contents: Contents, files: _Files) -> Iterator[str]:
    """Yield tensors that files of a rank lack, or have in another form, or should not have."""
    assert contents.plan is not None
    problems_of_owner: dict[int | None, list[str]] = defaultdict(list)
    for entry in filter(is_shard, contents.manifest.files):
        problems_of_owner[entry.rank].append(entry.path)
    stored = stored_plans(contents.plan)
    common = {name: entry for name, entry in stored.items() if is_common(entry)}
    sharded = {name: entry for name, entry in stored.items() if name not in common}
    for rank in (None, *range(contents.plan.tp)):
        if not files.problems.keys() & set(problems_of_owner[rank]):
            headers = {path: files.headers[path] for path in problems_of_owner[rank]}
            yield from _owner_problems(contents.plan, rank, headers, common if rank is None else sharded)


def _owner_problems(
    plan: Plan,
    rank: int | None,
    headers: Mapping[str, Mapping[str, StoredTensor]],
    expected: Mapping[str, ParameterPlan],
) -> Iterator[str]:
    """Yield the problems of the files of one rank, or of ``common/``."""
    where = manifest.COMMON_DIRECTORY if rank is None else manifest.rank_directory(rank, plan.tp)
    stored: dict[str, str] = {}
    for path, tensors in headers.items():
        for name, tensor in tensors.items():
            if name in stored:
                yield f"{path}: holds {name}, and so does {stored[name]}"
            stored[name] = path
            if name not in expected:
                yield f"{path}: holds {name}, which by the plan does not belong there"
                continue
            entry = expected[name]
            planned = (STORED_NAME[entry.dtype], local_shape(entry, plan.mesh, rank or 0))
            if (tensor.dtype, tensor.shape) != planned:
                got = f"{tensor.dtype} {list(tensor.shape)}"
                yield f"{path}: {name} is {got}, and by the plan {planned[0]} {list(planned[1])}"
    yield from (f"{where}: no file holds {name}" for name in expected if name not in stored)


def _others(contents: Contents) -> tuple[list[str], list[str]]:
    """Return problems and remarks about files that are not in the manifest.

    A file of tensors is a problem, since tools that read whole directories would load it as part of the
    model.
    """
    remarks: list[str] = []

    def unlisted(error: OSError) -> None:
        remarks.append(f"{error.filename} cannot be listed ({error.strerror})")

    named = {MANIFEST_NAME, PLAN_NAME, *(entry.path for entry in contents.manifest.files)}
    objects, directory = contents.files.objects, contents.files.directory
    if objects is None:
        paths, is_unfinished = list(_walk(directory, unlisted)), (directory / PARTIAL).exists()
    else:
        paths = sorted(path for path in objects.objects if not path.startswith(f"{PARTIAL}/"))
        is_unfinished = len(paths) < len(objects.objects)
    unnamed = [path for path in paths if path not in named]
    if is_unfinished:
        remarks.append(f"{PARTIAL} is there: a conversion to this directory was begun and is not finished")
    other_files = [path for path in unnamed if not path.endswith(SHARD)]
    if other_files:
        more = f" and {len(other_files) - SHOWN} more" if len(other_files) > SHOWN else ""
        remarks.append(f"not in the manifest: {', '.join(other_files[:SHOWN])}{more}")
    strays = [path for path in unnamed if path.endswith(SHARD)]
    return [f"{path}: the manifest does not name it; move it away" for path in strays], remarks


def _walk(directory: Path, on_error: Callable[[OSError], object]) -> Iterator[str]:
    """Yield all files in a directory by relative path, and links to directories, but nothing in
    ``.partial``."""
    for root, directories, files in os.walk(directory, onerror=on_error):
        below = Path(root).relative_to(directory)
        if below == Path():
            directories[:] = [name for name in directories if name != PARTIAL]
        links = [name for name in directories if os.path.islink(os.path.join(root, name))]
        yield from sorted((below / name).as_posix() for name in (*files, *links))
        directories.sort()
