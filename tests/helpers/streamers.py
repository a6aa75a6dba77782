"""Streamers of ``generate``."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: Tensor) -> None:
        """The prompt, then the tokens of all rows."""
        self.given.append(value.tolist())

    def end(self) -> None:
        """No more."""
        self.given.append("end")
