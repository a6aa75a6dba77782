"""Time limits for requests to the Hub, and errors between this machine and it, with their remedies."""

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

from ..errors import AccessError, MissingModelError, NetworkError, SourceError, brief
from ..hub_options import again, option
from .hub_time_limits import NoAnswerError, NotReachedError

HTTP_ERROR = HfHubHTTPError.__bases__[0]
"""The base of all errors of the client's HTTP library, which differs between its major versions."""

TIMEOUT_ERROR: type[Exception] = sys.modules[HTTP_ERROR.__module__].TimeoutException
"""The time-out error of the same library."""

FINAL = (GatedRepoError, RevisionNotFoundError, RepositoryNotFoundError, EntryNotFoundError)
"""Errors after which a retry cannot help."""

TEMPORARY = (408, 412, 429, 500, 502, 503, 504)
"""Statuses after which a retry may help; 412 means that the branch has moved."""


def hub_error(error: BaseException) -> Exception | None:
    """Return the first error of the Hub or the network in the chain of causes of an error; None if none."""
    for cause in _chain(error):
        if isinstance(cause, HTTP_ERROR | OfflineModeIsEnabled | NoAnswerError | NotReachedError):
            return cause  # type: ignore[return-value]
    return None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the Hub's answer; None without an answer."""
    cause = hub_error(error)
    return cause.response.status_code if isinstance(cause, HfHubHTTPError) else None


def has_timed_out(error: BaseException) -> bool:
    """Return whether a request timed out."""
    return isinstance(hub_error(error), TIMEOUT_ERROR | NoAnswerError)


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may help."""
    cause = hub_error(error)
    if cause is None or isinstance(cause, OfflineModeIsEnabled | NoAnswerError):
        return False
    return not isinstance(cause, HfHubHTTPError) or cause.response.status_code in TEMPORARY


def hub_failure(text: str, error: BaseException) -> SourceError:
    """Return the error to raise for an error of the client: by its kind, with a text from ``explain``."""
    cause, status = hub_error(error) or error, status_of(error)
    if isinstance(cause, GatedRepoError) or status in (401, 403):
        return AccessError(text)
    if isinstance(cause, OfflineModeIsEnabled | LocalEntryNotFoundError):
        return NetworkError(text)
    if isinstance(cause, FINAL):
        return MissingModelError(text)
    if isinstance(cause, HTTP_ERROR | NoAnswerError | NotReachedError | OSError):
        return NetworkError(text)
    return SourceError(text)


def explain(repo_id: str, revision: str | None, error: BaseException, *, writing: bool = False) -> str:
    """Return one line that names an error and its remedy.

    Args:
        error: raised by the client or by ``bounded``; it has a ``hub_error`` or is a local one.
    """
    cause, status = hub_error(error) or error, status_of(error)
    at = f" at revision {revision}" if revision else ""
    subject = f"{repo_id} of the Hub" if writing else f"no such directory: {repo_id}, and as a Hub id it"
    go_on = again() + (", it continues where it was" if writing else "")
    if isinstance(cause, GatedRepoError):
        return f"{repo_id} is gated on the Hub; accept its terms there, then pass {option('token')} or log in"
    if isinstance(cause, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision} on the Hub; check {option('revision')}"
    if isinstance(cause, RepositoryNotFoundError):
        return (
            f"{subject} does not exist, or is private and not for this token; check the spelling, or pass "
            f"{option('token')}"
        )
    if isinstance(cause, OfflineModeIsEnabled | LocalEntryNotFoundError):
        if writing:
            return f"{repo_id} cannot be written while HF_HUB_OFFLINE is set; unset it and {again()}"
        allow = f"allow downloads (no {option('local_files_only').rstrip('=')}, no HF_HUB_OFFLINE)"
        return f"{subject} is not in the local cache{at}; {allow}"
    if isinstance(cause, EntryNotFoundError):
        return f"{repo_id} lacks a file on the Hub{at}: {brief(cause)}"
    if status is not None:
        return _of_status(repo_id, status, cause, go_on, writing=writing)
    if isinstance(cause, NoAnswerError | TIMEOUT_ERROR):
        why = brief(cause) if isinstance(cause, NoAnswerError) else "timed out"
        return f"the Hub does not answer when asked for {repo_id} ({why}); check the network, then {go_on}"
    if isinstance(cause, HTTP_ERROR | NotReachedError):
        path = "" if writing else "the path (there is no such directory) and "
        return (
            f"the Hub cannot be reached for {repo_id} ({brief(cause)}); check {path}the network, then {go_on}"
        )
    if isinstance(cause, ValueError):
        return f"the Hub refused a request for {repo_id}: {brief(cause)}; follow its message"
    what = f"the upload to {repo_id}" if writing else f"the download from {repo_id}{at}"
    return f"{what} failed ({brief(cause)}); {go_on}"


def _of_status(repo_id: str, status: int, error: BaseException, go_on: str, *, writing: bool) -> str:
    """Explain an answer by its status only."""
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
        return f"the Hub repeatedly answers with status {status} ({repo_id}); later {go_on}"
    return f"the Hub refused a request for {repo_id}: {brief(error)}; follow its message"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
