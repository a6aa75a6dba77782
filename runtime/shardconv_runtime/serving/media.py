"""Images in the messages of a chat: their bytes, within limits, and the model's inputs for them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import http.client
import io
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import torch

from ..openai_api.chat_request import ChatRequest
from ..openai_api.schemas import BadRequest
from .bounded_calls import BoundedCalls, CallEndedError
from .grammars import Prepared
from .prompts import require_template_variables

MOST_IMAGES = 16
"""Most images of one request."""
MOST_IMAGE_BYTES = 20 * 2**20
"""Most bytes of one image as it is sent."""
MOST_PIXELS = 2**25
"""Most pixels of one image; decoded, they take 100 MB."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
FETCH_S = 10.0
"""Most seconds until an image has come from another server."""
FETCHES_AT_A_TIME = 8
PARAMETER = "messages"


@dataclass(frozen=True)
class Images:
    """How images get from requests to the model.

    Attributes:
        calls: processes in which images are decoded.
        domains: hosts from which images are fetched.
    """

    calls: BoundedCalls
    domains: frozenset[str] = frozenset()
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(FETCHES_AT_A_TIME))

    async def inputs(self, body: ChatRequest) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a chat with images."""
        urls = body.image_urls
        if len(urls) > MOST_IMAGES:
            raise BadRequest(
                f"the request has {len(urls)} images; at most {MOST_IMAGES} are taken", PARAMETER
            )
        loop = asyncio.get_running_loop()
        contents = [await loop.run_in_executor(self.threads, image_bytes, url, self.domains) for url in urls]
        try:
            packed = await self.calls.awaited(self.calls.call, packed_inputs, body, contents)
        except CallEndedError as error:
            raise BadRequest(
                f"the images and texts take more than {self.calls.cpu_s:g} s, or too much memory", PARAMETER
            ) from error
        inputs: dict[str, torch.Tensor] = torch.load(io.BytesIO(packed), weights_only=True)
        return inputs


def image_bytes(url: str, domains: frozenset[str]) -> bytes:
    """Return the bytes of an image at a URL.

    Raises:
        BadRequest: the URL is of another kind or host, or there is no image of that size.
    """
    if url.startswith("data:"):
        head, _, content = url.partition(",")
        if not head.endswith(";base64"):
            raise BadRequest("an image in a data URL has base64: data:image/png;base64,...", PARAMETER)
        if len(content) > MOST_IMAGE_BYTES * 4 // 3 + 4:
            raise BadRequest(f"an image has more than {MOST_IMAGE_BYTES} bytes", PARAMETER)
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise BadRequest(f"a data URL has no valid base64: {error}", PARAMETER) from error
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise BadRequest(f"an image has no valid URL: {error}", PARAMETER) from error
    if parts.scheme not in ("http", "https") or host not in domains:
        raise BadRequest(
            "images come as data URLs"
            + (f", or from {', '.join(sorted(domains))}" if domains else "; the server fetches none"),
            PARAMETER,
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        return _fetched(host, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https", path)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadRequest(f"an image cannot be fetched from {host}: {error}", PARAMETER) from error


def _fetched(host: str, port: int, is_secure: bool, path: str) -> bytes:
    """Return the content at an address of a host, which may not lead elsewhere.

    The connection goes to the address that was checked: a name could lead to another one the next time.
    """
    end = time.monotonic() + FETCH_S
    address = public_address(host, port)
    connection = http.client.HTTPConnection(host, port, timeout=FETCH_S)
    connection.sock = socket.create_connection((address, port), FETCH_S)
    try:
        if is_secure:
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        connection.request("GET", path, headers={"Accept": "image/*"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}; redirects are not followed")
        parts: list[bytes] = []
        while part := response.read1(2**16):
            parts.append(part)
            if sum(map(len, parts)) > MOST_IMAGE_BYTES:
                raise ValueError(f"it has more than {MOST_IMAGE_BYTES} bytes")
            if time.monotonic() > end:
                raise ValueError(f"it takes more than {FETCH_S:g} s")
        return b"".join(parts)
    finally:
        connection.close()


def public_address(host: str, port: int) -> str:
    """Return the address of a host; a name must have a public one. An address was allowed as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    addresses = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not all(ipaddress.ip_address(address).is_global for address in addresses):
        raise ValueError("its name leads to an address that is not public")
    return addresses[0]


# In the process of a call.


def packed_inputs(prepared: Prepared, body: ChatRequest, contents: Sequence[bytes]) -> bytes:
    """Return the tensors that the processor makes of a chat and its images, as ``torch.save`` writes them."""
    import PIL.Image  # an extra

    images = []
    for content in contents:
        try:
            image = PIL.Image.open(io.BytesIO(content), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise BadRequest(
                    f"an image has {image.width} x {image.height} pixels; at most {MOST_PIXELS} are taken",
                    PARAMETER,
                )
            images.append(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
            raise BadRequest(f"an image cannot be read: {error}", PARAMETER) from error
    if body.template_arguments:
        require_template_variables(body.template_arguments, prepared.tokenizer, bool(body.shown_tools))
    options = {"add_generation_prompt": True, **body.template_arguments}
    try:
        encoded = prepared.processor.apply_chat_template(
            [body.messages_with(images)],
            tools=body.shown_tools or None,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **options,
        )
    except MemoryError:
        raise
    except Exception as error:  # of the template, or of a processor that does not take the image
        raise BadRequest(f"the model's processor does not take these messages: {error}", PARAMETER) from error
    buffer = io.BytesIO()
    torch.save({name: value for name, value in encoded.items() if torch.is_tensor(value)}, buffer)
    return buffer.getvalue()
