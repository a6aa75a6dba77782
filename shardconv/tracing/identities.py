"""Map each Python tensor to a tensor of the tape.

The tape's tensors are values. A Python tensor that is written in place has another value afterwards, and the
tensors that share its memory have too. These are **stale** until they are next read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NewType, TypeVar

import torch
from torch import Tensor

from .tape import ALIAS_WRITE, Op, Ref, Tape, TensorInfo
from .values import MemoryLayout, Values

K = TypeVar("K")
T = TypeVar("T")


class Journal(dict[K, T]):
    """A dict that can be rewound. It keeps replaced values in ``log``; values must not be None."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[K, T | None]] = []

    def __setitem__(self, key: K, value: T) -> None:
        self.log.append((key, self.get(key)))
        super().__setitem__(key, value)

    def pop(self, key: K, default: Any = None) -> Any:
        """Remove and return the value of a key. The default is None."""
        self.log.append((key, self.get(key)))
        return super().pop(key, default)

    def rewind(self, length: int) -> None:
        """Undo the changes after the first ``length``."""
        while len(self.log) > length:
            key, before = self.log.pop()
            if before is None:
                super().pop(key, None)
            else:
                super().__setitem__(key, before)


META = torch.device("meta")

TensorKey = NewType("TensorKey", int)
"""Identifies a tensor in a table. A tensor cannot be a key itself while the tracer's modes are active, since
hashing and comparing it are torch calls, which the modes see. The owner of the table keeps the tensor
alive."""
StorageKey = NewType("StorageKey", int)
"""Identifies memory in a table, under the same condition."""


def tensor_key(tensor: Tensor) -> TensorKey:
    """Return the key of a tensor, valid as long as the tensor is alive."""
    return TensorKey(id(tensor))


def storage_key(tensor: Tensor) -> StorageKey:
    """Return the key of the memory under a tensor, valid as long as some tensor on it is alive."""
    return StorageKey(id(tensor.untyped_storage()))


