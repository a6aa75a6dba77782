"""``shardconv run`` and ``shardconv serve`` at a terminal, and the programs of their ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import VOCAB, save_causal
from distributed import torchrun_env
from forked import Forked
from ports import free_port
from shardconv_runtime import generate, serve
from shardconv_runtime.comm.launchers import RankReport, read_reports
from shardconv_runtime.errors import OptionError
from shardconv_runtime.files import manifest
from shardconv_runtime.serving.server import require_free_port
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import PreTrainedTokenizerFast

import shardconv
from shardconv import launching
from shardconv.cli import launch_commands
from shardconv.cli.entry import cli

TIMEOUT_S = 300
NEW_TOKENS = 6
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}w9"

PROMPTS = ("w11 w245 w3", "w88 w5 w250 w19 w77")


def save_words(path: Path) -> None:
    """A tokenizer with a word for each token, and a chat template."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


@dataclass(frozen=True)
class Model:
    """A model, its converted directory, and what the unsharded model continues texts with."""

    source: Path
    out: Path

    def continued(self, text: str) -> list[str]:
        """The words after a text, greedily."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float64).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.source)
        inputs = tokenizer(text, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return str(answer).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Converted for two ranks, with a tokenizer that was saved with the model."""
    root = tmp_path_factory.mktemp("run")
    source = save_causal("llama", root / "llama")
    save_words(source)
    shardconv.convert(source, root / "out", tp=2, check=False)
    return Model(source, root / "out")


