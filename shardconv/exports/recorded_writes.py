"""Records writes to allocated tensors, without doing them.

An engine allocates its parameters and copies the tensors of a checkpoint into views of them. Under
``RecordedWrites`` a parameter is allocated and not touched, and memory that is not touched takes none; each
write to it is kept as a view and a lazy tensor, and a read of it reads a lazy tensor. So the content
of every parameter is known afterwards, and no weight was read.

Small tensors have real values as well, since code asks for them, as long as nothing of the checkpoint is
written to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import (
    ComputedLeaf,
    LazyLeaf,
    LazyTensor,
    from_leaf,
    zeros,
)
from shardconv_runtime.checkpoint.recording_tensors import RecordedTensor, lazy_of, on_meta
from shardconv_runtime.format.header import dtype_name
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..tracing.identities import mutated_arguments
from .strided_views import UnknownContentError, View, Write, content_of


@dataclass(slots=True)
class StorageRecord:
    """The writes to a storage."""

    tensor: torch.Tensor
    """Keeps the storage alive, so that no other one gets its address."""
    is_real: bool
    """Whether its memory has the values; False once a write was kept and not done."""
    writes: list[tuple[View, LazyTensor | str | None]] = field(default_factory=list)
    """Views in the order of the writes, and the content of each since then; None: its memory has it."""

    def note(self, tensor: torch.Tensor, content: LazyTensor | str | None) -> None:
        """Add a write to a view of the storage."""
        if tensor.dtype == self.tensor.dtype:
            self.writes.append((View.of(tensor), content))
        else:
            size = self.tensor.untyped_storage().nbytes() // self.tensor.itemsize
            self.writes.append((View(0, (size,), (1,)), _taken_for(tensor.dtype)))

    def content(self, tensor: torch.Tensor) -> LazyTensor:
        """Return the content of a view of the storage."""
        if tensor.dtype != self.tensor.dtype:
            raise UnknownContentError(_taken_for(tensor.dtype))
        contents = []
        for view, content in self.writes:
            if content is None:
                content = constant(self.tensor.as_strided(view.shape, view.strides, view.offset))
            contents.append(Write(view, content))
        return content_of(View.of(tensor), dtype_name(tensor.dtype), contents)


def constant(tensor: torch.Tensor) -> LazyTensor:
    """Return the values of a tensor in memory, as they are now."""
    lazy = lazy_of(tensor.detach().clone(memory_format=torch.contiguous_format))
    assert lazy is not None, "it is real"
    return lazy


def _taken_for(dtype: torch.dtype) -> str:
    return f"its bytes are taken for {dtype}"


aten = torch.ops.aten

LARGE = 1 << 16
"""Tensors of at least this many elements have no real values."""

RANDOM = "it is drawn at random"


@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor of one value as the computation of a lazy leaf."""

    value: float
    dtype: str
    num_elements: int

    def __call__(self) -> torch.Tensor:
        """Return the tensor: ``[num_elements]``."""
        return torch.full((self.num_elements,), self.value, dtype=getattr(torch, self.dtype))


class RecordedWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which writes to tensors are recorded.

    >>> with RecordedWrites() as writes:
    ...     parameter = torch.empty(4, 2)
    ...     parameter.copy_(RecordedTensor(stored))
    >>> writes.content(parameter) == stored
    True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records: dict[int, StorageRecord] = {}
        self._changed: set[LazyLeaf] = set()
        """Leaves of which a tensor was changed in place; only that tensor has the new content."""

    def content(self, tensor: torch.Tensor) -> LazyTensor:
        """Return the content of a tensor."""
        if isinstance(tensor, RecordedTensor):
            if any(piece.leaf in self._changed for piece in tensor.lazy.pieces):
                raise UnknownContentError("a tensor that may share its bytes was changed in place")
            return tensor.lazy
        if tensor.is_meta:
            raise UnknownContentError("it has no memory")
        record = self._record_of(tensor)
        return constant(tensor) if record is None else record.content(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record one operator, or run it."""
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            raise UnknownContentError(f"ranks communicate while weights are loaded ({func})")
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        if func.overloadpacket in (*_EMPTY, *_FILLED, *_RANDOM):
            # A new tensor; a large one has no values.
            like = on_meta(func, args, kwargs, lambda result: result)
            device = kwargs.get("device")
            if device is None:
                device = args[0].device if args and isinstance(args[0], torch.Tensor) else "cpu"
            if torch.device(device).type == "meta":
                return like
            if func.overloadpacket in _EMPTY or like.numel() >= LARGE:
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
                record = self._track(made, is_real=like.numel() < LARGE)
            else:
                made = func(*_empty_on(None, args), **kwargs)  # it reads only shapes
                record = self._track(made, is_real=True)
            if func.overloadpacket in _RANDOM:
                record.note(made, RANDOM)
            elif func.overloadpacket in _FILLED:
                record.note(made, None if record.is_real else _filled(func, args, kwargs, made))
            return made
        return func(*args, **kwargs) if func.is_view else self._read(func, args, kwargs)

    def _record_of(self, tensor: torch.Tensor) -> StorageRecord | None:
        if isinstance(tensor, RecordedTensor) or tensor.is_meta:
            return None
        return self._records.get(id(tensor.untyped_storage()))

    def _track(self, tensor: torch.Tensor, *, is_real: bool) -> StorageRecord:
        record = StorageRecord(tensor.detach(), is_real)
        self._records[id(tensor.untyped_storage())] = record
        return record

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory has its content."""
        record = self._record_of(tensor)
        return not isinstance(tensor, RecordedTensor) and (record is None or record.is_real)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record or run an operator that changes some of its arguments."""
        changed = mutated_arguments(func, args, kwargs)
        if all(tensor.is_meta for tensor in changed):
            return func(*_empty_on("meta", args), **kwargs)
        if all(self.has_values(tensor) for tensor in _tensors((args, kwargs))):
            sources = [t for t in _tensors((args, kwargs)) if all(t is not other for other in changed)]
            for tensor in changed:
                # The memory gets values. An operator that only changes old values leaves the rest unwritten.
                record = self._record_of(tensor)
                if reason := self._why_unknown(func, sources):
                    (record or self._track_memory(tensor)).note(tensor, reason)
                elif record is not None and func.overloadpacket in _REPLACING:
                    record.note(tensor, None)
            return func(*args, **kwargs)
        for tensor in changed:
            content = self._written(func, args, kwargs, tensor)
            if isinstance(tensor, RecordedTensor):
                # Change a tensor of the checkpoint, or one made of it; others of the same bytes may be its
                # views.
                if isinstance(content, str):
                    raise UnknownContentError(f"of a tensor of the checkpoint, {content}")
                self._changed.update(piece.leaf for piece in tensor.lazy.pieces)
                tensor.lazy = content
                continue
            record = self._record_of(tensor) or self._track_memory(tensor)
            record.is_real = False
            record.note(tensor, content)
        return changed[0] if len(changed) == 1 else None

    def _track_memory(self, tensor: torch.Tensor) -> StorageRecord:
        """Begin to record a storage that has values."""
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.itemsize
        flat = tensor.detach().as_strided((size,), (1,), 0)
        record = self._track(flat, is_real=True)
        record.note(flat, None)
        return record

    def _written(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: torch.Tensor
    ) -> LazyTensor | str:
        """Return the content of a tensor after a change that is not done, or why it is not known."""
        if func.overloadpacket in _FILLED:
            return _filled(func, args, kwargs, tensor)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return RANDOM
        # The operator that returns the values that another one writes to its first argument, or None.
        name = func._schema.name.partition("::")[2]
        packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
        compute = getattr(packet, str(func).rpartition(".")[2], None)
        try:
            if func.overloadpacket is aten.copy_:
                source = self._as_lazy(args[1])
            elif compute is not None and args[0] is tensor:
                source = compute(*self._as_lazy(args), **self._as_lazy(kwargs))
            else:
                return f"it is changed in place by {func.overloadpacket}"
        except UnknownContentError as error:
            return str(error)
        if source.dtype != tensor.dtype:
            source = source.to(tensor.dtype)
        if source.shape != tensor.shape:
            source = source.expand(tensor.shape)
        return source.lazy if isinstance(source, RecordedTensor) else constant(source)

    def _as_lazy(self, values: Any) -> Any:
        """Return arguments with a recorded tensor for each tensor without values, and copies of the
        others."""

        def lazy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            content = self.content(value)
            return value.detach().clone() if self.has_values(value) else RecordedTensor(content)

        return tree_map(lazy, values)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that changes nothing, on recorded tensors if there are no values."""
        if all(self.has_values(tensor) for tensor in _tensors((args, kwargs))):
            results = func(*args, **kwargs)
            reason = self._why_unknown(func, _tensors((args, kwargs)))
            for tensor in _tensors(results):
                if reason and self._record_of(tensor) is None:
                    self._track(tensor, is_real=True).note(tensor, reason)
            return results
        if func is aten._local_scalar_dense.default:
            return read_tensor(self.content(args[0])).item()
        reason = RANDOM if torch.Tag.nondeterministic_seeded in func.tags else ""
        try:
            recorded = self._as_lazy(args), self._as_lazy(kwargs)
        except UnknownContentError as error:
            reason = str(error)
        if reason:
            return on_meta(func, args, kwargs, lambda like: self._unknown(like, reason))
        return func(*recorded[0], **recorded[1])

    def _why_unknown(self, func: Any, inputs: Iterable[torch.Tensor]) -> str:
        """Return why the result of an operator on values in memory is not known all the same; "" if it is."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return RANDOM
        try:
            for tensor in inputs:
                if (record := self._record_of(tensor)) is not None:
                    record.content(tensor)
        except UnknownContentError as error:
            return str(error)
        return ""

    def _unknown(self, like: torch.Tensor, reason: str) -> torch.Tensor:
        """Return a tensor like another one, whose content is not known."""
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        self._track(made, is_real=False).note(made, reason)
        return made


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def _empty_on(device: str | None, args: tuple[Any, ...]) -> Any:
    """Return arguments with an empty tensor on ``device`` for each recorded tensor."""

    def empty(value: Any) -> Any:
        if isinstance(value, RecordedTensor):
            return torch.empty(value.shape, dtype=value.dtype, device=device)
        return value

    return tree_map(empty, args)


def _filled(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: torch.Tensor
) -> LazyTensor | str:
    """Return a tensor of the one value that an operator writes, or why it is not known."""
    value = _FILLED[func.overloadpacket]
    if value is None:
        value = kwargs.get("fill_value", kwargs.get("value", args[-1]))
    if isinstance(value, RecordedTensor):
        return f"it is filled with a value of the checkpoint by {func.overloadpacket}"
    number = value.item() if isinstance(value, torch.Tensor) else value
    dtype, size = dtype_name(tensor.dtype), tensor.numel()
    if number == 0 and math.copysign(1, number) > 0:
        return zeros(dtype, tensor.shape)
    return from_leaf(ComputedLeaf("a constant", Filled(number, dtype, size), dtype, size), tensor.shape)


_EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
"""Operators that make a tensor without values."""

_FILLED: Mapping[Any, Any] = {
    aten.zeros: 0,
    aten.zeros_like: 0,
    aten.new_zeros: 0,
    aten.zero_: 0,
    aten.ones: 1,
    aten.ones_like: 1,
    aten.new_ones: 1,
    aten.full: None,
    aten.full_like: None,
    aten.new_full: None,
    aten.fill_: None,
}
"""Operators that give all elements of a tensor one value: that value, or None if it is an argument."""

_RANDOM = (aten.rand, aten.randn, aten.randint, aten.rand_like, aten.randn_like, aten.randint_like)
"""Operators that make a tensor of random values."""

_REPLACING = (aten.copy_, aten.fill_, aten.zero_)
"""Operators that replace all values of a tensor."""


class RefusedRawReads(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """A mode in which the memory of a tensor without values is not read past the dispatcher."""

    def __init__(self, writes: RecordedWrites) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes = writes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse functions that hand out the memory."""
        if func in _RAW and not self._writes.has_values(args[0]):
            raise UnknownContentError(f"the memory of a parameter is read by {func.__name__}")
        return func(*args, **(kwargs or {}))


_RAW = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)
"""Methods that read memory without an operator."""
