"""Loading for FSDP2: each process reads only its chunk of its rank's parameters.

A model on the meta device is sharded before anything is read. Its DTensors then say which positions of each
parameter this process holds along the first dim. These are read, and become the local tensors. As in FSDP2,
each process holds all of its rank's buffers.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm.mesh import Launch, data_dims, mesh_processes
from ..errors import LaunchError, OptionError, PlanError
from ..format.header import ShardFile
from ..parallel.build import stored_tensors
from ..saving.local_windows import chunk, local_window
from ..storage.reading import Span, with_rows
from ..training.fsdp import DataParallel, require_data_dims, shard_parameters
from .transform import RankModel, ReadTensors, Transform


@dataclass(frozen=True)
class DataSharding(Transform):
    """The data parallelism that the caller of ``load`` asked for."""

    mesh: DeviceMesh = field(repr=False)
    settings: DataParallel

    def processes(self, start: Launch) -> Launch:
        """Return all processes that load the model together: if one has an error, all raise."""
        if self.mesh.device_type != start.device.type:
            raise LaunchError(
                f"the mesh is for {self.mesh.device_type}, and the model should be on {start.device}; pass "
                "device=, or make the mesh for that"
            )
        return mesh_processes(self.mesh, start.device)

    def spans(self, shards: Sequence[ShardFile]) -> list[Span]:
        """Return the byte ranges of its rank's files that this process will read, for reading ahead.

        Buffers are not known before there is a model, so of these only a part is included.
        """
        along = data_dims(self.mesh)[-1]
        part, parts = self.mesh.get_local_rank(along), self.mesh[along].size()
        spans = []
        for shard in shards:
            shapes = {name: tensor.shape for name, tensor in shard.tensors.items() if tensor.shape}
            rows = {name: chunk((0, shape[0]), parts, part) for name, shape in shapes.items()}
            offsets = [tensor.offsets for tensor in with_rows([shard], rows)[0].tensors.values()]
            spans += [(shard.path, shard.start + begin, shard.start + end) for begin, end in offsets]
        return spans

    def shape(self, rank: RankModel) -> RankModel:
        """Shard the model of local shapes. FSDP2 reads the dtypes when it does, so they are set before."""
        for name, parameter in rank.model.named_parameters():
            parameter.data = parameter.data.to(rank.dtypes.get(name, parameter.dtype))
        shard_parameters(rank.model, rank.held_plan, self.mesh, self.settings)
        return rank

    def fill(self, rank: RankModel, read: ReadTensors) -> ReadTensors:
        """Read the rows that this process holds."""
        sharded = {n: tensor for n, tensor in stored_tensors(rank.model) if isinstance(tensor, DTensor)}
        rows = {name: local_window(name, tensor)[0][0] for name, tensor in sharded.items()}
        return lambda _: _distributed(read(rows), sharded)

    def finish(self, rank: RankModel) -> None:
        """Load nothing: it is the only public call after which FSDP2 looks at replaced parameters."""
        nn.Module.load_state_dict(rank.model, {}, strict=False)


def data_sharding(
    mesh: DeviceMesh | None, settings: DataParallel | bool, *, training: bool, compiled: bool
) -> DataSharding | None:
    """Check the data parallelism that ``load`` was asked for; None without it."""
    if settings is False:
        return None
    if settings is True:
        settings = DataParallel()
    if not isinstance(settings, DataParallel):
        raise OptionError(
            f"data_parallel={settings!r} should be True or a shardconv_runtime.DataParallel(...)"
        )
    if mesh is None or not training:
        raise PlanError("data_parallel= is for training over a mesh: pass mesh= and training=True with it")
    if compiled:
        raise OptionError(
            "compile=True makes one graph of the forward pass, and FSDP2 gathers parameters inside of it; "
            "leave it out, and call compile() of each layer"
        )
    require_data_dims(mesh)
    return DataSharding(mesh, settings)


def _distributed(
    stored: Generator[tuple[str, Tensor]], sharded: Mapping[str, DTensor]
) -> Generator[tuple[str, Tensor]]:
    """Yield the same tensors; those in ``sharded`` as DTensors with the same placements."""
    with closing(stored) as tensors:
        for name, tensor in tensors:
            if (whole := sharded.get(name)) is not None:
                tensor = DTensor.from_local(
                    tensor, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
                )
            yield name, tensor
