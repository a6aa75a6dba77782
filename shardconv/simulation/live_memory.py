"""The bytes of live tensors while a model runs on the meta device.

A ``TorchDispatchMode`` sees each operator, and a weak reference to each new storage tells when Python frees
it. Nothing is computed: a run of any length costs the time of its Python code. Memory that a kernel allocates
internally is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..tracing.identities import (
    META,
    MetaResults,
    OperatorFacts,
    mutated_arguments,
    result_on_meta,
    tensors_in,
)

Value = TypeVar("Value")
Key = torch.Tensor | torch.UntypedStorage


class WeakTable(Generic[Value]):
    """A dict with weak keys, by identity. Comparing tensors would call torch, which an active mode sees."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Key], Value]] = {}

    def __contains__(self, key: Key) -> bool:
        return id(key) in self._entries

    def __getitem__(self, key: Key) -> Value:
        return self._entries[id(key)][1]

    def __setitem__(self, key: Key, value: Value) -> None:
        number, entries = id(key), self._entries
        entry = entries.get(number)
        reference = entry[0] if entry else weakref.ref(key, lambda _: entries.pop(number, None))
        entries[number] = reference, value

    def get(self, key: Key, default: Value) -> Value:
        """Return the value of a key, or the default."""
        entry = self._entries.get(id(key))
        return entry[1] if entry else default


# Values of tensors that depend on no parameter, for code that reads them while a model runs on the meta
# device.
#
# Each such tensor has a node: the operator that made it, and the nodes of its operands. It is evaluated when
# code reads it. Nodes hold no tensors of the run, so they do not change how long these live.

MAX_NUMEL = 1 << 24
"""Largest number of elements that is evaluated."""
_CPU = torch.device("cpu")


class AsksForValues(Exception):
    """The model's code reads values that depend on parameters, or too many values."""


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """The operator that computes a tensor, on the CPU."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int
    """Index of the tensor among the operator's results."""
    numel: int

    def compute(self) -> Tensor:
        if self.numel > MAX_NUMEL:
            raise AsksForValues("the model's code asks for the values of a large tensor")
        args, kwargs = pytree.tree_map_only(_Node, _Node.compute, (self.args, self.kwargs))
        if not self.func._schema.is_mutable:
            return tensors_in((self.func(*args, **kwargs),))[self.output]
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        self.func(*args, **kwargs)
        written: Tensor = mutated_arguments(self.func, args, kwargs)[self.output]
        return written


