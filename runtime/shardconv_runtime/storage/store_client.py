"""The client of object stores, and its errors as ours.

The library obstore sends the requests. It takes credentials, the endpoint and the region from the usual
environment of each store. No text of its errors reaches a message: it may hold a signed address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from ..errors import (
    AccessError,
    MissingModelError,
    MissingPackageError,
    NetworkError,
    ShardconvError,
    SourceError,
)
from ..hub_options import again
from .remote_files import TIMEOUT_S

READ_RETRIES = 3
"""Times that the library repeats a request that was answered with an error of the server. Reads are also
repeated here."""

WRITE_RETRIES = 8
"""The same for writes, which only the library repeats: half a minute of waiting."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")


def library() -> Any:
    """Return the library."""
    try:
        import obstore  # an extra, which few need
    except ImportError as error:
        raise MissingPackageError(
            "URLs of object stores need the package obstore: pip install obstore"
        ) from error
    return obstore


@cache
def client(url: str, retries: int = READ_RETRIES) -> Any:
    """Return the library's client of a directory, which keeps its connections."""
    library()
    from obstore.store import from_url

    options: dict[str, Any] = {}
    if url.startswith("s3") and "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ:
        options["credential_provider"] = _profile()
    with explained(url):
        return from_url(
            url,
            # Plain http is for an endpoint that the user has named so. There is no limit for a whole answer.
            client_options={
                "allow_http": True,
                "connect_timeout": f"{TIMEOUT_S:.0f}s",
                "read_timeout": f"{TIMEOUT_S:.0f}s",
                "timeout": "3600s",
            },
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=4 * TIMEOUT_S)},
            **options,
        )


def _profile() -> Any:
    """Return credentials of ``AWS_PROFILE``, which the library itself does not read."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingPackageError(
            "AWS_PROFILE is set, and profiles need the package boto3: pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    return Boto3CredentialProvider()


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise errors of the library as our own within this context."""
    try:
        yield
    except ShardconvError:
        raise
    except Exception as error:
        raise failure(what, error) from None  # its text may hold a signed address


def failure(what: str, error: Exception) -> Exception:
    """Return the error to raise for one of the library: one line with the remedy."""
    kind, status, code = type(error).__name__, status_of(error), _code(error)
    if kind == "InvalidPathError":
        return SourceError(f"{what} has an object with an empty part in its name (//); rename or remove it")
    if kind == "PreconditionError":
        return SourceError(f"{what} was replaced while it was read; {again()} when nobody writes there")
    if code == "NoSuchBucket":
        return MissingModelError(f"{what}: there is no such bucket; check its name, and the endpoint")
    if isinstance(error, FileNotFoundError) or status == 404:
        return MissingModelError(f"{what} is not there; check the bucket and the path")
    if (
        code in ("PermanentRedirect", "AuthorizationHeaderMalformed")
        or status in (301, 307)
        or reason_of(error) == _REDIRECT
    ):
        return AccessError(f"{what}: the bucket is in another region; set AWS_REGION to it")
    if code in ("ExpiredToken", "ExpiredTokenException", "RequestExpired"):
        return AccessError(f"{what}: the credentials have expired; renew them, then {again()}")
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return AccessError(
            f"{what}: the store refuses access ({reason_of(error)}); check the credentials in the "
            "environment (for a public S3 bucket set AWS_SKIP_SIGNATURE=true)"
        )
    if status is None and not is_temporary(error):
        return SourceError(f"{what} cannot be used ({reason_of(error)}); check the URL and the environment")
    return NetworkError(
        f"{what}: the store cannot be reached ({reason_of(error)}); check the network, then {again()}"
    )


def status_of(error: Exception) -> int | None:
    """Return the status of the server's answer, if there was one."""
    match = _STATUS.search(str(error))
    return None if match is None else int(match[1])


def _code(error: Exception) -> str:
    match = _CODE.search(str(error))
    return "" if match is None else match[1]


def reason_of(error: Exception) -> str:
    """Return the reason of an error without addresses: the status, the store's code, or the kind."""
    if isinstance(error, EOFError):
        return str(error)
    status, code = status_of(error), _code(error)
    if status is not None:
        return f"status {status}{f', {code}' if code else ''}"
    text = str(error).partition("\n")[0].casefold()
    for sign, reason in _SIGNS.items():
        if sign in text:
            return reason
    return type(error).__name__


_REDIRECT = "a redirect"
_SIGNS = {
    "timed out": "timed out",
    "redirect without location": _REDIRECT,
    "error sending request": "no connection",
    "body error": "the connection was lost",
    "http error": "the connection was lost",
    "metadata": "no credentials were found",
    "credential": "no credentials were found",
}
"""Parts of texts of the library -> their meanings."""


def is_temporary(error: Exception) -> bool:
    """Return whether another try may help."""
    status = status_of(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return reason_of(error) in ("timed out", "no connection", "the connection was lost")
