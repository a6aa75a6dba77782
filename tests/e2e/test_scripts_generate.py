"""``scripts/generate``, as a person runs it: text of the unsharded model, nothing else, and exit code 0."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import VOCAB, save_causal
from distributed import free_port, torchrun_env
from forked import Forked, run_script
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import shardconv

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "generate"
TIMEOUT_S = 300
NEW_TOKENS = 6

PROMPTS = ("w11 w245 w3", "w88 w5 w250 w19 w77")


def save_words(path: Path) -> None:
    """A tokenizer with a word for each token."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2").save_pretrained(path)


@dataclass(frozen=True)
class Converted:
    """A converted directory, and what the unsharded model continues the prompts with."""

    out: Path
    texts: list[str]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Converted for two ranks, with a tokenizer that was saved with the model."""
    root = tmp_path_factory.mktemp("script")
    source = save_causal("llama", root / "llama")
    save_words(source)
    shardconv.convert(source, root / "out", tp=2, check=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        texts.append(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return Converted(root / "out", texts)


def generate(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script with what a new terminal has in its environment."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False
    )


LINES = f"{PROMPTS[0]}\n\n{PROMPTS[1]}\n"
"""An empty line is no prompt."""


def printed_by_ranks(*arguments: object, stdin: str = "") -> str:
    """What the ranks of the script print, in the environment that its launcher and torchrun make."""
    argv = [str(SCRIPT), *map(str, arguments), "--max-new-tokens", str(NEW_TOKENS)]
    port = free_port()
    quiet = {"TORCHELASTIC_RUN_ID": "test", "TRANSFORMERS_VERBOSITY": "error"}
    envs = [{**os.environ, **torchrun_env(rank, 2, port), **quiet} for rank in range(2)]
    ranks = [Forked(run_script, SCRIPT, argv=argv, env=env, stdin=stdin) for env in envs]
    (text, errors), (nothing, other_errors) = (rank.communicate(TIMEOUT_S) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], errors + other_errors
    assert nothing == ""
    return text


def test_a_prompt(converted: Converted) -> None:
    assert printed_by_ranks(converted.out, PROMPTS[0]).split() == converted.texts[0].split()


def test_prompts_until_the_end_of_the_input(converted: Converted) -> None:
    lines = printed_by_ranks(converted.out, "--interactive", stdin=LINES).splitlines()
    assert [line.split() for line in lines] == [text.split() for text in converted.texts]


@pytest.mark.slow
def test_from_a_terminal(converted: Converted) -> None:
    """With the launcher and torchrun."""
    done = generate(converted.out, "--interactive", "--max-new-tokens", NEW_TOKENS, stdin=LINES)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [text.split() for text in converted.texts]


def test_what_is_wrong_is_said_in_one_line(converted: Converted, tmp_path: Path) -> None:
    def message(*arguments: object) -> str:
        done = generate(*arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    assert "no such directory" in message(tmp_path / "nowhere", "w3")
    assert "not a converted model" in message(tmp_path, "w3")
    without = tmp_path / "without"
    shutil.copytree(converted.out, without)
    for file in without.glob("tokenizer*"):
        file.unlink()
    assert "lacks a tokenizer" in message(without, "w3")


def test_a_prompt_or_many() -> None:
    for arguments in (["out"], ["out", "w3", "--interactive"]):
        done = generate(*arguments)
        assert done.returncode == 2
        assert "either a prompt or --interactive" in done.stderr