class Identities:
    """The tensors that were seen, and their numbers on one tape."""

    def __init__(self, tape: Tape, values: Values, stack: Sequence[int]) -> None:
        self.tape = tape
        self.values = values
        self._stack = stack
        self._tids: Journal[TensorKey, int] = Journal()
        self._alive: list[Tensor] = []
        self._twins: dict[TensorKey, Tensor] = {}
        self._on_storage: dict[StorageKey, list[Tensor]] = {}
        self._writes: dict[StorageKey, list[tuple[int, Tensor]]] = {}
        """Writes to the memory, in order: the new values, and the tensors that have them."""
        self._num_seen: Journal[TensorKey, int] = Journal()
        """Tensor -> number of writes to its memory that its value contains. It is stale if there are more.

        A write does not look for the tensors that it makes stale: code may write each element of a table.
        """

    def new(self, tensor: Tensor, kind: str = "value", name: str = "") -> int:
        """Give ``tensor``, of any shape, a new identity on the tape."""
        tid = len(self.tape.tensors)
        self.tape.tensors.append(TensorInfo(tuple(tensor.shape), tensor.dtype, kind, name))
        key = tensor_key(tensor)
        if key not in self._tids:  # code may write to one tensor a thousand times
            self._alive.append(tensor)
            self._on_storage.setdefault(storage_key(tensor), []).append(tensor)
        self.become(tensor, tid)
        return tid

    def tid(self, tensor: Tensor) -> int:
        """Return the identity of ``tensor``; an unknown one is a constant."""
        key = tensor_key(tensor)
        if self.is_stale(tensor):
            # ``tensor`` shares memory with tensors that were written to, so it has a new value.
            for mutated, holder in self._writes_to(tensor)[self._num_seen[key] :]:
                old = self._tids[key]
                new = self.new(tensor)
                shape = self.tape.tensors[mutated].shape
                in_storage = tensor.untyped_storage().nbytes() // tensor.element_size()
                overwrites_all = tensor.numel() == in_storage == math.prod(shape)
                call = self._stack[-1] if self._stack else 0
                op = Op(ALIAS_WRITE, (overwrites_all,), {}, (old, mutated), (new,), call)
                self.tape.events.append(op)
                self.values.wrote(op, MemoryLayout.of(self.meta(tensor)), MemoryLayout.of(self.meta(holder)))
        tid = self._tids.get(key)
        if tid is None:
            tid = self._same_memory(tensor)
        return self.add_constant(tensor) if tid is None else tid

    def _same_memory(self, tensor: Tensor) -> int | None:
        """Return the identity of a tensor with the same elements of the same memory, or None. A ``Parameter``
        is made from one."""
        if tensor.device != META:
            return None
        storage, layout = storage_key(tensor), _layout(tensor)
        for other in self._on_storage.get(storage, ()):
            if other.device == META and tensor_key(other) in self._tids and _layout(other) == layout:
                tid = self.tid(other)
                self.become(tensor, tid)
                self._alive.append(tensor)
                self._on_storage[storage].append(tensor)
                return tid
        return None

    def add_constant(
        self, tensor: Tensor, kind: str = "constant", name: str = "", is_weight: bool = False
    ) -> int:
        """Give a new identity to a tensor that the traced code did not make. If it is not on meta, its value
        is known."""
        tid = self.new(tensor, kind, name)
        if tensor.device == META:
            self.values.add_unknown(tid, is_weight)
        else:
            self.values.known[tid] = tensor
        return tid

    def meta(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it is on meta, otherwise a proxy of its shape and dtype on meta."""
        if tensor.device == META:
            return tensor
        key = tensor_key(tensor)
        twin = self._twins.get(key)
        if twin is None:
            with torch.inference_mode(False):
                twin = self._twins[key] = torch.empty_like(tensor, device=META)
            self.become(twin, self.tid(tensor))
            self._alive.append(twin)
            self._on_storage.setdefault(storage_key(twin), []).append(tensor)
        return twin

    def again(self, tensor: Tensor) -> Tensor:
        """Return another object with the memory and the present identity of a tensor on meta."""
        with torch.utils._python_dispatch._disable_current_modes():
            other = tensor.view_as(tensor)
        self.become(other, self.tid(tensor))
        self._alive.append(other)
        self._on_storage.setdefault(storage_key(other), []).append(other)
        return other

    def become(self, tensor: Tensor, tid: int) -> None:
        """Make ``tensor`` another tensor of the tape from now on. Its value contains all writes."""
        self._tids[tensor_key(tensor)] = tid
        self._num_seen[tensor_key(tensor)] = len(self._writes_to(tensor))

    def is_stale(self, tensor: Tensor) -> bool:
        """Return whether its memory was written through another tensor since it was last read."""
        num_seen = self._num_seen.get(tensor_key(tensor))
        return num_seen is not None and num_seen < len(self._writes_to(tensor))

    def _writes_to(self, tensor: Tensor) -> Sequence[tuple[int, Tensor]]:
        """Return the writes to the memory of a tensor so far. There are none without a proxy on meta."""
        if not self._writes:
            return ()
        on_meta = tensor if tensor.device == META else self._twins.get(tensor_key(tensor))
        return () if on_meta is None else self._writes.get(storage_key(on_meta), ())

    def rewrite(self, tensor: Tensor) -> int:
        """Give a new value to a tensor that was written in place. Its aliases become stale."""
        writes = self._writes.setdefault(storage_key(self.meta(tensor)), [])
        tid = self.new(tensor)
        writes.append((tid, tensor))
        self._num_seen[tensor_key(tensor)] = len(writes)
        return tid

    def point(self) -> IdentitiesPoint:
        """Return the current state."""
        return IdentitiesPoint(len(self._tids.log), len(self._num_seen.log))

    def rewind(self, point: IdentitiesPoint, num_tensors: int) -> None:
        """Go back to a state in which the tape had ``num_tensors``."""
        self._tids.rewind(point.tids)
        self._num_seen.rewind(point.num_seen)
        for writes in self._writes.values():
            while writes and writes[-1][0] >= num_tensors:
                writes.pop()
        self._twins = {key: twin for key, twin in self._twins.items() if tensor_key(twin) in self._tids}


@dataclass(frozen=True, slots=True)
class IdentitiesPoint:
    """A state of ``Identities``: the lengths of its journals."""

    tids: int
    num_seen: int


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """Describe which elements of its memory a tensor has."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


# Properties of ATen operators, and their results on meta tensors.


FIRST_ASKED = {
    "aten.index.Tensor": 1,
    "aten.masked_select.default": 1,
    "aten.repeat_interleave.self_Tensor": 1,
}
"""Operators whose result shape depends on values -> the first input whose values are needed."""


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Properties of an operator, which are looked up once."""

    name: str
    may_take_apart: bool
    """Whether it is composite, and recorded as its parts."""
    is_mutable: bool
    takes_device: bool
    makes_new: bool
    """Whether it returns one tensor that shares memory with no other."""

    @classmethod
    def of(cls, func: Any, keep: Collection[str]) -> OperatorFacts:
        """Return the facts of an ATen overload. Composite operators in ``keep`` are not decomposed."""
        name = str(func)
        is_kept = name.rsplit(".", 1)[0].rstrip("_") in keep
        return cls(
            name=name,
            may_take_apart=not is_kept,
            is_mutable=func._schema.is_mutable,
            takes_device=any(a.name == "device" for a in func._schema.arguments),
            makes_new=not func._schema.is_mutable
            and len(func._schema.returns) == 1
            and func._schema.returns[0].alias_info is None,
        )


class MetaResults:
    """Cache the results of operators that make one new tensor, since layers repeat and meta functions are
    slow."""

    MOST = 50_000
    """Number of results at which the cache is cleared."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``, whose tensor arguments are on the meta device."""
        key = (func, torch.get_default_dtype(), _geometry(args), _geometry(tuple(kwargs.items())))
        recorded = self._known.get(key)
        if recorded is not None:
            shape, stride, dtype = recorded
            return torch.empty_strided(shape, stride, dtype=dtype, device=META)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            if len(self._known) >= self.MOST:
                self._known.clear()
            self._known[key] = (result.shape, result.stride(), result.dtype)
        return result


META_RESULTS = MetaResults()
"""Shared by all traces, since a model is traced several times for a plan."""


def _geometry(value: Any) -> Any:
    """Return an operator's arguments as a hashable value, tensors by shape, strides and dtype."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_geometry(v) for v in value)
    return type(value), value


def result_on_meta(name: str, args: Any) -> Tensor | None:
    """Return the result of an operator whose meta function rejects some dtypes; None for other operators.

    ``_grouped_mm`` of x ``[S, I]`` and weight ``[E, I, O]`` returns ``[S, O]``.
    """
    if name == "aten._grouped_mm.default":
        x, weight = args[0], args[1]
        return torch.empty(*x.shape[:-1], weight.shape[-1], dtype=x.dtype, device=META)
    return None


def mutated_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors (or ``Ref``s) to which an operator writes, in lists too, in its schema's order."""
    out: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (tuple, list)) else (value,)
            out += [each for each in values if isinstance(each, Tensor | Ref)]
    return out


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments and in lists of arguments."""
    out: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            out.append(value)
        elif isinstance(value, (tuple, list)):
            out += tensors_in(value)
    return out
