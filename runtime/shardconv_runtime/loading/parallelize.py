"""From a model that the caller has in memory to the model of this rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.mesh import model_group
from ..default_modes import in_default_modes
from ..errors import PlanError
from ..format.plan import Plan
from ..keywords import checked_keywords
from ..option_values import Communication, Compiling, ExampleInputs, Planning, Training
from ..training.fsdp import DataParallel
from .in_memory import in_memory
from .load import load_model
from .load_options import MOVED, REMEDIES, load_options

M = TypeVar("M", bound=nn.Module)


@in_default_modes
@checked_keywords(MOVED, REMEDIES)
def parallelize(
    model: M,
    *,
    example_inputs: ExampleInputs | None = None,
    plan: Plan | Planning | None = None,
    device: torch.device | str | None = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    training: bool | Training = False,
    data_parallel: bool | DataParallel = False,
    sequence_parallel: bool = False,
    compile: bool | Compiling = False,
    gather_logits: bool | None = None,
    fuse: bool | None = None,
    communication: Communication | None = None,
) -> M:
    """Return this rank's part of a model in memory; call it on every rank of the job.

    Rank 0 plans the model, which takes seconds; nothing is read from a disk or a network. The model that is
    passed does not change, and the one that is returned shares no memory with it: drop the first one to free
    its memory. All ranks must pass a model with the same values, which is checked. For a model on meta, the
    returned one is on meta too, with local shapes.

    Args:
        model: an ``nn.Module`` or a model of transformers, neither quantized nor sharded, without adapters.
        example_inputs: the keyword arguments of a call, with which a module that is not of transformers is
            traced; or a function that returns them for the model's ``config``, or a file of them.
        plan: a plan that ``shardconv.plan`` returned for this model, or a ``Planning(...)``. By default the
            model is planned for all processes.
        device: as in ``load``, like the arguments that follow.

    Returns:
        A model of the same class in eval mode, in the dtypes of the one that was passed.

    Raises:
        ShardconvError: the message names the problem, the rank and the remedy.

    Example:
        >>> model = shardconv_runtime.parallelize(MyModule(), example_inputs={"x": torch.randn(2, 16)})
        >>> model = shardconv_runtime.parallelize(AutoModel.from_config(config), training=True)
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"parallelize takes an nn.Module, got a {type(model).__name__}; load takes paths and Hub ids"
        )
    if example_inputs is not None:
        if isinstance(plan, Plan):
            raise PlanError("example_inputs= is for planning, and plan= is a plan; leave one out")
        planning = plan or Planning()
        if planning.example_inputs is not None:
            raise PlanError("example_inputs= and plan=Planning(example_inputs=) are the same; leave one out")
        plan = replace(planning, example_inputs=example_inputs)
    options = load_options(
        path=type(model).__name__,
        plan=plan,
        in_memory=in_memory(model),
        dtype=None,
        mesh=mesh,
        training=training,
        data_parallel=data_parallel,
        sequence_parallel=sequence_parallel,
        compile=compile,
        gather_logits=gather_logits,
        fuse=fuse,
        communication=communication,
    )
    group = process_group if mesh is None else model_group(mesh, process_group)
    return load_model(options, group, device)  # type: ignore[return-value]