class KnownValues:
    """The tensors of a run whose values can be computed."""

    def __init__(self) -> None:
        self._nodes: WeakTable[tuple[_Node, int]] = WeakTable()
        """Tensor -> its node, and the number of earlier writes to its memory."""
        self._writes: WeakTable[int] = WeakTable()
        """Storage -> number of writes to it."""

    def fill(self, tensor: Tensor, value: int) -> None:
        """Set all values of an input to a number."""
        full = torch.ops.aten.full.default
        node = _Node(full, (list(tensor.shape), value), {"dtype": tensor.dtype}, 0, tensor.numel())
        self._nodes[tensor] = node, 0

    def made(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note that an operator with the operands ``tensors`` ran on meta."""
        is_mutable = func._schema.is_mutable
        is_known = all(self._operand(t) is not None for t in tensors)
        if not is_mutable and not is_known:
            return
        outputs = mutated_arguments(func, args, kwargs) if is_mutable else tensors_in((result,))
        if is_known:
            args, kwargs = pytree.tree_map_only(Tensor, self._operand, (args, kwargs))
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
        for index, tensor in enumerate(outputs):
            writes = self._writes.get(tensor.untyped_storage(), 0) + is_mutable
            if is_mutable:
                self._writes[tensor.untyped_storage()] = writes
            if is_known:
                self._nodes[tensor] = _Node(func, args, kwargs, index, tensor.numel()), writes

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, on the CPU.

        Raises:
            AsksForValues: if it is not known.
        """
        operand = self._operand(tensor)
        if operand is None:
            raise AsksForValues("the model's code asks for values that depend on its parameters")
        if isinstance(operand, Tensor):
            return operand
        with _disable_current_modes():
            return operand.compute()

    def _operand(self, tensor: Tensor) -> Tensor | _Node | None:
        """Return a tensor with values, or its node, unless the memory was written through another tensor."""
        if tensor.device != META:
            return tensor
        if tensor not in self._nodes:
            return None
        node, writes = self._nodes[tensor]
        return node if writes == self._writes.get(tensor.untyped_storage(), 0) else None


_ATTENTION = "aten.scaled_dot_product_attention"
"""A composite operator, but all devices have kernels that allocate no memory for the scores."""
_KEPT = (_ATTENTION, "aten.linear", "aten.matmul")
"""Composite operators that are counted as one, since they allocate only their result."""


class TooLong(Exception):
    """A run exceeds its number of operators."""


class OperatorMemo:
    """Cached facts of operators, which several runs share."""

    def __init__(self) -> None:
        self.facts: dict[Any, OperatorFacts] = {}
        self.results = MetaResults()

    def facts_of(self, func: Any) -> OperatorFacts:
        """Return the facts of an ATen overload."""
        facts = self.facts.get(func)
        if facts is None:
            facts = self.facts[func] = OperatorFacts.of(func, _KEPT)
        return facts


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the storages that are made while it is active, and when they are freed.

    Args:
        max_operators: most operators of the run.
        where: is called for each new storage, and names the place for ``places``.
        before: existing tensors, which are not counted.
        memo: shared by the runs of a model.

    Attributes:
        sizes: bytes of each storage, in the order in which they were made.
        places: the place of each storage.
        lives: (index of a storage, True if it was made and False if it was freed), in the order of these
            events.
        operators_left: number of operators that the run may still have.
    """

    def __init__(
        self, max_operators: int, where: Callable[[], str], before: Iterable[Tensor], memo: OperatorMemo
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = KnownValues()
        self.sizes: list[int] = []
        self.places: list[str] = []
        self.lives: list[tuple[int, bool]] = []
        self._where = where
        self._indices: WeakTable[int | None] = WeakTable()
        for tensor in before:
            self._indices[tensor.untyped_storage()] = None
        self._references: list[weakref.ref[Any]] = []
        self.operators_left = max_operators
        self._memo = memo

    def index(self, tensor: Tensor) -> int | None:
        """Return the number of the storage under a tensor; None if it was made before."""
        return self._indices.get(tensor.untyped_storage(), None)

    def ran(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Is called behind each operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = self._memo.facts_of(func)
        kwargs = kwargs or {}
        if facts.may_take_apart:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._memo.facts[func] = replace(facts, may_take_apart=False)
        self.operators_left -= 1
        if self.operators_left < 0:
            raise TooLong
        if facts.name == "aten._local_scalar_dense.default":
            return self.values.value(args[0]).item()
        tensors = tensors_in(args) + tensors_in(kwargs.values())
        is_constant = [t.device != META for t in tensors]
        if tensors and all(is_constant) and "device" not in kwargs:
            return func(*args, **kwargs)  # all operands are constants of the code
        if "device" in kwargs or (facts.takes_device and not tensors):
            kwargs = {**kwargs, "device": META}
        if facts.takes_device:
            args = tuple(META if isinstance(a, torch.device) else a for a in args)
        on_meta = (args, kwargs)
        if any(is_constant):
            on_meta = pytree.tree_map_only(Tensor, _on_meta, on_meta)
        result = self._run(func, facts, *on_meta)
        if result is None:  # its shape depends on values
            values = pytree.tree_map_only(Tensor, self.values.value, (args, kwargs))
            result = pytree.tree_map_only(Tensor, _on_meta, func(*values[0], **values[1]))
        self.values.made(func, tensors, args, kwargs, result)
        self.ran(facts.name, func, on_meta[0], on_meta[1], result)
        for tensor in tensors_in((result,)):
            self._note(tensor)
        return result

    def _run(self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result on meta; None if it depends on values."""
        if facts.name.startswith(_ATTENTION):
            return self._attention(args, kwargs)
        result = result_on_meta(facts.name, args)
        if result is not None:
            return result
        try:
            if facts.makes_new:
                return self._memo.results.run(func, args, kwargs)
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            return None

    def _attention(self, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Allocate the result in the kernels' layout. A bool mask is converted to numbers while they run."""
        query, value = args[0], args[2]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        numbers = None
        if mask is not None and mask.dtype == torch.bool:
            numbers = torch.empty(mask.shape, dtype=query.dtype, device=META)
            self._note(numbers)
        *batch, heads, length, _ = query.shape
        shape = (*batch, length, heads, value.shape[-1])
        result = torch.empty(shape, dtype=query.dtype, device=META).transpose(-2, -3)
        self._note(result)  # while the numbers are there
        del numbers
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device != META or storage in self._indices:
            return
        index = len(self.sizes)
        self._indices[storage] = index
        self.sizes.append(storage.nbytes())
        self.places.append(self._where())
        self.lives.append((index, True))
        self._references.append(weakref.ref(storage, lambda _: self.lives.append((index, False))))


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.device == META:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
