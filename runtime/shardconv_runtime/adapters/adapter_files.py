"""Adapters as files that the peft library loads, with their plans."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CodeMismatchError, OptionError, SourceError
from ..files.fingerprint import check_code
from ..files.manifest import sha256_checksum
from ..format import plan_json
from ..format.plan import Plan
from ..parallel.build import stored_tensors
from .adapter_names import ANY_NAME, CONFIG_NAME, DEFAULT, PLAN_NAME, WEIGHTS_NAME, naming_errors, peft
from .attaching import Adapter, read_config

# A directory with an adapter and the plan of its model with it, as ``shardconv adapt`` writes it.
#
# In addition to ``adapter_plan.json`` it has the files of the peft library, so that peft loads it too. Each
# rank takes its part out of the ordinary file.

Given = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
"""A directory, or several by the names that the adapters get."""


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter, and the plan of its model with it."""

    adapter: Adapter
    plan: Plan
    """Its name in there is ``ANY_NAME``."""
    content: str
    """Checksums of its files."""


def read_adapters(given: Given) -> dict[str, PlannedAdapter]:
    """Read the configs and plans of adapters, by their names."""
    directories = given if isinstance(given, Mapping) else {DEFAULT: given}
    if not directories:
        raise OptionError("adapter={} names no adapter; leave it out")
    return {require_name(name): _read(Path(directory)) for name, directory in directories.items()}


def require_name(name: str) -> str:
    """Return the name if an adapter can have it."""
    if not isinstance(name, str) or not name or "." in name or "/" in name or name == ANY_NAME:
        raise OptionError(f"{name!r} cannot be the name of an adapter; give one without dots and slashes")
    return name


def _read(directory: Path) -> PlannedAdapter:
    for name, remedy in (
        (CONFIG_NAME, "name the directory that `shardconv adapt` wrote"),
        (PLAN_NAME, f"run `shardconv adapt OUT {directory} NEW` for the model OUT, and load NEW"),
        (WEIGHTS_NAME, "copy the directory again"),
    ):
        if not (directory / name).is_file():
            raise SourceError(f"{directory}: it has no {name}; {remedy}")
    plan = plan_json.read(directory / PLAN_NAME)
    try:
        check_code(plan)
    except CodeMismatchError as error:
        raise CodeMismatchError(f"{directory}: {error} (for an adapter: `shardconv adapt`)") from error
    files = (PLAN_NAME, CONFIG_NAME, WEIGHTS_NAME)
    content = " ".join(sha256_checksum(directory / name) for name in files)
    return PlannedAdapter(Adapter(read_config(directory), str(directory)), plan, content)


def saved_names(wrapper: Any, name: str, fqns: Iterable[str]) -> list[str]:
    """Return the names of the model's tensors that peft saves with an adapter."""
    markers = {fqn: torch.empty(0) for fqn in fqns}
    with naming_errors(f"the adapter {name!r}"):
        state = _state(wrapper, name, markers)
    chosen = {id(marker) for marker in state.values()}
    return [fqn for fqn, marker in markers.items() if id(marker) in chosen]


def _state(wrapper: Any, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the tensors, by FQN in the model, that peft saves with an adapter, by its names."""
    prefix = _prefix(wrapper)
    named = {prefix + fqn: tensor for fqn, tensor in tensors.items()}
    # Layers may share a tensor that the wrapper has under a name of its own, such as a bank of vectors.
    inner = reversed(list(stored_tensors(wrapper.get_base_model())))
    inside = {id(tensor): fqn for fqn, tensor in inner if fqn in tensors}  # the first name of each
    for outside, tensor in stored_tensors(wrapper):
        if id(tensor) in inside:
            named.setdefault(outside, tensors[inside[id(tensor)]])
    state: dict[str, Tensor] = peft().get_peft_model_state_dict(
        wrapper, state_dict=named, adapter_name=name, save_embedding_layers=False
    )
    return state


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
        tensors: global, on the CPU, by FQN in the model inside of the wrapper; also of other adapters.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = _prefix(wrapper)
    with naming_errors(f"the adapter {name!r}"):
        state = _state(wrapper, name, tensors)
        state |= {prefix + fqn: tensors[fqn] for fqn in more}
        config = copy.deepcopy(wrapper.peft_config[name])
        config.inference_mode = True
        config.base_model_name_or_path = config.base_model_name_or_path or base_name or None
        saved = {key: tensor.contiguous() for key, tensor in state.items()}
        shared = {tensor.data_ptr() for tensor in saved.values()}
        if len(shared) < len(saved):
            saved = {key: tensor.clone() for key, tensor in saved.items()}
        save_file(saved, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(os.fspath(folder))


def _prefix(wrapper: Any) -> str:
    """Return the prefix of the names of the model inside of a ``PeftModel``."""
    inner = wrapper.get_base_model()
    return next(f"{name}." for name, module in wrapper.named_modules() if module is inner)
