"""Loading for FSDP2: each process reads its chunk of its rank's parameters, and no rank's tensor is whole.

A model on the meta device is sharded before anything is read. Its DTensors then say which positions of each
parameter this process holds, along the first dim; these are read, and become their local tensors. Buffers
are whole on each process, as FSDP2 has them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm.mesh import Launch, data_dims, mesh_processes
from ..errors import LaunchError, PlanError
from ..format.header import ShardFile
from ..format.plan import Plan
from ..format.slices import Rows
from ..parallel.build import stored_tensors
from ..saving.dcp_boxes import chunk, local_window
from ..training.fsdp import DataParallel, require_data_dims, shard_parameters
from . import rank_files
from .reading import Span, with_rows


@dataclass(frozen=True)
class DataSharding:
    """The wish for data parallelism of a caller of ``load``."""

    mesh: DeviceMesh = field(repr=False)
    settings: DataParallel

    def processes(self, start: Launch) -> Launch:
        """All processes that load the model: if one has an error, all raise.

        Raises:
            LaunchError: one of them did not join, or the mesh is for another kind of device.
        """
        if self.mesh.device_type != start.device.type:
            raise LaunchError(
                f"the mesh is for {self.mesh.device_type}, and the model should be on {start.device}; pass "
                "device=, or make the mesh for that"
            )
        return mesh_processes(self.mesh, start.device)

    def spans(self, shards: Sequence[ShardFile]) -> list[Span]:
        """The bytes that this process will read of its rank's files, to read them ahead.

        Before there is a model it is not known which tensors are buffers: of those this is a part.
        """
        along = data_dims(self.mesh)[-1]
        part, parts = self.mesh.get_local_rank(along), self.mesh[along].size()
        found = []
        for shard in shards:
            shapes = {name: tensor.shape for name, tensor in shard.tensors.items() if tensor.shape}
            rows = {name: chunk((0, shape[0]), parts, part) for name, shape in shapes.items()}
            held = [tensor.offsets for tensor in with_rows([shard], rows)[0].tensors.values()]
            found += [(shard.path, shard.start + begin, shard.start + end) for begin, end in held]
        return found

    def read(
        self,
        model: nn.Module,
        plan: Plan,
        stored: Callable[[Rows], Generator[tuple[str, Tensor]]],
        start: Launch,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """Shard a parallelized model, of local shapes, and fill it, in place.

        Args:
            model: see ``rank_files.read``.
            plan: of it, without packed parameters.
            stored: gives the local tensors of this rank, or rows of them.
            start: this rank.
            dtypes: see ``rank_files.read``.

        Raises:
            PlanError: FSDP2 cannot shard the model.
            CheckpointError: see ``rank_files.read``.
        """
        for (
            name,
            parameter,
        ) in model.named_parameters():  # FSDP2 wants to know them before it has their values
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
        shard_parameters(model, plan, self.mesh, self.settings)
        sharded = {name: tensor for name, tensor in stored_tensors(model) if isinstance(tensor, DTensor)}
        rows = {name: local_window(name, tensor)[0][0] for name, tensor in sharded.items()}
        rank_files.read(model, plan, _distributed(stored(rows), sharded), start, dtypes)
        # Not to load: it is the only public call after which FSDP2 looks at parameters that were replaced.
        nn.Module.load_state_dict(model, {}, strict=False)


def data_sharding(
    mesh: DeviceMesh | None, settings: DataParallel | bool, *, training: bool, compiled: bool
) -> DataSharding:
    """What ``load`` was asked for.

    Raises:
        PlanError: it is not for training, there is no mesh, the forward pass is to be one graph, or the
            settings are of another kind.
        LaunchError: the mesh has no dims for it.
    """
    if settings is True:
        settings = DataParallel()
    if not isinstance(settings, DataParallel):
        raise PlanError(f"data_parallel={settings!r} should be True or a shardconv_runtime.DataParallel(...)")
    if mesh is None or not training:
        raise PlanError("data_parallel= is for training over a mesh: pass mesh= and training=True with it")
    if compiled:
        raise PlanError(
            "compile=True makes one graph of the forward pass, and FSDP2 gathers parameters inside of it; "
            "leave it out, and call compile() of each layer"
        )
    require_data_dims(mesh)
    return DataSharding(mesh, settings)


def _distributed(
    stored: Generator[tuple[str, Tensor]], sharded: Mapping[str, DTensor]
) -> Generator[tuple[str, Tensor]]:
    """The same tensors; those of which a process has a part as DTensors, placed as those in ``sharded``."""
    with closing(stored) as tensors:
        for name, tensor in tensors:
            if (whole := sharded.get(name)) is not None:
                tensor = DTensor.from_local(
                    tensor, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
                )
            yield name, tensor
