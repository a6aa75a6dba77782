"""Puts adapters into a model on the meta device, by the code of the peft library itself.

The model's own tensors get memory without bytes on the CPU while the library works (one number, repeated). So
it initializes an adapter there, from torch's random numbers as in one process, or takes a saved one, with all
its renaming and casts. Reads and writes of the weights of the model are detected.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import SourceError, missing
from ..format.plan import Plan, parameter_plans
from ..parallel.build import DROPOUTS, stored_tensors
from .adapter_names import naming_errors, peft


@dataclass(frozen=True)
class Adapter:
    """An adapter to attach."""

    config: Any
    """A ``peft.PeftConfig``; it is copied."""
    directory: str | None = None
    """The directory of its saved tensors; None for a new adapter."""
    seed: int = 0
    """The seed of the weights of a new one."""
    name: str | None = None
    """Its name in messages; None for its directory."""

    def __str__(self) -> str:
        new = f"the new adapter ({type(self.config).__name__})"
        return self.name or self.directory or new


@dataclass(frozen=True)
class Attached:
    """A model with adapters."""

    wrapper: nn.Module
    """A ``peft.PeftModel`` around the model, on meta."""
    base_names: Mapping[str, str]
    """FQN of a stored tensor or a module of the model, now -> before the adapters came."""
    tensors: Mapping[str, Tensor]
    """The adapters' parameters and persistent buffers, global, on the CPU, by FQN in the model; also tensors
    of the model that an adapter was saved with (biases, embeddings), in place of the model's own."""
    copies: Mapping[str, str]
    """FQN of an adapter's copy of a tensor of the model, trained in its place -> FQN of that tensor before
    the adapters came. Copies of a new adapter have the model's values and are not in ``tensors``."""
    replaced: frozenset[str]
    """Names in ``tensors`` of tensors that belong to the model."""
    not_trained: str = ""
    """Why parts of the adapters on ranks cannot be trained; empty if they can."""

    def copied_modules(self) -> dict[str, str]:
        """Return the FQNs of copies of modules -> the FQN of the module that each copy replaces.

        Tied modules have one tensor, so its name does not tell which of them was copied. A copy is kept next
        to the module.
        """
        present: dict[str, list[str]] = {}
        for name, old in self.base_names.items():
            present.setdefault(old, []).append(name)
        original_of = {}
        for copied, old in self.copies.items():
            original = max(present[old], key=partial(_num_common, copied))
            ours, theirs = copied.split("."), original.split(".")
            while ours and theirs and ours[-1] == theirs[-1]:
                ours.pop()
                theirs.pop()
            original_of[".".join(ours)] = ".".join(theirs)
        return original_of

    def in_place_of(self, module: str) -> list[str]:
        """Return the FQNs of the modules that are called in place of one, by the adapters that are active."""
        copied = self.copied_modules()
        original = copied.get(module, module)
        interchangeable = [original, *(name for name, of in copied.items() if of == original)]
        return [name for name in interchangeable if name != module]

    def dtypes_of_model(self, base: Plan, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Return dtypes of tensors of the model that adapters replaced by saved ones.

        peft copies a saved tensor into one with the dtype of the model's tensor and ignores the file's dtype.

        Args:
            dtypes: dtypes of tensors of the model, by FQN with the adapters; the plan has the others.
        """
        names_in_model = dict(self.copies) | {name: self.base_names[name] for name in self.replaced}
        now = {old: name for name, old in self.base_names.items()}
        entries, stored = parameter_plans(base), dict(base.tied)
        planned = {
            name: getattr(torch, entries[stored.get(old, old)].dtype) for name, old in names_in_model.items()
        }
        return {name: dtypes.get(now[old], planned[name]) for name, old in names_in_model.items()}

    def linear_layers(self, model: nn.Module) -> list[str]:
        """Return the FQNs of the adapters' own linear layers in the model."""
        modules = model.named_modules()
        return [n for n, m in modules if isinstance(m, nn.Linear) and n not in self.base_names]


def attach(
    model: nn.Module, adapters: Mapping[str, Adapter], *, trainable: bool, initialized: bool = True
) -> Attached:
    """Put adapters into a model, in place; the first one is active.

    Args:
        model: the model on meta in global shapes, as ``meta_model.build_model`` makes it.
    """
    before = dict(stored_tensors(model))
    modules = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    base = _BaseWithoutBytes(model)
    with base.in_place():
        wrapper: Any = None
        copied: dict[str, Tensor] = {}
        for name, adapter in adapters.items():
            with nullcontext() if initialized else _uninitialized():
                wrapper = _with_adapter(wrapper, model, name, adapter, base, trainable=trainable)
            _tie_copies(model, name, adapter)
            copied |= base.copies()
            with base.kept(adapter), base.watched():
                if adapter.directory is not None:
                    with naming_errors(str(adapter)):
                        result = wrapper.load_adapter(
                            adapter.directory,
                            name,
                            is_trainable=trainable,
                            low_cpu_mem_usage=True,
                            torch_device="cpu",
                        )
                    if unexpected := set(result.unexpected_keys):
                        raise SourceError(
                            f"{adapter}: {missing(unexpected, 'tensor', 'its file', 'the model')}; "
                            "adapt the model that it was trained on"
                        )
            _tie_copies(model, name, adapter)
            base.require_unchanged(adapter)
            base.require_nothing_derived(adapter)
        wrapper.set_adapter(next(iter(adapters)), inference_mode=not trainable)
        wrapper.train(model.training)  # the library makes dropouts in training mode
        stored = dict(stored_tensors(model))
        added = {name: tensor.detach() for name, tensor in stored.items() if not base.has(tensor)}
    names = {id(tensor): name for name, tensor in reversed(before.items())}
    base_names = {n: names[id(t)] for n, t in stored_tensors(model) if id(t) in names}
    if lost := {name for name in before if names[id(before[name])] not in base_names.values()}:
        raise SourceError(f"{missing(lost, 'parameter', 'the model', 'the model with adapters')}")
    base_names |= {n: modules[id(m)] for n, m in model.named_modules() if id(m) in modules}
    copies = {name: names[id(original)] for name, original in copied.items()}
    tensors = {name: tensor for name, tensor in added.items() if base.copied(tensor) is None}
    replaced = {n: base.replaced[id(t)] for n, t in stored_tensors(model) if id(t) in base.replaced}
    replaced = {n: t for n, t in replaced.items() if n == _first_name(n, base_names)}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise SourceError(f"{name}: no file of the adapter has it; it is not complete")
    added_modules = [module for module in model.modules() if id(module) not in modules]
    reasons = (_why_not_trained(adapter, added_modules) for adapter in adapters.values())
    not_trained = next(filter(None, reasons), "")
    return Attached(wrapper, base_names, {**tensors, **replaced}, copies, frozenset(replaced), not_trained)


_OWN_LOSSES = {
    "ADALORA": "AdaLoRA adds a loss of its full matrices and prunes by their norms, and a rank has parts of "
    "them; train LoRA, or train AdaLoRA in one process"
}
"""Kinds of adapters whose wrapper only adds to the loss -> why they are not trained. Such a wrapper calls the
model and does nothing else in evaluation."""


def _why_not_trained(adapter: Adapter, added: Collection[nn.Module]) -> str:
    """Say why parts of an adapter on ranks cannot be trained; empty if they can."""
    if why := _OWN_LOSSES.get(adapter_kind(adapter)):
        return why
    # Masks of dropout modules are right on shards. Code of the library that draws itself may choose rows of a
    # local weight, or whether a layer takes part at all.
    dropout_rates = {module.p for module in added if isinstance(module, DROPOUTS)}
    for name, value in adapter.config.to_dict().items():
        if "dropout" in name and isinstance(value, float) and value and value not in dropout_rates:
            return (
                f"{name}={value} of {adapter_kind(adapter)} draws random numbers for the full weights; set "
                "it to 0, or train in one process"
            )
    return ""


def token_remedy(adapter: Adapter) -> str:
    """Return a remedy for an adapter that trains rows of an embedding; empty if it trains none."""
    names = ("trainable_token_indices", "token_indices")
    if not any(getattr(adapter.config, name, None) for name in names):
        return ""
    return "train the whole embedding with modules_to_save, or merge the adapter in one process with peft"


def adapter_kind(adapter: Adapter) -> str:
    """Return peft's name for the kind of an adapter."""
    return str(getattr(adapter.config.peft_type, "value", adapter.config.peft_type))


def _num_common(one: str, other: str) -> int:
    """Return how many parts two FQNs have in common at the beginning."""
    same = [a == b for a, b in zip(one.split("."), other.split("."), strict=False)]
    return (*same, False).index(False)


def _first_name(name: str, base_names: Mapping[str, str]) -> str:
    """Return the first one of the names of a tensor of the model."""
    return next(other for other, old in base_names.items() if old == base_names[name])


def _with_adapter(
    wrapper: Any,
    model: nn.Module,
    name: str,
    adapter: Adapter,
    base: _BaseWithoutBytes,
    *,
    trainable: bool,
) -> Any:
    """Return the wrapper with one more adapter."""
    config = copy.deepcopy(adapter.config)
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise SourceError(
            f"{adapter}: {config.peft_type.value} adds tokens, not parameters of layers, and peft would "
            "use the local sizes of a rank as global ones; use LoRA or another adapter of layers"
        )
    config.inference_mode = not trainable
    is_saved = adapter.directory is not None
    with base.watched() as watch, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*base_model_name_or_path.*was renamed")
        torch.manual_seed(adapter.seed)
        try:
            with naming_errors(str(adapter)):
                if wrapper is None:
                    wrapper = peft().get_peft_model(model, config, name, low_cpu_mem_usage=is_saved)
                else:
                    wrapper.add_adapter(name, config, low_cpu_mem_usage=is_saved)
        except SourceError as error:
            raise _changes_the_model(adapter) if watch.read_by and is_saved else error from error
    if watch.read_by and not is_saved:
        if remedy := token_remedy(adapter):
            raise SourceError(f"{adapter}: it begins with rows of an embedding, which is sharded; {remedy}")
        raise SourceError(
            f"{adapter}: it is initialized from the weights of the model ({watch.read_by}), which are "
            "sharded; initialize it in one process with peft, save it, and adapt that"
        )
    is_plain = type(wrapper.base_model).forward is peft().tuners.tuners_utils.BaseTuner.forward
    if not is_plain and adapter_kind(adapter) not in _OWN_LOSSES:
        raise SourceError(
            f"{adapter}: {adapter_kind(adapter)} runs its code around the model, which no plan knows; "
            "use LoRA or another adapter of layers"
        )
    if getattr(config, "target_modules_to_tie", None):
        raise SourceError(
            f"{adapter}: it ties the products of an embedding and of a head (ensure_weight_tying, with an "
            "embedding among its target modules), which peft makes of transposed views of one parameter, and "
            "these cannot be sharded; leave ensure_weight_tying out"
        )
    config.base_model_name_or_path = adapter.config.base_model_name_or_path
    return wrapper


@contextmanager
def _uninitialized() -> Iterator[None]:
    """Make torch's functions that initialize a tensor do nothing within this context."""
    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    functions = {name: getattr(nn.init, name) for name in names}
    for name in names:
        setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(nn.init, name, function)


def _changes_the_model(adapter: Adapter) -> SourceError:
    return SourceError(
        f"{adapter}: it changes weights of the model itself (as its initialization does); convert it to an "
        "ordinary adapter in one process (in peft: save_pretrained(..., "
        "path_initial_model_for_weight_conversion=...))"
    )


def _tie_copies(model: nn.Module, name: str, adapter: Adapter) -> None:
    """Make an adapter's copies of one tensor one tensor again, in place, if its config ties them.

    peft ties them when it makes them. On meta they come apart, and again when saved ones take their places.
    """
    if not getattr(adapter.config, "ensure_weight_tying", False):
        return
    first: dict[int, Tensor] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, peft().utils.ModulesToSaveWrapper) or name not in module.modules_to_save:
            continue
        copied = module.modules_to_save[name]
        for attribute, original in module.original_module._parameters.items():
            copied_tensor = copied._parameters.get(attribute)
            first_copy = first.setdefault(id(original), copied_tensor) if copied_tensor is not None else None
            if first_copy is None or copied_tensor is None or first_copy is copied_tensor:
                continue
            if (
                _has_values(first_copy)
                and _has_values(copied_tensor)
                and not torch.equal(first_copy, copied_tensor)
            ):
                raise SourceError(
                    f"{adapter}: it was saved with a {fqn}.{attribute} that differs from the one that its "
                    "config ties it to (ensure_weight_tying); correct the config"
                )
            copied._parameters[attribute] = first_copy


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and any(tensor.stride())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first operator that read the memory, except copies of full tensors, which get no bytes."""

    def __init__(self, memory: dict[int, Tensor], derived: set[StorageWeakRef]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        """Address -> the tensor without bytes; copies are added."""
        self.derived = derived
        """Storages that were computed from the memory; more are added."""
        self.read_by = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = [t for x in tree_leaves((args, kwargs)) if (t := self.memory.get(_address(x))) is not None]
        if read and func is torch.ops.aten.clone.default and args[0].shape == read[0].shape:
            copied = _without_bytes(args[0])
            self.memory[_address(copied)] = read[0]
            return copied
        result = func(*args, **(kwargs or {}))
        if _reads_no_values(func):
            return result
        if read and not self.read_by:
            self.read_by = str(func.overloadpacket).removeprefix("aten.")
        if read or any(_storage(x) in self.derived for x in tree_leaves((args, kwargs))):
            self.derived.update(storage for x in tree_leaves(result) if (storage := _storage(x)) is not None)
        return result


def _storage(value: Any) -> StorageWeakRef | None:
    """Return what tells the memory of a tensor with bytes from all others, also once it is freed."""
    if not isinstance(value, Tensor) or value.is_meta:
        return None
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def _address(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) and not value.is_meta else 0


def _without_bytes(tensor: Tensor) -> Tensor:
    """Return zeros of a tensor's shape and dtype on the CPU: one number, repeated."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _reads_no_values(func: Any) -> bool:
    """Return whether an operator makes a view, or looks at shapes only."""
    name = func.overloadpacket.__name__
    return (
        func.is_view or name in ("detach", "lift_fresh") or name.endswith("_like") or name.startswith("new_")
    )


