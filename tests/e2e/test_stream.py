"""Conversion of a repository that stays on the Hub: which bytes are asked for, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner
from hub_server import HubServer
from shardconv_runtime import Hub
from shardconv_runtime.checkpoint import copying
from shardconv_runtime.errors import SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.storage import remote_files
from small_models import save_random, small_config

import shardconv
from shardconv.arguments import Writing
from shardconv.cli import cli

REPO = "user/model"
TP = 4
RANK = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several files, large beside its headers."""
    path = tmp_path_factory.mktemp("model")
    config = small_config(
        hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, vocab_size=1000
    )
    save_random(config, transformers.LlamaForCausalLM, path)
    unsharded = transformers.LlamaForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    unsharded.save_pretrained(path, max_shard_size="500KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, converted from the disk."""
    out = tmp_path_factory.mktemp("converted") / "out"
    shardconv.convert(model, out, TP)
    return out


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.01)
    remote_files.remote_header.cache_clear()
    with HubServer() as server:
        server.use(monkeypatch, tmp_path / "home")
        server.add_repo(REPO, model)
        yield server


def weight_bytes(hub: HubServer) -> int:
    return sum(count for name, count in hub.served().items() if name.endswith(".safetensors"))


def header_bytes(model: Path) -> int:
    return sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in model.glob("*.safetensors"))


def shards(out: Path, rank: int | None) -> dict[str, bytes]:
    directory = out / ("common" if rank is None else manifest.rank_directory(rank, TP))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def partial(out: Path, rank: int) -> dict[str, bytes]:
    return shards(out / ".partial", rank)


def test_one_rank_takes_its_own_bytes(hub: HubServer, model: Path, converted: Path, tmp_path: Path) -> None:
    shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[RANK]))
    assert partial(tmp_path / "out", RANK) == shards(converted, RANK)
    own = sum(map(len, shards(converted, RANK).values())) + sum(map(len, shards(converted, None).values()))
    assert 0.9 * own < weight_bytes(hub) <= 1.02 * (own + header_bytes(model))
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_ranks_one_after_another_complete_it(hub: HubServer, converted: Path, tmp_path: Path) -> None:
    for ranks in ([0], [1, 2], [3]):
        shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=ranks))
    found, want = (manifest.read(out) for out in (tmp_path / "out", converted))
    assert {f.path: f.checksum for f in found.files} == {f.path: f.checksum for f in want.files}
    assert found.source.name == REPO
    assert found.source.revision == hub.head(REPO).oid
    assert all(len(file.sha256) == 64 for file in found.source.files)
    assert plan_json.read(tmp_path / "out/plan.json") == plan_json.read(converted / "plan.json")


def test_all_ranks_at_once_take_each_byte_once(
    hub: HubServer, model: Path, converted: Path, tmp_path: Path
) -> None:
    shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(stream=True))
    assert all(shards(tmp_path / "out", r) == shards(converted, r) for r in (None, *range(TP)))
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert weight_bytes(hub) <= 1.01 * size


def test_by_default_all_ranks_are_downloaded_and_read_from_the_cache_then(
    hub: HubServer, model: Path, tmp_path: Path
) -> None:
    shardconv.convert(REPO, tmp_path / "out", TP)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert weight_bytes(hub) == size
    shardconv.convert(REPO, tmp_path / "other", TP, writing=Writing(ranks=[0]))
    assert weight_bytes(hub) == size


def test_a_bad_network_costs_time_only(hub: HubServer, converted: Path, tmp_path: Path) -> None:
    hub.faults.only = ".safetensors"
    hub.faults.error_every = 5
    hub.faults.truncate_every = 7
    hub.faults.truncate_after_bytes = 500
    hub.faults.signed_requests = 20
    shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[RANK]))
    assert partial(tmp_path / "out", RANK) == shards(converted, RANK)


def test_a_dead_server_is_an_error_from_which_one_can_go_on(
    hub: HubServer, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "TRIES", 3)
    hub.faults.only = "-of-"
    hub.faults.error_every = 1
    with pytest.raises(SourceError, match=f"{REPO}/model-.* cannot be read after 3 tries"):
        shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[RANK]))
    hub.faults.error_every = 0
    shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[RANK]))
    assert partial(tmp_path / "out", RANK) == shards(converted, RANK)


def test_what_came_before_an_interruption_is_not_asked_for_again(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished files are not; here each tensor has one of its own."""
    shardconv.convert(model, tmp_path / "expected", TP, writing=Writing(max_file_size=1))
    monkeypatch.setattr(copying, "MAX_WORKERS", 1)
    read_into, count = remote_files.HubReader.read_into, 0

    def interrupted(self: remote_files.HubReader, offset: int, into: memoryview) -> None:
        nonlocal count
        count += 1
        if count == 200:
            raise KeyboardInterrupt
        read_into(self, offset, into)

    monkeypatch.setattr(remote_files.HubReader, "read_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[RANK], max_file_size=1))
    before = weight_bytes(hub)
    assert before > header_bytes(model) * 2
    shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[RANK], max_file_size=1))
    expected = [shards(tmp_path / "expected", rank) for rank in (RANK, None)]
    assert partial(tmp_path / "out", RANK) == expected[0]
    own = sum(len(data) for files in expected for data in files.values())
    largest = 1000 * 128 * 4 // TP  # a matrix that was being read
    assert weight_bytes(hub) <= 1.02 * (own + header_bytes(model)) + largest


def test_a_server_without_ranges_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.ignore_range = True
    found = CliRunner().invoke(cli, ["convert", REPO, "--tp", "4", "--ranks", "0", str(tmp_path / "out")])
    assert "does not send ranges" in str(found.exception)
    shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[0], stream=False))


def test_short_gaps_are_read_along_where_there_would_be_too_many_requests(
    hub: HubServer, model: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardconv.convert(REPO, tmp_path / "exact", TP, writing=Writing(ranks=[RANK]))
    exact, num_requests = weight_bytes(hub), len(hub.requests)
    hub.forget()
    monkeypatch.setattr(copying, "MAX_REQUESTS", 50)
    shardconv.convert(REPO, tmp_path / "out", TP, writing=Writing(ranks=[RANK]))
    assert partial(tmp_path / "out", RANK) == shards(converted, RANK)
    assert len(hub.requests) < num_requests / 5
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert exact < weight_bytes(hub) < size


def test_a_token_is_for_the_hub_alone(hub: HubServer, model: Path, converted: Path, tmp_path: Path) -> None:
    hub.add_repo("user/secret", model, private=True)
    shardconv.convert(
        "user/secret", tmp_path / "out", TP, writing=Writing(ranks=[RANK]), hub=Hub(token="hf_reader")
    )
    assert partial(tmp_path / "out", RANK) == shards(converted, RANK)
    contents = [request for request in hub.requests if request.status == 206]
    assert contents
    assert {request.token for request in contents} == {None}
