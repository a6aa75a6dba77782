"""Servers that take requests and never answer: an error soon, from few requests, that says what to do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from converted import llama_plan, random_llama, write_directory
from hub_server import HubServer, Request
from huggingface_hub import HfApi, constants, file_download
from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
from shardconv_runtime.checkpoint.model_location import locate
from shardconv_runtime.errors import SourceError
from shardconv_runtime.files import hub_downloads
from shardconv_runtime.hub_options import Hub
from shardconv_runtime.storage import hub_time_limits, remote_files

import shardconv
from shardconv import cli
from shardconv.hub import branch

REPO = "user/model"
SHORT_S, LIMIT_S = 0.5, 12.0
"""The time-outs of the tests, and how long any of the calls may take with them."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Every time-out is short, and the waits between tries are those of the client alone."""
    for module in (branch, hub_downloads, remote_files):
        monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(hub_time_limits, "ANSWER_S", SHORT_S)
    monkeypatch.setattr(hub_time_limits, "PATIENCE_S", 2 * SHORT_S)
    monkeypatch.setattr(remote_files, "TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", SHORT_S)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", SHORT_S)
    monkeypatch.setattr(file_download, "_ETAG_RETRY_TIMEOUT", SHORT_S, raising=False)
    with HubServer() as server:
        server.use(monkeypatch, tmp_path / "home", "hf_writer")
        server.add_repo("user/other")
        HfApi().model_info("user/other")  # with which the client asks what it asks once in a process
        server.forget()
        yield server


@pytest.fixture
def out(tmp_path: Path) -> Path:
    model = random_llama(torch.float32)
    path: Path = write_directory(tmp_path / "out", model, llama_plan(model.config, (2,), "float32"), 1)
    return path


@contextmanager
def soon() -> Iterator[None]:
    """What is done within takes a short time."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < LIMIT_S


def recorded(hub: HubServer) -> list[Request]:
    """All requests; the last ones are recorded a little after their answers."""
    known = -1
    while known != len(hub.requests):
        known = len(hub.requests)
        time.sleep(0.1)
    return hub.requests


def asked(hub: HubServer) -> Counter[str]:
    """How often each path was asked for and not answered, which the server records when it closes."""
    hub.closing.set()
    return Counter(f"{request.method} {request.path}" for request in recorded(hub) if request.status == 0)


# Writing ------------------------------------------------------------------------------------------------


def test_a_push_to_a_silent_server_ends(hub: HubServer, out: Path) -> None:
    hub.faults.hang = True
    with (
        soon(),
        pytest.raises(SourceError, match=r"does not answer when asked for user/model \(no answer"),
    ):
        shardconv.push(out, REPO)
    assert asked(hub) == {f"GET /api/models/{REPO}": 1}


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("/tree/", marks=pytest.mark.slow),
        "/api/repos/create",
        pytest.param("/info/lfs", marks=pytest.mark.slow),
        "PUT /upload",
        pytest.param("/preupload/", marks=pytest.mark.slow),
        "/commit/",
    ],
)
def test_a_push_ends_wherever_the_server_falls_silent(
    hub: HubServer, out: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    if place == "/tree/":
        hub.add_repo(REPO)
    hub.faults.hang, hub.faults.only = True, place
    with soon():
        assert cli.run(["push", str(out), REPO, "-q"]) == 4
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the Hub does not answer when asked for user/model (no answer for " in error
    assert error.endswith("check the network, then run the same command again, it continues where it was")
    found = asked(hub)
    assert found
    assert set(found.values()) == {1}, found


def test_a_push_goes_on_after_silence(hub: HubServer, out: Path) -> None:
    hub.faults.hang, hub.faults.only = True, "/commit/"
    with pytest.raises(SourceError, match="does not answer"):
        shardconv.push(out, REPO)
    hub.faults.hang = False
    shardconv.push(out, REPO)
    assert hub.files(REPO)["tp-2/plan.json"] == (out / "plan.json").read_bytes()


def test_a_refused_connection_does_not_end_the_watch(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client replaces its session after one, and asks again inside of its functions."""
    hub.faults.hang = True
    endpoint = HfApi(endpoint="http://127.0.0.1:9", token=False)
    with soon(), hub_time_limits.bounded(), pytest.raises(hub_time_limits.NotReachedError, match="refused"):
        list(endpoint.list_repo_tree(REPO))
    with soon(), hub_time_limits.bounded(), pytest.raises(hub_time_limits.NoAnswerError):
        list(HfApi(endpoint=hub.endpoint, token=False).list_repo_tree(REPO))


def test_the_session_is_left_as_it_was(hub: HubServer) -> None:
    session = get_session()
    before, timeout = session.event_hooks, session.timeout
    with hub_time_limits.bounded():
        with hub_time_limits.bounded():
            assert len(session.event_hooks["request"]) == len(before["request"]) + 1
        assert len(session.event_hooks["request"]) == len(before["request"]) + 1
    assert (get_session(), session.event_hooks, session.timeout) == (session, before, timeout)


def test_other_threads_of_the_client_are_watched(hub: HubServer) -> None:
    hub.faults.hang = True
    errors: list[Exception] = []

    def ask() -> None:
        try:
            HfApi().model_info(REPO)
        except Exception as error:
            errors.append(error)

    with soon(), hub_time_limits.bounded():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [hub_time_limits.NoAnswerError]


def test_slow_is_not_silent(hub: HubServer, out: Path) -> None:
    """Each piece comes in time, all together take longer than any time-out."""
    shardconv.push(out, REPO)
    hub.faults.delay_s, hub.faults.chunk_bytes = SHORT_S / 3, 10_000
    repository, found = hub_downloads.find(REPO, Hub(), 2)
    repository.fetch(found.files_of(0))
    assert all((repository.directory / entry.path).is_file() for entry in found.files_of(0))


