"""A Hugging Face Hub on the loopback, for tests that use the real client.

    with HubServer() as hub:
        hub.add_repo("user/model", {"config.json": b"{}"})
        hub.use(monkeypatch)  # or: subprocess.run(..., env={**os.environ, **hub.environment(home)})
        snapshot_download("user/model")
        assert hub.served() == {"config.json": 2}

The tokens ``hf_writer`` and ``hf_reader`` are known: both are of ``user``, and the first may write.
Everything goes over plain HTTP and the protocol of git-lfs. ``hub.faults`` makes it misbehave.

As a program it is a server that many processes share; see ``--help``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import parse_qsl, urlsplit

from hub_endpoints import Answer, Call, Endpoints, Refused, Token, Window
from hub_store import CHUNK_BYTES, Commit, Repo, Store, files_below

HOST, CDN_HOST = "127.0.0.1", "localhost"
"""The same server for two names, so that a client takes large files from another host."""


@dataclass
class Faults:
    """How the server misbehaves; each field may be set at any time."""

    error_every: int = 0
    """Every so many requests one is answered by ``error_status``; 0: none."""
    error_status: int = 503
    retry_after_s: int | None = None
    """The ``Retry-After`` of such an answer."""
    only: str = ""
    """Errors, truncations and silence are for those requests alone whose ``METHOD /path`` contains this."""
    truncate_every: int = 0
    """Every so many bodies of files one ends early; 0: none."""
    truncate_after_bytes: int = 0
    """Where it ends; the connection is closed there."""
    delay_s: float = 0.0
    """Before each chunk of a body, sent or received."""
    chunk_bytes: int = 64 * 1024
    """How much is sent or received at once, while there is a delay."""
    hang: bool = False
    """Requests are taken and never answered."""
    hang_after_bytes: int | None = None
    """Bodies of files stop after so much, and the connection stays open."""
    ignore_range: bool = False
    """A request for a range is answered by the whole file."""
    multi_range: bool = False
    """Several ranges in one request are answered by ``multipart/byteranges``, not by the whole file."""
    signed_requests: int = 0
    """A signed URL is good for so many requests, and answered by 403 then; 0: it is good for ever."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was answered, or was to be."""

    method: str
    path: str
    """Without the query."""
    query: str
    range: str | None
    status: int
    """0: there was no answer."""
    sent_bytes: int
    """Of the body of the answer, as far as it was handed to the connection."""
    received_bytes: int
    """Of the body of the request."""
    file: str
    """The path in the repository, where the answer was (of) a file."""
    token: str | None
    user_agent: str
    client: tuple[str, int]
    """Address and port of the connection."""
    seconds: float
    """From when its head was read to the end of its answer."""


