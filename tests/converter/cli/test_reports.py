"""``--json`` of every command: one object, of the schema in the docs, with plain numbers and lists."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from schema_checks import problems
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.files import manifest

import shardconv
from shardconv import cli
from shardconv.cli import export_command
from shardconv.cli.entry import EXIT_CODES
from shardconv.hub.push import Pushed
from shardconv.reporting.records import REPORTS

SCHEMAS = json.loads((ROOT / "docs" / "schemas" / "reports.json").read_text())
COMMANDS = runpy.run_path(str(ROOT / "scripts" / "commands"), run_name="scripts.commands")

Report = Callable[..., dict[str, Any]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs a command with ``--json`` and returns its report, which was compared with its schema."""

    def run(*argv: object, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.run([str(arg) for arg in argv] + ["--json"]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        wrong = list(problems(found, SCHEMAS["$defs"]["commands"][argv[0]], SCHEMAS))
        assert not wrong
        assert not re.search(r"\d@\d|\{\d+(\.\.|,)", json.dumps(found)), "a notation that must be parsed"
        return found

    return run


@pytest.fixture
def out(llama_dir: Path, tmp_path: Path, hand_solver: None) -> Path:
    """A converted directory for two ranks."""
    shardconv.convert(llama_dir, tmp_path / "out", 2)
    return tmp_path / "out"


@pytest.mark.usefixtures("measured")
def test_of_plan(llama_dir: Path, report: Report) -> None:
    found = report("plan", llama_dir, "--tp", 2, "--tokens", 10)
    assert (found["tp"], found["pp"], found["mesh"], found["tokens"]) == (2, 1, [2], 10)
    assert sum(found["rank_bytes"]) > found["total_bytes"]  # norms are replicated
    (down,) = (each for each in found["layers"] if each["modules"][0].endswith("mlp.down_proj"))
    assert (down["category"], down["modules"][1]) == ("row", "model.layers.1.mlp.down_proj")
    (weight,) = down["tensors"]
    whole, first, second = weight["global_shape"], *weight["local_shapes"]
    assert first[1] + second[1] == whole[1]
    assert first[0] == second[0] == whole[0]
    assert [each["kind"] for each in found["collectives"]].count("all_reduce") > 1
    for each in found["collectives"]:
        assert each["num_bytes"] == 10 * each["token_bytes"]
        assert each["count"] == len(each["modules"])
    (norms,) = found["replicated"]
    assert norms["num_bytes"] == sum(each["num_bytes"] for each in norms["tensors"])
    assert norms["reason"]
    assert found["memory"][0]["weights_bytes"] >= max(found["rank_bytes"])
    assert found["workload"] is None
    assert found["candidates"] == []


@pytest.mark.usefixtures("measured")
def test_of_plan_with_a_device(llama_dir: Path, report: Report) -> None:
    device = ("--device-memory", "3GB", "--context", 64)
    found = report("plan", llama_dir, "--tp", "auto", *device)
    assert found["tp"] == 1
    chosen = [each for each in found["candidates"] if each["is_chosen"]]
    assert [each["tp"] for each in chosen] == [1]
    assert {each["tp"] for each in found["candidates"]} == {1, 2}
    assert found["workload"]["fits"] is True
    assert found["workload"]["total_bytes"] == chosen[0]["total_bytes"]


@pytest.mark.usefixtures("hand_solver")
def test_of_convert(llama_dir: Path, tmp_path: Path, report: Report) -> None:
    argv = ("convert", llama_dir, tmp_path / "out", "--tp", 2)
    part = report(*argv, "--ranks", 0)
    assert (part["is_complete"], part["files"]) == (False, [])
    done = report(*argv, "--ranks", 1)
    assert (done["is_complete"], done["was_complete"]) == (True, False)
    assert [each["path"] for each in done["files"]] == [
        entry.path for entry in manifest.read(tmp_path / "out").files
    ]
    assert {each["rank"] for each in done["files"]} == {None, 0, 1}
    assert report(*argv)["was_complete"] is True


def test_of_inspect(out: Path, tmp_path: Path, report: Report) -> None:
    found = report("inspect", out)
    (directory,) = found["directories"]
    assert directory["source"] == "llama"
    assert sum(each["num_bytes"] for each in directory["files"]) > found["plan"]["total_bytes"]
    by_file = report("inspect", out / "plan.json")
    assert by_file == {"plan": found["plan"], "directories": []}


def test_of_verify(out: Path, llama_dir: Path, report: Report) -> None:
    found = report("verify", out, "--against", llama_dir)
    assert (found["is_intact"], found["problems"]) == (True, [])
    assert found["num_tensors"] > 20
    shard = next(out.glob("rank-00001*/*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = report("verify", out, code=3)
    assert (found["is_intact"], found["num_files"]) == (False, None)
    assert "rank-00001" in found["problems"][0]


def test_of_reshard(out: Path, tmp_path: Path, report: Report) -> None:
    found = report("reshard", out, tmp_path / "out3", "--tp", 3)
    assert (found["plan"]["tp"], found["is_complete"]) == (3, True)
    assert report("reshard", out, "--in-place")["plan"]["tp"] == 2


def test_of_export(out: Path, tmp_path: Path, report: Report) -> None:
    found = report("export", out, tmp_path / "hf", "--format", "hf")
    assert found | {"num_bytes": 0} == {
        "output": str(tmp_path / "hf"),
        "format": "hf",
        "num_tensors": 21,
        "num_files": 1,
        "num_bytes": 0,
        "is_complete": True,
        "was_complete": False,
    }
    text = report("export", out, tmp_path / "plan.json", "--format", "plan")
    assert text["num_bytes"] == (tmp_path / "plan.json").stat().st_size


def test_of_push(out: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed("user/model", "tp-2", None, "https://hub/user/model", {"tp-2/a": 3}, 3, {}, ("tp-2/b",))
    monkeypatch.setattr(export_command, "push", lambda *args, **kwargs: pushed)
    found = report("push", out, "user/model", "--dry-run")
    assert found["sent"] == [{"path": "tp-2/a", "num_bytes": 3}]
    assert (found["is_dry_run"], found["deleted"], found["commit"]) == (True, ["tp-2/b"], None)


def test_of_env(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = report("env")
    assert found["packages"]["shardconv"] == shardconv.__version__
    assert found["packages"]["torch"].startswith("2.")
    assert found["variables"]["HF_HUB_OFFLINE"] == "1"
    assert "secret" not in json.dumps(found)
    assert "gloo" in found["backends"]


def test_every_report_has_a_command() -> None:
    with_json = {
        name
        for name, command in cli.cli.commands.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == REPORTS.keys() == SCHEMAS["$defs"]["commands"].keys()


def test_the_check_of_schemas_finds_faults() -> None:
    schema = SCHEMAS["$defs"]["SizedFileReport"]
    assert not list(problems({"path": "a", "num_bytes": 1}, schema, SCHEMAS))
    for value in ({"path": "a"}, {"path": 1, "num_bytes": 1}, {"path": "a", "num_bytes": True}, []):
        assert list(problems(value, schema, SCHEMAS))
    assert list(problems({"path": "a", "num_bytes": 1, "more": 2}, schema, SCHEMAS))


class TestThePage:
    """docs/commands.md and docs/schemas are those of the code; ``scripts/commands`` writes them."""

    def test_the_commands(self) -> None:
        assert (ROOT / "docs" / "commands.md").read_text() == COMMANDS["page"]()

    def test_the_schemas(self) -> None:
        assert (ROOT / "docs" / "schemas" / "reports.json").read_text() == COMMANDS["schemas"]()

    def test_the_exit_codes(self) -> None:
        text = (ROOT / "docs" / "commands.md").read_text()
        assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == EXIT_CODES.keys()
        help_text = cli.cli.help or ""
        assert all(str(code) in help_text for code in EXIT_CODES)

        def kinds(kind: type[ShardconvError]) -> list[type[ShardconvError]]:
            return [kind, *(each for sub in kind.__subclasses__() for each in kinds(sub))]

        assert {kind.exit_code for kind in kinds(ShardconvError)} <= EXIT_CODES.keys()


@pytest.mark.usefixtures("measured")
def test_of_plan_on_a_cluster(llama_dir: Path, report: Report) -> None:
    found = report("plan", llama_dir, "--tp", 2, "--on", "2x2xH100", "--context", 64, "--batch", 3)
    (predicted,) = found["predictions"]
    assert predicted["cluster"] == "2x2xH100"
    assert (predicted["tp"], predicted["pp"], predicted["replicas"], predicted["batch"]) == (2, 1, 1, 3)
    assert predicted["fits"]
    assert predicted["device_tokens_per_s"] == pytest.approx(3 / predicted["token_s"] / 2)
    assert predicted["hosts_bytes"] == 0
    assert set(predicted["errors"]) == {"prefill", "token", "training", "start"}
    assert found["workload"]["device_bytes"] == 80 * 10**9


@pytest.mark.usefixtures("measured")
def test_of_plan_for_all_choices_of_a_cluster(llama_dir: Path, report: Report) -> None:
    found = report("plan", llama_dir, "--tp", "auto", "--on", "2xL4", "--context", 64, "--batch", 4)
    rows = [(each["tp"], each["pp"], each["replicas"], each["batch"]) for each in found["predictions"]]
    assert rows == [(1, 1, 2, 2), (2, 1, 1, 4)]
    assert [each["is_fastest"] for each in found["predictions"]].count(True) == 1
    assert [each["has_most_tokens"] for each in found["predictions"]].count(True) == 1
    (fastest,) = (each for each in found["predictions"] if each["is_fastest"])
    assert found["tp"] == fastest["tp"]
