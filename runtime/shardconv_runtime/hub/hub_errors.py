"""What went wrong between this machine and the Hub, in words that say what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import brief
from ..wording import again, option
from .time_limits import NoAnswerError, NotReachedError

HTTP_ERROR = HfHubHTTPError.__bases__[0]
"""The base of all errors of the client's HTTP library, which is another one in each major version."""

TIMEOUT_ERROR: type[Exception] = sys.modules[HTTP_ERROR.__module__].TimeoutException
"""Of the same library."""

FINAL = (GatedRepoError, RevisionNotFoundError, RepositoryNotFoundError, EntryNotFoundError)
"""Errors that another try does not mend."""

TEMPORARY = (408, 412, 429, 500, 502, 503, 504)
"""Answers after which trying again may help; 412: the branch has moved on."""


def hub_error(error: BaseException) -> Exception | None:
    """The error of the Hub, or of the way to it, that ``error`` is or was raised from; None: none."""
    for found in _chain(error):
        if isinstance(found, HTTP_ERROR | OfflineModeIsEnabled | NoAnswerError | NotReachedError):
            return found  # type: ignore[return-value]
    return None


def status_of(error: BaseException) -> int | None:
    """The status that the Hub answered with; None: it did not answer."""
    found = hub_error(error)
    return found.response.status_code if isinstance(found, HfHubHTTPError) else None


def has_timed_out(error: BaseException) -> bool:
    """Whether nothing came for some time."""
    return isinstance(hub_error(error), TIMEOUT_ERROR | NoAnswerError)


def is_temporary(error: BaseException) -> bool:
    """Whether trying again may help."""
    found = hub_error(error)
    if found is None or isinstance(found, OfflineModeIsEnabled | NoAnswerError):
        return False
    return not isinstance(found, HfHubHTTPError) or found.response.status_code in TEMPORARY


def explain(repo_id: str, revision: str | None, error: BaseException, *, writing: bool = False) -> str:
    """An error in one line, and what to do.

    Args:
        repo_id: id of the repository.
        revision: branch, tag or commit; None: the default branch.
        error: what was raised by the client or by ``bounded``; it has a ``hub_error`` or is of this machine.
        writing: the repository is written, and was to be. Else it is read, and what was given as its id may
            have been meant as a directory.
    """
    found, status = hub_error(error) or error, status_of(error)
    at = f" at revision {revision}" if revision else ""
    subject = f"{repo_id} of the Hub" if writing else f"no such directory: {repo_id}, and as a Hub id it"
    go_on = again() + (", it continues where it was" if writing else "")
    if isinstance(found, GatedRepoError):
        return f"{repo_id} is gated on the Hub; accept its terms there, then pass {option('token')} or log in"
    if isinstance(found, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision} on the Hub; check {option('revision')}"
    if isinstance(found, RepositoryNotFoundError):
        return (
            f"{subject} does not exist, or is private and not for this token; check the spelling, or pass "
            f"{option('token')}"
        )
    if isinstance(found, OfflineModeIsEnabled | LocalEntryNotFoundError):
        if writing:
            return f"the Hub is not asked for {repo_id}, since HF_HUB_OFFLINE is set; unset it and {again()}"
        allow = f"allow downloads (no {option('local_files_only').rstrip('=')}, no HF_HUB_OFFLINE)"
        return f"{subject} is not in the local cache{at}; {allow}"
    if isinstance(found, EntryNotFoundError):
        return f"{repo_id} lacks a file on the Hub{at}: {brief(found)}"
    if status is not None:
        return _of_status(repo_id, status, found, go_on, writing=writing)
    if isinstance(found, NoAnswerError | TIMEOUT_ERROR):
        why = brief(found) if isinstance(found, NoAnswerError) else "timed out"
        return f"the Hub does not answer when asked for {repo_id} ({why}); check the network, then {go_on}"
    if isinstance(found, HTTP_ERROR | NotReachedError):
        path = "" if writing else "the path (there is no such directory) and "
        return (
            f"the Hub cannot be reached for {repo_id} ({brief(found)}); check {path}the network, then {go_on}"
        )
    if isinstance(found, ValueError):
        return f"the Hub refused what was asked of {repo_id}: {brief(found)}; see what it says"
    what = f"what was sent to {repo_id}" if writing else f"what was asked of {repo_id}{at}"
    return f"{what} did not arrive ({brief(found)}); {go_on}"


def _of_status(repo_id: str, status: int, error: BaseException, go_on: str, *, writing: bool) -> str:
    """An answer that is an error, and tells no more than its status."""
    if status == 401:
        token = option("token")
        return f"the Hub does not know the token ({repo_id}); run hf auth login, or pass another with {token}"
    if status == 403:
        verb, access = ("write to", "write") if writing else ("read", "read")
        may = f"has {access} access to it"
        return f"the token may not {verb} {repo_id}; pass {option('token')} with one that {may}"
    if status == 412:
        return f"{repo_id} was changed by others at the same time; {again()}"
    if status in TEMPORARY:
        return f"the Hub answers with status {status} again and again ({repo_id}); later {go_on}"
    return f"the Hub refused what was asked of {repo_id}: {brief(error)}; see what it says"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