class HubServer:
    """A Hub that runs in threads of this process.

    Args:
        directory: where the contents lie; None: in one that is removed at the end.
        port: where to listen; 0: anywhere.
        part_bytes: larger uploads are made in parts of this size.
        page_size: entries in a page of a tree.
        log: a file that gets a line of JSON for each request.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int = 0,
        part_bytes: int = 5 * 2**20,
        page_size: int = 1000,
        log: Path | None = None,
    ) -> None:
        self._own = None if directory else tempfile.mkdtemp(prefix="hub-")
        self._log = log.open("a") if log else None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._records: list[Request] = []
        self.closing = threading.Event()
        self._server = _Server((HOST, port), _Handler)
        self._server.hub = self
        number = self._server.server_address[1]
        self.endpoint = f"http://{HOST}:{number}"
        self.store = Store(directory or Path(self._own or ""))
        cdn = f"http://{CDN_HOST}:{number}"
        self.endpoints = Endpoints(self.store, self.endpoint, cdn, part_bytes, page_size)
        self.faults = Faults()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        if self._log:
            self._log.close()
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)

    # What it holds

    def add_repo(
        self,
        repo_id: str,
        files: Mapping[str, bytes] | Mapping[str, bytes | Path] | Path | None = None,
        *,
        private: bool = False,
        gated: bool = False,
        branch: str = "main",
    ) -> str:
        """Commit files, given by their paths or as a directory; the repository is made if there is none.

        Returns:
            The id of the commit.
        """
        found = files_below(files) if isinstance(files, Path) else dict(files or {})
        return self.store.add(repo_id, found, private, gated, branch).oid

    def repo(self, repo_id: str) -> Repo:
        """A repository."""
        return self.store.repos[repo_id]

    def head(self, repo_id: str, revision: str = "main") -> Commit:
        """The last commit of a branch."""
        commit = self.repo(repo_id).at(revision)
        assert commit is not None, f"{repo_id} has no {revision}"
        return commit

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """All contents at a revision by their paths."""
        found = self.head(repo_id, revision).files
        return {path: self.store.blobs.read(file.sha256) for path, file in found.items()}

    @property
    def blobs(self) -> set[str]:
        """The sha256 of everything that was ever stored."""
        return set(self.store.blobs)

    @property
    def tokens(self) -> dict[str, Token]:
        """The known tokens; more may be added."""
        return self.endpoints.tokens

    # What was asked of it

    @property
    def requests(self) -> list[Request]:
        """All requests so far, in the order of their ends."""
        with self._lock:
            return list(self._records)

    def forget(self) -> None:
        """Begin the records anew."""
        with self._lock:
            self._records.clear()

    def served(self, path_prefix: str = "") -> dict[str, int]:
        """Bytes of bodies sent for each file (by its path in its repository) that begins so."""
        sums: Counter[str] = Counter()
        for request in self.requests:
            if request.file and request.file.startswith(path_prefix) and request.status in (200, 206):
                sums[request.file] += request.sent_bytes
        return dict(sums)

    @property
    def uploaded(self) -> int:
        """Bytes of large files that were received, those of requests that failed too."""
        return sum(r.received_bytes for r in self.requests if r.method == "PUT")

    def record(self, request: Request) -> None:
        """Remember a request."""
        with self._lock:
            self._records.append(request)
            if self._log and not self._log.closed:
                self._log.write(json.dumps(dataclasses.asdict(request)) + "\n")
                self._log.flush()

    # How to reach it

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Variables for a process that is to use this server, and to have its cache in ``home``."""
        given = {"HF_TOKEN": token} if token else {}
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            **given,
        }

    def use(self, monkeypatch: Any, home: Path, token: str | None = None) -> None:
        """Have this process use this server, as ``environment`` does for another one."""
        from huggingface_hub import constants

        for name, value in self.environment(home, token).items():
            monkeypatch.setenv(name, value)
        if token is None:
            monkeypatch.delenv("HF_TOKEN", raising=False)
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        changed = {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_ASSETS_CACHE": str(home / "assets"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        }
        for name, constant in changed.items():
            monkeypatch.setattr(constants, name, constant)

    # What goes wrong

    def apply_faults(self) -> None:
        """Tell the endpoints what is theirs of the faults."""
        faults, endpoints = self.faults, self.endpoints
        endpoints.signed_requests = faults.signed_requests
        endpoints.ignore_range, endpoints.multi_range = faults.ignore_range, faults.multi_range

    def fault(self, kind: str, what: str) -> bool:
        """Whether this request is the one that goes wrong.

        Args:
            kind: ``error`` or ``truncate``.
            what: the method and path.
        """
        every: int = getattr(self.faults, f"{kind}_every")
        if not every or self.faults.only not in what:
            return False
        with self._lock:
            self._counts[kind] += 1
            return self._counts[kind] % every == 0


class _Server(ThreadingHTTPServer):
    """Threads that do not keep the process, and connections that can be closed."""

    daemon_threads = True
    request_queue_size = 256
    hub: HubServer

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """End those that wait for another request."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no news; all else is."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Reads requests, has them answered, and sends what comes; here things go wrong."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or small answers wait for the acknowledgement of their headers
    server: _Server

    def handle_one_request(self) -> None:
        """As inherited; a connection that breaks ends quietly."""
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: there are records."""

    def _handle(self) -> None:
        self._begin, self._received, self._sent = time.monotonic(), 0, 0
        body = self.server.hub.store.blobs.scratch()
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = Call(self.command, url.path, dict(parse_qsl(url.query)), headers, body)
        self._recorded = False
        try:
            self._receive(body)
            answer = self._answer(call)
            if answer is not None:
                self._send(call, answer)
        finally:
            body.unlink(missing_ok=True)
            self._record(call, None)

    def _record(self, call: Call, answer: Answer | None) -> None:
        """Remember the request, once: before the end of its answer, since then the client goes on."""
        if self._recorded:
            return
        self._recorded = True
        record = Request(
            method=self.command,
            path=call.path,
            query=urlsplit(self.path).query,
            range=call.headers.get("range"),
            status=answer.status if answer else 0,
            sent_bytes=self._sent,
            received_bytes=self._received,
            file=answer.file if answer and self.command == "GET" else "",
            token=call.bearer,
            user_agent=call.headers.get("user-agent", ""),
            client=self.client_address,
            seconds=time.monotonic() - self._begin,
        )
        self.server.hub.record(record)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _answer(self, call: Call) -> Answer | None:
        hub = self.server.hub
        if hub.faults.hang and hub.faults.only in f"{call.method} {call.path}":
            self._hang()
            return None
        if hub.fault("error", f"{call.method} {call.path}"):
            after = hub.faults.retry_after_s
            named = {} if after is None else {"Retry-After": str(after)}
            return Refused(hub.faults.error_status, "", "this is a test", named).answer
        hub.apply_faults()
        return hub.endpoints.answer(call)

    def _hang(self) -> None:
        self.server.hub.closing.wait()
        self.close_connection = True

    def _receive(self, body: Path) -> None:
        with body.open("wb") as file:
            for chunk in self._chunks_received():
                self._received += len(chunk)
                file.write(chunk)

    def _chunks_received(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield from self._read(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield from self._read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers

    def _read(self, num_bytes: int) -> Iterator[bytes]:
        while num_bytes:
            chunk = self.rfile.read(min(num_bytes, self._pause()))
            if not chunk:
                raise ConnectionResetError("the client went away")
            num_bytes -= len(chunk)
            yield chunk

    def _pause(self) -> int:
        """Be slow; how much to move next."""
        faults = self.server.hub.faults
        if not faults.delay_s:
            return CHUNK_BYTES
        time.sleep(faults.delay_s)
        return faults.chunk_bytes

    def _send(self, call: Call, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(answer.num_bytes))
        limit = self._limit(answer)
        total = 0 if self.command == "HEAD" else min(answer.num_bytes, limit)
        if not total:
            self._record(call, answer)
        self.end_headers()
        for chunk in self._chunks(answer, total):
            self._sent += len(chunk)
            if self._sent == total:
                self._record(call, answer)
            self.wfile.write(chunk)
        if limit < answer.num_bytes:
            self._end_early()

    def _chunks(self, answer: Answer, total: int) -> Iterator[bytes]:
        """The first ``total`` bytes of a body."""
        for piece in answer.body if total else ():
            for chunk in [piece] if isinstance(piece, bytes) else self._window(piece):
                yield chunk[:total]
                total -= len(chunk[:total])
                if not total:
                    return

    def _limit(self, answer: Answer) -> int:
        """Where the body ends, which for a file may be too early."""
        faults = self.server.hub.faults
        if not answer.file or answer.status not in (200, 206) or self.command == "HEAD":
            return answer.num_bytes
        if faults.hang_after_bytes is not None:
            return faults.hang_after_bytes
        truncated = self.server.hub.fault("truncate", f"GET {urlsplit(self.path).path}")
        return faults.truncate_after_bytes if truncated else answer.num_bytes

    def _end_early(self) -> None:
        self.close_connection = True
        if self.server.hub.faults.hang_after_bytes is not None:
            self._hang()

    def _window(self, window: Window) -> Iterator[bytes]:
        with self.server.hub.store.blobs.open(window.sha256) as file:
            file.seek(window.start)
            yield from self._read_file(file, window.stop - window.start)

    def _read_file(self, file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
        while num_bytes and (chunk := file.read(min(num_bytes, self._pause()))):
            num_bytes -= len(chunk)
            yield chunk


def main() -> None:
    """Run a server until it is killed."""
    parser = argparse.ArgumentParser(description="A Hugging Face Hub on the loopback, for tests.")
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0: anywhere")
    parser.add_argument("--dir", type=Path, help="where the contents lie; else in a temporary directory")
    parser.add_argument("--log", type=Path, help="a file that gets a line of JSON for each request")
    parser.add_argument("--repo", action="append", default=[], metavar="ID=DIR", help="a repository to hold")
    parser.add_argument("--faults", type=json.loads, default={}, help="fields of Faults, as JSON")
    options = parser.parse_args()
    with HubServer(options.dir, port=options.port, log=options.log) as hub:
        for given in options.repo:
            repo_id, _, directory = given.partition("=")
            hub.add_repo(repo_id, Path(directory))
        hub.faults = Faults(**options.faults)
        print(hub.endpoint, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
