"""Where images come from: data URLs, and hosts that the server was allowed to fetch from."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("fastapi")

from shardconv_runtime.openai_api.schemas import BadRequest
from shardconv_runtime.serving import media
from shardconv_runtime.serving.media import image_bytes, public_address

HERE = frozenset({"127.0.0.1"})


class Handler(BaseHTTPRequestHandler):
    """A host with an image, and with what should not be there."""

    def do_GET(self) -> None:
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/image?size=1")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        try:
            if self.path == "/large":
                for _ in range(100):
                    self.wfile.write(b"x" * 1000)
            elif self.path == "/slow":
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            else:
                self.wfile.write(self.path.encode())
        except OSError:
            pass  # it was enough

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_image_from_a_host(host: str) -> None:
    assert image_bytes(f"{host}/image?size=1", HERE) == b"/image?size=1"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/redirect", "status 302; redirects are not followed"),
        ("/missing", "status 404"),
        ("/large", "more than 50000 bytes"),
        ("/slow", "more than 0.5 s"),
    ],
)
def test_images_that_are_not_fetched(
    host: str, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MOST_IMAGE_BYTES", 50_000)
    monkeypatch.setattr(media, "FETCH_S", 0.5)
    with pytest.raises(BadRequest, match=reason):
        image_bytes(host + path, HERE)


@pytest.mark.parametrize(
    ("url", "domains", "reason"),
    [
        ("http://127.0.0.1/a", frozenset(), "the server fetches none"),
        ("http://127.0.0.1/a", frozenset({"images.example"}), "or from images.example"),
        ("http://images.example@127.0.0.1/a", frozenset({"images.example"}), "or from images.example"),
        ("http://images.example.evil/a", frozenset({"images.example"}), "or from images.example"),
        ("ftp://127.0.0.1/a", HERE, "come as data URLs"),
        ("http://127.0.0.1:99999/a", HERE, "no valid URL"),
        ("http://127.0.0.1/a\r\nX: y", HERE, "cannot be fetched"),
        ("http://localhost/a", frozenset({"localhost"}), "not public"),
        ("data:image/png,abc", HERE, "has base64"),
        ("data:image/png;base64,a", HERE, "no valid base64"),
        ("data:image/png;base64," + "a" * 80_000, HERE, "more than 50000 bytes"),
    ],
)
def test_urls_that_are_refused(
    url: str, domains: frozenset[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MOST_IMAGE_BYTES", 50_000)
    monkeypatch.setattr(media, "FETCH_S", 1.0)
    with pytest.raises(BadRequest, match=reason) as error:
        image_bytes(url, domains)
    assert error.value.parameter == "messages"


def test_a_data_url() -> None:
    content = base64.b64encode(b"abc").decode()
    assert image_bytes(f"data:image/png;base64,{content}", frozenset()) == b"abc"


@pytest.mark.parametrize(
    ("addresses", "is_public"),
    [
        (["93.184.216.34"], True),
        (["93.184.216.34", "10.0.0.1"], False),
        (["169.254.169.254"], False),
        (["::1"], False),
        (["::ffff:127.0.0.1"], False),
    ],
)
def test_names_lead_to_public_addresses(
    addresses: list[str], is_public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(0, 0, 0, "", (address, 80)) for address in addresses]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: answers)
    if is_public:
        assert public_address("images.example", 80) == addresses[0]
    else:
        with pytest.raises(ValueError, match="not public"):
            public_address("images.example", 80)
