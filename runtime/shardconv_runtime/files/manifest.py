"""The files of a converted directory: their names, sizes and checksums, and the source that they came from.

``manifest.json`` is written last and atomically, so that a directory which has one is complete.
Paths in it are relative, and are checked before anything is opened.

    out/
      plan.json  manifest.json  config.json ...
      common/model-00001-of-00001.safetensors
      rank-00000-of-00008/model-00001-of-00001.safetensors
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError, DamagedError, MissingFileError, NotConvertedError, PlanError
from ..format import plan_json
from ..format.field_checks import check_tp, fail, is_sha256
from ..format.header import StoredTensor
from ..format.measured import Numerics
from ..format.plan import Plan
from ..format.typed_json import MalformedError, dump_document, load_document, read_text, write_text
from ..storage.file_access import WeightFile, header

VERSION = 3
FORMAT = "shardconv.manifest"
MANIFEST_NAME = "manifest.json"
PLAN_NAME = "plan.json"
COMMON_DIRECTORY = "common"
PARTIAL = ".partial"
"""The directory in a converted one with the files of a conversion that did not finish."""
UNUSED_NAME = "unused.tensors"
"""A safetensors file of tensors that the model does not use; no rank reads it, and no shard has its name."""

MAX_PATH_LENGTH = 1000

MAX_TEXT_LENGTH = 1000
"""Most characters of a name or a version."""

_RANK_DIRECTORY = re.compile(r"rank-[0-9]+-of-[0-9]+")
OF_PIECES = "crc32-of-pieces"
"""The kind of a shard's checksum, see ``checksums``."""
_CHECKSUM = re.compile(rf"{OF_PIECES}:[0-9a-f]{{8}}|sha256:[0-9a-f]{{64}}")
_SAMPLE = re.compile(r"crc32:[0-9a-f]{8}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
"""Names that are devices on some systems and files on others."""
_REMEDY = "copy the directory again, or convert the model again"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the directory; every file but the manifest and the plan has one."""

    path: str
    """Relative to the directory, with ``/``."""
    num_bytes: int
    checksum: str
    """``crc32-of-pieces:`` and 8 hex digits for shards, see ``checksums``; ``sha256:`` and 64 for others."""
    rank: int | None = None
    """The rank that reads it; None: every rank does."""
    sample: str = ""
    """The checksum of some blocks of a shard, see ``samples``; empty in older directories."""

    def __post_init__(self) -> None:
        if problem := path_problem(self.path):
            fail("path", f"{self.path[:200]!r}: {problem}")
        if self.path in (MANIFEST_NAME, PLAN_NAME):
            fail("path", f"{self.path} is not listed in the manifest")
        if self.num_bytes < 0:
            fail("num_bytes", "must not be negative")
        if not _CHECKSUM.fullmatch(self.checksum):
            fail("checksum", f"expected {OF_PIECES}: or sha256: and 8 or 64 hex digits in lower case")
        if self.sample and not _SAMPLE.fullmatch(self.sample):
            fail("sample", "expected crc32: and 8 hex digits in lower case")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A weight file that was converted."""

    path: str
    """Its name in the repository or directory."""
    num_bytes: int
    sha256: str = ""
    """The sha256 of the bytes, in hex, if the hub cache knows it; empty for local directories."""


@dataclass(frozen=True, slots=True)
class Source:
    """The model that was converted."""

    name: str
    """Id of the repository, or name of the directory."""
    revision: str | None = None
    """Commit of the repository, if it has one."""
    files: tuple[SourceFile, ...] = ()
    """The weight files, sorted by path."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a converted directory."""

    tp: int
    plan_sha256: str
    """The sha256 of the bytes of ``plan.json``, in hex."""
    source: Source
    tools: Mapping[str, str]
    """Versions of the programs that wrote it, by name."""
    files: tuple[FileEntry, ...]
    """Sorted by path."""
    sha256: str = ""
    """The sha256 of this document with the field left out, in hex; ``manifest_writing`` fills it in and
    checks it."""
    numerics: Numerics | None = None
    """How the ranks compare with the unsharded model; None: that was not measured for these files."""
    quantization_errors: Mapping[str, float] | None = None
    """FQN of a weight -> its relative error, for weights that were quantized when they were converted: the
    Frobenius norm of the dequantized weight minus the weight, by the weight's norm; None: none were."""
    version: int = field(default=VERSION, kw_only=True)

    def __post_init__(self) -> None:
        check_tp(self.tp)
        for name, digest in (("plan_sha256", self.plan_sha256), ("sha256", self.sha256)):
            if not is_sha256(digest) and (name, digest) != ("sha256", ""):
                fail(name, "expected 64 hex digits in lower case")
        for index, entry in enumerate(self.files):
            # A file is in the directory of the rank that reads it, or outside of all of these.
            where = f"files[{index}]"
            if entry.rank is not None and not 0 <= entry.rank < self.tp:
                fail(f"{where}.rank", f"{entry.rank} is not one of {self.tp} ranks")
            top = entry.path.split("/")[0]
            owner = top if _RANK_DIRECTORY.fullmatch(top) else None
            if owner != (None if entry.rank is None else rank_directory(entry.rank, self.tp)):
                reader = "every rank" if entry.rank is None else f"rank {entry.rank}"
                problem = f"{entry.path[:200]!r} is not in the directory of the files that {reader} reads"
                fail(f"{where}.path", problem)
        for name, error in (self.quantization_errors or {}).items():
            if not 0 <= error < math.inf:
                fail("quantization_errors", f"{name[:200]!r}: must be finite and not negative")
        texts = [self.source.name, self.source.revision or "", *chain(*self.tools.items())]
        if any(len(text) > MAX_TEXT_LENGTH for text in texts):
            fail("", f"a name or a version has more than {MAX_TEXT_LENGTH} characters")
        paths = [entry.path for entry in self.files]
        if paths != sorted(set(paths)):
            fail("files", "must be sorted by path, each path once")
        # On some file systems, names that differ in case only are one file.
        owners = {MANIFEST_NAME: MANIFEST_NAME, PLAN_NAME: PLAN_NAME}
        for path in paths:
            other = owners.setdefault(unicodedata.normalize("NFC", path).casefold(), path)
            if other != path:
                fail("files", f"{path!r} and {other!r} differ in case only")

    def files_of(self, rank: int) -> Iterator[FileEntry]:
        """Yield the files that ``rank`` reads: its own and those for every rank."""
        files = (entry for entry in self.files if entry.path != UNUSED_NAME)
        return (entry for entry in files if entry.rank is None or entry.rank == rank)


def rank_directory(rank: int, tp: int) -> str:
    """Return the name of a rank's directory, such as ``rank-00000-of-00008``."""
    return f"rank-{rank:05d}-of-{tp:05d}"


def shard_path(rank: int | None, tp: int, index: int, count: int) -> str:
    """Return the path of file ``index`` (from 0) of ``count`` of a rank, or of ``common/`` for None."""
    directory = COMMON_DIRECTORY if rank is None else rank_directory(rank, tp)
    return f"{directory}/model-{index + 1:05d}-of-{count:05d}.safetensors"


def shard_metadata(rank: int | None, tp: int, layout_sha256: str) -> dict[str, str]:
    """Return the metadata in the header of each shard, by which a swapped file is known."""
    return {
        "format": "pt",
        "shardconv.rank": "common" if rank is None else str(rank),
        "shardconv.tp": str(tp),
        "shardconv.layout": layout_sha256,
    }


def loads(text: str) -> Manifest:
    """Read a manifest from JSON."""
    try:
        return load_document(Manifest, text, FORMAT, VERSION, plan_json.MAX_BYTES, "convert the model again")
    except MalformedError as error:
        raise CheckpointError(str(error)) from error


def read(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a converted directory."""
    path = resolve(directory, MANIFEST_NAME)
    if not _is_file(path):
        where = os.fspath(directory)
        if not os.path.isdir(where):
            link = "it is a link to nothing" if os.path.islink(where) else "there is no such directory"
            kind = "it is a file" if os.path.isfile(where) else link
            raise NotConvertedError(f"{where}: {kind}; name a directory that `shardconv convert` wrote")
        if stages := sorted(path.name for path in Path(directory).glob("stage-*-of-*")):
            raise NotConvertedError(f"{where} holds stages; name the directory of one, as {stages[0]}")
        if os.path.isdir(os.path.join(where, PARTIAL)):
            raise CheckpointError(
                f"{where} holds an unfinished conversion ({PARTIAL}) and no {MANIFEST_NAME}; run the same "
                "conversion again, it continues where it was"
            )
        raise NotConvertedError(
            f"{where} has no {MANIFEST_NAME}: it is not a converted model; name the output of shardconv "
            "convert, or run that command again"
        )
    try:
        return loads(read_text(path, plan_json.MAX_BYTES))
    except (MalformedError, CheckpointError) as error:
        raise DamagedError(f"{os.fspath(directory)}: {MANIFEST_NAME}: {error}") from error


def quantization_errors(manifests: Iterable[Manifest]) -> dict[str, float]:
    """Return the errors of weights that were quantized when they were converted, by FQN.

    Args:
        manifests: one for each stage.
    """
    return {name: error for each in manifests for name, error in (each.quantization_errors or {}).items()}


def read_plan(directory: str | os.PathLike[str], manifest: Manifest) -> Plan:
    """Read the plan of a converted directory."""
    where = os.fspath(directory)
    path = resolve(directory, PLAN_NAME)
    if not _is_file(path):
        raise MissingFileError(f"{where}: {PLAN_NAME} is missing; {_REMEDY}")
    try:
        text = read_text(path, plan_json.MAX_BYTES)
    except MalformedError as error:
        raise DamagedError(f"{where}: {PLAN_NAME}: {error}; {_REMEDY}") from error
    if plan_json.sha256(text) != manifest.plan_sha256:
        raise DamagedError(
            f"{where}: {PLAN_NAME} is not the plan that the files were written for "
            f"(its sha256 is not that in {MANIFEST_NAME}); {_REMEDY}"
        )
    try:
        plan = plan_json.loads(text)
    except PlanError as error:
        raise PlanError(f"{where}: {PLAN_NAME}: {error}") from error
    if plan.tp != manifest.tp:
        raise CheckpointError(f"{where}: tp is {plan.tp} in {PLAN_NAME} and {manifest.tp} in {MANIFEST_NAME}")
    return plan


def sha256_checksum(path: str | os.PathLike[str]) -> str:
    """Return the ``checksum`` of a file other than a shard."""
    return f"sha256:{sha256_of(path)}"


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the sha256 (hex) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resolve(directory: str | os.PathLike[str], path: str) -> Path:
    """Return the path of a file of a converted directory.

    Symbolic links may not lead out of the directory, except from a snapshot of a hub cache to the cache's
    blobs.
    """
    if problem := path_problem(path):
        raise CheckpointError(f"{path!r}: {problem}")
    try:
        root = Path(directory).resolve()
        target = (root / path).resolve()
    except (OSError, RuntimeError) as error:
        raise DamagedError(f"{os.fspath(directory)}: {path} cannot be found: {error}") from error
    if not any(target.is_relative_to(directory) for directory in _allowed_directories(root)):
        raise CheckpointError(
            f"{os.fspath(directory)}: {path} is a link out of the directory, to {target}; "
            "put the file itself there"
        )
    return target


def check_sizes(directory: str | os.PathLike[str], manifest: Manifest, rank: int) -> None:
    """Check that the files of ``rank`` exist and have their sizes, and that the plan is the manifest's.

    Reads ``plan.json``; of the other files, only their sizes.
    """
    where = os.fspath(directory)
    if not 0 <= rank < manifest.tp:
        raise CheckpointError(f"{where}: rank {rank} is outside of the {manifest.tp} ranks of the conversion")
    read_plan(directory, manifest)
    for entry in manifest.files_of(rank):
        check_size(directory, entry, f"rank {rank}")


def check_size(directory: str | os.PathLike[str], entry: FileEntry, reader: str) -> None:
    """Check that a file exists and has its size."""
    where, path = os.fspath(directory), resolve(directory, entry.path)
    if not _is_file(path):
        raise MissingFileError(f"{where}: {entry.path} is missing ({reader} needs it); {_REMEDY}")
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        raise DamagedError(
            f"{where}: {entry.path} has {num_bytes} bytes and should have {entry.num_bytes}; {_REMEDY}"
        )


def check_listed_sizes(
    where: str, sizes: Mapping[str, int], entries: Iterable[FileEntry], remedy: str
) -> None:
    """Check that files are in a listing, with the sizes of the manifest.

    Args:
        where: the beginning of the message, which goes on with the path.
        sizes: path -> bytes.
    """
    for entry in entries:
        size = sizes.get(entry.path)
        if size != entry.num_bytes:
            problem = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{where}{entry.path} {problem} and should have {entry.num_bytes} bytes; {remedy}"
            )


def check_shard(path: WeightFile, rank: int | None, tp: int, layout_sha256: str) -> dict[str, StoredTensor]:
    """Check that a safetensors file is complete and belongs to this rank and layout; return its tensors."""
    metadata, tensors = header(path)
    for key, expected in shard_metadata(rank, tp, layout_sha256).items():
        if key.startswith("shardconv.") and metadata.get(key) != expected:
            raise DamagedError(
                f"{path}: {key} is {str(metadata.get(key))[:80]!r} and should be {expected!r}: "
                f"the file is from another rank or conversion; {_REMEDY}"
            )
    return tensors


def _allowed_directories(root: Path) -> list[Path]:
    """Return the directories in which a file of the directory ``root`` may be.

    A hub cache keeps ``<cache>/<repository>/snapshots/<commit>/<path>`` as links into
    ``<cache>/<repository>/blobs``, which may be links into ``<cache>/blobs``. A repository may hold several
    converted directories, one level down, and these may contain the directories of stages.
    """
    for commit in (root, *root.parents[:2]):
        if commit.parent.name == "snapshots":
            repository = commit.parent.parent
            return [root, repository / "blobs", repository.parent / "blobs"]
    return [root]


def _is_file(path: Path) -> bool:
    """Return whether a file exists."""
    try:
        return path.is_file()
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror})") from error


def is_reserved(path: str) -> bool:
    """Return whether a path in a converted directory is for files that are made there."""
    top = path.split("/")[0]
    is_of_weights = _RANK_DIRECTORY.fullmatch(top) is not None or top == COMMON_DIRECTORY
    return is_of_weights or path.casefold() in (MANIFEST_NAME, PLAN_NAME, UNUSED_NAME)


def path_problem(path: str) -> str:
    """Return why a path is unsafe or not relative; empty if it is safe."""
    if not path or any(c in '\\:*?"<>|\x7f' or ord(c) < 32 for c in path):
        return 'a path must not be empty, or have a control character or one of \\ : * ? " < > |'
    if path.startswith("/"):
        return "the path must be relative"
    if len(path) > MAX_PATH_LENGTH or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        return f"the path is longer than {MAX_PATH_LENGTH} characters, or a part of it than 255 bytes"
    if any(_RESERVED.fullmatch(part) or part.endswith((" ", ".")) for part in path.split("/")):
        return "a part of the path is the name of a device, or ends with a space or a dot"
    if ".." in path.split("/") or str(PurePosixPath(path)) != path or path == ".":
        return "the path must not have empty, '.' or '..' parts"
    return ""


# Manifests as JSON, with their own checksum.


def dumps(manifest: Manifest) -> str:
    """Return the manifest as deterministic JSON, with its own checksum."""
    plain = dump_document(replace(manifest, sha256=""), FORMAT)
    text = dump_document(replace(manifest, sha256=plan_json.sha256(plain)), FORMAT)
    loads(text)
    return text


def is_intact(text: str) -> bool:
    """Return whether a manifest has exactly the bytes that ``dumps`` wrote."""
    return dumps(loads(text)) == text


def write(manifest: Manifest, directory: str | os.PathLike[str]) -> None:
    """Write the manifest of a directory atomically; the last step of a conversion."""
    write_text(Path(directory) / MANIFEST_NAME, dumps(manifest))
