"""A server of the part of the S3 protocol that is used here, on this machine, with faults on request."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape, unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "models"


@dataclass(frozen=True)
class Request:
    """A request for bytes of an object, as it was answered."""

    key: str
    first: int
    num_bytes: int


@dataclass
class Store:
    """The objects of a bucket by key, and what happens to requests for them."""

    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[str], str] = lambda key: ""
    """For each request of an object: ``"503"`` or another status, ``"cut"``, ``"silence"``, or nothing."""
    write_fault: Callable[[str, str], str] = lambda operation, key: ""
    """For each request that changes an object, named ``put``, ``create`` (of an upload), ``part``,
    ``complete``, ``abort`` or ``delete``: a status, ``"cut"`` in the middle of its bytes, ``"lost"`` (it is
    done, and the answer is cut off), ``"silence"``, or nothing."""
    written: list[tuple[str, str]] = field(default_factory=list)
    """The requests that changed an object: operation and key."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Uploads in parts that are neither completed nor aborted: id -> number -> bytes."""
    most_uploaded: int = 0
    """Most bytes that these had at once."""
    has_conditions: bool = True
    """Whether ``If-Match`` and ``If-None-Match`` of writes are obeyed; otherwise they are ignored."""
    least_part: int = 5 << 20
    """Least bytes of a part of an upload, except of the last one."""
    quotes_marks: bool = True
    """Whether a listing has quotes around the ETags, as that of Azure has not."""
    page: int = 1000
    """Objects in one answer to a request for a listing."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def upload(self, directory: Path, prefix: str) -> str:
        """Copy a directory into the bucket, and return its URL."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.objects[f"{prefix}/{path.relative_to(directory).as_posix()}"] = path.read_bytes()
        return f"s3://{BUCKET}/{prefix}"

    def num_bytes_read(self, suffix: str = ".safetensors") -> int:
        """The bytes of objects that were sent."""
        return sum(each.num_bytes for each in self.requests if each.key.endswith(suffix))


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet, which the system does not delay
    store: Store

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            self._error(404, "NoSuchBucket")
        elif not key:
            self._listing({name: values[0] for name, values in parse_qs(url.query).items()})
        else:
            self._object(key)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        key, query = self._place()
        with self.store.lock:
            fault = self.store.write_fault("part" if "uploadId" in query else "put", key)
        length = int(self.headers.get("Content-Length", 0))
        if fault == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        data = self.rfile.read(length)
        if fault.isdigit():
            self._error(int(fault), "Fault")
            return
        if fault == "silence":
            time.sleep(3)
        with self.store.lock:
            if "uploadId" in query:
                if query["uploadId"] not in self.store.uploads:
                    self._error(404, "NoSuchUpload")
                    return
                self.store.uploads[query["uploadId"]][int(query["partNumber"])] = data
                all_parts = (part for parts in self.store.uploads.values() for part in parts.values())
                self.store.most_uploaded = max(self.store.most_uploaded, sum(map(len, all_parts)))
            else:
                if (status := self._condition(key)) is not None:
                    self._error(*status)
                    return
                self.store.objects[key] = data
            self.store.written.append(("part" if "uploadId" in query else "put", key))
        if fault == "lost":
            self.close_connection = True
            return
        self._send(200, b"", {"ETag": etag(data)})

    def do_POST(self) -> None:
        key, query = self._place()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        operation = "create" if "uploads" in query else "complete" if "uploadId" in query else "delete"
        with self.store.lock:
            fault = self.store.write_fault(operation, key)
        if fault.isdigit():
            self._error(int(fault), "Fault")
            return
        if operation == "delete":
            keys = [unescape(each) for each in re.findall("<Key>(.*?)</Key>", body)]
            for each in keys:
                self._remove(each)
            deleted = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in keys)
            text = f"<DeleteResult>{deleted}</DeleteResult>"
            self._send(200, text.encode(), {"Content-Type": "application/xml"})
            return
        with self.store.lock:
            self.store.written.append((operation, key))
            if operation == "create":
                upload = f"upload-{len(self.store.written)}"
                self.store.uploads[upload] = {}
                result = "InitiateMultipartUploadResult"
                text = f"<{result}><UploadId>{upload}</UploadId></{result}>"
            elif query["uploadId"] not in self.store.uploads:
                self._error(404, "NoSuchUpload")
                return
            elif (status := self._condition(key)) is not None:
                self._error(*status)
                return
            else:
                parts = self.store.uploads.pop(query["uploadId"])
                numbers = [int(number) for number in re.findall("<PartNumber>([0-9]+)</PartNumber>", body)]
                assert numbers == list(range(1, len(parts) + 1))
                if any(len(parts[number]) < self.store.least_part for number in numbers[:-1]):
                    self._error(400, "EntityTooSmall")
                    return
                self.store.objects[key] = b"".join(parts[number] for number in numbers)
                text = (
                    f"<CompleteMultipartUploadResult><ETag>{etag(self.store.objects[key])}</ETag>"
                    "</CompleteMultipartUploadResult>"
                )
        if fault == "lost":
            self.close_connection = True
            return
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def do_DELETE(self) -> None:
        key, query = self._place()
        if "uploadId" in query:
            with self.store.lock:
                self.store.uploads.pop(query["uploadId"], None)
                self.store.written.append(("abort", key))
        else:
            self._remove(key)
        self._send(204, b"", {})

    def _remove(self, key: str) -> None:
        with self.store.lock:
            self.store.objects.pop(key, None)
            self.store.written.append(("delete", key))

    def _place(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        values = parse_qs(url.query, keep_blank_values=True)
        return unquote(url.path).lstrip("/").partition("/")[2], {
            name: each[0] for name, each in values.items()
        }

    def _condition(self, key: str) -> tuple[int, str] | None:
        """Return the error of a write whose condition is not met."""
        data = self.store.objects.get(key)
        if self.store.has_conditions and (
            (self.headers.get("If-None-Match") == "*" and data is not None)
            or self.headers.get("If-Match") not in (None, None if data is None else etag(data))
        ):
            return 412, "PreconditionFailed"
        return None

    def _listing(self, query: dict[str, str]) -> None:
        start = query.get("continuation-token", "")
        keys = sorted(k for k in self.store.objects if k.startswith(query.get("prefix", "")) and k > start)
        some, more = keys[: self.store.page], keys[self.store.page :]
        contents = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(self.store.objects[key])}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{self._listed_mark(key)}</ETag>"
            "</Contents>"
            for key in some
        )
        token = f"<NextContinuationToken>{some[-1]}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><Name>{BUCKET}</Name><KeyCount>{len(some)}</KeyCount>"
            f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{contents}{token}</ListBucketResult>"
        )
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def _listed_mark(self, key: str) -> str:
        mark = etag(self.store.objects[key])
        return mark if self.store.quotes_marks else mark.strip('"')

    def _object(self, key: str) -> None:
        with self.store.lock:
            fault = self.store.fault(key)
        if fault.isdigit():
            self._error(int(fault), "Fault")
            return
        data = self.store.objects.get(key)
        if data is None:
            self._error(404, "NoSuchKey")
            return
        if self.headers.get("If-Match") not in (None, etag(data)):
            self._error(412, "PreconditionFailed")
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (0, len(data) - 1) if match is None else (int(match[1]), int(match[2]))
        part = data[first : last + 1]
        fields = {"ETag": etag(data), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if match is not None:
            fields["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        if fault == "silence":
            time.sleep(3)
        sent = part[: len(part) // 2] if fault == "cut" else part
        with self.store.lock:
            self.store.requests.append(Request(key, first, len(sent)))
        self._send(200 if match is None else 206, sent, fields, len(part))

    def _error(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode(), {})

    def _send(self, status: int, data: bytes, fields: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**fields, "Content-Length": str(len(data) if length is None else length)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()
        if length is not None and length != len(data):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that are gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def s3_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server with an empty bucket, which the environment names."""
    store = Store()
    server = Server(("127.0.0.1", 0), type("_Handler", (Handler,), {"store": store}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-secret-that-no-message-may-show",
        "AWS_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