class _BaseWithoutBytes:
    """The stored meta tensors of a model, and the proxies that replace them on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.originals: dict[int, Tensor] = {}
        """Id of a proxy -> the original tensor."""
        self.proxies: dict[int, Tensor] = {}
        """Id of an original tensor -> its proxy."""
        self.memory: dict[int, Tensor] = {}
        """Address of a proxy, or of a copy of one -> the original."""
        self.replaced: dict[int, Tensor] = {}
        """Id of an original tensor -> the tensor of a saved adapter that replaces it."""
        self.derived: set[StorageWeakRef] = set()
        """Memory that was computed from proxies."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the proxies into the model within this context; afterwards other tensors are on meta."""
        for tensors, name in self._stored():
            if tensors[name].is_meta:
                tensors[name] = self._proxy(tensors[name])
        try:
            yield
        finally:
            made: dict[int, Tensor] = {}
            for tensors, name in self._stored():
                tensor = tensors[name]
                if not tensor.is_meta:
                    tensors[name] = made.setdefault(id(tensor), self._on_meta(tensor))

    @contextmanager
    def kept(self, adapter: Adapter) -> Iterator[None]:
        """Collect tensors that replace proxies within this context in ``replaced``."""
        proxies = [
            (tensors, name, tensors[name]) for tensors, name in self._stored() if self.has(tensors[name])
        ]
        yield
        for tensors, name, proxy in proxies:
            replacement = tensors[name]
            if replacement is proxy:
                continue
            original = self.originals[id(proxy)]
            first_replacement = self.replaced.setdefault(id(original), replacement.detach())
            if first_replacement.shape != replacement.shape or not torch.equal(
                first_replacement, replacement
            ):
                raise SourceError(
                    f"{adapter}: it has a {name} of the model itself, and so has another adapter; load them "
                    "one by one"
                )
            proxy.requires_grad_(replacement.requires_grad)
            tensors[name] = proxy

    @contextmanager
    def watched(self) -> Iterator[_Watch]:
        """Note the operators that read the proxies within this context."""
        with _Watch(self.memory, self.derived) as watch:
            yield watch

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a proxy."""
        return id(tensor) in self.originals

    def copied(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor of which a tensor without bytes is a copy."""
        return self.memory.get(_address(tensor))

    def copies(self) -> dict[str, Tensor]:
        """Return the FQNs of tensors of the model that are copies of others, and these."""
        originals = ((name, self.copied(t)) for name, t in stored_tensors(self.model) if not self.has(t))
        return {name: original for name, original in originals if original is not None}

    def require_unchanged(self, adapter: Adapter) -> None:
        """Raise ``SourceError`` if a proxy was written to, or got other memory."""
        for proxy in self.proxies.values():
            if proxy._version or any(proxy.stride()):
                raise _changes_the_model(adapter)

    def require_nothing_derived(self, adapter: Adapter) -> None:
        """Raise ``SourceError`` if something that an adapter keeps was computed from the proxies.

        Its file has other tensors, and the library computes these from the weights each time.
        """
        for fqn, module in self.model.named_modules() if self.derived else ():
            attributes = {**vars(module), **module._parameters, **module._buffers}
            for name, value in attributes.items():
                if any(_storage(tensor) in self.derived for tensor in tree_leaves(value)):
                    raise SourceError(
                        f"{adapter}: peft computes {fqn}.{name} ({adapter_kind(adapter)}) from the weights "
                        "of the model whenever it loads the adapter, and a rank has parts of them; merge it "
                        "in one process with peft, and convert the result"
                    )

    def _stored(self) -> list[tuple[dict[str, Any], str]]:
        """Return the tables and names of parameters and persistent buffers of the model's modules."""
        places: list[tuple[dict[str, Any], str]] = []
        for module in self.model.modules():
            places += ((module._parameters, n) for n, t in module._parameters.items() if t is not None)
            persistent = module._buffers.keys() - module._non_persistent_buffers_set
            places += ((module._buffers, n) for n in persistent if module._buffers[n] is not None)
        return places

    def _proxy(self, tensor: Tensor) -> Tensor:
        proxy = self.proxies.get(id(tensor))
        if proxy is None:
            proxy = _without_bytes(tensor)
            if isinstance(tensor, nn.Parameter):
                proxy = nn.Parameter(proxy, requires_grad=tensor.requires_grad)
            self.proxies[id(tensor)] = proxy
            self.originals[id(proxy)] = tensor
            self.memory[_address(proxy)] = tensor
        return proxy

    def _on_meta(self, tensor: Tensor) -> Tensor:
        if self.has(tensor):
            original = self.originals[id(tensor)]
            if isinstance(original, nn.Parameter):
                original.requires_grad_(tensor.requires_grad)
            return original
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta


def enable_adapters(model: nn.Module, *, enabled: bool) -> None:
    """Let the adapters of a model take part in its calls, or not."""
    kinds = peft().tuners.tuners_utils.BaseTunerLayer, peft().utils.AuxiliaryTrainingWrapper
    for module in model.modules():
        if isinstance(module, kinds):
            module.enable_adapters(enabled)


def read_config(directory: str | os.PathLike[str]) -> Any:
    """Return the ``peft.PeftConfig`` of a saved adapter, or of a file that is like its
    ``adapter_config.json``.
    """
    path = os.fspath(directory)
    with naming_errors(path):
        if not os.path.isfile(path):
            return peft().PeftConfig.from_pretrained(path)
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
                json.dump(values, file)
            return peft().PeftConfig.from_pretrained(folder)
