"""Checkpoints of an optimizer's state from which a job with other ranks can continue.

    shardconv_runtime.save_optimizer(model, optimizer, "step-1000/optimizer")

The tensors that an optimizer keeps for a parameter (momenta, squares) are stored as boxes of the full tensor,
under the parameter's FQN. A job that loads the model for another tp, or shards it over another number of
data-parallel processes, reads the boxes that its own parameters need.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..comm import agreement
from ..default_modes import in_default_modes
from ..loaded import loaded
from . import dcp_boxes
from .local_state import common_index, fresh_groups, fresh_state, held_state, install, resumption
from .optimizer_index import INDEX_NAME, OptimizerIndex, StateFile, read_index, write_index
from .replicas import Replicas, Staging, replicas_of, staged

_SHOWN = 5
"""Names in a warning."""


@in_default_modes
@agreement.named_call("save_optimizer")
def save_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Write the state of an optimizer; call it on every process of the model.

    If several ranks hold an element, the lowest of them writes it. For a Partial parameter, the rank with
    the values writes. The directory appears only when it is complete.

    Args:
        model: returned by ``load``, or a wrapper of it; see ``save``.
        optimizer: an optimizer of some of its parameters. Its state may contain tensors of the parameter's
            shape, and numbers.
        directory: directory to create, on a file system that all processes share. It must not exist or must
            be empty, unless ``overwrite`` is set.
        overwrite: replace the directory if it holds only the state of an optimizer.
        replicas: see ``save``.

    Raises:
        ShardconvError: the message names the problem, the rank, and the remedy.

    Example:
        >>> shardconv_runtime.save(model, "step-1000/model")
        >>> shardconv_runtime.save_optimizer(model, optimizer, "step-1000/optimizer")
    """
    holders = replicas_of(model, replicas)
    state = holders.together(lambda: held_state(model, optimizer, holders))
    summary = holders.together(state.summary)
    index = common_index(agreement.exchange(holders.launch, summary), state.entries)
    target = Path(directory).expanduser().resolve()
    source = loaded(model).directory.resolve()
    with staged(holders, target, overwrite=overwrite, known=optimizer_files, apart_from=source) as staging:
        dcp_boxes.write(state.written(index), staging.path, holders.launch)
        holders.together(lambda: _finish(holders, staging, index), agreement.READ_TIMEOUT_S)


@in_default_modes
@agreement.named_call("load_optimizer")
def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    *,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Load the state that ``save_optimizer`` wrote; call it on every process of the model.

    The number of ranks and of data-parallel processes may differ from the saved job. The optimizer must
    have the same class and at least the saved parameters. State is matched by parameter name, so the groups
    may be in another order. Hyperparameters get the saved values. Parameters without saved state, for
    example parameters that were frozen, start without state, and the first process warns with their names.
    The optimizer changes only after everything was read.

    Args:
        model: returned by ``load``, or a wrapper of it; see ``save``.
        optimizer: an optimizer of its parameters.
        directory: directory that ``save_optimizer`` wrote. It contains an index of DCP, which is a pickle:
            load only trusted files.
        replicas: see ``save``.

    Raises:
        ShardconvError: the message names the problem, the rank, and the remedy.

    Example:
        >>> model = shardconv_runtime.load("step-1000/model-for-8")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> shardconv_runtime.load_optimizer(model, optimizer, "step-1000/optimizer")
    """
    holders = replicas_of(model, replicas)
    source = Path(directory).expanduser().resolve()
    state = holders.together(lambda: held_state(model, optimizer, holders))
    summary, index = holders.together(lambda: (state.summary(), read_index(source)))
    resumed = resumption(source, index, agreement.exchange(holders.launch, summary), state.entries)
    fresh, groups = holders.together(
        lambda: (fresh_state(state, index), fresh_groups(state, resumed.hyperparameters))
    )
    dcp_boxes.read(state.wanted(fresh, index), source, holders.launch)
    holders.together(lambda: install(state, index, fresh, groups))
    if resumed.new and holders.is_leader:
        what = f"{len(resumed.new)} parameters start" if len(resumed.new) > 1 else "1 parameter starts"
        warnings.warn(
            f"load_optimizer: {what} anew, of which {source} has no state: {', '.join(resumed.new[:_SHOWN])}"
            + (" ..." if len(resumed.new) > _SHOWN else ""),
            stacklevel=2,
        )


def optimizer_files(directory: Path) -> Collection[str]:
    """Return the files of a directory that ``save_optimizer`` wrote."""
    return {INDEX_NAME, *(entry.path for entry in read_index(directory).files)}


def _finish(holders: Replicas, staging: Staging, index: OptimizerIndex) -> None:
    """Write the index of the files and commit the directory, on one process."""
    if not holders.is_leader:
        return
    files = (StateFile(path.name, path.stat().st_size) for path in sorted(staging.path.iterdir()))
    write_index(replace(index, files=tuple(files)), staging.path)
    staging.commit()
