"""Builds vLLM's model of one rank, and records the writes of vLLM's loader to it.

Only the processes of ``vllm_recorder`` import this module: it imports vLLM, which keeps its parallel state
and its config in globals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.checkpoint.recording_tensors import RecordedTensor
from shardconv_runtime.format.header import dtype_name
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's way to have a rank alone
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from .recorded_writes import RecordedWrites, RefusedRawReads
from .strided_views import UnknownContentError
from .vllm_state import Answer, Declared, Recorded, Request

# vLLM's process groups for one rank without the others: it may ask who it is, and cannot communicate.


class LoneGroup(parallel_state.GroupCoordinator):  # type: ignore[misc]
    """A group of which this process knows its place only."""

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        *_: Any,
        **__: Any,
    ) -> None:
        self.rank = torch.distributed.get_rank()
        self.local_rank = local_rank
        self.group_ranks = group_ranks
        self.ranks = next(ranks for ranks in group_ranks if self.rank in ranks)
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.device = torch.device("cpu")
        self.cpu_group = self.device_group = torch.distributed.new_group(self.ranks, backend="fake")
        self.unique_name = self.device_group.group_name
        parallel_state._register_group(self)
        self.device_communicator = self.mq_broadcaster = None
        self.use_device_communicator = self.use_custom_op_call = self.use_cpu_custom_send_recv = False


@contextmanager
def lone_rank(rank: int, tp: int) -> Iterator[None]:
    """Let vLLM make its groups for one rank of ``tp``, without the other ranks."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    with patch.object(parallel_state, "GroupCoordinator", LoneGroup):
        world = LoneGroup([list(range(tp))], rank)
        parallel_state._WORLD, parallel_state._NODE_COUNT = world, 1
        parallel_state.initialize_model_parallel(tp, 1, backend="fake")
        yield


def engine_config(request: Request) -> Any:
    """Return vLLM's config, which is the same for all ranks."""
    asked = EngineArgs(
        model=str(request.directory),
        tensor_parallel_size=request.tp,
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    # vLLM inspects a model's class in a separate process, which imports everything again, so that CUDA is not
    # initialized in the process that serves. This process imports the class anyway, and serves nothing.
    here = patch.object(registry, "_run_in_subprocess", lambda function: function())
    with here if hasattr(registry, "_run_in_subprocess") else nullcontext():
        return asked.create_engine_config()


def answer(request: Request, config: Any, rank: int) -> Answer:
    """Build vLLM's model for a rank and load the tensors, none of which is read."""

    class _Loader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's default loader, which gets the given tensors instead of reading files."""

        is_read = False

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            if self.is_read or source.subfolder is not None:
                raise ValueError(
                    f"weights of {source.model_or_path} are loaded in addition to the checkpoint's own"
                )
            self.is_read = True
            return ((source.prefix + name, RecordedTensor(lazy)) for name, lazy in request.tensors.items())

    loader, model_config = _Loader(config.load_config), config.model_config
    is_wanted = rank in request.ranks
    with set_current_vllm_config(config), lone_rank(rank, request.tp), RecordedWrites() as writes:  # type: ignore[no-untyped-call]
        with _on_the_cpu(writes, model_config.dtype):
            model = loader.create_model(vllm_config=config, model_config=model_config)
        state = _state(model)
        built = _declared(state)
        if is_wanted:
            with _on_the_cpu(writes, model_config.dtype):
                loader.load_weights(model, model_config)
            state = _state(model)
    declared = _declared(state)
    return Answer(
        declared,
        _recorded(writes, state, built == declared) if is_wanted else None,
        dtype_name(model_config.dtype),
        current_platform.device_name,
        type(model).__name__,
    )


@contextmanager
def _on_the_cpu(writes: RecordedWrites, dtype: torch.dtype) -> Iterator[None]:
    """Run vLLM's code so that new tensors have this dtype, and values that do not exist are not read."""
    with RefusedRawReads(writes), set_default_torch_dtype(dtype), torch.device("cpu"):  # type: ignore[no-untyped-call]
        yield


def _state(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors that vLLM itself would save."""
    state: Mapping[str, torch.Tensor] = ShardedStateLoader._filter_subtensors(model.state_dict())
    return state


def _declared(state: Mapping[str, torch.Tensor]) -> Declared:
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()}


def _recorded(writes: RecordedWrites, state: Mapping[str, torch.Tensor], is_as_declared: bool) -> Recorded:
    tensors: dict[str, LazyTensor] = {}
    refused: dict[str, str] = {}
    for name, tensor in state.items():
        try:
            tensors[name] = writes.content(tensor)
        except UnknownContentError as error:
            refused[name] = str(error)
    return Recorded(tensors, refused, is_as_declared)
