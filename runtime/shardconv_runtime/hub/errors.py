"""What went wrong while a repository was written, in words that say what to do; of reading: ``access.py``."""

from __future__ import annotations

from collections.abc import Iterator

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..messages import brief

HTTP_ERROR = HfHubHTTPError.__bases__[0]
"""The base of all errors of the client's HTTP library, which is another one in each major version."""

TEMPORARY = (408, 412, 429, 500, 502, 503, 504)
"""Answers after which trying again may help; 412: the branch has moved on."""


def hub_error(error: BaseException) -> Exception | None:
    """The error of the Hub, or of the way to it, that ``error`` is or was raised from; None: none."""
    for found in _chain(error):
        if isinstance(found, HTTP_ERROR | OfflineModeIsEnabled):
            return found  # type: ignore[return-value]
    return None


def status_of(error: BaseException) -> int | None:
    """The status that the Hub answered with; None: it did not answer."""
    found = hub_error(error)
    return found.response.status_code if isinstance(found, HfHubHTTPError) else None


def is_temporary(error: BaseException) -> bool:
    """Whether trying again may help."""
    found = hub_error(error)
    if found is None or isinstance(found, OfflineModeIsEnabled):
        return False
    return not isinstance(found, HfHubHTTPError) or found.response.status_code in TEMPORARY


def explain(repo_id: str, revision: str | None, error: BaseException) -> str:
    """An error in one line, and what to do.

    Args:
        repo_id: id of the repository.
        revision: branch, tag or commit; None: the default branch.
        error: has a ``hub_error``, or is a ``ValueError`` of the client or any error of Xet.
    """
    found, status = hub_error(error), status_of(error)
    if isinstance(found, GatedRepoError):
        return f"{repo_id} is gated on the Hub; accept its terms there, then pass --token or log in"
    if isinstance(found, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision} on the Hub; check --revision"
    if isinstance(found, RepositoryNotFoundError):
        return (
            f"{repo_id} does not exist on the Hub, or is private and not for this token; "
            "check the spelling, or pass --token"
        )
    if isinstance(found, OfflineModeIsEnabled):
        return f"the Hub is not asked for {repo_id}, since HF_HUB_OFFLINE is set; unset it and try again"
    if status == 401:
        return f"the Hub does not know the token ({repo_id}); run hf auth login, or pass another --token"
    if status == 403:
        return f"the token may not write to {repo_id}; pass --token with one that has write access to it"
    if status == 412:
        return f"{repo_id} was changed by others at the same time; run the same command again"
    if status is not None and is_temporary(error):
        again = "run the same command later, it continues where it was"
        return f"the Hub answers with status {status} again and again ({repo_id}); {again}"
    if found is None and not isinstance(error, ValueError):
        again = "run the same command again, it continues where it was"
        return f"what was sent to {repo_id} did not arrive ({brief(error)}); {again}"
    if found is None or status is not None:
        return f"the Hub refused what was asked of {repo_id}: {brief(found or error)}; see what it says"
    again = "check the network, then run the same command again, it continues where it was"
    return f"the Hub cannot be reached for {repo_id} ({type(found).__name__}); {again}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
