"""Other libraries' errors in ours."""

from __future__ import annotations


def brief(error: BaseException, limit: int = 200) -> str:
    """An error's message in one line of at most ``limit`` characters, or its type's name."""
    text = " ".join(str(error).split()).rstrip(".:;")
    return (text if len(text) <= limit else text[:limit] + "...") or type(error).__name__
