"""Time limits for servers that accept a request and never answer.

The time-outs of the Hub's client differ between its versions: most requests have none (some pass
``timeout=None`` in any session), and requests that time out are repeated up to six times. In all versions
threads share one session, whose hooks see each request: they fill in a time-out and, through the
request's ``trace``, a documented extension of the HTTP library, observe failures.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

from ..errors import brief

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


class UnknownHostError(NotReachedError):
    """The name of the server could not be resolved: there is no network, or no such host."""


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
    other_hooks = [hook for hook in hooks["request"] if hook is not _begin]
    session.event_hooks = {**hooks, "request": [*other_hooks, _begin] if wanted else other_hooks}


def _begin(request: Any) -> None:
    """Hook: a request, possibly a redirected one, is about to be sent."""
    timeouts = request.extensions.get("timeout") or {}
    is_open = timeouts.get("read") is None
    filled = {what: ANSWER_S for what in ("connect", "read", "write") if timeouts.get(what) is None}
    request.extensions["timeout"] = {**timeouts, **filled}
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
    if kind == "ConnectError" and isinstance(error.__cause__, socket.gaierror):
        raise UnknownHostError(brief(error)) from error  # which the client would repeat for minutes
    if is_open and kind == "ConnectError":
        raise NotReachedError(brief(error)) from error
