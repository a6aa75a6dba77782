"""Build a model without its parameters, but with the buffers that no file holds.

A constructor allocates and fills every parameter, which is slow and needs memory for the unsharded
model; on the meta device it also loses the values of non-persistent buffers (rotary
frequencies, masks, ALiBi slopes), which no checkpoint stores. ``LazyInit`` lets the constructor
run on the meta device and records its operators; afterwards ``materialize`` replays, on real
tensors, only the operators that one tensor depends on. (The same idea as torchdistX's deferred
initialization, which worked per tensor; here it works per storage, so views and in-place
operators need no bookkeeping.)
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..errors import PlanError, ShardconvError, SourceError, brief
from ..files.model_config import SteadySet

_building = threading.Lock()
"""The default dtype, which constructors go by, is one for all threads."""

_CPU = torch.device("cpu")
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class _Record:
    """One operator that wrote to some storage; its tensors are meta tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    default_dtype: torch.dtype


class LazyInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, every tensor that is made is a meta tensor, and the operators that made it are recorded.

    Code that needs a value at once (``item``, ``tolist``, ``numpy``, a data-dependent shape) gets the true
    one by replay. Random fills are recorded like other operators, so they cost nothing unless asked for;
    a replay draws them from a fixed seed, the same on every rank.

    Example:
        >>> with LazyInit() as lazy:
        ...     layer = SomeModule()
        >>> layer.table = lazy.materialize(layer.table)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records: list[_Record] = []
        self._reads: list[tuple[int, ...]] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._constants: dict[int, Tensor] = {}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._values = _Values(self)
        self._paused = False

    def __enter__(self) -> LazyInit:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._values.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._values.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if not all(t.is_meta for t in _tensors(args, kwargs)):
            args, kwargs = tree_map_only(Tensor, self._as_meta, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.materialize(args[0]).item()
        if _is_fill(func):
            self._record(func, args, kwargs, args[0])
            return args[0]
        try:
            outputs = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            # Meta tensors cannot run it, since its shape depends on data: run it now, and keep the result.
            with self._pause():
                outputs = _call(func, *tree_map_only(Tensor, self.materialize, (args, kwargs)))
            return tree_map_only(Tensor, self._as_meta, outputs)
        self._record(func, args, kwargs, outputs)
        return outputs

    def materialize(self, tensor: Tensor) -> Tensor:
        """Return the real CPU tensor of a meta tensor, in separate memory, with its shape and dtype."""
        twin = self._twins.get(id(tensor))
        if twin is not None:
            tensor = twin[1]
        elif not tensor.is_meta:
            return tensor
        with self._pause():
            return self._replay(tensor)(tensor)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Let operators run unrecorded if values are needed while the mode is active."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _as_meta(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor for a tensor that holds data, whose value becomes a constant of the record."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._twins:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            self._twins[id(tensor)] = (tensor, twin)
            self._constants[_storage(twin)] = tensor.detach()
        return self._twins[id(tensor)][1]

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        read = tuple({_storage(t) for t in _tensors(args, kwargs)})
        made = {_storage(t) for t in _tensors((outputs,), {})}
        written = made.union(read) if _mutates(func) else made.difference(read)
        if not written:
            return  # a view, fully described by its shape, strides and offset
        for key in written:
            self._writers[key].append(len(self._records))
        self._records.append(_Record(func, args, kwargs, outputs, torch.get_default_dtype()))
        self._reads.append(read)

    def _replay(self, tensor: Tensor) -> _Storages:
        """Run the recorded operators on which a tensor depends on real tensors; a subclass replaces it."""
        todo, needed = [_storage(tensor)], set[int]()
        while todo:
            for index in self._writers.get(todo.pop(), ()):
                if index not in needed:
                    needed.add(index)
                    todo.extend(self._reads[index])
        storages = _Storages(self._constants)
        records = [self._records[i] for i in sorted(needed)]
        with torch.no_grad(), _fixed_seed(any(_is_random(r.func) for r in records)):
            for record in records:
                with default_dtype(record.default_dtype):
                    args, kwargs = tree_map_only(Tensor, storages, (record.args, record.kwargs))
                    storages.keep(record.outputs, _call(record.func, args, kwargs))
        return storages


class _Storages:
    """Real storages by meta storage; called, it gives the real tensor of a meta tensor."""

    def __init__(self, constants: dict[int, Tensor]) -> None:
        self._constants = constants
        self._real: dict[int, torch.UntypedStorage] = {}

    def __call__(self, meta: Tensor) -> Tensor:
        key = _storage(meta)
        if key not in self._real:
            if key not in self._constants:
                raise PlanError(
                    f"a tensor of shape {tuple(meta.shape)} cannot be computed: it was made outside of the "
                    "model's constructor, on the meta device; build the model without that device"
                )
            tensor = self._constants[key]
            self._real[key] = _laid_out_like(tensor, tensor, always=True).untyped_storage()
        real = torch.empty(0, dtype=meta.dtype)
        real.set_(self._real[key], meta.storage_offset(), meta.shape, meta.stride())
        real = real.conj() if meta.is_conj() else real
        return torch._neg_view(real) if meta.is_neg() else real

    def keep(self, metas: Any, reals: Any) -> None:
        """Register the storages of new outputs."""
        for meta, real in zip(tree_leaves(metas), tree_leaves(reals), strict=True):
            if isinstance(meta, Tensor) and _storage(meta) not in self._real:
                self._real[_storage(meta)] = _laid_out_like(real, meta).untyped_storage()


class _Values(TorchFunctionMode):
    """Conversions to Python data never reach the dispatcher, so they are intercepted one level higher.

    torch's fills with random numbers are intercepted too. One level lower, each costs as much as a module.
    """

    _CONVERSIONS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
    _FILLS = frozenset({nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_})
    """Most calls of a constructor of many layers; their values are almost never needed."""

    def __init__(self, lazy: LazyInit) -> None:
        super().__init__()
        self._lazy = lazy

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._CONVERSIONS and isinstance(args[0], Tensor):
            real = self._lazy.materialize(args[0].detach())
            with self._lazy._pause():
                return func(real, *args[1:], **(kwargs or {}))
        if func in self._FILLS and not self._lazy._paused:
            (tensor,) = _tensors(args, kwargs or {})
            if tensor.is_meta:
                self._lazy._record(func, args, kwargs or {}, tensor)
                return tensor
        return func(*args, **(kwargs or {}))


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
    with _building, LazyInit() as lazy, default_dtype(dtype):
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
    with _building:
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
    stored = {_storage(t) for t in model.parameters()} | {_storage(t) for t in _persistent_buffers(model)}
    done: dict[int, Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta or _storage(value) in stored:
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


def _storage(tensor: Tensor) -> int:
    """Return the identity of the memory under a tensor, valid while something refers to it."""
    return int(tensor.untyped_storage()._cdata)


@cache
def _mutates(func: Any) -> bool:
    return func in _Values._FILLS or bool(func._schema.is_mutable)


@cache
def _is_random(func: Any) -> bool:
    return func in _Values._FILLS or torch.Tag.nondeterministic_seeded in func.tags


@cache
def _is_fill(func: Any) -> bool:
    """Return whether an operator, such as ``normal_``, only puts random numbers into its argument."""
    return _is_random(func) and _mutates(func) and func._schema.name.endswith("_")


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, at the top or one list deep (``tree_leaves`` is slow)."""
    tensors = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors.extend(v for v in value if isinstance(v, Tensor))
    return tensors


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **({**kwargs, "device": _CPU} if "device" in kwargs else kwargs))


def _laid_out_like(real: Tensor, meta: Tensor, always: bool = False) -> Tensor:
    """Return ``real`` in fresh or equal memory, with the strides of ``meta`` at offset 0."""
    same = real.stride() == meta.stride() and real.storage_offset() == 0 == meta.storage_offset()
    if same and not always:
        return real
    out = torch.empty_strided(meta.shape, meta.stride(), dtype=real.dtype)
    out.copy_(real)
    return out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` torch's default within this context."""
    before = torch.get_default_dtype()
    if dtype != before:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _fixed_seed(needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
