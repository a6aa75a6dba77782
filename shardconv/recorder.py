"""Records ATen operators on meta tensors.

In inference mode a ``TorchDispatchMode`` sees composite operators (``linear``,
``scaled_dot_product_attention``, ``reshape`` …) before they are taken apart. An operator that has no
rule and is composite is recorded as its parts. Inputs and buffers have real values beside their meta
stand-ins: a question that depends on them alone is answered by evaluating the tape backwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .tape import Mark, Op, Ref, Tape, TensorInfo

META = torch.device("meta")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every ATen operator and writes the tape.

    Args:
        keep: names of operators, without overload, that are recorded whole even if they are composite.
    """

    def __init__(self, keep: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep = keep
        self.tape = Tape()
        self.ids: dict[int, int] = {}
        self.alive: list[Any] = []
        self.twins: dict[int, torch.Tensor] = {}
        self.real: dict[int, torch.Tensor] = {}
        self.by_storage: dict[int, list[torch.Tensor]] = {}
        self.stale: dict[int, int] = {}
        self.producer: dict[int, Op] = {}
        self.stack: list[int] = []
        self.call_counts: dict[str, int] = {}
        self.facts: dict[Any, _Facts] = {}
        self.results: dict[Any, tuple[Any, Any, torch.dtype]] = {}

    # Tensors ---------------------------------------------------------------------------------

    def new(self, tensor: torch.Tensor, kind: str = "value", name: str = "") -> int:
        """Give ``tensor`` a new identity on the tape."""
        tid = len(self.tape.tensors)
        self.tape.tensors.append(TensorInfo(tuple(tensor.shape), tensor.dtype, kind, name))
        self.ids[id(tensor)] = tid
        self.alive.append(tensor)
        self.by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        return tid

    def tid(self, tensor: torch.Tensor) -> int:
        """The identity of ``tensor``; an unknown one is a constant."""
        key = id(tensor)
        if key in self.stale:
            self._refresh(tensor)
        tid = self.ids.get(key)
        if tid is None:
            tid = self.new(tensor, "constant")
            if tensor.device != META:
                self.real[tid] = tensor
        return tid

    def meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself if it is on meta, else a stand-in that is."""
        if tensor.device == META:
            return tensor
        twin = self.twins.get(id(tensor))
        if twin is None:
            with torch.inference_mode(False):
                twin = self.twins[id(tensor)] = torch.empty_like(tensor, device=META)
            self.ids[id(twin)] = self.tid(tensor)
            self.alive.append(twin)
            self.by_storage.setdefault(twin.untyped_storage()._cdata, []).append(tensor)
        return twin

    def _refresh(self, tensor: torch.Tensor) -> None:
        """``tensor`` shares memory with one that was written to: it has a new value."""
        mutated = self.stale.pop(id(tensor))
        old = self.ids[id(tensor)]
        new = self.new(tensor)
        whole = tensor.numel() == _storage_size(tensor) == math.prod(self.tape.tensors[mutated].shape)
        self._emit(Op("alias_write", (whole,), {}, (old, mutated), (new,), self.stack[-1]))

    def register_model(self, model: nn.Module) -> None:
        """Parameters and buffers become tensors of the tape; tied ones keep their first name."""
        for name, parameter in model.named_parameters():
            self.new(parameter, "parameter", name)
        persistent = set(model.state_dict(keep_vars=True))
        for name, buffer in model.named_buffers():
            tid = self.new(buffer, "buffer" if name in persistent else "constant", name)
            if buffer.device != META:
                self.real[tid] = buffer

    def register_input(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A meta stand-in for an input; its real value answers data-dependent questions."""
        twin = torch.empty_like(value, device=META)
        tid = self.new(twin, "input", name)
        self.real[tid] = value
        self.tape.inputs += (tid,)
        return twin

    # Operators -------------------------------------------------------------------------------

    def _emit(self, op: Op) -> None:
        self.tape.events.append(op)
        self._remember(op)

    def _remember(self, op: Op) -> None:
        """Keep what makes these tensors, unless it depends on parameters: then nobody can ask for values."""
        if op.overload is not None and all(t in self.real or t in self.producer for t in op.inputs):
            self.producer.update(dict.fromkeys(op.outputs, op))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = self.facts.get(func)
        if facts is None:
            facts = self.facts[func] = _Facts.of(func, self.keep)
        kwargs = kwargs or {}
        if facts.take_apart:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if facts.name == "aten._local_scalar_dense.default":
            return self._item(args[0])
        return self._record(func, facts, args, kwargs, _calling_module())

    def _record(self, func: Any, facts: _Facts, args: Any, kwargs: dict[str, Any], origin: str) -> Any:
        inputs: list[int] = []
        tensors: list[torch.Tensor] = []

        def ref(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tid = self.tid(value)
                inputs.append(tid)
                tensors.append(value)
                return Ref(tid)
            if isinstance(value, (tuple, list)):
                return (
                    type(value)(ref(v) for v in value)
                    if type(value) in (tuple, list)
                    else [ref(v) for v in value]
                )
            return value

        recorded_args = tuple(ref(a) for a in args)
        recorded_kwargs = {k: ref(v) for k, v in kwargs.items()}
        result = self._run(func, facts, args, kwargs, recorded_args, recorded_kwargs)
        call = self.stack[-1] if self.stack else 0
        op = Op(facts.name, recorded_args, recorded_kwargs, tuple(inputs), (), call, func, origin)
        if facts.is_mutable:
            mutated = self._mutated(func, args, kwargs)
            op.outputs = tuple(self._rewrite(t) for t in mutated)
            if not op.outputs:
                op.outputs = self._outputs(result)
        else:
            op.outputs = self._outputs(result)
        self._emit(op)
        return result

    def _outputs(self, result: Any) -> tuple[int, ...]:
        leaves = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(self.new(t) for t in leaves if isinstance(t, torch.Tensor))

    def _run(
        self, func: Any, facts: _Facts, args: Any, kwargs: dict[str, Any], refs: Any, kwrefs: Any
    ) -> Any:
        """Execute on meta; where the shape depends on data, on the real values."""
        tensors = _tensors(args) + _tensors(kwargs.values())
        if "device" in kwargs or (facts.takes_device and not tensors):
            kwargs = {**kwargs, "device": META}
        if any(t.device != META for t in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.meta, (args, kwargs))
        if facts.takes_device:
            args = tuple(META if isinstance(a, torch.device) else a for a in args)
        if facts.name == "aten.lift_fresh.default":
            return args[0]
        shape = _shape_of(facts.name, args)
        if shape is not None:
            return shape
        try:
            return self._cached(func, args, kwargs) if facts.makes_new else func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            real = self._evaluate_op(func, refs, kwrefs)
            if real is None:
                real = self._guess(func, facts.name, refs, kwrefs)
            return pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=META), real)

    def _cached(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operator that makes one new tensor; layers repeat, and meta functions are slow."""
        key = (func, _geometry(args), _geometry(tuple(kwargs.items())))
        known = self.results.get(key)
        if known is not None:
            shape, stride, dtype = known
            return torch.empty_strided(shape, stride, dtype=dtype, device=META)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.results[key] = (result.shape, result.stride(), result.dtype)
        return result

    def _mutated(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        out = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                if isinstance(value, torch.Tensor):
                    out.append(value)
        return out

    def _rewrite(self, tensor: torch.Tensor) -> int:
        """A new value for a tensor that was written in place; its aliases become stale."""
        holder = tensor
        known = self.by_storage.setdefault(self.meta(tensor).untyped_storage()._cdata, [])
        tid = self.new(holder)
        for other in known:
            if other is not holder and id(other) in self.ids:
                self.stale[id(other)] = tid
        self.stale.pop(id(holder), None)
        return tid

    # Values ----------------------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Any:
        real = self.value(self.tid(tensor))
        if real is not None:
            return real.item()
        self.tape.guesses.append(f"{self.current_fqn()}: the value of a {tensor.dtype} scalar")
        return False if tensor.dtype == torch.bool else 0

    def value(self, tid: int) -> torch.Tensor | None:
        """The real value of a tensor, if it does not depend on parameters."""
        if tid in self.real:
            return self.real[tid]
        op = self.producer.get(tid)
        if op is None:
            return None
        result = self._evaluate_op(op.overload, op.args, op.kwargs)
        if result is None:
            return None
        leaves = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if t is not None]
        for out, leaf in zip(op.outputs, leaves, strict=False):
            self.real[out] = leaf
        return self.real.get(tid)

    def _guess(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result if all that depends on parameters were zero, and true."""
        self.tape.guesses.append(f"{self.current_fqn()}: the result of {name}, which depends on data")
        return self._evaluate_op(func, args, kwargs, guessing=True)

    def plausible(self, tid: int) -> torch.Tensor:
        """A guess at a value that depends on parameters: zeros, or all true."""
        info = self.tape.tensors[tid]
        return torch.full(info.shape, int(info.dtype == torch.bool), dtype=info.dtype, device="cpu")

    def _evaluate_op(self, func: Any, args: Any, kwargs: Any, guessing: bool = False) -> Any:
        missing = False

        def load(ref: Ref) -> torch.Tensor:
            nonlocal missing
            real = self.value(ref.tid)
            if real is None:
                missing = not guessing
                return self.plausible(ref.tid) if guessing else torch.empty(0)
            return real.clone() if func._schema.is_mutable else real

        def restore(value: Any) -> Any:
            if isinstance(value, Ref):
                return load(value)
            if isinstance(value, (tuple, list)):
                return type(value)(restore(v) for v in value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        new_args = restore(args)
        new_kwargs = {k: restore(v) for k, v in kwargs.items()}
        if missing:
            return None
        with torch.utils._python_dispatch._disable_current_modes():
            return func(*new_args, **new_kwargs)

    # Modules ---------------------------------------------------------------------------------

    def current_fqn(self) -> str:
        """The module that is running."""
        return self.tape.calls[self.stack[-1]].fqn if self.stack else ""

    def mark(self, call: int, slots: list[tuple[str, torch.Tensor]]) -> None:
        """Record identities for the tensors at these slots; equal tensors share one."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in slots:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, tensor in tensors.items():
            source = self.tid(tensor)
            info = self.tape.tensors[source]
            if info.kind == "parameter":
                continue
            target = len(self.tape.tensors)
            self.tape.tensors.append(TensorInfo(info.shape, info.dtype, "value"))
            self.ids[key] = target
            if source in self.real:
                self.real[target] = self.real[source]
            else:
                self._remember(Op("mark", (Ref(source),), {}, (source,), (target,), call, _identity()))
            self.tape.events.append(Mark(call, tuple(names[key]), source, target))


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the recorder asks of an operator, once."""

    name: str
    take_apart: bool
    is_mutable: bool
    takes_device: bool
    makes_new: bool
    """One tensor comes out, and it shares memory with no other."""

    @classmethod
    def of(cls, func: Any, keep: Collection[str]) -> _Facts:
        name = str(func)
        kept = name.rsplit(".", 1)[0].rstrip("_") in keep
        return cls(
            name=name,
            take_apart=not kept and func._can_decompose(),
            is_mutable=func._schema.is_mutable,
            takes_device=any(a.name == "device" for a in func._schema.arguments),
            makes_new=not func._schema.is_mutable
            and len(func._schema.returns) == 1
            and func._schema.returns[0].alias_info is None,
        )


def _geometry(value: Any) -> Any:
    """An operator's arguments as a hashable value, tensors by what decides the result's shape."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_geometry(v) for v in value)
    return type(value), value


def _storage_size(tensor: torch.Tensor) -> int:
    """Number of elements in the memory that a tensor is a view of."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments and in lists of them."""
    out: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(value)
        elif isinstance(value, (tuple, list)):
            out += _tensors(value)
    return out


def _calling_module() -> str:
    """The Python module outside of torch and of the tracer whose code is calling an operator."""
    frame = sys._getframe(2)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if (
            not name.startswith(("torch.", "shardconv.recorder", "shardconv.trace", "contextlib"))
            and name != "torch"
        ):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _identity() -> Any:
    return torch.ops.aten.alias.default


def _shape_of(name: str, args: Any) -> torch.Tensor | None:
    """Results of operators whose meta function refuses some dtypes."""
    if name == "aten._grouped_mm.default":
        x, weight = args[0], args[1]
        return torch.empty(*x.shape[:-1], weight.shape[-1], dtype=x.dtype, device=META)
    return None
