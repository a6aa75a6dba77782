"""Pieces of text join to the text of all tokens, up to a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from shardconv_runtime.openai_api.text_streams import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def pieces(text: str, *stops: str) -> list[str]:
    """What each token adds."""
    stream, tokens = TextStream(Bytes(), stops), text.encode()
    return [stream.push(list(tokens[:n]), n == len(tokens)) for n in range(1, len(tokens) + 1)]


@pytest.mark.parametrize("text", ["plain", "zwölf Ähren", "日本語 🙂 ok"])
def test_characters_are_not_divided(text: str) -> None:
    found = pieces(text)
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found)


def test_a_part_of_a_character_at_the_end_is_shown() -> None:
    stream = TextStream(Bytes())
    assert stream.push([65, 0xE6], True) == "A\ufffd"


def test_bytes_that_are_no_character_are_decoded_a_few_times_only() -> None:
    decoded: list[int] = []

    class Counting(Bytes):
        def decode(self, tokens: list[int], **options: Any) -> str:
            decoded.append(len(tokens))
            return super().decode(tokens, **options)

    stream, tokens = TextStream(Counting()), [0xFF] * 1000
    text = "".join(stream.push(tokens[:n], n == len(tokens)) for n in range(1, len(tokens) + 1))
    assert text == "\ufffd" * 1000
    assert max(decoded) < 20


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one twin", ["two"], "one twin"),
        ("one tw", ["two"], "one tw"),
        ("aab", ["ab"], "a"),
        ("END", ["END"], ""),
    ],
)
def test_the_text_ends_before_a_stop_string(text: str, stops: list[str], want: str) -> None:
    assert "".join(pieces(text, *stops)) == want
