"""Observers, inside of the process, of the memory and the communication of a training step."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Private, but CommDebugMode is built on it.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Kind = tuple[str, str]
Sizes = Mapping[str, Sequence[int]]

_REDUCE, _GATHER, _SCATTER = "all_reduce", "all_gather", "reduce_scatter"
COLLECTIVES = (_REDUCE, _GATHER, _SCATTER)

_KINDS: Mapping[Kind, tuple[str, bool]] = {
    ("_c10d_functional", "all_reduce"): (_REDUCE, False),
    ("_c10d_functional", "all_reduce_"): (_REDUCE, False),
    ("_c10d_functional", "all_gather_into_tensor"): (_GATHER, True),
    ("_c10d_functional", "reduce_scatter_tensor"): (_SCATTER, False),
    ("c10d", "allreduce_"): (_REDUCE, False),
    ("c10d", "_allgather_base_"): (_GATHER, False),
}
"""Operator: the collective, and whether its full tensor is the result rather than the first argument."""

_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


def wire_bytes(collective: str, payload: float, num_ranks: int) -> float:
    """Bytes that each rank sends in a ring.

    Args:
        collective: one of ``COLLECTIVES``.
        payload: bytes of the full tensor: summed, gathered, or before it is scattered.
        num_ranks: of the group.
    """
    return payload * (2 if collective == _REDUCE else 1) * (num_ranks - 1) / num_ranks


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives, and the bytes of their full tensors, by phase.

    Attributes:
        phase: the name under which they are counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = ""
        self._sizes: dict[tuple[str, str], list[int]] = defaultdict(list)

    def sizes(self, phase: str) -> dict[str, list[int]]:
        """Payload bytes of each call in a phase, by collective."""
        return {kind: sizes for (when, kind), sizes in self._sizes.items() if when == phase}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the operator if it is a collective."""
        if _has_wrapped(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            if (func.namespace, name) not in _KINDS:
                raise NotImplementedError(f"{func.namespace}::{name} is in no table of {__file__}")
            collective, of_result = _KINDS[func.namespace, name]
            full = out if of_result else args[0]
            num_bytes = sum(x.nbytes for x in tree_leaves(full) if isinstance(x, Tensor))
            self._sizes[self.phase, collective].append(num_bytes)
        return out


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the living storages that operators returned, without their internal allocations.

    Args:
        known: tensors that were there before, which do not count.

    Attributes:
        peak_bytes: the most at any time.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._bytes = 0
        self._known = {storage(x).data_ptr() for x in known}
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the storages of the results."""
        if _has_wrapped(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(storage(x))
        return out

    def _note(self, found: torch.UntypedStorage) -> None:
        if found.device.type == "meta" or not found.nbytes():
            return  # DTensor asks shapes of tensors that have no memory
        address, num_bytes = found.data_ptr(), found.nbytes()
        if address in self._known or address in self._alive:
            return
        self._alive.add(address)
        self._bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(found, self._free, address, num_bytes)

    def _free(self, address: int, num_bytes: int) -> None:
        self._alive.discard(address)
        self._bytes -= num_bytes


class Saved:
    """Storages that a forward pass keeps for its backward pass, each once.

    Args:
        known: tensors whose storages do not count, as parameters.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {storage(x).data_ptr() for x in known}
        self._found: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(self._found.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward pass; saved tensors stay alive, so that an address identifies a storage."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x):
            yield

    def _pack(self, x: Tensor) -> Tensor:
        found = storage(x)
        if found.data_ptr() not in self._known:
            self._found[found.data_ptr()] = found.nbytes()
        return x.detach()  # a result that is saved by its own node would keep itself alive


def storage(x: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor: of the local part of a distributed one, of the result of a pending one."""
    while is_traceable_wrapper_subclass(x):
        names, _ = x.__tensor_flatten__()
        x = getattr(x, names[0])
    return x.untyped_storage()


def _has_wrapped(types: Iterable[type]) -> bool:
    """Whether a call has distributed tensors; it is dispatched again on the local ones."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def total(sizes: Sizes, num_ranks: int) -> float:
    """Bytes that each rank sends for all calls."""
    return math.fsum(wire_bytes(kind, sum(each), num_ranks) for kind, each in sizes.items())
