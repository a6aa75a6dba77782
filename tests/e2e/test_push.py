"""Publishing converted directories, with the real client and a Hub on the loopback."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import llama_plan, random_llama, write_directory
from forked import Forked
from hub_endpoints import Token
from hub_server import HubServer
from huggingface_hub import HfApi
from shardconv_runtime.errors import CheckpointError, SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.files.checksums import shard_checksum
from shardconv_runtime.files.manifest import MANIFEST_NAME, Source
from shardconv_runtime.format.measured import Numerics

import shardconv
from shardconv import cli
from shardconv.hub import branch
from shardconv.hub.card import BEGIN, END
from shardconv.reporting.progress import Advance, Silent

REPO = "user/model"
PART_BYTES = 300_000
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2048}
TIMEOUT_S = 120


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(branch, "FIRST_WAIT_S", 0.01)
    with HubServer(part_bytes=PART_BYTES) as server:
        server.use(monkeypatch, tmp_path / "home", "hf_writer")
        yield server


def make(path: Path, tp: int = 2, shards: int = 2, **changes: object) -> Path:
    """A converted directory of some megabytes; the shards have checksums as conversions write them."""
    sizes: dict[str, Any] = {**SIZES, **changes}
    model = random_llama(torch.float32, **sizes)
    out: Path = write_directory(path, model, llama_plan(model.config, (tp,), "float32"), shards)
    found = manifest.read(out)
    files = tuple(
        dataclasses.replace(e, checksum=shard_checksum(out / e.path))
        if e.path.endswith(".safetensors")
        else e
        for e in found.files
    )
    manifest.write(dataclasses.replace(found, files=files), out)
    return out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return make(tmp_path / "out")


def files_of(out: Path) -> dict[str, bytes]:
    """All contents of a directory."""
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def below(hub: HubServer, folder: str, revision: str = "main") -> dict[str, bytes]:
    """All contents of a folder of the repository."""
    start = f"{folder}/"
    found = hub.files(REPO, revision)
    return {path.removeprefix(start): data for path, data in found.items() if path.startswith(start)}


def large_bytes(out: Path) -> int:
    """What of a directory goes to large-file storage, each content once."""
    return sum(map(len, {data for path, data in files_of(out).items() if path.endswith(".safetensors")}))


def complete_manifests(hub: HubServer, folder: str) -> list[bool]:
    """For each commit with a manifest in ``folder``: whether every file it names is there, of its size."""
    found = []
    for commit in hub.repo(REPO).history():
        file = commit.files.get(f"{folder}/{MANIFEST_NAME}")
        if file is not None:
            text = hub.store.blobs.read(file.sha256).decode()
            sizes = {p: f.num_bytes for p, f in commit.files.items()}
            entries = manifest.loads(text).files
            found.append(all(sizes.get(f"{folder}/{e.path}") == e.num_bytes for e in entries))
    return found


def test_what_is_published_is_the_directory(hub: HubServer, out: Path) -> None:
    before, stamps = files_of(out), {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    pushed = shardconv.push(out, REPO)
    assert below(hub, "tp-2") == before == files_of(out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == stamps
    found = hub.files(REPO)
    assert found["config.json"] == before["config.json"]
    assert set(found) - {f"tp-2/{path}" for path in before} == {
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "shardconv/tp-2.svg",
    }
    assert found["shardconv/tp-2.svg"].startswith(b"<svg")
    assert (pushed.commit, pushed.path, pushed.there) == (hub.head(REPO).oid, "tp-2", {})
    assert set(pushed.sent) == set(found) - {".gitattributes"}
    assert hub.uploaded == large_bytes(out)
    assert complete_manifests(hub, "tp-2") == [True]
    assert not hub.repo(REPO).private


def test_a_push_again_changes_nothing(hub: HubServer, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = shardconv.push(out, REPO)
    hub.forget()
    again = shardconv.push(out, REPO)
    assert (again.commit, again.sent, again.deleted) == (first.commit, {}, ())
    assert set(again.there) == set(first.sent)
    assert {r.method for r in hub.requests} <= {"GET", "HEAD"}
    assert cli.run(["push", str(out), REPO]) == 0
    assert "is up to date, nothing was sent" in capsys.readouterr().out


def test_another_number_of_ranks_stands_beside_it(hub: HubServer, out: Path, tmp_path: Path) -> None:
    shardconv.push(out, REPO)
    four = make(tmp_path / "four", tp=4)
    shared = {p for p, data in files_of(four).items() if data in files_of(out).values()}
    hub.forget()
    shardconv.push(four, REPO)
    assert (below(hub, "tp-2"), below(hub, "tp-4")) == (files_of(out), files_of(four))
    equal = sum(len(files_of(four)[p]) for p in shared if p.endswith(".safetensors"))
    assert hub.uploaded == large_bytes(four) - equal
    card = hub.files(REPO)["README.md"].decode()
    assert "shardconv/tp-2.svg" in card
    assert "shardconv/tp-4.svg" in card


def test_equal_contents_are_not_sent_again(hub: HubServer, out: Path) -> None:
    shardconv.push(out, REPO)
    hub.forget()
    shardconv.push(out, "user/copy")
    assert hub.uploaded == 0
    assert below(hub, "tp-2") == files_of(out)


def test_what_a_person_wrote_stays(hub: HubServer, out: Path) -> None:
    text = "---\nlicense: mit\ntags:\n- mine\nlibrary_name: other\n---\n# By hand\n\nRead this.\n"
    hub.add_repo(REPO, {"README.md": text.encode(), "notes/a.txt": b"a"})
    shardconv.push(out, REPO)
    card = hub.files(REPO)["README.md"].decode()
    assert "# By hand\n\nRead this." in card
    assert card.count(BEGIN) == card.count(END) == 1
    head = card.split("---")[1]
    assert "license: mit" in head
    assert "library_name: other" in head
    assert "- mine" in head
    assert hub.files(REPO)["notes/a.txt"] == b"a"

    changed = card.replace("Read this.", "Read that.") + "\nAnd an end.\n"
    hub.add_repo(REPO, {"README.md": changed.encode()})
    pushed = shardconv.push(out, REPO)
    assert pushed.sent == {}, "a person's text is no reason to push"
    assert hub.files(REPO)["README.md"].decode() == changed


def test_metadata_that_cannot_be_read_is_left_to_its_author(hub: HubServer, out: Path) -> None:
    hub.add_repo(REPO, {"README.md": b"---\na: [\n---\n"})
    with pytest.raises(SourceError, match="metadata that cannot be read"):
        shardconv.push(out, REPO)
    assert len(hub.repo(REPO).history()) == 2


def test_a_text_that_cannot_be_read_is_left_to_its_author(hub: HubServer, out: Path) -> None:
    hub.add_repo(REPO, {"README.md": "é".encode("latin-1")})
    with pytest.raises(SourceError, match=r"README\.md of user/model is not UTF-8 text"):
        shardconv.push(out, REPO)


def test_the_card_says_what_the_base_model_says(hub: HubServer, out: Path) -> None:
    base = hub.add_repo("org/base", {"README.md": b"---\nlicense: apache-2.0\n---\nA model.\n"})
    for source, expected in ((Source("org/base", base), True), (Source("org/gone", "0" * 40), False)):
        found = dataclasses.replace(manifest.read(out), source=source)
        manifest.write(found, out)
        shardconv.push(out, f"{REPO}-{expected}")
        card = hub.files(f"{REPO}-{expected}")["README.md"].decode()
        assert ("license: apache-2.0" in card) == expected
        assert source.name in card


def test_a_branch_is_made(hub: HubServer, out: Path) -> None:
    hub.add_repo(REPO, {"a.txt": b"a"})
    main = hub.head(REPO).oid
    pushed = shardconv.push(out, REPO, revision="try/1")
    assert hub.head(REPO).oid == main
    assert below(hub, "tp-2", "try/1") == files_of(out)
    assert pushed.url.endswith("/user/model/tree/try/1")
    with pytest.raises(SourceError, match="not a branch"):
        shardconv.push(out, REPO, revision=main)


@pytest.mark.parametrize("exists", [False, True])
def test_a_dry_run_changes_nothing(
    hub: HubServer, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], exists: bool
) -> None:
    if exists:
        shardconv.push(out, REPO)
    four = make(tmp_path / "four", tp=4)
    hub.forget()
    assert cli.run(["push", str(four), REPO, "--dry-run", "--token", "hf_reader"]) == 0
    assert {r.method for r in hub.requests} <= {"GET", "HEAD"}
    assert (REPO in hub.store.repos) == exists
    printed = capsys.readouterr().out
    assert "would send    tp-4/rank-00000-of-00004/" in printed
    assert ("in place      config.json" in printed) == exists
    assert "hf_reader" not in printed


def test_a_private_repository(hub: HubServer, out: Path) -> None:
    shardconv.push(out, REPO, private=True)
    assert hub.repo(REPO).private
    assert shardconv.push(out, REPO, private=True).sent == {}
    hub.repo(REPO).private = False
    (out / "config.json").write_bytes((out / "config.json").read_bytes())
    hub.add_repo(REPO, {"tp-2/plan.json": b"{}"})
    with pytest.raises(SourceError, match="exists and is public"):
        shardconv.push(out, REPO, private=True)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("hf_wrong", "does not know the token"),
        ("hf_reader", "may not write to user/model"),
        ("hf_stranger", "may not write to user/model"),
        (None, "not logged in"),
    ],
)
def test_who_may_not_write_is_told(
    hub: HubServer,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
    message: str,
) -> None:
    hub.tokens["hf_stranger"] = Token("stranger")
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    for exists in (False, True):
        if exists:
            hub.add_repo(REPO)
        given = ["--token", token] if token else []
        assert cli.run(["push", str(out), REPO, *given]) == 5
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
        assert "; " in error.splitlines()[-1]
        assert not token or token not in error
    assert len(hub.repo(REPO).history()) == 2
    assert hub.uploaded == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("storage is away"), r"failed \(storage is away\); try again, it continues"),
        (ConnectionError("cut"), r"failed \(cut\); try again, it continues"),
        (ValueError("no such thing"), "the Hub refused a request for user/model: no such thing"),
    ],
)
def test_errors_of_other_storage_are_ours(
    hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(HfApi, "preupload_lfs_files", fail)
    with pytest.raises(SourceError, match=message):
        shardconv.push(out, REPO)


def test_a_server_that_is_not_there_is_said_so(hub: HubServer, out: Path) -> None:
    hub.__exit__(None, None, None)
    with pytest.raises(SourceError, match=r"cannot be reached for user/model .* check the network"):
        shardconv.push(out, REPO)


@pytest.mark.parametrize("repo_id", ["model", "a/b/c", "user/mo del", "./out"])
def test_what_is_no_repository_is_refused(hub: HubServer, out: Path, repo_id: str) -> None:
    with pytest.raises(SourceError, match="give it as user/name"):
        shardconv.push(out, repo_id)
    assert hub.requests == []


def test_a_damaged_directory_is_refused(
    hub: HubServer, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next(out.glob("rank-*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cli.run(["push", str(out), REPO]) == 3
    problem = f"{file.relative_to(out).as_posix()}: is damaged: its checksum (crc32-of-pieces) is"
    assert problem in capsys.readouterr().err
    (out / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        shardconv.push(out, REPO)
    assert (hub.requests, hub.store.repos) == ([], {})


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries again at once."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.mark.usefixtures("no_waits")
def test_errors_in_between_are_survived(hub: HubServer, out: Path) -> None:
    hub.faults.error_every, hub.faults.retry_after_s = 4, 0
    hub.faults.error_status = 503
    shardconv.push(out, REPO)
    assert below(hub, "tp-2") == files_of(out)
    assert complete_manifests(hub, "tp-2") == [True]
    assert 503 in {r.status for r in hub.requests}


class Recorded(Silent):
    """What bars are shown, how long they are, and how far they come."""

    def __init__(self) -> None:
        self.bars: dict[str, list[int]] = {}

    @contextmanager
    def bar(self, label: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
        """Add up."""
        found = self.bars[label] = [total_bytes, done_bytes]

        def advance(num_bytes: int) -> None:
            assert num_bytes > 0
            found[1] += num_bytes

        yield advance


@pytest.mark.usefixtures("no_waits")
def test_progress_counts_every_byte_once(hub: HubServer, out: Path) -> None:
    hub.faults.error_every, hub.faults.only, hub.faults.retry_after_s = 3, "PUT", 0
    first, second = Recorded(), Recorded()
    shardconv.push(out, REPO, progress=first)
    files = {p: data for p, data in files_of(out).items() if p not in ("manifest.json", "plan.json")}
    assert first.bars["sending"] == [sum(map(len, files.values()))] * 2
    assert first.bars["sha256"][0] == first.bars["sha256"][1] > large_bytes(out)
    shardconv.push(out, REPO, progress=second)
    assert set(second.bars) == {"checksums"}, "nothing is hashed or sent again"


def test_what_others_commit_in_between_stays(
    hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, parents = branch.Remote.commit, []

    def late(self: branch.Remote, *args: Any, parent: str | None = None, **options: Any) -> str:
        if parent is not None:
            parents.append(parent)
            if len(parents) == 1:
                hub.add_repo(REPO, {"README.md": b"By others."})
        return commit(self, *args, parent=parent, **options)

    monkeypatch.setattr(branch.Remote, "commit", late)
    shardconv.push(out, REPO)
    assert len(parents) == 2
    assert hub.files(REPO)["README.md"].startswith(b"---")
    assert b"By others." in hub.files(REPO)["README.md"]
    assert below(hub, "tp-2") == files_of(out)


def test_errors_without_end_are_said_to_be_so(
    hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.error_every, hub.faults.only = 1, "/commit/"
    with pytest.raises(SourceError, match=r"repeatedly answers with status 503 .* continues where it was"):
        shardconv.push(out, REPO)
    hub.faults.error_every = 0
    sent = hub.uploaded
    shardconv.push(out, REPO)
    assert hub.uploaded == sent == large_bytes(out), "what was sent is known to the Hub"
    assert below(hub, "tp-2") == files_of(out)


def test_another_content_takes_the_place(hub: HubServer, out: Path, tmp_path: Path) -> None:
    shardconv.push(out, REPO)
    other = make(tmp_path / "other", shards=1, intermediate_size=128)
    gone = {f"tp-2/{path}" for path in files_of(out).keys() - files_of(other).keys()}
    pushed = shardconv.push(other, REPO)
    assert below(hub, "tp-2") == files_of(other)
    assert set(pushed.deleted) == gone
    assert complete_manifests(hub, "tp-2") == [True, True]


def test_a_result_of_numerics_is_published_with_its_content(
    hub: HubServer, out: Path, tmp_path: Path
) -> None:
    shardconv.push(out, REPO)
    found = Numerics(2e-15, 1e-9, "float64", {"input_ids": (3, 24)})
    manifest.write(dataclasses.replace(manifest.read(out), numerics=found), out)
    pushed = shardconv.push(out, REPO)
    assert set(pushed.sent) == {"README.md", f"tp-2/{MANIFEST_NAME}"}
    assert complete_manifests(hub, "tp-2") == [True, True]
    assert all(f"tp-2/{MANIFEST_NAME}" in commit.files for commit in hub.repo(REPO).history()[:2])
    assert b"differ from the unsharded model by at most 2.0e-15" in hub.files(REPO)["README.md"]
    shardconv.push(make(tmp_path / "other", shards=1, intermediate_size=128), REPO)
    assert b"differ from the unsharded model" not in hub.files(REPO)["README.md"]
    assert b"numerics" not in below(hub, "tp-2")[MANIFEST_NAME]


def test_a_replacement_that_ends_early_leaves_no_manifest_that_lies(
    hub: HubServer, out: Path, tmp_path: Path
) -> None:
    shardconv.push(out, REPO)
    other = make(tmp_path / "other", shards=3, intermediate_size=128)
    hub.faults.error_every, hub.faults.error_status, hub.faults.only = 1, 400, "PUT /upload"
    with pytest.raises(SourceError, match="the Hub refused"):
        shardconv.push(other, REPO)
    assert MANIFEST_NAME not in below(hub, "tp-2")
    hub.faults.error_every = 0
    shardconv.push(other, REPO)
    assert below(hub, "tp-2") == files_of(other)
    assert all(complete_manifests(hub, "tp-2"))


def test_a_killed_push_goes_on(hub: HubServer, tmp_path: Path) -> None:
    out = make(tmp_path / "many", tp=4, shards=4, num_hidden_layers=4)
    total, largest = large_bytes(out), max(map(len, files_of(out).values()))
    hub.faults.delay_s, hub.faults.chunk_bytes = 0.03, 32 * 1024
    process = start(hub, out, tmp_path / "home")
    limit = time.monotonic() + TIMEOUT_S
    while hub.uploaded < total / 3:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(TIMEOUT_S)
    time.sleep(0.5)  # what is in its connections arrives
    done = hub.blobs & {manifest.sha256_of(path) for path in out.rglob("*.safetensors")}
    assert done
    assert REPO in hub.store.repos
    assert MANIFEST_NAME not in below(hub, "tp-4")

    hub.faults.delay_s = 0
    before = len(hub.requests)
    process = start(hub, out, tmp_path / "home")
    process.communicate(TIMEOUT_S)
    assert process.returncode == 0
    assert below(hub, "tp-4") == files_of(out)
    again = {r.path.split("/")[2] for r in hub.requests[before:] if r.method == "PUT"}
    assert not again & done
    assert total <= hub.uploaded <= total + branch.THREADS * largest


def start(hub: HubServer, out: Path, home: Path) -> Forked:
    """A push in a process of its own."""
    argv = ["shardconv", "push", "-q", str(out), REPO]
    return Forked(cli.main, argv=argv, env={**os.environ, **hub.environment(home, "hf_writer")})
