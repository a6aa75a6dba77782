"""Build a model without its parameters, but with the buffers that no file holds.

A constructor allocates and fills every parameter, which is slow and needs memory for the unsharded
model; on the meta device it also loses the values of non-persistent buffers (rotary
frequencies, masks, ALiBi slopes), which no checkpoint stores. So the constructor runs under ``LazyInit``, and
only these buffers are computed.
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
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..errors import PlanError, ShardconvError, SourceError, brief
from ..files.model_config import SteadySet
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
