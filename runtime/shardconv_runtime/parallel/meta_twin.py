"""The twin of a model that a caller has in memory: the same modules, with parameters on meta."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..errors import SourceError, brief
from ..loaded import LOADED_ATTRIBUTE
from .meta_model import build_model, with_steady_sets


def class_name_of(cls: type) -> str:
    """Return ``module:Class``, relative to the directory for a class that transformers imported from one.

    transformers imports custom code under a name that depends on the directory's path.
    """
    module = cls.__module__
    if is_custom(cls):
        module = module.rpartition(".")[2]
    return f"{module}:{cls.__qualname__}"


def is_custom(cls: type) -> bool:
    """Return whether transformers imported the class from a model repository."""
    return cls.__module__.startswith("transformers_modules.")


_WRAPPERS = {
    torch.jit.ScriptModule: "pass the module before torch.jit",
    DistributedDataParallel: "pass the module inside, and wrap the result",
    nn.DataParallel: "pass the module inside",
}
"""Classes around a module -> the remedy."""

_LIBRARIES = ("torch.", "transformers.")
"""Modules whose own hooks a copy of a model may have: of parametrizations, and for recording outputs."""


def refuse_other_models(model: nn.Module) -> None:
    """Refuse a model that is wrapped, sharded already, quantized, or has adapters or hooks of others."""
    for wrapper, remedy in _WRAPPERS.items():
        if isinstance(model, wrapper):
            raise SourceError(f"the model in memory is a {type(model).__name__}; {remedy}")
    if "_orig_mod" in model._modules:
        raise SourceError("the model in memory is compiled; pass the module before torch.compile")
    if hasattr(model, LOADED_ATTRIBUTE):
        raise SourceError(f"this {type(model).__name__} is a rank's part already; pass an unsharded model")
    for name, module in model.named_modules():
        for kind, hooks in vars(module).items():
            if not kind.endswith("_hooks") or not isinstance(hooks, dict):
                continue
            for hook in hooks.values():
                owner = getattr(hook, "__module__", None) or type(hook).__module__
                if f"{owner}.".startswith(_LIBRARIES):
                    continue
                text = f"{getattr(hook, '__qualname__', type(hook).__name__)} in {kind.strip('_')}"
                raise SourceError(
                    f"{name or 'the model'} has a hook ({text}), which would see a rank's part of tensors; "
                    "remove it, and register it on the model that is returned"
                )
    if getattr(model, "hf_quantizer", None) is not None:
        raise SourceError(
            f"{type(model).__name__} is quantized in memory; pass its quantized checkpoint to load"
        )
    if getattr(model, "peft_config", None):
        raise SourceError(
            f"{type(model).__name__} has adapters in memory; pass the model without them, or save them, and "
            "use `shardconv adapt` and load(adapter=)"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer) or tensor.layout != torch.strided:
            raise SourceError(
                f"{name} of {type(model).__name__} is a {type(tensor).__name__}, and a model in memory is "
                "sharded from plain dense tensors; pass the model before it is sharded or quantized"
            )


def meta_twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and persistent buffers are on meta; it shares no memory.

    Tied parameters stay tied. Buffers that no state dict holds keep their values.
    """
    memo: dict[int, Any] = {}
    kept_alive: list[Tensor] = []
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                empty = torch.empty_like(parameter, device="meta")
                memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
                kept_alive.append(buffer)
    try:
        twin = copy.deepcopy(model, memo).eval()
    except Exception as error:
        raise SourceError(
            f"{type(model).__name__} cannot be copied ({brief(error)}); leave out attributes that are not "
            "modules, tensors or plain values, and use torch.nn.utils.parametrizations.weight_norm"
        ) from error
    _fill_buffers(twin)
    for module in twin.modules():
        for name, buffer in _computed_buffers(module):
            module._buffers[name] = buffer.cpu()
    with_steady_sets(twin)
    return twin


def _computed_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of one module that no state dict holds."""
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None:
            yield name, buffer


def _fill_buffers(twin: nn.Module) -> None:
    """Give values to buffers that no state dict holds, if the model was made on meta.

    A model of transformers computes them from its config.
    """
    empty = [
        (f"{path}.{name}".lstrip("."), module, name)
        for path, module in twin.named_modules()
        for name, buffer in _computed_buffers(module)
        if buffer.is_meta
    ]
    if not empty:
        return
    computed: dict[str, Tensor] = {}
    if isinstance(twin, PreTrainedModel):
        computed = dict(build_model(type(twin), twin.config, twin.dtype).named_buffers())
    for fqn, module, name in empty:
        value = computed.get(fqn)
        buffer = module._buffers[name]
        if value is None or value.is_meta or buffer is None or value.shape != buffer.shape:
            raise SourceError(
                f"{fqn} of {type(twin).__name__} is on meta and in no state dict, so that it cannot "
                "get a value; make the model on the CPU, or give this buffer its value first"
            )
        module._buffers[name] = value
