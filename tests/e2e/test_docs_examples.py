"""Examples of the README and of the guides run, on a tiny model and two ranks.

A block of Python or shell is run, or a comment in front of it says why not: ``<!-- not run: REASON -->``.
Each page has its own directory. Its commands run there first, and then its Python blocks on each rank.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plans_once
import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from distributed import run_processes
from places import ROOT

from shardconv.cli import cli, run

PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("start", "converting", "inference", "training", "serving")),
    *(f"docs/{name}.md" for name in ("adapters", "hub", "vllm")),
)
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<language>python|sh)\n(?P<body>.*?)^```$", re.M | re.S
)
MODELS = ("my-model", "model", "my-config", "org/model", "HuggingFaceTB/SmolLM2-135M-Instruct")
"""Names of models in the pages; all of them are the tiny one."""
STARTED = re.compile(r"(?:torchrun|scripts/\w+) ")
"""Lines of shell that start what the Python blocks are."""
TP = 2


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    body: str
    why_not: str | None


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(m["language"], m["body"], m["why"]) for m in BLOCK.finditer(text)]


def commands(page: str) -> Iterator[str]:
    """Lines of the shell blocks of a page that are run."""
    for block in blocks(page):
        if block.language == "sh" and block.why_not is None:
            yield from filter(None, block.body.replace("\\\n", " ").splitlines())


def programs(page: str) -> list[str]:
    """Python blocks of a page that are run, for two ranks on a CPU."""
    found = [b.body for b in blocks(page) if b.language == "python" and b.why_not is None]
    return [body.replace(", compile=True", "").replace('"cuda"', '"cpu"') for body in found]


def on_two_ranks(command: str) -> list[str]:
    """The arguments of a command, for fewer ranks, and without checks that other tests make."""
    arguments = shlex.split(re.sub(r"--tp 8\b", f"--tp {TP}", command), comments=True)[1:]
    options = {o for parameter in cli.commands[arguments[0]].params for o in parameter.opts}
    secondary = {o for parameter in cli.commands[arguments[0]].params for o in parameter.secondary_opts}
    return [*arguments, *(["--no-check"] if "--no-check" in options | secondary else [])]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each page, with the models that it names; its commands have run."""
    root = tmp_path_factory.mktemp("docs")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "vocab_size": 256}
    tiny = save_causal("llama", root / "tiny", **sizes)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tiny)
    found = {}
    for page in PAGES:
        place = found[page] = root / Path(page).stem
        for name in MODELS:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(tiny)
        (place / "examples").symlink_to(ROOT / "examples")
        if not any(" convert " in line for line in commands(page)):
            (place / "out").symlink_to(found["README.md"] / "out")
        with contextlib.chdir(place), pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans_once.Solved, "measures", True)  # for what fits on a device
            for line in commands(page):
                if line.startswith("shardconv "):
                    assert run(on_two_ranks(line)) == 0, f"{page}: {line}"
                else:
                    assert STARTED.match(line), f"{page}: {line}"
    return found


def run_programs(places: dict[str, Path]) -> dict[str, str]:
    """Of each page, what its Python blocks print on this rank."""
    printed = {}
    tokens = torch.arange(24).reshape(2, 12)
    for page, place in places.items():
        names: dict[str, Any] = {
            "shardconv_runtime": shardconv_runtime,
            "dp": 1,
            "tp": TP,
            "input": lambda _: "A prompt",
            "input_ids": tokens,
            "labels": tokens,
        }
        with contextlib.chdir(place), contextlib.redirect_stdout(io.StringIO()) as output:
            for program in programs(page):
                exec(compile(program, page, "exec"), names)
        printed[page] = output.getvalue()
    return printed


def test_the_examples_run(places: dict[str, Path]) -> None:
    with_programs = {page: place for page, place in places.items() if programs(page)}
    assert len(with_programs) >= 5
    first, other = run_processes(TP, run_programs, with_programs)
    assert first["README.md"]  # the streamer prints on rank 0 only
    assert not other["README.md"]
    trained = places["docs/training.md"] / "new"
    assert {"plan.json", "manifest.json"} <= set(os.listdir(trained / "model"))


def test_reasons_are_few() -> None:
    """Most blocks run, apart from those that need the Hub, a GPU, several hosts or minutes."""
    every = [block for page in PAGES for block in blocks(page)]
    assert len(every) > 40
    assert sum(block.why_not is None for block in every) >= 16
