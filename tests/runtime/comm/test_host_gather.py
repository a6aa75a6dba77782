"""What is issued for tensors of GPUs over gloo: operators that gloo has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed import run_errors, run_processes
from shardconv_runtime.comm.collectives import ProcessCommunicator
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.comm.process_groups import needs_host
from shardconv_runtime.errors import LaunchError
from shardconv_runtime.pp.stage_processes import stage_processes
from torch.utils._python_dispatch import TorchDispatchMode
from warm_compiler import warm_up

GPU = torch.device("cuda", 0)


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the names of operators that communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func._schema.name or "shardconv" in func._schema.name:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def gather_as_on_a_gpu() -> None:
    """Two ranks: the numbers of the ordinary way, and the names of the operators, eager and compiled."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    assert needs_host(world, GPU)
    assert not needs_host(world, torch.device("cpu"))
    axes = (0,)
    ordinary = ProcessCommunicator(rank, (2,), {axes: world})
    comm = ProcessCommunicator(rank, (2,), {axes: world}, device=GPU)
    x = torch.arange(8.0).reshape(4, 2) + 10 * rank

    def steps(comm: ProcessCommunicator) -> list[torch.Tensor]:
        begun = comm.begin_concatenating(x, axes)
        return [comm.concatenate(x, axes), begun(), comm.reduce_scatter(x, axes), comm.all_reduce(x, axes)]

    with _Names() as names:
        found = steps(comm)
    for got, want in zip(found, steps(ordinary), strict=True):
        assert torch.equal(got, want)
    assert sorted(set(names.found)) == [
        "_c10d_functional::all_reduce",
        "_c10d_functional::wait_tensor",
        "shardconv::host_gather",
    ]
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(steps, backend=backend, fullgraph=True)
    for got, want in zip(compiled(comm), found, strict=True):
        assert torch.equal(got, want)
    (text,) = graphs
    assert "shardconv.host_gather" in text
    assert "all_gather_into_tensor" not in text


def test_gathers_go_through_the_host() -> None:
    warm_up()
    run_processes(2, gather_as_on_a_gpu, start_group=True)


def join_stages() -> None:
    stage_processes(Launch(dist.get_rank(), 2, GPU, dist.group.WORLD), 2, 1)


def test_stages_on_gpus_need_nccl() -> None:
    for error in run_errors(2, join_stages, start_group=True):
        assert isinstance(error, LaunchError)
        assert "nccl" in str(error)
