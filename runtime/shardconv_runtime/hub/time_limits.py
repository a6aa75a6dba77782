"""Servers that take a request and never answer: the client would wait for ever, or for many minutes.

From version to version the client of the Hub sets other time-outs, for most requests none (some say
``timeout=None``, whatever the session has), and repeats up to six times, inside of its functions, those that
it sets. What all versions have is one session for all threads, with hooks that see each request: there a
time-out is filled in, and the ``trace`` of the request, a documented extension of the HTTP library, tells
what fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

from ..errors import brief

ANSWER_S = 120.0
"""For a request that has no time-out of its own: the Hub may take a minute to commit many files."""

PATIENCE_S = 60.0
"""After so long without an answer a request that has timed out is not repeated."""

_lock = threading.Lock()
_num_uses = 0
_thread = threading.local()
"""``since``: when the first request began of those that had no answer."""


class NoAnswerError(Exception):
    """The server took a request, and then nothing came for too long."""


class NotReachedError(Exception):
    """There was no connection to the server."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within it no request of the client takes for ever, on any thread of the process.

    A request that has no time-out gets one of ``ANSWER_S``. Others that time out are left to the client,
    which may take what is in its cache, or ask again, until nothing has come for ``PATIENCE_S``.

    Raises:
        NoAnswerError: nothing came; another try would take as long again.
        NotReachedError: there was no connection for a request without a time-out of its own. The client would
            replace its session by one that is not watched, and try again.
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
    """Have the session call ``_begin`` for each request, or not."""
    session = get_session()
    hooks = session.event_hooks
    others = [hook for hook in hooks["request"] if hook is not _begin]
    session.event_hooks = {**hooks, "request": [*others, _begin] if wanted else others}


def _begin(request: Any) -> None:
    """A request is about to be sent, or one to which it was redirected."""
    given = request.extensions.get("timeout") or {}
    is_open = given.get("read") is None
    filled = {what: ANSWER_S for what in ("connect", "read", "write") if given.get(what) is None}
    request.extensions["timeout"] = {**given, **filled}
    request.extensions.setdefault("trace", partial(_follow, is_open))
    if getattr(_thread, "since", None) is None:
        _thread.since = time.monotonic()


def _follow(is_open: bool, event: str, info: Mapping[str, Any]) -> None:
    """Something has begun, is complete or has failed.

    Args:
        is_open: the request had no time-out of its own.
        event: as ``"http11.receive_response_headers.complete"``.
        info: with the ``exception`` of what failed, of the library below the HTTP library.
    """
    if event.endswith("receive_response_headers.complete"):
        _thread.since = None
    if not event.endswith(".failed"):
        return
    error, now = info["exception"], time.monotonic()
    kind = type(error).__name__  # the library is another one in each major version of the client
    if kind.endswith("Timeout"):
        _thread.since = since = getattr(_thread, "since", None) or now
        if is_open or now - since >= PATIENCE_S:
            raise NoAnswerError(f"nothing came for {now - since:.0f} s") from error
        return
    _thread.since = None
    if is_open and kind == "ConnectError":
        raise NotReachedError(brief(error)) from error
