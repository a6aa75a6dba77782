"""The README.md of a repository: a section that shardconv writes, in the text of a person."""

from __future__ import annotations

import re
from typing import Any

from huggingface_hub import ModelCard
from shardconv_runtime.errors import SourceError

BEGIN, END = "<!-- shardconv: begin -->", "<!-- shardconv: end -->"
"""Each push replaces the text between them."""

_OWN = re.compile(f"{BEGIN}(?:(?!{BEGIN}).)*?{END}", re.DOTALL)


def merged(existing: str | None, card: str) -> str:
    """Replace the card in ``existing``, and keep everything else.

    Metadata in ``existing`` takes precedence; lists get the items of both.

    Args:
        existing: the current README.md; None: there is none.
        card: a model card with metadata.

    Raises:
        SourceError: the metadata of ``existing`` cannot be read.
    """
    made = ModelCard(card)
    metadata: dict[str, Any] = made.data.to_dict()  # type: ignore[no-untyped-call]
    section = _section(made.text)
    if existing is None:
        return _with_metadata(metadata, f"\n{section}\n")
    try:
        found = ModelCard(existing, ignore_metadata_errors=True)
    except Exception as error:  # of the YAML library, or the client's
        raise SourceError(
            "the README.md on the Hub begins with metadata that cannot be read; correct it there, between "
            "the lines ---"
        ) from error
    before: dict[str, Any] = found.data.to_dict()  # type: ignore[no-untyped-call]
    after = _united(before, metadata)
    body = _replaced(found.text, section)
    if after == before:
        return existing[: len(existing) - len(found.text)] + body
    return _with_metadata(after, body)


def _section(text: str) -> str:
    """The text between the two comments, including them."""
    inner = text.split(BEGIN, 1)[-1].rsplit(END, 1)[0] if BEGIN in text and END in text else text
    return f"{BEGIN}\n{inner.strip()}\n{END}"


def _replaced(text: str, section: str) -> str:
    found = _OWN.search(text)
    if found is None:
        return f"{text.rstrip()}\n\n{section}\n" if text.strip() else f"\n{section}\n"
    return text[: found.start()] + section + text[found.end() :]


def _united(existing: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    united = dict(existing)
    for key, value in made.items():
        old = united.get(key)
        if old is None:
            united[key] = value
        elif isinstance(old, list) and isinstance(value, list):
            united[key] = [*old, *(item for item in value if item not in old)]
    return united


def _with_metadata(metadata: dict[str, Any], body: str) -> str:
    card = ModelCard(body)
    card.data = card.card_data_class(ignore_metadata_errors=True, **metadata)
    return str(card)
