"""Options for reaching the Hub, and checks of repository ids."""

from __future__ import annotations

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..errors import SourceError


def looks_like_path(text: str) -> bool:
    """Whether a text cannot be the id of a repository."""
    return text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1


def require_repo_id(text: str) -> None:
    """Refuse a text that cannot be the id of a repository.

    Raises:
        SourceError: the text looks like a path.
    """
    try:
        if not looks_like_path(text):
            validate_repo_id(text)
            return
    except HFValidationError:
        pass
    raise SourceError(f"no such directory: {text} (and it is not a Hub id); check the path")
