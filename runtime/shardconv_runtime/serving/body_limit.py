"""A limit of the bytes of requests: the JSON of a body is in memory as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

MOST_BODY_BYTES = 128 * 2**20
"""Most bytes of the body of a request; images are the largest part."""


@dataclass(frozen=True)
class BodyLimit:
    """An ASGI application that refuses bodies which are too large while they come."""

    app: Any
    most_bytes: int = MOST_BODY_BYTES

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        num_bytes = 0

        async def counted() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.most_bytes:
                raise HTTPException(413, f"the request has more than {self.most_bytes} bytes")
            return message

        await self.app(scope, counted, send)
