"""Adapters as files that the peft library loads."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .adapter_names import WEIGHTS_NAME, naming_errors, peft


def saved_names(wrapper: Any, name: str, fqns: Iterable[str]) -> list[str]:
    """Those of a model's tensors that peft saves with an adapter.

    Args:
        wrapper: a ``peft.PeftModel``.
        name: of the adapter.
        fqns: of all parameters and persistent buffers of the model inside of the wrapper.

    Raises:
        SourceError: peft fails.
    """
    prefix = _prefix(wrapper)
    markers = {fqn: torch.empty(0) for fqn in fqns}
    with naming_errors(f"the adapter {name!r}"):
        state = _state(wrapper, name, {prefix + fqn: marker for fqn, marker in markers.items()})
    chosen = {id(marker) for marker in state.values()}
    return [fqn for fqn, marker in markers.items() if id(marker) in chosen]


def _state(wrapper: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = peft().get_peft_model_state_dict(
        wrapper, state_dict=tensors, adapter_name=name, save_embedding_layers=False
    )
    return found


def write_adapter(
    wrapper: Any,
    name: str,
    tensors: Mapping[str, Tensor],
    directory: str | os.PathLike[str],
    base_name: str = "",
    more: Collection[str] = (),
) -> None:
    """Write the config and the tensors of one adapter, as peft does.

    Args:
        wrapper: a ``peft.PeftModel``.
        name: of the adapter.
        tensors: global, on the CPU, by FQN in the model inside of the wrapper; also of other adapters.
        directory: where to; it is made.
        base_name: of the model, if the config has none.
        more: FQNs of further tensors of the model that the adapter was saved with.

    Raises:
        SourceError: peft fails.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = _prefix(wrapper)
    with naming_errors(f"the adapter {name!r}"):
        state = _state(wrapper, name, {prefix + fqn: tensor for fqn, tensor in tensors.items()})
        state |= {prefix + fqn: tensors[fqn] for fqn in more}
        config = copy.deepcopy(wrapper.peft_config[name])
        config.inference_mode = True
        config.base_model_name_or_path = config.base_model_name_or_path or base_name or None
        own = {key: tensor.contiguous() for key, tensor in state.items()}
        shared = {tensor.data_ptr() for tensor in own.values()}
        if len(shared) < len(own):
            own = {key: tensor.clone() for key, tensor in own.items()}
        save_file(own, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(os.fspath(folder))


def _prefix(wrapper: Any) -> str:
    """Of the names of the model inside of a ``PeftModel``."""
    inner = wrapper.get_base_model()
    return next(f"{name}." for name, module in wrapper.named_modules() if module is inner)
