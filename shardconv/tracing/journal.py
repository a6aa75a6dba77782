"""A dict that can be taken back to an earlier state."""

from __future__ import annotations

from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Journal(dict[K, T]):
    """Keeps the values that changes replaced, in ``log``; a value is never None."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[K, T | None]] = []

    def __setitem__(self, key: K, value: T) -> None:
        self.log.append((key, self.get(key)))
        super().__setitem__(key, value)

    def pop(self, key: K, default: Any = None) -> Any:
        """As of a dict; the default is None."""
        self.log.append((key, self.get(key)))
        return super().pop(key, default)

    def rewind(self, length: int) -> None:
        """Undo the changes behind the first ``length``."""
        while len(self.log) > length:
            key, before = self.log.pop()
            if before is None:
                super().pop(key, None)
            else:
                super().__setitem__(key, before)
