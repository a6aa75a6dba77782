"""The Hub of the tests, used by the real client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_endpoints import Token
from hub_server import HubServer
from huggingface_hub import (
    CommitOperation,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

REPO = "user/model"
PART_BYTES = 100_000
WEIGHTS = bytes(range(256)) * 1000
FILES = {"config.json": b'{"a": 1}', "sub/weights.safetensors": WEIGHTS, "sub/empty.txt": b""}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(part_bytes=PART_BYTES, page_size=2) as server:
        server.use(monkeypatch, tmp_path / "home", "hf_writer")
        yield server


def folder(path: Path) -> Path:
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def contents(directory: str | Path) -> dict[str, bytes]:
    found = {p.relative_to(directory).as_posix(): p for p in Path(directory).rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in found.items()}


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_what_is_uploaded_is_downloaded(hub: HubServer, tmp_path: Path) -> None:
    api = HfApi()
    assert api.whoami()["name"] == "user"
    assert api.create_repo(REPO).repo_id == REPO
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(REPO)
    api.create_repo(REPO, exist_ok=True)
    info = api.upload_folder(repo_id=REPO, folder_path=folder(tmp_path / "in"), path_in_repo="tp-2")
    assert info.oid == hub.head(REPO).oid == api.model_info(REPO).sha
    expected = {f"tp-2/{name}": content for name, content in FILES.items()}
    assert {k: v for k, v in hub.files(REPO).items() if k != ".gitattributes"} == expected
    assert hub.uploaded == len(WEIGHTS)
    assert [r.received_bytes for r in hub.requests if r.method == "PUT"] == [100_000, 100_000, 56_000]

    hub.forget()
    assert contents(snapshot_download(REPO, token=False))["tp-2/sub/weights.safetensors"] == WEIGHTS
    assert hub.served("tp-2/") == {name: len(content) for name, content in expected.items() if content}
    hub.forget()
    snapshot_download(REPO)
    assert hub.served() == {}, "it is in the cache"


def test_equal_contents_are_uploaded_once(hub: HubServer) -> None:
    api = HfApi()
    api.create_repo(REPO)
    for path in ("a.bin", "b.bin"):
        api.upload_file(repo_id=REPO, path_in_repo=path, path_or_fileobj=WEIGHTS)
    assert hub.uploaded == len(WEIGHTS)
    assert hub.files(REPO)["b.bin"] == WEIGHTS


def test_trees_and_paths(hub: HubServer) -> None:
    commit, api = hub.add_repo(REPO, FILES), HfApi()
    assert {e.path for e in api.list_repo_tree(REPO)} == {".gitattributes", "config.json", "sub"}
    entries = {e.path: e for e in api.list_repo_tree(REPO, recursive=True, expand=True)}
    assert set(entries) == {*FILES, ".gitattributes", "sub"}
    assert len([r for r in hub.requests if "/tree/" in r.path]) == 2 + 3, "pages of two"
    large = entries["sub/weights.safetensors"]
    assert large.lfs.sha256 == hub.head(REPO).files[large.path].sha256  # type: ignore[union-attr]
    assert large.last_commit.oid == commit  # type: ignore[union-attr]
    assert [e.path for e in api.list_repo_tree(REPO, "sub", revision=commit)] == sorted(
        p for p in FILES if p.startswith("sub/")
    )
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "nothing"))
    assert [e.path for e in api.get_paths_info(REPO, ["sub", "no", "config.json"])] == ["sub", "config.json"]
    assert api.file_exists(REPO, "config.json")
    assert not api.file_exists(REPO, "config.yaml")


def test_branches_are_snapshots_of_their_own(hub: HubServer) -> None:
    first, api = hub.add_repo(REPO, FILES), HfApi()
    api.create_branch(REPO, branch="a/b")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(REPO, branch="a/b")
    changes: list[CommitOperation] = [
        CommitOperationAdd("new.txt", b"new"),
        CommitOperationDelete("sub/"),
        CommitOperationAdd("config.json", b"{}"),
    ]
    second = api.create_commit(REPO, changes, commit_message="change", revision="a/b", parent_commit=first)
    assert set(hub.files(REPO, "a/b")) == {".gitattributes", "new.txt", "config.json"}
    assert hub.head(REPO).oid == first
    assert {b.name: b.target_commit for b in api.list_repo_refs(REPO).branches} == {
        "main": first,
        "a/b": second.oid,
    }
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(
            REPO,
            [CommitOperationDelete("new.txt")],
            commit_message="late",
            revision="a/b",
            parent_commit=first,
        )
    with pytest.raises(RevisionNotFoundError):
        snapshot_download(REPO, revision="c")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "nothing.json")


def test_metadata_that_cannot_be_read_is_refused(hub: HubServer) -> None:
    hub.add_repo(REPO)
    with pytest.raises(ValueError, match="Invalid metadata"):
        HfApi().upload_file(repo_id=REPO, path_in_repo="README.md", path_or_fileobj=b"---\na: [\n---\n")


def test_private_and_gated_repositories(hub: HubServer) -> None:
    hub.add_repo("user/private", FILES, private=True)
    hub.add_repo("other/gated", FILES, gated=True)
    hub.tokens["hf_stranger"] = Token("stranger", gated=False)
    assert contents(snapshot_download("user/private", token="hf_reader"))["config.json"] == b'{"a": 1}'
    for token in (False, "hf_stranger"):
        with pytest.raises(RepositoryNotFoundError):
            HfApi(token=token).model_info("user/private")
        with pytest.raises(GatedRepoError):
            hf_hub_download("other/gated", "config.json", token=token)
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(token="hf_wrong").model_info("other/gated")
    assert hf_hub_download("other/gated", "config.json", token="hf_reader")
    for token, repo in (("hf_reader", "user/private"), ("hf_writer", "other/gated")):
        with pytest.raises(HfHubHTTPError, match="403"):
            HfApi(token=token).upload_file(repo_id=repo, path_in_repo="a", path_or_fileobj=b"a")
        with pytest.raises(HfHubHTTPError, match="403"):
            HfApi(token=token).create_repo(f"{repo.split('/')[0]}/new")
    assert set(hub.store.repos) == {"user/private", "other/gated"}


def test_tokens_are_not_sent_to_the_host_of_large_files(hub: HubServer) -> None:
    hub.add_repo("user/private", FILES, private=True)
    snapshot_download("user/private")
    tokens = {r.path.split("/")[1]: r.token for r in hub.requests if r.file}
    assert tokens == {"user": "hf_writer", "cdn": None}


def test_ranges(hub: HubServer) -> None:
    hub.add_repo(REPO, FILES)
    url = f"{hub.endpoint}/{REPO}/resolve/main/sub/weights.safetensors"
    for asked, expected in (("5-8", WEIGHTS[5:9]), ("255990-", WEIGHTS[-10:]), ("-3", WEIGHTS[-3:])):
        status, headers, body = get(url, Range=f"bytes={asked}")
        assert (status, body) == (206, expected)
        assert headers["Content-Range"].endswith(f"/{len(WEIGHTS)}")
    assert get(url, Range="bytes=256000-")[0] == 416
    assert get(url, Range="bytes=0-1,5-9")[::2] == (200, WEIGHTS)
    hub.faults.multi_range = True
    status, headers, body = get(url, Range="bytes=0-1,5-9")
    boundary = headers["Content-Type"].rpartition("=")[2]
    parts = [part.partition(b"\r\n\r\n")[2] for part in body.split(f"\r\n--{boundary}".encode())[1:-1]]
    assert (status, parts) == (206, [WEIGHTS[:2], WEIGHTS[5:10]])
    hub.faults.ignore_range = True
    assert get(url, Range="bytes=5-8")[::2] == (200, WEIGHTS)


def test_a_signed_url_expires(hub: HubServer) -> None:
    hub.add_repo(REPO, FILES)
    hub.faults.signed_requests = 2
    opened = urllib.request.urlopen(f"{hub.endpoint}/{REPO}/resolve/main/sub/weights.safetensors")
    assert opened.url.startswith("http://localhost:")
    opened.close()
    assert [get(opened.url)[0] for _ in range(2)] == [200, 403]


def test_a_body_that_ends_early_is_resumed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what the client keeps is whole chunks
    hub.add_repo(REPO, FILES)
    hub.faults.truncate_every, hub.faults.truncate_after_bytes = 1, 150_000
    path = hf_hub_download(REPO, "sub/weights.safetensors")
    assert Path(path).read_bytes() == WEIGHTS
    assert hub.served() == {"sub/weights.safetensors": len(WEIGHTS)}
    assert [r.range for r in hub.requests if r.file] == [None, "bytes=150000-"]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_errors_in_between_are_survived(hub: HubServer, tmp_path: Path, status: int) -> None:
    api = HfApi()
    api.create_repo(REPO)
    faults = hub.faults
    faults.error_every, faults.error_status, faults.only, faults.retry_after_s = 2, status, "PUT", 0
    api.upload_folder(repo_id=REPO, folder_path=folder(tmp_path / "in"))
    assert hub.files(REPO)["sub/weights.safetensors"] == WEIGHTS
    assert status in {r.status for r in hub.requests}


def test_a_slow_and_a_silent_server(hub: HubServer) -> None:
    hub.add_repo(REPO, FILES)
    hub.faults.delay_s = 0.1
    begin = time.monotonic()
    hf_hub_download(REPO, "sub/weights.safetensors")
    assert time.monotonic() - begin >= 0.4, "four chunks of 64 KiB"
    hub.faults.hang = True
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(f"{hub.endpoint}/{REPO}/resolve/main/config.json", timeout=0.5)


def test_a_server_for_many_processes(tmp_path: Path) -> None:
    log, script = tmp_path / "log.jsonl", Path(__file__).parent.parent / "helpers" / "hub_server.py"
    faults = json.dumps({"ignore_range": True})
    given = [f"--repo={REPO}={folder(tmp_path / 'in')}", f"--log={log}", f"--faults={faults}"]
    command = [sys.executable, str(script), *given, f"--dir={tmp_path / 'blobs'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            code = f"from huggingface_hub import snapshot_download; print(snapshot_download({REPO!r}))"
            own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
            own |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}  # of a busy machine
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            assert contents(done.stdout.strip())["sub/weights.safetensors"] == WEIGHTS
        finally:
            server.kill()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(r["sent_bytes"] for r in records if r["file"] == "sub/weights.safetensors") == len(WEIGHTS)
    assert records[0]["client"][0] == "127.0.0.1"