def environment(**more: str) -> Mapping[str, str]:
    """What a new terminal has in its environment."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | more


def command(*arguments: object, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    argv = [sys.executable, "-m", "shardconv", *map(str, arguments)]
    env = environment(**more)
    return subprocess.run(
        argv, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False
    )


def printed_by_ranks(*arguments: object, stdin: str = "") -> str:
    """What the ranks of ``shardconv_runtime.generate`` print; torchrun is not started for it."""
    argv = ["generate", *map(str, arguments), "--max-new-tokens", str(NEW_TOKENS)]
    port = free_port()
    quiet = {"TORCHELASTIC_RUN_ID": "test", "TRANSFORMERS_VERBOSITY": "error"}
    envs = [{**os.environ, **torchrun_env(rank, 2, port), **quiet} for rank in range(2)]
    ranks = [Forked(generate.main, argv=argv, env=env, stdin=stdin) for env in envs]
    (text, errors), (nothing, other_errors) = (rank.communicate(TIMEOUT_S) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], errors + other_errors
    assert nothing == ""
    return text


LINES = f"{PROMPTS[0]}\n\n{PROMPTS[1]}\n"
"""An empty line is no prompt."""


class TestRun:
    """Text of the unsharded model, and nothing else."""

    def test_a_prompt_is_continued(self, model: Model) -> None:
        printed = printed_by_ranks(model.out, PROMPTS[0], "--no-chat", "--temperature", "0")
        assert printed.split() == model.continued(PROMPTS[0])

    def test_a_prompt_is_a_message_to_a_chat_model(self, model: Model) -> None:
        chat = f"user {PROMPTS[0]} w9"
        assert printed_by_ranks(model.out, PROMPTS[0]).split() == model.continued(chat)
        printed = printed_by_ranks(model.out, PROMPTS[0], "--system", "w4 w5")
        assert printed.split() == model.continued(f"system w4 w5 {chat}")

    def test_prompts_until_the_end_of_the_input(self, model: Model) -> None:
        lines = printed_by_ranks(model.out, "--no-chat", stdin=LINES).splitlines()
        assert [line.split() for line in lines] == [model.continued(prompt) for prompt in PROMPTS]

    def test_a_seed_gives_the_same_tokens(self, model: Model) -> None:
        sampling = ("--no-chat", "--temperature", "3", "--top-k", "50", "--seed", "5")
        first = printed_by_ranks(model.out, PROMPTS[0], *sampling)
        assert first == printed_by_ranks(model.out, PROMPTS[0], *sampling)
        assert first.split() != model.continued(PROMPTS[0])

    @pytest.mark.slow
    def test_from_a_terminal(self, model: Model) -> None:
        """With the launcher; the model on standard output, and how many ranks start on the other one."""
        options = ("--max-new-tokens", NEW_TOKENS, "--temperature", 0)
        done = command("run", model.out, "-", "--no-chat", *options, stdin=PROMPTS[1])
        assert done.stderr.splitlines() == [
            f"starting 2 ranks: {model.out} is converted for tp 2",
            f"loading {model.out}",
            "generating",
        ]
        assert (done.returncode, done.stdout.split()) == (0, model.continued(PROMPTS[1]))

    def test_a_model_that_was_not_converted(self, model: Model, tmp_path: Path) -> None:
        options = ("--no-chat", "--max-new-tokens", NEW_TOKENS, "--tp", 2)
        done = command("run", model.source, PROMPTS[0], *options, SHARDCONV_CACHE=str(tmp_path))
        assert f"starting 2 ranks: {model.source} is not converted" in done.stderr
        assert (done.returncode, done.stdout.split()) == (0, model.continued(PROMPTS[0]))

    def test_wrong_sources_are_refused_before_ranks_start(
        self,
        model: Model,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A path is never taken for the id of a repository."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        (tmp_path / "unfinished" / manifest.PARTIAL).mkdir(parents=True)
        monkeypatch.setattr("shardconv.launching.launch", lambda *_: pytest.fail("ranks were started"))
        sources = {
            "./models/mine": (2, "no such directory: ./models/mine"),
            "folder/model": (2, "no such directory: folder/model, and folder is a directory here"),
            "folder": (2, "no config.json in folder"),
            "unfinished": (3, "unfinished holds an unfinished conversion"),
        }
        for source, (code, message) in sources.items():
            assert shardconv.cli.run(["run", source, "w3"]) == code
            printed = capsys.readouterr()
            assert printed.err.startswith(f"error: {message}")
            assert (printed.out, printed.err.count("\n")) == ("", 1)

    def test_an_error_is_one_line_with_its_exit_code(self, model: Model, tmp_path: Path) -> None:
        """It is that of rank 1, and not the one of rank 0, which stops because of it."""
        without = tmp_path / "without"
        shutil.copytree(model.out, without)
        (shard,) = without.glob("rank-00001-*/*.safetensors")
        shard.unlink()
        done = command("run", "-q", without, "w3")
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith(f"error: rank 1: {without}: {shard.relative_to(without)} is missing")
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--top-p", "2"], "--top-p must be above 0 and at most 1, got 2.0"),
            (["--temperature", "-1"], "--temperature must be 0 or more, got -1.0"),
            (["--max-new-tokens", "0"], "--max-new-tokens must be 1 or more, got 0"),
        ],
    )
    def test_wrong_arguments(self, options: list[str], message: str) -> None:
        arguments = generate.argument_parser().parse_args(["out", "w3", *options])
        with pytest.raises(OptionError, match=message):
            generate.settings_of(arguments)

    def test_the_end_of_a_rank_that_failed_alone_is_shown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Rank 1 ends; its output goes to a file, and rank 0 waits until the launcher ends it."""
        (tmp_path / "half.py").write_text(
            "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('out of paper')\ntime.sleep(60)\n"
        )
        program = launching.Program(
            "half", [], {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        )
        before = dict(os.environ)
        assert launching.launch(program, 2) == 1
        assert dict(os.environ) == before
        assert capsys.readouterr().err == "rank 1: out of paper\n"

    @pytest.mark.parametrize(
        ("reports", "exit_codes", "expected"),
        [
            ({0: (5, True), 1: (3, False)}, {0: 5, 1: 3}, (3, "error: rank 1: of 1\n")),
            ({0: (3, False), 1: (3, False)}, {0: 3, 1: 3}, (3, "error: of 0\n")),
            ({0: (5, True), 1: (5, True)}, {0: 5, 1: 5}, (5, "error: of 0\n")),
            ({0: (5, True)}, {0: 5, 1: 1}, (1, "rank 1: last words\n")),
            ({0: (5, True)}, {0: 5, 1: -9}, (1, "rank 1: last words\nerror: rank 1 was ended by SIGKILL\n")),
            ({1: (4, False)}, {0: -15, 1: 4}, (4, "error: rank 1: of 1\n")),
            ({1: (5, True)}, {0: 1, 1: 5}, (1, "")),
        ],
    )
    def test_the_error_that_explains_the_others(
        self,
        reports: dict[int, tuple[int, bool]],
        exit_codes: dict[int, int],
        expected: tuple[int, str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """A rank that waited for another one only says so; a rank that crashed writes no report."""
        log = tmp_path / "attempt" / "1" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text("last words\n")
        failures = {
            rank: ProcessFailure(rank, 100 + rank, code, str(tmp_path / "none"))
            for rank, code in exit_codes.items()
        }
        error = ChildFailedError("job", failures)
        written = [RankReport(rank, code, f"of {rank}", late) for rank, (code, late) in reports.items()]
        (tmp_path / "reports").mkdir()
        for report in written:
            (tmp_path / "reports" / f"{report.rank}.json").write_text(json.dumps(asdict(report)))
        code = launching.explained(error, tmp_path, read_reports(tmp_path / "reports"))
        assert (code, capsys.readouterr().err) == expected

    def test_an_end_by_a_signal_is_told(
        self, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("shardconv.launching.launch", lambda *_: 130)
        assert shardconv.cli.run(["run", str(model.out), "w3"]) == 130
        assert capsys.readouterr().err.splitlines()[-1] == "stopped"
        assert shardconv.cli.run(["run", "-q", str(model.out), "w3"]) == 130
        assert capsys.readouterr().err == ""

    def test_more_ranks_than_gpus(
        self, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("shardconv.launching.num_gpus", lambda: 1)
        assert shardconv.cli.run(["run", str(model.out), "w3"]) == 5
        assert "there are 2 ranks for 1 GPUs" in capsys.readouterr().err


def test_the_number_of_ranks(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = launch_commands.num_ranks
    assert found(str(model.out), None)[0] == 2
    assert found(str(model.source), None)[0] == launch_commands.DEFAULT_CPU_RANKS
    assert found(str(model.source), 3)[0] == 3
    monkeypatch.setattr("shardconv.launching.num_gpus", lambda: 4)
    assert found(str(model.source), None)[0] == 4
    shardconv.convert(model.source, tmp_path / "staged", tp=2, pp=2, check=False)
    count, why = found(str(tmp_path / "staged"), None)
    assert (count, why) == (4, f"{tmp_path / 'staged'} is converted for tp 2 and 2 stages")
    shutil.copytree(model.out, tmp_path / "many" / "tp-2")
    assert found(str(tmp_path / "many"), 2)[0] == 2


class TestServe:
    """One line when it is ready, and an end that leaves nothing behind."""

    @pytest.mark.parametrize(
        ("number", "code"),
        [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
    )
    def test_from_a_terminal(self, model: Model, number: signal.Signals, code: int) -> None:
        port = free_port()
        argv = [sys.executable, "-m", "shardconv", "serve", "-q", str(model.out), "--port", str(port)]
        with subprocess.Popen(
            [*argv, "--num-blocks", "8", "--api-key", "secret"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        ) as server:
            assert server.stdout is not None
            line = server.stdout.readline()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": "Bearer secret"}
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    name = json.load(answer)["data"][0]["id"]
            finally:
                os.killpg(server.pid, number)  # as a terminal does
                out, err = server.communicate(timeout=60)
            assert (line, name) == (f"ready at http://127.0.0.1:{port}/v1, as out\n", "out")
            assert (server.returncode, out, err) == (code, "", "")

    def test_a_port_in_use_is_an_error_before_the_model_is_loaded(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(OptionError, match="give another --port") as caught:
                require_free_port("127.0.0.1", other.getsockname()[1])
        assert caught.value.exit_code == 2

    def test_a_package_that_is_missing(
        self, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(serve, "PACKAGES", ("no_such_package",))
        assert shardconv.cli.run(["serve", str(model.out)]) == 5
        assert "serving needs no_such_package: pip install fastapi" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "program"), [("run", generate), ("serve", serve)])
def test_the_commands_have_the_options_of_the_programs(name: str, program: Any) -> None:
    actions = {
        action.option_strings[0]: action
        for action in program.argument_parser()._actions[1:]
        if action.option_strings
    }
    options = {max(p.opts, key=len): p for p in cli.commands[name].params if p.opts[0].startswith("-")}
    assert options.keys() - {"--tp"} == actions.keys()
    # Without a default, click has a marker of its own there.
    known = (str, int, float)
    defaults = {o: (p.default or None) if isinstance(p.default, known) else None for o, p in options.items()}
    for option in actions.keys() - {"--ignore", "--api-key"}:
        assert defaults[option] == (actions[option].default or None), option
