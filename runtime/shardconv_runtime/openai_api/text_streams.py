"""From the tokens of an answer to its text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .token_texts import INCOMPLETE

LONGEST_CHARACTER = 8
"""Tokens after which bytes without a complete character are invalid: a character has at most four bytes."""


class TextStream:
    """The text of an answer as its tokens come, up to the first stop string."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._skip_special_tokens = skip_special_tokens
        self._window = (0, 0)
        """Tokens with which the next ones are decoded, for spaces and joined bytes: start and stop."""
        self._held = ""
        self.is_stopped = False

    def push(self, tokens: Sequence[int], is_last: bool) -> str:
        """Return the text that is known since the last call."""
        if self.is_stopped:
            return ""
        self._held += self._decoded(tokens, is_last)
        positions = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if positions:
            self.is_stopped, text = True, self._held[: min(positions)]
            return text
        num_held = 0 if is_last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        return text

    def _decoded(self, tokens: Sequence[int], is_last: bool) -> str:
        begin, end = self._window
        before, text = self._decode(tokens[begin:end]), self._decode(tokens[begin:])
        if text.endswith(INCOMPLETE) and not is_last and len(tokens) - end < LONGEST_CHARACTER:
            return ""
        self._window = (end, len(tokens))
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        # Spaces are cleaned up by the text that follows them, so that pieces would not join to the text of
        # all.
        return str(
            self._tokenizer.decode(
                list(tokens),
                skip_special_tokens=self._skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
