"""Builds vLLM's model of one rank, and records the writes of vLLM's loader to it.

It runs in processes of ``vllm_recorder``, since vLLM keeps its parallel state and its config in globals.
Functions import vLLM themselves: ``imported`` checks first that it has everything they use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from shardconv_runtime.checkpoint.recorded import RecordedTensor
from shardconv_runtime.tensors.lazy_tensor import LazyTensor, Shape

from .recorded_writes import RecordedWrites, RefusedRawReads, dtype_name
from .strided_views import UnknownContentError
from .vllm_calls import require_known


@dataclass(frozen=True, slots=True)
class Request:
    """The model to load, and the ranks to record."""

    directory: Path
    """The directory with the model's config."""
    tensors: Mapping[str, LazyTensor]
    """The checkpoint: global tensors by its names."""
    tp: int
    ranks: tuple[int, ...]
    """The ranks whose loading is recorded. The other ranks only declare their tensors."""
    dtype: str
    """The dtype of the parameters, or ``"auto"``: vLLM chooses."""
    trust_remote_code: bool


Declared = Mapping[str, tuple[str, Shape]]
"""dtype (torch's name) and local shape of tensors, by vLLM's names."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The state of a rank's model after loading, before vLLM processes it for a device."""

    tensors: Mapping[str, LazyTensor]
    """Local tensors by vLLM's names."""
    refused: Mapping[str, str]
    """Names of tensors whose content is not known, and why."""
    is_as_declared: bool
    """Whether the model had the same tensors before anything was loaded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The tensors of vLLM's model of a rank."""

    declared: Declared
    recorded: Recorded | None
    """The state; None if it was not asked for."""
    dtype: str
    """The dtype that the parameters have by default."""
    platform: str
    """The platform for which vLLM chose its parameters."""
    model_class: str
    """The name of vLLM's class of the model, for reports."""


def imported() -> None:
    """Import the parts of vLLM that all ranks need.

    Raises:
        ShardconvError: if vLLM lacks a part, or a part has another signature than here.
        ImportError: if vLLM cannot be imported.
    """
    import_module("vllm")
    require_known()
    import_module(f"{__package__}.vllm_groups")


def engine_config(request: Request) -> Any:
    """Return vLLM's config, which is the same for all ranks.

    Raises:
        Exception: any that vLLM raises.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

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
    """Build vLLM's model for a rank and load the tensors, none of which is read.

    Raises:
        Exception: any that vLLM raises.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.platforms import current_platform

    from .vllm_groups import lone_rank

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
    from vllm.utils.torch_utils import set_default_torch_dtype

    with RefusedRawReads(writes), set_default_torch_dtype(dtype), torch.device("cpu"):  # type: ignore[no-untyped-call]
        yield


def _state(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors that vLLM itself would save."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    found: Mapping[str, torch.Tensor] = ShardedStateLoader._filter_subtensors(model.state_dict())
    return found


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