# Reading ------------------------------------------------------------------------------------------------


def test_loading_from_a_silent_server_ends(hub: HubServer, out: Path) -> None:
    shardconv.push(out, REPO)
    hub.forget()
    hub.faults.hang = True
    with soon(), pytest.raises(SourceError, match=r"does not answer .* check the network, then try again"):
        hub_downloads.find(REPO, Hub(), 2)
    assert sum(asked(hub).values()) <= 4


def test_loading_ends_where_the_server_falls_silent(hub: HubServer, out: Path) -> None:
    shardconv.push(out, REPO)
    repository, found = hub_downloads.find(REPO, Hub(), 2)
    hub.forget()
    hub.faults.hang = True
    entries = found.files_of(0)
    with soon(), pytest.raises(SourceError, match=r"cannot be downloaded: no answer for .* the same call"):
        repository.fetch(entries)
    assert max(asked(hub).values()) <= 4


def test_a_body_that_stops_is_not_asked_for_again_and_again(
    hub: HubServer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks six times for more of it, and waits a second each time; that is done once."""
    shardconv.push(out, REPO)
    repository, found = hub_downloads.find(REPO, Hub(), 2)
    hub.forget()
    hub.faults.hang_after_bytes = 100
    entry = next(e for e in found.files_of(0) if e.path.endswith(".safetensors"))
    with monkeypatch.context() as patched, soon():
        patched.setattr(time, "sleep", lambda seconds: None)
        with pytest.raises(SourceError, match="cannot be downloaded"):
            repository.fetch([entry])
    bodies = [r for r in recorded(hub) if r.method == "GET" and r.file]
    assert 1 <= len(bodies) <= 8


def test_what_is_in_the_cache_is_loaded_from_a_silent_server(hub: HubServer, out: Path) -> None:
    shardconv.push(out, REPO)
    repository, found = hub_downloads.find(REPO, Hub(), 2)
    repository.fetch(found.files_of(0))
    hub.faults.hang = True
    with soon():
        again, same = hub_downloads.find(REPO, Hub(), 2)
        again.fetch(same.files_of(0))
    assert (again.directory, same) == (repository.directory, found)


def test_other_numbers_of_ranks_are_not_asked_for_for_ever(hub: HubServer, out: Path) -> None:
    shardconv.push(out, REPO)
    hub.faults.hang, hub.faults.only = True, "/tree/"
    with soon(), pytest.raises(SourceError, match="does not answer when asked for user/model"):
        hub_downloads.find(REPO, Hub(), 3)
    with soon(), pytest.raises(SourceError, match="does not answer when asked for user/model"):
        hub_downloads.find(REPO, Hub(), None)


def test_an_ordinary_model_is_not_waited_for(hub: HubServer) -> None:
    hub.add_repo(REPO, {"config.json": b"{}"})
    hub.faults.hang = True
    with soon(), pytest.raises(SourceError, match=r"does not answer when asked for user/model"):
        locate(REPO, Hub(), code=False, need_weights=False)


# Ranges -------------------------------------------------------------------------------------------------


@pytest.fixture
def file(hub: HubServer) -> remote_files.RepositoryFile:
    """A file on the Hub that stays there."""
    commit = hub.add_repo(REPO, {"a.safetensors": bytes(range(256)) * 100})
    (found,) = remote_files.remote_files(REPO, commit, ["a.safetensors"], Hub())
    hub.forget()
    return found


def test_ranges_of_a_silent_server_are_requested_thrice(
    hub: HubServer, file: remote_files.RepositoryFile
) -> None:
    hub.faults.hang = True
    message = r"byte 10 cannot be read after 3 tries .* check the network, then try again"
    with soon(), pytest.raises(SourceError, match=message):
        remote_files.HubReader(file).read_into(10, memoryview(bytearray(100)))
    assert sum(asked(hub).values()) == remote_files.SILENT_TRIES


def test_a_range_that_stops_is_asked_for_from_there_on(
    hub: HubServer, file: remote_files.RepositoryFile
) -> None:
    """A byte that came is news, and the tries begin anew."""
    hub.faults.hang_after_bytes = 40
    buffer = bytearray(150)
    with soon():
        remote_files.HubReader(file).read_into(10, memoryview(buffer))
    assert bytes(buffer) == (bytes(range(256)) * 2)[10:160]
    hub.faults.hang_after_bytes = 0
    with soon(), pytest.raises(SourceError, match="byte 10 cannot be read after 3 tries"):
        remote_files.HubReader(file).read_into(10, memoryview(buffer))


def test_errors_are_repeated_more_often_than_silence(
    hub: HubServer, file: remote_files.RepositoryFile
) -> None:
    hub.faults.error_every, hub.faults.only = 1, "/cdn/"
    with pytest.raises(SourceError, match=f"cannot be read after {remote_files.TRIES} tries"):
        remote_files.HubReader(file).read_into(10, memoryview(bytearray(100)))
    assert sum(request.status == 503 for request in recorded(hub)) == remote_files.TRIES


def test_paths_are_not_asked_about_for_ever(hub: HubServer, file: remote_files.RepositoryFile) -> None:
    hub.faults.hang = True
    with soon(), pytest.raises(SourceError, match="does not answer when asked for user/model"):
        remote_files.remote_files(REPO, file.commit, ["a.safetensors"], Hub())


def test_the_limits_are_minutes_at_most() -> None:
    assert hub_time_limits.ANSWER_S <= 120
    assert hub_time_limits.PATIENCE_S <= 60
    assert remote_files.TIMEOUT_S * remote_files.SILENT_TRIES <= 120
