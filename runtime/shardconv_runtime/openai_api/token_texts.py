"""Each token's text and bytes, as the log probabilities of an answer show them.

A token by itself is decoded otherwise than in an answer: many decoders strip the space at the begin of a
text, and parts of a character's bytes are no text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"
"""Result of decoding a part of a character's bytes."""


class TokenTexts:
    """The tokens of a tokenizer, as they are within a text.

    Attributes:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[tuple[int, bool], str] = {}

    def text(self, token: int, is_first: bool) -> str:
        """Return the text that a token adds, U+FFFD for bytes that are no text."""
        key = token, is_first
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._decode([token]) if is_first else self._later(token)
        return self._known[key]

    def bytes_of(self, token: int, is_first: bool) -> bytes:
        """Return the bytes that a token adds to a text."""
        text = self.text(token, is_first)
        if INCOMPLETE not in text:
            return text.encode(errors="replace")
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        if single := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes([int(single[1], 16)])
        if all(character in BYTE_OF for character in name):
            return bytes(BYTE_OF[character] for character in name)
        return text.encode()

    def name(self, token: int, is_first: bool, prefix: str = "") -> str:
        r"""Return a token's text, or ``\xe2\x82`` for bytes that are no text, as OpenAI's API does."""
        text = self.text(token, is_first)
        if INCOMPLETE not in text:
            return text
        content = self.bytes_of(token, is_first)
        try:
            return content.decode()  # the character U+FFFD itself
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in content)

    def _later(self, token: int) -> str:
        # After itself: any token before it does.
        before, text = self._decode([token]), self._decode([token, token])
        return text[len(before) :] if text.startswith(before) else before

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


MOST_KNOWN = 2**16
"""Texts that are kept."""


def _bytes_of_characters() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(other_bytes)}


BYTE_OF = _bytes_of_characters()
