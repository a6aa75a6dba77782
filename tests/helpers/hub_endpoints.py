"""What the Hub of the tests answers: the endpoints that ``huggingface_hub`` calls, without the HTTP."""

from __future__ import annotations

import base64
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import yaml  # type: ignore[import-untyped]
from hub_store import Commit, File, Repo, Store, folders_of, is_lfs

REPO = r"(?P<repo>[^/]+/[^/]+)"
API = f"/api/models/{REPO}"
REVISION = r"(?P<revision>[^/]+)"


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes ``start`` to ``stop`` of a content."""

    sha256: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, headers, and a body in pieces."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[bytes | Window, ...] = ()
    file: str = ""
    """The path in the repository, where the body is (of) a file of one."""

    @property
    def num_bytes(self) -> int:
        """Of the body."""
        return sum(len(p) if isinstance(p, bytes) else p.stop - p.start for p in self.body)


class Refused(Exception):
    """An answer that is an error.

    Args:
        status: of the answer.
        code: the ``X-Error-Code``, by which the client knows what is missing; empty for none.
        message: the ``X-Error-Message``.
        headers: more headers.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        names = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self.answer = as_json({"error": message}, status, names)


@dataclass(frozen=True, slots=True)
class Token:
    """Who sends a token, and what it allows."""

    user: str
    write: bool = True
    orgs: tuple[str, ...] = ()
    gated: bool = True
    """Whether the user has accepted the terms of gated repositories."""

    def may_write(self, namespace: str) -> bool:
        """Whether it allows changes to a repository of the namespace."""
        return self.write and self.may_read(namespace)

    def may_read(self, namespace: str) -> bool:
        """Whether it opens private repositories of the namespace."""
        return namespace in (self.user, *self.orgs)


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has been read."""

    method: str
    path: str
    """Still quoted, without the query."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case names."""
    body: Path
    """The file that holds the body."""

    @property
    def bearer(self) -> str | None:
        """The token that was sent."""
        kind, _, value = self.headers.get("authorization", "").partition(" ")
        return value if kind.lower() == "bearer" and value else None

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body.read_bytes() or b"{}")


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer that is a JSON document."""
    found = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
    return Answer(status, found, (json.dumps(value).encode(),))


Endpoint = Callable[..., Answer]
ROUTES: list[tuple[str, re.Pattern[str], Endpoint]] = []
"""Method, path and function of every endpoint; the first that fits is called with the named groups."""


def route(method: str, pattern: str) -> Callable[[Endpoint], Endpoint]:
    """Put a function in ``ROUTES``."""

    def register(function: Endpoint) -> Endpoint:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


class Endpoints:
    """The Hub's answers.

    Args:
        store: what it holds.
        endpoint: its own URL.
        cdn: the URL under which the same server hands out large files; another host for the client, which
            must not send its token there.
        part_bytes: larger uploads are made in parts of this size.
        page_size: entries in a page of a tree.
    """

    def __init__(self, store: Store, endpoint: str, cdn: str, part_bytes: int, page_size: int) -> None:
        self.store, self.endpoint, self.cdn = store, endpoint, cdn
        self.part_bytes, self.page_size = part_bytes, page_size
        self.tokens = {"hf_writer": Token("user"), "hf_reader": Token("user", write=False)}
        self.signatures: dict[str, int] = {}
        """How often each signed URL was used."""
        self.signed_requests = 0
        """A signed URL is good for so many requests; 0: for ever."""
        self.multi_range = False
        """Whether several ranges in one request are answered, or the whole file is."""
        self.ignore_range = False
        """Whether every request for a range is answered by the whole file."""
        self._lock = threading.Lock()

    def answer(self, call: Call) -> Answer:
        """What an endpoint answers, or the error it raised."""
        method = "GET" if call.method == "HEAD" else call.method
        try:
            for wanted, pattern, function in ROUTES:
                match = pattern.fullmatch(call.path)
                if wanted == method and match:
                    named = {name: unquote(value) for name, value in match.groupdict().items() if value}
                    return function(self, call, **named)
            raise Refused(404, "", f"Cannot {call.method} {call.path}")
        except Refused as refused:
            return refused.answer

    # Who asks, and for what

    def token(self, call: Call) -> Token | None:
        """Who asks; None: nobody known."""
        if call.bearer is None:
            return None
        if call.bearer not in self.tokens:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return self.tokens[call.bearer]

    def repo(self, call: Call, repo_id: str, *, write: bool = False) -> Repo:
        """The repository, where the one who asks may read it, or write to it."""
        token, repo = self.token(call), self.store.repos.get(repo_id)
        if repo is None or (repo.private and not (token and token.may_read(repo.owner))):
            if token is None:
                raise Refused(401, "RepoNotFound", "Invalid username or password.")
            raise Refused(404, "RepoNotFound", "Repository not found")
        if write and token is None:
            raise Refused(401, "", "Invalid username or password.")
        if write and token is not None and not token.may_write(repo.owner):
            raise Refused(403, "", "Forbidden: you must use a write token to upload to a repository.")
        return repo

    def commit(self, repo: Repo, revision: str) -> Commit:
        """The commit of a revision."""
        found = repo.at(revision)
        if found is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def signed(self, path: str, **query: str) -> str:
        """A URL on the second host that carries its own permission."""
        signature = secrets.token_hex(8)
        with self._lock:
            self.signatures[signature] = 0
        rest = "".join(f"&{name}={quote(value, safe='')}" for name, value in query.items())
        return f"{self.cdn}{path}?Signature={signature}{rest}"

    def require_signature(self, call: Call) -> None:
        """Count a request of a signed URL."""
        signature = call.query.get("Signature", "")
        with self._lock:
            used = self.signatures.get(signature)
            if used is None or 0 < self.signed_requests <= used:
                raise Refused(403, "", "Request has expired")
            self.signatures[signature] += 1

    # Accounts and repositories

    @route("GET", "/api/whoami-v2")
    def whoami(self, call: Call) -> Answer:
        """The owner of a token."""
        token = self.token(call)
        if token is None:
            raise Refused(401, "", "Invalid username or password.")
        access = {"displayName": "test", "role": "write" if token.write else "read"}
        orgs = [{"type": "org", "name": name} for name in token.orgs]
        auth = {"type": "access_token", "accessToken": access}
        return as_json({"type": "user", "id": token.user, "name": token.user, "orgs": orgs, "auth": auth})

    @route("POST", "/api/repos/create")
    def create_repo(self, call: Call) -> Answer:
        """A new repository, 409 where there is one."""
        token, wanted = self.token(call), call.json()
        if token is None:
            raise Refused(401, "", "Invalid username or password.")
        owner = wanted.get("organization") or token.user
        if not token.may_write(owner):
            message = f'You don\'t have the rights to create a model under the namespace "{owner}"'
            raise Refused(403, "", message)
        repo_id = f"{owner}/{wanted['name']}"
        found = {"url": f"{self.endpoint}/{repo_id}", "name": repo_id}
        with self.store.lock:
            if repo_id in self.store.repos:
                return as_json({**found, "error": "You already created this model repo"}, 409)
            private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
            self.store.create(repo_id, private)
        return as_json(found)

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self, call: Call) -> Answer:
        """Whether the metadata of a README.md can be read."""
        match = re.match(r"\s*---\n(.*?)\n---\s*(\n|$)", call.json()["content"], re.DOTALL)
        try:
            found = yaml.safe_load(match[1]) if match else {}
            errors = [] if isinstance(found or {}, dict) else [{"message": "metadata is not a mapping"}]
        except yaml.YAMLError as error:
            errors = [{"message": str(error)}]
        return as_json({"errors": errors, "warnings": []}, 400 if errors else 200)

    @route("GET", f"{API}/refs")
    def refs(self, call: Call, repo: str) -> Answer:
        """All branches."""
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
            for name, oid in self.repo(call, repo).branches.items()
        ]
        return as_json({"branches": branches, "converts": [], "tags": [], "pullRequests": []})

    @route("POST", f"{API}/branch/(?P<branch>[^/]+)")
    def create_branch(self, call: Call, repo: str, branch: str) -> Answer:
        """A branch that begins where another one, or a commit, is."""
        found = self.repo(call, repo, write=True)
        start = self.commit(found, call.json().get("startingPoint", "main"))
        with self.store.lock:
            if branch in found.branches:
                raise Refused(409, "", f"Reference already exists: {branch}")
            found.branches[branch] = start.oid
        return as_json({"success": True})

    @route("GET", f"{API}(/revision/{REVISION})?")
    def info(self, call: Call, repo: str, revision: str | None = None) -> Answer:
        """About a repository at a revision."""
        found = self.repo(call, repo)
        commit = self.commit(found, revision or "main")
        blobs = call.query.get("blobs", "").lower() in ("1", "true")
        siblings = [
            {"rfilename": path, **(_sibling(file) if blobs else {})} for path, file in commit.files.items()
        ]
        about = {"author": found.owner, "private": found.private, "disabled": False, "tags": []}
        gated = "auto" if found.gated else False
        date = {"lastModified": commit.date, "createdAt": found.history("main")[-1].date}
        names = {"_id": repo, "id": repo, "modelId": repo, "sha": commit.oid}
        return as_json({**names, **about, **date, "gated": gated, "siblings": siblings})

    @route("GET", f"{API}/tree/{REVISION}(/(?P<path>.*))?")
    def tree(self, call: Call, repo: str, revision: str, path: str = "") -> Answer:
        """The entries of a folder, page by page."""
        commit = self.commit(self.repo(call, repo), revision)
        expand, recursive = (call.query.get(n, "").lower() in ("1", "true") for n in ("expand", "recursive"))
        folder = path.strip("/")
        inside = [p for p in (*folders_of(commit.files), *commit.files) if _below(p, folder, recursive)]
        if folder and not inside:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        first = int(call.query.get("cursor", "0"))
        size = min(int(call.query.get("limit", self.page_size)), self.page_size)
        page = sorted(inside)[first : first + size]
        headers = {}
        if first + size < len(inside):
            kept = {n: v for n, v in call.query.items() if n != "cursor"}
            query = "&".join(f"{n}={quote(v)}" for n, v in {**kept, "cursor": str(first + size)}.items())
            headers["Link"] = f'<{self.endpoint}{call.path}?{query}>; rel="next"'
        return as_json([_entry(commit, p, expand) for p in page], headers=headers)

    @route("POST", f"{API}/paths-info/{REVISION}")
    def paths_info(self, call: Call, repo: str, revision: str) -> Answer:
        """Those of some paths that exist."""
        commit = self.commit(self.repo(call, repo), revision)
        if "json" in call.headers.get("content-type", ""):
            paths, expand = call.json()["paths"], call.json().get("expand", False)
        else:
            form = parse_qs(call.body.read_bytes().decode())
            paths, expand = form.get("paths", []), form.get("expand", [""])[0].lower() == "true"
        known = {*commit.files, *folders_of(commit.files)}
        return as_json([_entry(commit, p.strip("/"), expand) for p in paths if p.strip("/") in known])

    # Reading files

    @route("GET", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)")
    def resolve(self, call: Call, repo: str, revision: str, path: str) -> Answer:
        """A file, or for one in large-file storage a redirect to a signed URL."""
        found = self.repo(call, repo)
        token = self.token(call)
        if found.gated and not (token and (token.gated or token.may_read(found.owner))):
            message = f"Access to model {repo} is restricted. You must have access to it."
            raise Refused(403 if token else 401, "GatedRepo", message)
        commit = self.commit(found, revision)
        named = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            raise Refused(404, "EntryNotFound", "Entry not found", named)
        file = commit.files[path]
        if not file.lfs:
            return self._content(call, file, path, named)
        linked = {"X-Linked-Size": str(file.num_bytes), "X-Linked-Etag": f'"{file.sha256}"'}
        location = self.signed(f"/cdn/{file.sha256}", file=path)
        etag = f'"{file.oid}"'
        return Answer(302, {**named, **linked, "ETag": etag, "Location": location}, (b"Found.",))

    @route("GET", "/cdn/(?P<sha256>[0-9a-f]{64})")
    def cdn_file(self, call: Call, sha256: str) -> Answer:
        """A content by its signed URL."""
        self.require_signature(call)
        size = self.store.blobs.path(sha256).stat().st_size
        return self._content(call, File(sha256, size, "", lfs=True), call.query.get("file", ""), {})

    def _content(self, call: Call, file: File, path: str, headers: Mapping[str, str]) -> Answer:
        """A file, or the parts of it that are asked for."""
        size = file.num_bytes
        named = {**headers, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        typed = {**named, "Content-Type": "application/octet-stream"}
        whole = Answer(200, typed, (Window(file.sha256, 0, size),), path)
        ranges = None if self.ignore_range else _ranges(call.headers.get("range", ""), size)
        if ranges is None or (len(ranges) > 1 and not self.multi_range):
            return whole
        if not ranges:
            return Answer(416, {**named, "Content-Range": f"bytes */{size}"}, (), path)
        windows = [Window(file.sha256, start, stop) for start, stop in ranges]
        if len(windows) == 1:
            span = f"bytes {windows[0].start}-{windows[0].stop - 1}/{size}"
            return Answer(206, {**typed, "Content-Range": span}, tuple(windows), path)
        boundary = secrets.token_hex(12)
        kind = {"Content-Type": f"multipart/byteranges; boundary={boundary}"}
        return Answer(206, {**named, **kind}, tuple(_multipart(windows, size, boundary)), path)

    # Writing files

    @route("POST", f"{API}/preupload/{REVISION}")
    def preupload(self, call: Call, repo: str, revision: str) -> Answer:
        """For each file whether it goes to large-file storage, and what is at its path."""
        commit = self.commit(self.repo(call, repo, write=True), revision)
        files = []
        for wanted in call.json()["files"]:
            path, there = wanted["path"], commit.files.get(wanted["path"])
            lfs = is_lfs(path, wanted["size"], base64.b64decode(wanted.get("sample", "")))
            mode = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            files.append({**mode, **({"oid": there.etag} if there else {})})
        return as_json({"files": files})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/batch")
    def batch(self, call: Call, repo: str) -> Answer:
        """How to upload the contents that are not there."""
        self.repo(call, repo, write=True)
        wanted = call.json()
        parts = "multipart" in wanted.get("transfers", ())
        objects = [self._upload_of(one["oid"], one["size"], repo, parts) for one in wanted["objects"]]
        return as_json({"transfer": "multipart" if parts else "basic", "objects": objects})

    def _upload_of(self, oid: str, size: int, repo: str, parts: bool) -> dict[str, Any]:
        named: dict[str, Any] = {"oid": oid, "size": size}
        if oid in self.store.blobs:
            return named
        upload: dict[str, Any] = {"href": self.signed(f"/upload/{oid}")}
        if parts and size > self.part_bytes:
            numbers = range(1, -(-size // self.part_bytes) + 1)
            urls = {str(n): self.signed(f"/upload/{oid}/{n}") for n in numbers}
            complete = f"{self.endpoint}/{repo}.git/info/lfs/complete"
            upload = {"href": complete, "header": {"chunk_size": str(self.part_bytes), **urls}}
        verify = {"href": f"{self.endpoint}/{repo}.git/info/lfs/verify"}
        return {**named, "authenticated": True, "actions": {"upload": upload, "verify": verify}}

    @route("PUT", "/upload/(?P<oid>[0-9a-f]{64})(/(?P<part>[0-9]+))?")
    def upload(self, call: Call, oid: str, part: str | None = None) -> Answer:
        """A content, or a part of one, by its signed URL."""
        self.require_signature(call)
        if part is not None:
            call.body.replace(self._part(oid, int(part)))
            return Answer(200, {"ETag": f'"{oid[:8]}-{part}"'})
        self._take(call.body, oid)
        return Answer(200, {"ETag": f'"{oid}"'})

    @route("POST", rf"/{REPO}\.git/info/lfs/complete")
    def complete(self, call: Call, repo: str) -> Answer:
        """Put the parts of a content together."""
        wanted = call.json()
        parts = [self._part(wanted["oid"], one["partNumber"]) for one in wanted["parts"]]
        if not all(part.exists() and one["etag"] for part, one in zip(parts, wanted["parts"], strict=True)):
            raise Refused(400, "", "a part is missing")
        whole = self.store.blobs.scratch()
        with whole.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
                part.unlink()
        self._take(whole, wanted["oid"])
        return as_json({"success": True})

    @route("POST", rf"/{REPO}\.git/info/lfs/verify")
    def verify(self, call: Call, repo: str) -> Answer:
        """Whether a content arrived."""
        self.repo(call, repo, write=True)
        wanted = call.json()
        path = self.store.blobs.path(wanted["oid"])
        if not path.exists() or path.stat().st_size != wanted["size"]:
            raise Refused(404, "", "Object not found")
        return as_json({"message": "Verified"})

    def _part(self, oid: str, number: int) -> Path:
        return self.store.blobs.directory / f"{oid}.part-{number}"

    def _take(self, file: Path, oid: str) -> None:
        if self.store.blobs.adopt(file) != oid:
            raise Refused(400, "", f"the content that was sent is not {oid}")

    @route("POST", f"{API}/commit/{REVISION}")
    def make_commit(self, call: Call, repo: str, revision: str) -> Answer:
        """Files that are added and deleted, in one commit; all or none."""
        found = self.repo(call, repo, write=True)
        if revision not in found.branches:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        lines = [json.loads(line) for line in call.body.read_bytes().splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        with self.store.lock:
            before = found.commits[found.branches[revision]]
            parent = header.get("parentCommit")
            if parent and not before.oid.startswith(parent):
                raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
            files = dict(before.files)
            for line in lines:
                self._apply(line["key"], line["value"], files)
            commit = found.add(revision, header["summary"], files)
        url = f"{self.endpoint}/{repo}/commit/{commit.oid}"
        return as_json({"success": True, "commitOid": commit.oid, "commitUrl": url, "pullRequestUrl": None})

    def _apply(self, key: str, value: Mapping[str, Any], files: dict[str, File]) -> None:
        path = value.get("path", "")
        if key == "file":
            content = base64.b64decode(value["content"])
            if is_lfs(path, len(content), content[:512]):
                raise Refused(400, "", f"Your push was rejected: {path} belongs to large-file storage")
            files[path] = self.store.regular_file(self.store.blobs.put(content))
        elif key == "lfsFile":
            oid = value["oid"]
            if oid not in self.store.blobs:
                raise Refused(400, "", f"LFS pointer of {path} pointed to a file that does not exist")
            files[path] = self.store.lfs_file(oid, self.store.blobs.path(oid).stat().st_size)
        elif key in ("deletedFile", "deletedFolder"):
            gone = [p for p in files if p == path or (key == "deletedFolder" and _below(p, path, True))]
            if not gone:
                raise Refused(404, "EntryNotFound", f'A file with this name doesn\'t exist: "{path}"')
            for name in gone:
                del files[name]
        elif key != "header":
            raise Refused(400, "", f"unknown operation {key}")


def _sibling(file: File) -> dict[str, Any]:
    large = {"lfs": {"sha256": file.sha256, "size": file.num_bytes, "pointerSize": 134}} if file.lfs else {}
    return {"size": file.num_bytes, "blobId": file.oid, **large}


def _below(path: str, folder: str, recursive: bool) -> bool:
    """Whether a path is in a folder; directly in it, if not ``recursive``."""
    start = f"{folder.rstrip('/')}/" if folder else ""
    return path.startswith(start) and path != folder and (recursive or "/" not in path[len(start) :])


def _entry(commit: Commit, path: str, expand: bool) -> dict[str, Any]:
    """A file or folder as the tree lists it."""
    last = {"lastCommit": {"id": commit.oid, "title": commit.title, "date": commit.date}} if expand else {}
    if path not in commit.files:
        return {"type": "directory", "oid": commit.oid, "size": 0, "path": path, **last}
    file = commit.files[path]
    large = {"oid": file.sha256, "size": file.num_bytes, "pointerSize": 134}
    plain = {"type": "file", "oid": file.oid, "size": file.num_bytes, "path": path}
    return {**plain, **({"lfs": large} if file.lfs else {}), **last}


def _ranges(header: str, size: int) -> list[tuple[int, int]] | None:
    """The parts of a file that a Range header asks for; None: it asks for none, empty: there are none."""
    match = re.fullmatch(r"bytes=((\d+-\d*|-\d+)(,\s*(\d+-\d*|-\d+))*)", header.strip())
    if not match:
        return None
    found = []
    for part in match[1].split(","):
        first, last = part.strip().split("-")
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start < stop:
            found.append((start, stop))
    return found


def _multipart(windows: Iterable[Window], size: int, boundary: str) -> Iterable[bytes | Window]:
    """The body of an answer to several ranges."""
    for window in windows:
        span = f"Content-Range: bytes {window.start}-{window.stop - 1}/{size}"
        kind = "Content-Type: application/octet-stream"
        yield f"\r\n--{boundary}\r\n{kind}\r\n{span}\r\n\r\n".encode()
        yield window
    yield f"\r\n--{boundary}--\r\n".encode()
