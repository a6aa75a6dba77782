"""Reshard a converted directory for another number of ranks, file to file."""

from __future__ import annotations

import os
from collections.abc import Collection

from shardconv_runtime.format.plan import Plan
from shardconv_runtime.parallel.default_modes import in_default_modes

from ..arguments import MAX_FILE_SIZE, MEMORY, SolveOptions, parse_memory, parse_ranks, parse_size, require_tp
from ..reporting.progress import Progress, Silent
from ..writing.outputs import WriteOptions, prepared
from . import derived


@in_default_modes
def reshard(
    out: str | os.PathLike[str],
    out2: str | os.PathLike[str],
    tp: int,
    *,
    pp: int = 1,
    stages: str = "",
    max_file_size: int | str = MAX_FILE_SIZE,
    memory: int | str = MEMORY,
    ranks: Collection[int] | str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Solve the model of a converted directory for ``tp`` ranks and write its shards to ``out2``.

    The weights come from ``out`` and are not cast; the original checkpoint is not needed. Converting it
    would give the same files. To continue an interrupted run, call it again with the same arguments.

    Args:
        out: a converted directory.
        out2: directory to create. It must not exist, be empty, or hold the unfinished files of an earlier
            run, unless ``overwrite`` is set.
        tp: number of ranks.
        pp: number of stages; ``out`` may have another number, or none.
        stages: first and last layer of each stage, see ``convert``.
        max_file_size: maximum size of a shard file in bytes, or as text such as ``"5GB"``. A larger tensor
            gets its own file.
        memory: I/O buffer size in bytes, or as text.
        ranks: the ranks to write, or text such as ``"0-3,6"``; by default all. See ``convert``.
        trust_remote_code: import the Python code in ``out``; necessary if its plan was made with it.
        overwrite: replace ``out2`` if it is a converted directory.
        check: simulate the ranks in float64 and check the plan before anything is written.
        progress: where to report progress.

    Returns:
        The plan, as in ``out2/plan.json``.

    Raises:
        ShardconvError: the message names the problem and the remedy.

    Example:
        >>> plan = shardconv.reshard("out/", "out-4/", tp=4)
    """
    require_tp(tp)
    write_options = WriteOptions(parse_size(max_file_size), parse_memory(memory), parse_ranks(ranks, tp * pp))
    derived.require_apart(out, out2)
    outputs = prepared(out2, pp, overwrite=overwrite, source=out, options=write_options, tp=tp)
    found = derived.read(out, trust_remote_code=trust_remote_code)

    # torch and transformers are imported once the arguments are known to be right.
    from .solved_again import resharded

    has_sequence_form = tp > 1 and derived.has_sequence_form(found.plan)
    options = SolveOptions(
        tp, found.plan.experts, has_sequence_form, check, measure=True, pp=pp, stages=stages
    )
    return resharded(found, outputs, options, write_options, progress or Silent())
