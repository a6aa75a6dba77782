"""The state of an optimizer in a checkpoint that a job with other ranks can continue from.

    shardconv_runtime.save_optimizer(model, optimizer, "step-1000/optimizer")

What an optimizer keeps for a parameter, element for element (momenta, squares), is stored as pieces of the
whole parameter, under its FQN. So a job that loads the same model for another tp, or shards it over
another number of data-parallel processes, takes from it what its own parameters need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..comm import agreement
from ..errors import CheckpointError
from ..loaded import loaded
from . import dcp_boxes
from .common_state import common_index, require_same
from .held_state import fresh_groups, fresh_state, held_state, install
from .optimizer_index import INDEX_NAME, OptimizerIndex, StateFile, read_index, write_index
from .replicas import Everyone, everyone
from .staging import Staging, begin

T = TypeVar("T")


def save_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Write the state of an optimizer; every process of the model calls it.

    Elements that several ranks hold are written once, by the lowest of them, and of a Partial parameter
    (a bias that is whole on one rank, zero on the others) those of the rank that has it. The directory is
    there only once it is complete.

    Args:
        model: that ``load`` returned, or a wrapper of it, see ``save``.
        optimizer: over some of its parameters. Its state has tensors of the parameter's shape, and numbers.
        directory: to make, on a file system that all processes share; it must not exist, or be empty,
            unless ``overwrite``.
        overwrite: replace it if it holds the state of an optimizer, and nothing else.
        replicas: see ``save``.

    Raises:
        ShardconvError: with what is wrong, on which rank, and the remedy.

    Example:
        >>> shardconv_runtime.save(model, "step-1000/model")
        >>> shardconv_runtime.save_optimizer(model, optimizer, "step-1000/optimizer")
    """
    every = everyone(model, replicas)
    held = _together(every, lambda: held_state(model, optimizer, every))
    own = _together(every, held.summary)
    index = common_index(agreement.exchange(every.launch, own), held.entries)
    place = Path(directory).expanduser().resolve()
    source = loaded(model).directory.resolve()
    staging = begin(every, place, overwrite=overwrite, contents=optimizer_files, apart_from=source)
    try:
        dcp_boxes.write(held.written(index), staging.path, every.launch)
        _together(every, lambda: _finish(every, staging, index), agreement.READ_TIMEOUT_S)
    except BaseException:
        if every.is_leader:
            staging.discard()
        raise


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    *,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Give an optimizer the state that ``save_optimizer`` wrote; every process of the model calls it.

    The model may be loaded for another number of ranks, and sharded over other data-parallel processes, than
    it was when the state was saved. The optimizer is of the same class, with the same parameters in as many
    groups; its hyperparameters become those that were saved. It is changed when all was read, or not at all.

    Args:
        model: that ``load`` returned, or a wrapper of it, see ``save``.
        optimizer: over its parameters.
        directory: that ``save_optimizer`` wrote. DCP's own index in it is a pickle: load only what you trust.
        replicas: see ``save``.

    Raises:
        ShardconvError: with what is wrong, on which rank, and the remedy.

    Example:
        >>> model = shardconv_runtime.load("step-1000/model-for-8")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> shardconv_runtime.load_optimizer(model, optimizer, "step-1000/optimizer")
    """
    every = everyone(model, replicas)
    place = Path(directory).expanduser().resolve()
    held = _together(every, lambda: held_state(model, optimizer, every))
    own, index = _together(every, lambda: (held.summary(), read_index(place)))
    require_same(place, index, agreement.exchange(every.launch, own), held.entries)
    fresh, groups = _together(every, lambda: (fresh_state(held, index), fresh_groups(held, index)))
    dcp_boxes.read(held.wanted(fresh, index), place, every.launch)
    _together(every, lambda: install(held, fresh, groups))


def optimizer_files(directory: Path) -> Collection[str]:
    """The files of a directory that ``save_optimizer`` wrote.

    Raises:
        CheckpointError: it wrote something else, or nothing.
    """
    return {INDEX_NAME, *(entry.path for entry in read_index(directory).files)}


def _finish(every: Everyone, staging: Staging, index: OptimizerIndex) -> None:
    """Write the index of what was written and put the directory in its place; on one process."""
    if not every.is_leader:
        return
    files = (StateFile(path.name, path.stat().st_size) for path in sorted(staging.path.iterdir()))
    write_index(replace(index, files=tuple(files)), staging.path)
    staging.commit()


def _together(every: Everyone, stage: Callable[[], T], timeout_s: float | None = None) -> T:
    """What a stage gives on this process, once it is done on all; what goes wrong on one, all raise."""
    outcome: list[T] = []
    error: Exception | None = None
    try:
        outcome.append(stage())
    except OSError as failure:
        error = CheckpointError(f"{failure.filename or 'the checkpoint'}: {failure.strerror or failure}")
    except Exception as failure:
        error = failure
    every.agree(error, timeout_s)
    return outcome[0]
