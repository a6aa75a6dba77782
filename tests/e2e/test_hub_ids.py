"""Commands that read a converted directory take the id of a repository, and download no weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from converted import llama_plan, random_llama, write_directory
from hub_server import HubServer
from huggingface_hub import constants
from places import ROOT
from shardconv_runtime.files.manifest import MANIFEST_NAME, PLAN_NAME

from shardconv import cli

ONE, TWO, ROOTED = "user/one-tp", "user/two-tp", "user/rooted"


def make(path: Path, tp: int) -> Path:
    model = random_llama(torch.float32)
    out: Path = write_directory(path, model, llama_plan(model.config, (tp,), "float32"), 1)
    return out


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two converted ones."""
    path = tmp_path_factory.mktemp("both")
    for tp in (2, 4):
        make(path / f"tp-{tp}", tp)
    return path


def files(path: Path, folder: str) -> dict[str, bytes | Path]:
    """Those of a folder, by their names in ``path``."""
    return {p.relative_to(path).as_posix(): p for p in (path / folder).rglob("*") if p.is_file()}


@pytest.fixture
def hub(both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.chdir(tmp_path)
    with HubServer() as server:
        server.use(monkeypatch, tmp_path / "home")
        server.add_repo(TWO, both)
        server.add_repo(ROOTED, both / "tp-2")
        server.add_repo(ONE, files(both, "tp-2"))
        yield server


def done(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints."""
    capsys.readouterr()
    assert cli.run(argv) == 0, capsys.readouterr().err
    found = capsys.readouterr()
    assert not found.err
    return found.out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The error of a command, in one line."""
    capsys.readouterr()
    assert cli.run(argv) in (2, 3, 4, 5)
    (error,) = capsys.readouterr().err.splitlines()
    return error


@pytest.mark.parametrize(
    ("argv", "local"),
    [
        ([ONE], "tp-2"),
        ([ROOTED], "tp-2"),
        ([ROOTED, "--tp", "2"], "tp-2"),
        ([TWO, "--tp", "4"], "tp-4"),
        ([TWO, "--tp", "2", "--json"], "tp-2"),
    ],
)
def test_inspect_prints_what_it_prints_of_the_directory(
    hub: HubServer, both: Path, capsys: pytest.CaptureFixture[str], argv: list[str], local: str
) -> None:
    want = done(capsys, "inspect", str(both / local), *(a for a in argv if a == "--json"))
    found = done(capsys, "inspect", *argv)
    if "--json" in argv:
        assert f'"directory": "{TWO}/{local}"' in found
        found = found.replace(f"{TWO}/{local}", str(both / local))
    assert found == want
    served = {path.rpartition("/")[2] for path in hub.served()}
    assert served == {MANIFEST_NAME, PLAN_NAME}


def test_several_are_named(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--html", "page.html"]):
        error = refused(capsys, "inspect", TWO, *options)
        assert f"{TWO} holds several converted models, tp-2, tp-4; choose with --tp" in error
        error = refused(capsys, "inspect", TWO, *options, "--tp", "8")
        assert f"{TWO} holds no converted model for 8 ranks, but for 2, 4; give one of these as --tp" in error
    error = refused(capsys, "inspect", ROOTED, "--tp", "8")
    assert f"{ROOTED} is converted for 2 ranks, not for 8; leave out --tp" in error


def test_a_directory_of_several_is_taken_apart_alike(
    hub: HubServer, both: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = done(capsys, "inspect", str(both / "tp-4"))
    assert done(capsys, "inspect", str(both), "--tp", "4") == want
    assert "holds several converted models, tp-2, tp-4; choose with --tp" in refused(
        capsys, "inspect", str(both)
    )
    assert "is converted for 2 ranks, not for 4" in refused(
        capsys, "inspect", str(both / "tp-2"), "--tp", "4"
    )
    assert not hub.requests


def test_what_is_no_converted_model_is_said_to_be_none(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add_repo("user/plain", {"config.json": b"{}", "tp-x/manifest.json": b"{}"})
    assert "user/plain holds no converted model; name the output" in refused(capsys, "inspect", "user/plain")
    assert "for 2 ranks or any other number; convert it" in refused(
        capsys, "inspect", "user/plain", "--tp", "2"
    )
    hub.add_repo("user/odd", {MANIFEST_NAME: b"{}"})
    assert "user/odd" in refused(capsys, "inspect", "user/odd")


def test_what_is_not_there_is_said_so(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    for tp in ([], ["--tp", "2"]):
        error = refused(capsys, "inspect", ONE, "--revision", "nowhere", *tp)
        assert f"{ONE} has no revision nowhere on the Hub; check --revision" in error
        error = refused(capsys, "inspect", "user/absent", *tp)
        assert "no such directory: user/absent, and as a Hub id it does not exist, or is private" in error
        assert error.endswith("check the spelling, or pass --token")


def test_a_private_repository_needs_a_token(
    hub: HubServer, both: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add_repo("user/secret", both / "tp-2", private=True)
    assert "or pass --token" in refused(capsys, "inspect", "user/secret")
    assert "the Hub does not know the token" in refused(capsys, "inspect", "user/secret", "--token", "hf_no")
    want = done(capsys, "inspect", str(both / "tp-2"))
    assert done(capsys, "inspect", "user/secret", "--token", "hf_reader") == want


def test_a_revision_is_read(hub: HubServer, both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = hub.head(ONE).oid
    hub.add_repo(ONE, files(both, "tp-4"))
    assert "several" in refused(capsys, "inspect", ONE)
    assert done(capsys, "inspect", ONE, "--revision", first) == done(capsys, "inspect", str(both / "tp-2"))


def test_a_file_that_is_missing_or_cut_is_named(
    hub: HubServer, both: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = files(both / "tp-2", "")
    shard = next(name for name in found if name.startswith("rank-00001"))
    hub.add_repo("user/cut", {**found, shard: b"cut"})
    assert f"user/cut: {shard} has 3 bytes and should have" in refused(capsys, "inspect", "user/cut")
    hub.add_repo("user/gone", {name: path for name, path in found.items() if name != shard})
    assert f"user/gone: {shard} is missing and should have" in refused(capsys, "inspect", "user/gone")


def test_the_cache_is_enough(
    hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(capsys, "inspect", ONE, "--local-files-only")
    assert "is not in the local cache; allow downloads (no --local-files-only" in error
    done(capsys, "inspect", ONE, "--html", "page.html")
    hub.forget()
    done(capsys, "inspect", ONE, "--html", "page.html", "--local-files-only")
    want = done(capsys, "inspect", ONE)
    hub.forget()
    assert done(capsys, "inspect", ONE, "--local-files-only") == want
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done(capsys, "inspect", ONE, "--html", "page.html", "--tp", "2")
    assert done(capsys, "inspect", ONE) == want
    assert not hub.requests


def test_a_page_is_written_here(
    hub: HubServer, both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ("--html", "page.html")
    assert done(capsys, "inspect", TWO, "--tp", "4", *page) == "page.html: open it in a browser\n"
    done(capsys, "inspect", str(both / "tp-4"), "--html", "local.html")
    assert (tmp_path / "page.html").read_text() == (tmp_path / "local.html").read_text()
    assert done(capsys, "inspect", TWO, "--tp", "4", "--html", "-").startswith("<!DOCTYPE html>")
    (tmp_path / "page.html").write_text("mine")
    assert "is not a report" in refused(capsys, "inspect", TWO, "--tp", "2", *page)
    assert {path.rpartition("/")[2] for path in hub.served()} == {MANIFEST_NAME, PLAN_NAME}


def test_verify_says_how_to_get_the_files(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "verify", TWO)
    assert "no such directory: user/two-tp; " in error
    assert f"hf download {TWO} --local-dir DIR, then give DIR or its tp-N/" in error
    assert not hub.requests


def test_what_is_a_directory_or_looks_like_a_path_is_not_asked_for(
    hub: HubServer, both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / TWO).symlink_to(both / "tp-4")
    assert done(capsys, "inspect", TWO) == done(capsys, "inspect", str(both / "tp-4"))
    for path in ("./absent/out", "absent/out/", "a/b/c", "absent", "/absent/out", "~/absent"):
        assert "there is no such directory" in refused(capsys, "inspect", path)
    assert "absent/plan.json" in refused(capsys, "inspect", "absent/plan.json", "--html", "page.html")
    assert not hub.requests


def test_the_client_is_imported_for_repositories_alone(hub: HubServer, both: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from shardconv import cli; code = cli.run(sys.argv[1:]); "
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules], "
        "file=sys.stderr); sys.exit(code)"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONPATH": path}
    found = {}
    for out in (str(both / "tp-2"), ONE):
        command = [sys.executable, "-c", code, "inspect", out]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert process.returncode == 0, process.stderr
        found[out] = process.stderr.splitlines()[-1]
    assert found == {str(both / "tp-2"): "[]", ONE: "['huggingface_hub']"}
