"""Checks the arguments of users, and turns them from text to numbers.

Nothing here imports torch or transformers, so that a wrong argument is refused at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shardconv_runtime.errors import OptionError
from shardconv_runtime.files.shard_files import MAX_FILE_SIZE as MAX_FILE_SIZE
from shardconv_runtime.format.field_checks import MAX_TP
from shardconv_runtime.format.plan import EXPERT_MODES
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.keywords import CLOSE, moved_fields

MEMORY = 512 * 2**20
"""I/O buffer size in bytes."""

MIN_MEMORY = 2**20

SCHEMES = (
    *("fp8", "fp8_dynamic", "int8", "nf4", "torchao_float8", "torchao_int8"),
    *("w4a16", "w8a16", "w8a8"),
)
"""Schemes in which weights can be quantized; some format of the runtime has each."""

ON_GPUS = {
    "mxfp4": "transformers packs it with kernels for GPUs that are downloaded from the Hub",
    "torchao_int4": "torchao packs 4-bit weights on GPUs only",
}
"""Schemes whose libraries do not run on CPUs, with the reasons."""

_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quantizing:
    """How weights are quantized while they are copied.

    Attributes:
        scheme: one of ``SCHEMES``.
        keep: patterns of modules that stay as they are, such as ``"model.layers.0.*"``, besides those that
            transformers does not quantize.

    Raises:
        ShardconvError: there is no such scheme.
    """

    scheme: str
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_scheme(self.scheme)


def quantizing(value: str | Quantizing | None) -> Quantizing | None:
    """Return the value of an argument that may be a scheme alone."""
    return Quantizing(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class OnCluster:
    """The devices that a model is planned for, and the calls whose times decide between its plans.

    Attributes:
        cluster: hosts x devices x device, such as ``"2x8xH100"``, ``"8xH100"`` or ``"L4"``.
        context: length of each sequence in tokens.
        batch: number of sequences.
        hardware: a file of more devices, which ``shardconv env --measure`` writes.
    """

    cluster: str
    context: int = 2048
    batch: int = 1
    hardware: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("context", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name} must be a whole number from 1, got {value!r}")


def on_cluster(value: str | OnCluster | None) -> OnCluster | None:
    """Return the value of an argument that may be a cluster alone."""
    return OnCluster(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class ExampleInputs:
    """A call of the model that the user gives, to be traced in place of values that are made up."""

    source: str
    """The file or the object that the caller passed, for messages."""
    call: Callable[[Any], Mapping[str, Any]]
    """Config -> keyword arguments of the call."""


@dataclass(frozen=True, slots=True)
class HostLinks:
    """The links between hosts over which a plan's ranks are spread, and the call that its costs are for."""

    hosts: int
    """Hosts; ranks are counted through each of them."""
    bandwidth: float
    """Bytes per second at which a ring of all ranks goes through the hosts."""
    latency_s: float
    """Seconds of a collective between hosts, without its bytes."""
    memory_bandwidth: float
    """Bytes per second of a device's memory."""
    flops: float
    """Operations per second of products."""
    tokens: int
    """Tokens of the call: one of each sequence."""
    weight_bytes: int
    """Bytes that a rank has for weights."""


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """The options that a model is solved for."""

    tp: int
    """Number of ranks."""
    experts: str = "tp"
    """How experts are sharded: ``tp``, inside of each expert, or ``ep``, whole experts on each rank."""
    sequence_parallel: bool = False
    """Solve for activations that are sharded over the sequence, as well."""
    check: bool = True
    """Compare simulated ranks with the unsharded model."""
    measure: bool = False
    """Measure the bytes that a rank needs for caches and activations."""
    pp: int = 1
    """Number of stages, each of which is sharded over ``tp`` ranks."""
    stages: str = ""
    """First and last layer of each stage, as ``0-39,40-79``; empty: stages are balanced."""
    example: ExampleInputs | None = None
    """The call to trace; None: the example in the model's directory, otherwise values that are made up."""
    links: HostLinks | None = None
    """Links between the hosts of a stage's ranks; None: all links are alike."""
    fewest_collectives: bool = False
    """Leave more of the model replicated where sharding it costs collectives."""
    devices: str = ""
    """The devices that decided the two above, for the plan; empty: none did."""

    def __post_init__(self) -> None:
        require_tp(self.tp)
        require_experts(self.experts)
        require_pp(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Which files are written, and how.

    Attributes:
        ranks: the ranks to write, or text such as ``"0-3,6"``; by default all. Several machines may write
            different ranks to one directory, and the last one completes it. Ranks of stages are counted
            through: the second of two stages of 8 has the ranks 8 to 15.
        max_file_size: maximum size of a shard file in bytes, or as text such as ``"5GB"``. A larger tensor
            gets its own file.
        memory: I/O buffer size in bytes, or as text such as ``"512MiB"``.
        stream: request only the necessary bytes from the Hub and cache none; if False, download the files
            to the cache. By default stream if ``ranks`` are given. Cached files are not downloaded again.
            Files other than safetensors are always downloaded.
        overwrite: replace a converted directory.
    """

    ranks: Collection[int] | str | None = None
    max_file_size: int | str = MAX_FILE_SIZE
    memory: int | str = MEMORY
    stream: bool | None = None
    overwrite: bool = False


HUB_FIELDS = moved_fields("hub", Hub)
"""Arguments that are fields of ``hub=``."""

WRITING_FIELDS = moved_fields("writing", Writing)
"""Arguments that are fields of ``writing=``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomInit:
    """The weights of a newly initialized model.

    Attributes:
        seed: the same seed gives the same weights for any number of ranks.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        seed = self.seed
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise OptionError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")


def require_tp(tp: int) -> None:
    """Raise ``ShardconvError`` unless ``tp`` is an int from 1 to the format's limit."""
    if not isinstance(tp, int) or isinstance(tp, bool) or not 1 <= tp <= MAX_TP:
        raise OptionError(f"tp must be a whole number from 1 to {MAX_TP:,}, got {tp!r}")


def require_pp(options: SolveOptions) -> None:
    """Raise ``ShardconvError`` unless this is a number of stages, and the other options know stages."""
    pp = options.pp
    if not isinstance(pp, int) or isinstance(pp, bool) or not 1 <= pp * options.tp <= MAX_TP:
        raise OptionError(f"pp must be a whole number from 1 to {MAX_TP // options.tp:,}, got {pp!r}")
    if options.stages and pp == 1:
        raise OptionError("the layers of stages need more than one stage; add --pp (pp=)")


def require_experts(experts: str) -> None:
    """Raise ``ShardconvError`` unless this is a way to shard experts."""
    if experts not in EXPERT_MODES:
        raise OptionError(f"experts must be one of {', '.join(EXPERT_MODES)}, got {experts!r}")


def require_scheme(scheme: str) -> None:
    """Raise ``ShardconvError`` unless weights can be quantized in this scheme."""
    if scheme in ON_GPUS:
        raise OptionError(
            f"weights are not quantized in {scheme}: {ON_GPUS[scheme]}; choose w4a16 or nf4, or another of "
            f"{', '.join(SCHEMES)}"
        )
    if scheme not in SCHEMES:
        nearest = get_close_matches(str(scheme), SCHEMES, 1, CLOSE)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise OptionError(f"weights are quantized in {', '.join(SCHEMES)}, not in {scheme!r}{hint}")


def parse_size(size: int | str) -> int:
    """Return bytes from a number or from text such as ``5GB``, ``500 MB``, ``2GiB``."""
    if isinstance(size, int):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise OptionError(f"{size!r} is not a size; write it as 5GB or 500MB")
        power = " kMGT".lower().index(match[2].lower() or " ")
        num_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if num_bytes < 1:
        raise OptionError(f"the size {size!r} must be 1 byte or more, as 5GB or 500MB")
    return num_bytes


def parse_memory(memory: int | str) -> int:
    """Return bytes from a number or from text such as ``512MiB``."""
    num_bytes = parse_size(memory)
    if num_bytes < MIN_MEMORY:
        raise OptionError(f"memory of {memory} is too little; give 1MiB or more")
    return num_bytes


def parse_ranks(ranks: Collection[int] | str | None, tp: int) -> tuple[int, ...] | None:
    """Return ranks, ascending, from numbers or from text such as ``0-3,6``; None means all."""
    if ranks is None:
        return None
    if isinstance(ranks, str):
        return tuple(sorted({rank for item in ranks.split(",") for rank in _parse_range(item, ranks, tp)}))
    wrong = [rank for rank in ranks if rank not in range(tp)]
    if wrong:
        raise OptionError(f"{wrong[0]!r} is not a rank of {tp}: they are 0 to {tp - 1}")
    return tuple(sorted(set(ranks)))


def _parse_range(item: str, text: str, tp: int) -> range:
    match = _RANKS.fullmatch(item.strip())
    if match is None:
        raise OptionError(f"{text!r} is not a list of ranks; write it as 0-3 or 0,2,5")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last or last >= tp:
        where = "" if item == text else f" (in {text!r})"
        what = "is not a rank" if match[2] is None else "are not ranks"
        raise OptionError(f"{item.strip()}{where} {what} of {tp}: they are 0 to {tp - 1}")
    return range(first, last + 1)
