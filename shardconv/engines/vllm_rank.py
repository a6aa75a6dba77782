"""Runs vLLM's loader for one rank and records what it writes: ``python -m shardconv.engines.vllm_rank``.

A program of its own, in a process of its own: vLLM keeps its parallel state and its config in globals, and
prints as it likes. It reads a ``Request`` from a file and writes an ``Answer`` to another; both are pickled
by this package for itself.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shardconv_runtime.checkpoint.recorded import RecordedTensor
from shardconv_runtime.errors import brief
from shardconv_runtime.tensors.lazy_tensor import LazyTensor

from . import vllm_rank
from .recorded_writes import RecordedWrites, RefusedRawReads
from .strided_views import UnknownContentError

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Of the environment, for vLLM: it starts no process, asks no server, and plans for a small cache."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is recorded."""

    directory: Path
    """With the model's config."""
    tensors: Mapping[str, LazyTensor]
    """The checkpoint: global tensors by its names."""
    rank: int
    tp: int
    dtype: str
    """Of the parameters, or ``"auto"``: vLLM chooses."""
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The state of a rank's model after loading, before vLLM processes it for a device."""

    tensors: Mapping[str, LazyTensor]
    """Local, by vLLM's names."""
    refused: Mapping[str, str]
    """Names of tensors whose content is not known, and why."""
    dtype: str
    """That the parameters have by default."""
    platform: str
    """For which vLLM chose its parameters."""
    model_class: str
    """vLLM's, for reports."""


@dataclass(frozen=True, slots=True)
class Failure:
    """vLLM cannot load the model."""

    reason: str


def record(request: Request) -> Answer:
    """Build vLLM's model for a rank and load the tensors, none of which is read.

    Raises:
        Exception: any that vLLM raises.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from .vllm_groups import lone_rank

    config = EngineArgs(
        model=str(request.directory),
        tensor_parallel_size=request.tp,
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        skip_tokenizer_init=True,
        enforce_eager=True,
    ).create_engine_config()
    model_config = config.model_config
    # vLLM's default loader, which gets the tensors in place of those of files.
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class _Loader(DefaultModelLoader):  # type: ignore[misc]
        is_read = False

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            if self.is_read or source.subfolder is not None:
                raise ValueError(f"weights of {source.model_or_path} are loaded beside the checkpoint's own")
            self.is_read = True
            return ((source.prefix + name, RecordedTensor(lazy)) for name, lazy in request.tensors.items())

    loader = _Loader(config.load_config)
    with set_current_vllm_config(config), lone_rank(request.rank, request.tp), RecordedWrites() as writes:  # type: ignore[no-untyped-call]
        with RefusedRawReads(writes), set_default_torch_dtype(model_config.dtype), torch.device("cpu"):  # type: ignore[no-untyped-call]
            model = loader.create_model(vllm_config=config, model_config=model_config)
            loader.load_weights(model, model_config)
        state = ShardedStateLoader._filter_subtensors(model.state_dict())
    tensors, refused = _contents(writes, state)
    dtype = str(model_config.dtype).removeprefix("torch.")
    return Answer(tensors, refused, dtype, current_platform.device_name, type(model).__name__)


def _contents(
    writes: RecordedWrites, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    tensors: dict[str, LazyTensor] = {}
    refused: dict[str, str] = {}
    for name, tensor in state.items():
        try:
            tensors[name] = writes.content(tensor)
        except UnknownContentError as error:
            refused[name] = str(error)
    return tensors, refused


def main(request: str, answer: str) -> None:
    """Read a request, and write the answer."""
    os.environ.update(SETTINGS)
    with open(request, "rb") as file:
        asked: Request = pickle.load(file)
    try:
        found: Answer | Failure = record(asked)
    except Exception as error:  # vLLM's own, of any kind
        traceback.print_exc()
        found = Failure(f"{type(error).__name__}: {brief(error, 400)}")
    with open(f"{answer}.new", "wb") as file:
        pickle.dump(found, file)
    os.replace(f"{answer}.new", answer)


if __name__ == "__main__":
    vllm_rank.main(*sys.argv[1:])
