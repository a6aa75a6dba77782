"""A table whose keys are tensors or their memory, by identity; it keeps none of them alive."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")
Key = torch.Tensor | torch.UntypedStorage


class WeakTable(Generic[Value]):
    """A dict by identity: comparing tensors would be a call of torch, which an active mode sees."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Key], Value]] = {}

    def __contains__(self, key: Key) -> bool:
        return id(key) in self._entries

    def __getitem__(self, key: Key) -> Value:
        return self._entries[id(key)][1]

    def __setitem__(self, key: Key, value: Value) -> None:
        number, entries = id(key), self._entries
        known = entries.get(number)
        reference = known[0] if known else weakref.ref(key, lambda _: entries.pop(number, None))
        entries[number] = reference, value

    def get(self, key: Key, default: Value) -> Value:
        """The value of a key, or the default."""
        known = self._entries.get(id(key))
        return known[1] if known else default
