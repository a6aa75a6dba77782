"""Time limits for requests to the Hub, and errors between this machine and it, with their remedies."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from ..errors import brief
from ..hub_options import again, option

# Time limits for servers that accept a request and never answer.
#
# The time-outs of the Hub's client differ between its versions: most requests have none (some pass
# ``timeout=None`` in any session), and requests that time out are repeated up to six times. In all versions
# threads share one session, whose hooks see each request: they fill in a time-out and, through the
# request's ``trace``, a documented extension of the HTTP library, observe failures.


ANSWER_S = 120.0
"""Time-out of requests without their own; the Hub may take a minute to commit many files."""

PATIENCE_S = 60.0
"""Time without an answer after which a request that has timed out is not repeated."""

_lock = threading.Lock()
_num_uses = 0
_thread = threading.local()
"""``since``: start of the first request without an answer."""


class NoAnswerError(Exception):
    """The server accepted a request and did not answer in time."""


class NotReachedError(Exception):
    """The server could not be connected to."""


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the time of every request of the client, on any thread of the process, within this context.

    Requests without a time-out get one of ``ANSWER_S``. Other time-outs are left to the client, which may use
    its cache or repeat the request, until no answer has come for ``PATIENCE_S``.
    """
    global _num_uses
    _thread.since = None
    with _lock:
        _num_uses += 1
        _watch_requests(True)
    try:
        yield
    finally:
        with _lock:
            _num_uses -= 1
            if not _num_uses:
                _watch_requests(False)


def _watch_requests(wanted: bool) -> None:
    """Add ``_begin`` to the hooks that the session calls for each request, or remove it."""
    session = get_session()
    hooks = session.event_hooks
    others = [hook for hook in hooks["request"] if hook is not _begin]
    session.event_hooks = {**hooks, "request": [*others, _begin] if wanted else others}


def _begin(request: Any) -> None:
    """Hook: a request, possibly a redirected one, is about to be sent."""
    given = request.extensions.get("timeout") or {}
    is_open = given.get("read") is None
    filled = {what: ANSWER_S for what in ("connect", "read", "write") if given.get(what) is None}
    request.extensions["timeout"] = {**given, **filled}
    request.extensions.setdefault("trace", partial(_follow, is_open))
    if getattr(_thread, "since", None) is None:
        _thread.since = time.monotonic()


def _follow(is_open: bool, event: str, info: Mapping[str, Any]) -> None:
    """Trace a request: one of its steps has begun, is complete or has failed."""
    if event.endswith("receive_response_headers.complete"):
        _thread.since = None
    if not event.endswith(".failed"):
        return
    error, now = info["exception"], time.monotonic()
    kind = type(error).__name__  # the library is another one in each major version of the client
    if kind.endswith("Timeout"):
        _thread.since = since = getattr(_thread, "since", None) or now
        if is_open or now - since >= PATIENCE_S:
            raise NoAnswerError(f"no answer for {now - since:.0f} s") from error
        return
    _thread.since = None
    if is_open and kind == "ConnectError":
        raise NotReachedError(brief(error)) from error


# Contexts without the logs, warnings and progress bars of transformers and of the Hub client.


@contextmanager
def without_hub_logging() -> Iterator[None]:
    """Disable huggingface_hub's logs and bars; restore them on exit."""
    verbosity, had_bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


@contextmanager
def without_library_logging() -> Iterator[None]:
    """Disable transformers' and huggingface_hub's logs, warnings and bars; restore them on exit."""
    from transformers.utils import logging as transformers_logging  # takes seconds, see `without_hub_logging`

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with without_hub_logging(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


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
    for found in _chain(error):
        if isinstance(found, HTTP_ERROR | OfflineModeIsEnabled | NoAnswerError | NotReachedError):
            return found  # type: ignore[return-value]
    return None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the Hub's answer; None without an answer."""
    found = hub_error(error)
    return found.response.status_code if isinstance(found, HfHubHTTPError) else None


def has_timed_out(error: BaseException) -> bool:
    """Return whether a request timed out."""
    return isinstance(hub_error(error), TIMEOUT_ERROR | NoAnswerError)


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may help."""
    found = hub_error(error)
    if found is None or isinstance(found, OfflineModeIsEnabled | NoAnswerError):
        return False
    return not isinstance(found, HfHubHTTPError) or found.response.status_code in TEMPORARY


def explain(repo_id: str, revision: str | None, error: BaseException, *, writing: bool = False) -> str:
    """Return one line that names an error and its remedy.

    Args:
        error: raised by the client or by ``bounded``; it has a ``hub_error`` or is a local one.
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
            return f"{repo_id} cannot be written while HF_HUB_OFFLINE is set; unset it and {again()}"
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
        return f"the Hub refused a request for {repo_id}: {brief(found)}; follow its message"
    what = f"the upload to {repo_id}" if writing else f"the download from {repo_id}{at}"
    return f"{what} failed ({brief(found)}); {go_on}"


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
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
