"""Records ATen operators on meta tensors.

In inference mode a ``TorchDispatchMode`` sees composite operators (``linear``,
``scaled_dot_product_attention``, ``reshape`` …) before they are taken apart. An operator that has no
rule and is composite is recorded as its parts. Questions about values are answered by ``Values``.

What was recorded since a point can be taken back: when a module turns out to be untraceable, say.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .journal import Journal
from .tape import Mark, Op, Ref, Tape, TensorInfo, starred
from .values import Place, Values

META = torch.device("meta")
T = TypeVar("T")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every ATen operator and writes the tape.

    Args:
        keep: names of operators, without overload, that are recorded whole even if they are composite.
        answers: guesses to give, by module call, as on the tape of an earlier run.
    """

    def __init__(
        self, keep: Collection[str], answers: Mapping[tuple[str, int], Sequence[Any]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep = keep
        self.answers = answers or {}
        self.tape = Tape()
        self.values = Values(self.tape)
        self.ids: Journal[int] = Journal()
        self.alive: list[Any] = []
        self.twins: dict[int, torch.Tensor] = {}
        self.by_storage: dict[int, list[torch.Tensor]] = {}
        self.writes: dict[int, list[tuple[int, torch.Tensor]]] = {}
        """By storage, what was written to it, in order: the new values and the tensors that have them."""
        self.stale: Journal[int] = Journal()
        """Tensors whose memory was written through others, with the first such write that they miss."""
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
            self._know(tid, tensor)
        return tid

    def _know(self, tid: int, tensor: torch.Tensor, is_weight: bool = False) -> None:
        if tensor.device == META:
            self.values.add_unknown(tid, is_weight)
        else:
            self.values.known[tid] = tensor

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
        """``tensor`` shares memory with some that were written to: it has a new value."""
        missed = self.stale.pop(id(tensor))
        for mutated, holder in self.writes[self._storage(tensor)][missed:]:
            old = self.ids[id(tensor)]
            new = self.new(tensor)
            whole = tensor.numel() == _storage_size(tensor) == math.prod(self.tape.tensors[mutated].shape)
            op = Op("alias_write", (whole,), {}, (old, mutated), (new,), self.call())
            self.tape.events.append(op)
            self.values.wrote(op, Place.of(self.meta(tensor)), Place.of(self.meta(holder)))

    def register_model(self, model: nn.Module) -> None:
        """Parameters and buffers become tensors of the tape; tied ones keep their first name."""
        for name, parameter in model.named_parameters():
            self.values.add_unknown(self.new(parameter, "parameter", name), is_weight=True)
        persistent = set(model.state_dict(keep_vars=True))
        for name, buffer in model.named_buffers():
            tid = self.new(buffer, "buffer" if name in persistent else "constant", name)
            self._know(tid, buffer, is_weight=True)

    def register_input(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A meta stand-in for an input; its real value answers data-dependent questions."""
        twin = torch.empty_like(value, device=META)
        tid = self.new(twin, "input", name)
        self.values.known[tid] = value
        self.tape.inputs += (tid,)
        return twin

    # Operators -------------------------------------------------------------------------------

    def emit(self, op: Op) -> None:
        """Put an operator on the tape."""
        self.tape.events.append(op)
        self.values.made(op)

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
            return self.ask(args[0]).item()
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
        op = Op(facts.name, recorded_args, recorded_kwargs, tuple(inputs), (), self.call(), func, origin)
        result, values = self._run(func, facts, args, kwargs, op)
        if facts.is_mutable:
            mutated = self._mutated(func, args, kwargs)
            op.outputs = tuple(self.rewrite(t) for t in mutated)
            if not op.outputs:
                op.outputs = self._outputs(result)
        else:
            op.outputs = self._outputs(result)
        self.emit(op)
        for tid, value in zip(op.outputs, values, strict=False):
            (self.values.guessed if self.values.is_unknown(tid) else self.values.known)[tid] = value
        return result

    def _outputs(self, result: Any) -> tuple[int, ...]:
        leaves = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(self.new(t) for t in leaves if isinstance(t, torch.Tensor))

    def _run(
        self, func: Any, facts: _Facts, args: Any, kwargs: dict[str, Any], op: Op
    ) -> tuple[Any, list[torch.Tensor]]:
        """Execute on meta; where the shape depends on data, on values, which are returned as well."""
        tensors = _tensors(args) + _tensors(kwargs.values())
        if "device" in kwargs or (facts.takes_device and not tensors):
            kwargs = {**kwargs, "device": META}
        if any(t.device != META for t in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.meta, (args, kwargs))
        if facts.takes_device:
            args = tuple(META if isinstance(a, torch.device) else a for a in args)
        if facts.name == "aten.lift_fresh.default":
            return args[0], []
        shape = _shape_of(facts.name, args)
        if shape is not None:
            return shape, []
        try:
            return (self._cached(func, args, kwargs) if facts.makes_new else func(*args, **kwargs)), []
        except (NotImplementedError, RuntimeError):
            return self._run_on_values(op)

    def _run_on_values(self, op: Op) -> tuple[Any, list[torch.Tensor]]:
        """The result of an operator whose meta function does not know it."""
        asked = op.inputs[_FIRST_ASKED.get(op.name, 0) :]
        if all(self.values.value(t) is not None for t in asked):
            result = self.values.results(op, asked)
        else:
            self.note_guess(f"the result of {op.name}, which depends on data")
            result = self._answered(lambda: self.values.results(op, asked))
        on_meta = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=META), result)
        return on_meta, _tensors((result,)) if len(asked) == len(op.inputs) else []

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

    def rewrite(self, tensor: torch.Tensor) -> int:
        """A new value for a tensor that was written in place; its aliases become stale."""
        storage = self._storage(tensor)
        tid = self.new(tensor)
        writes = self.writes.setdefault(storage, [])
        for other in self.by_storage.get(storage, ()):
            key = id(other)
            if other is not tensor and key not in self.stale and key in self.ids:
                self.stale[key] = len(writes)
        writes.append((tid, tensor))
        return tid

    def _storage(self, tensor: torch.Tensor) -> int:
        return int(self.meta(tensor).untyped_storage()._cdata)

    # Values ----------------------------------------------------------------------------------

    def compared(self, left: Any, right: Any) -> None:
        """Code asked which of two ints is larger."""
        self.tape.comparisons.append((left, right))

    def ask(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor holds, or a guess; it must be whole."""
        tid = self.tid(tensor)
        self.emit(Op("question", (Ref(tid),), {}, (tid,), (), self.call(), None, _calling_module()))
        value = self.values.value(tid)
        if value is not None:
            return value
        what = "the values of a {} tensor" if tensor.dim() else "the value of a {} scalar"
        self.note_guess(what.format(tensor.dtype))
        return self._answered(lambda: self.values.guess(tid))

    def note_guess(self, what: str) -> None:
        """Tell the user what was guessed here."""
        self.tape.guesses.append(f"{starred(self.current_fqn()) or 'the model'}: {what}")

    def _answered(self, guess: Callable[[], T]) -> T:
        """A guess, or the answer that the same question was given in an earlier run."""
        call = self.tape.calls[self.call()] if self.tape.calls else None
        key = (call.fqn, call.index) if call else ("", 0)
        given, before = self.answers.get(key, ()), self.tape.answers.setdefault(key, [])
        before.append(given[len(before)] if len(before) < len(given) else guess())
        answer: T = before[-1]
        return answer

    # Modules ---------------------------------------------------------------------------------

    def call(self) -> int:
        """The module call that is running."""
        return self.stack[-1] if self.stack else 0

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
            if source in self.values.known:
                self.values.known[target] = self.values.known[source]
            else:
                self.values.made(Op("mark", (Ref(source),), {}, (source,), (target,), call, _identity()))
            self.tape.events.append(Mark(call, tuple(names[key]), source, target))

    # Taking back -----------------------------------------------------------------------------

    def point(self) -> Point:
        """Where the recording is now."""
        t = self.tape
        recorded = (t.tensors, t.events, t.calls, t.replays, t.guesses, t.opaque)
        lengths = tuple(len(x) for x in recorded)
        return Point(lengths, len(self.ids.log), len(self.stale.log), len(self.stack))

    def rewind(self, point: Point) -> None:
        """Forget all that was recorded since ``point``."""
        tape = self.tape
        num_tensors, num_events, num_calls, num_replays, num_guesses, num_opaque = point.lengths
        self.values.forget(num_tensors, len(tape.tensors))
        for call in tape.calls[num_calls:]:
            self.call_counts[call.fqn] -= 1
            tape.answers.pop((call.fqn, call.index), None)
        for key in list(tape.opaque)[num_opaque:]:
            del tape.opaque[key]
        del tape.tensors[num_tensors:], tape.events[num_events:], tape.calls[num_calls:]
        del tape.replays[num_replays:], tape.guesses[num_guesses:], self.stack[point.depth :]
        self.ids.rewind(point.ids)
        self.stale.rewind(point.stale)
        for writes in self.writes.values():
            while writes and writes[-1][0] >= num_tensors:
                writes.pop()
        self.twins = {key: twin for key, twin in self.twins.items() if id(twin) in self.ids}


@dataclass(frozen=True, slots=True)
class Point:
    """A state of a recorder that it can go back to."""

    lengths: tuple[int, ...]
    ids: int
    stale: int
    depth: int


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


_FIRST_ASKED = {
    "aten.index.Tensor": 1,
    "aten.masked_select.default": 1,
    "aten.repeat_interleave.self_Tensor": 1,
}
"""Operators whose result has a shape that depends on values: on those of this input and later ones."""


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


_TRACER = (
    "torch.",
    "contextlib",
    *(f"{__package__}.{part}" for part in ("recorder", "trace", "functions", "opaque")),
)


def _calling_module() -> str:
    """The Python module outside of torch and of the tracer whose code is calling an operator."""
    frame = sys._getframe(2)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if not name.startswith(_TRACER) and name != "torch":
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
