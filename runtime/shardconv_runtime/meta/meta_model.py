"""Build a model without its parameters, but with the buffers that no file holds.

A constructor allocates and fills every parameter, which is slow and needs memory for the unsharded
model; on the meta device it also loses the values of non-persistent buffers (rotary
frequencies, masks, ALiBi slopes), which no checkpoint stores. So the constructor runs under ``LazyInit``, and
only these buffers are computed. A model that a caller has in memory is copied instead.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..errors import PlanError, ShardconvError, SourceError, brief
from ..files.model_config import SteadySet
from ..loaded import LOADED_ATTRIBUTE
from .lazy_init import LazyInit, default_dtype, memory_key

building = threading.Lock()
"""The default dtype, which constructors go by, is one for all threads."""


def for_older_transformers(cls: type[nn.Module], error: Exception) -> str:
    """Say how to change code of a model's repository that is for transformers 4.

    Returns:
        The message; empty if the error has another cause.
    """
    names = getattr(cls, "_tied_weights_keys", None)
    is_about_keys = isinstance(error, AttributeError) and error.name == "keys"
    if not is_about_keys or not isinstance(names, (list, tuple, set)):
        return ""
    # transformers 4 took the names alone, and looked for the tensors that they share.
    return (
        f"{cls.__name__}: _tied_weights_keys is a {type(names).__name__}, and transformers "
        f"{transformers_version} needs the weight that each name is tied to; change it in "
        f"{cls.__module__.rpartition('.')[2]}.py to a dict: "
        "{" + ", ".join(f'"{name}": "<name of the weight>"' for name in names) + "}"
    )


def _from_config(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Build a model of transformers."""
    try:
        model: nn.Module = cls._from_config(config, dtype=dtype)
    except ShardconvError:
        raise
    except Exception as error:
        if not cls.__module__.startswith("transformers_modules."):
            raise
        raise SourceError(
            for_older_transformers(cls, error)
            or f"{cls.__name__}, code of the model's repository, fails with transformers "
            f"{transformers_version} ({type(error).__name__}: {brief(error)}); change the code, or take a "
            "revision of the repository that is for this version"
        ) from error
    return model


def build_model(
    model_class: str | type[nn.Module],
    config: Any,
    dtype: torch.dtype | None = None,
    tied: Mapping[str, str] | None = None,
) -> nn.Module:
    """Build a model whose parameters and persistent buffers are meta tensors of global shape.

    All other tensors are real, on the CPU. The class chooses its implementations (attention, experts) as it
    does when loading a checkpoint.
    Threads may call this at the same time; they take turns.

    Args:
        dtype: default dtype while the model is built; the configuration's, or torch's default, if None.
    """
    cls = find_class(model_class) if isinstance(model_class, str) else model_class
    config = copy.deepcopy(config)
    if dtype is None:
        named = getattr(config, "dtype", None)
        named = getattr(torch, named) if isinstance(named, str) else named
        dtype = named if isinstance(named, torch.dtype) else torch.get_default_dtype()
    with building, LazyInit() as lazy, default_dtype(dtype):
        if hasattr(cls, "_from_config"):  # as the Auto classes do; sets up more than __init__
            model: nn.Module = _from_config(cls, config, dtype)
        else:
            model = cls(config)
        if dtype != torch.float32:
            # Compute the buffers that no file holds as ``from_pretrained`` does: in float32, after the
            # constructor. In the constructor the default dtype is the model's, in which a table of positions
            # has other values. ``from_pretrained`` calls the same private method of transformers.
            def visit(module: nn.Module, owner: Any) -> None:
                owner = module if hasattr(module, "_init_weights") else owner
                if owner is not None and module._non_persistent_buffers_set:
                    owner._init_weights(module)
                for child in module.children():
                    visit(child, owner)

            with default_dtype(torch.float32), torch.no_grad():
                visit(model, None)
    with building:
        _fill(model, lazy)
    if tied is not None:
        _untie(model, tied)
    _keep_float32(model, dtype)
    with_steady_sets(model)
    return model.eval()


def with_steady_sets(model: nn.Module) -> None:
    """Replace sets that are attributes of modules by sets that are iterated in one order.

    Code may loop over one, in an order that depends on the process. The ranks, and copies of the model, need
    the same order.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if type(value) is set and value and not name.startswith("_"):
                setattr(module, name, SteadySet(value))


def _untie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Leave only those parameters tied that are in ``tied``, see ``build_model``."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for parameter, together in names.items():
        parameter_of: dict[str, nn.Parameter] = {}
        for name in together:
            first = tied.get(name, name)
            if first not in parameter_of:
                like = torch.empty_like(parameter)
                parameter_of[first] = (
                    nn.Parameter(like, parameter.requires_grad) if parameter_of else parameter
                )
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = parameter_of[first]
    # transformers keeps tied names in this attribute, from which from_pretrained takes such names, too.
    tied_keys: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    present = dict(model.named_parameters(remove_duplicate=False))
    for alias, name in list(tied_keys.items()):
        if present.get(alias) is not present.get(name):
            del tied_keys[alias]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> first name of the parameters of a model that are one tensor."""
    first: dict[nn.Parameter, str] = {}
    first_names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            first_names[name] = first[parameter]
        else:
            first[parameter] = name
    return first_names


def _keep_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the tensors that the class keeps in float32 when a checkpoint is loaded in half precision.

    The patterns are private attributes of transformers' base class. They are matched here as its
    ``from_pretrained`` matches them: as regular expressions, in which ``*`` matches any text.
    """
    float32_names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        float32_names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        float32_names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not float32_names:
        return
    pattern = re.compile("|".join(f"(?:{name.replace('*', '.*')})" for name in sorted(float32_names)))
    stored = {id(tensor) for tensor in _persistent_buffers(model)}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) in stored]
    for name, tensor in (*model.named_parameters(), *buffers):
        if pattern.search(name):
            tensor.data = tensor.data.float()  # integers too: a count of batches


_MODELING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
"""The modules of transformers' models, the only ones that a plan, which is untrusted, may import."""


def find_class(name: str) -> type[nn.Module]:
    """Return the model class ``module:Class``; only models of transformers are imported."""
    module, _, attribute = name.partition(":")
    if module not in sys.modules and not _MODELING.fullmatch(module):
        raise PlanError(
            f"the model class {name!r} is not part of transformers, and a plan may import nothing else; "
            "if it is yours, import its module before the model is loaded"
        )
    try:
        model_class = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything, for example if a package is missing
        raise PlanError(f"the model class {name!r} cannot be imported: {error}") from error
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise PlanError(f"{name!r} is not a model class")
    return model_class


def _fill(model: nn.Module, lazy: LazyInit) -> None:
    """Give non-persistent buffers, and tensors that are plain attributes, their values."""
    stored = {memory_key(t) for t in model.parameters()} | {memory_key(t) for t in _persistent_buffers(model)}
    done: dict[int, Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta or memory_key(value) in stored:
            return value
        if id(value) not in done:
            done[id(value)] = lazy.materialize(value)
        return done[id(value)]

    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = real(buffer)
        for name, value in module.__dict__.items():
            if (
                not name.startswith("_")
                and isinstance(value, (Tensor, tuple, list, dict))
                and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
            ):
                module.__dict__[name] = tree_map(real, value)


def _persistent_buffers(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


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
