"""The command line in processes that are killed, stopped, starved of space, or run into each other."""

from __future__ import annotations

import hashlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from forked import Forked
from shardconv_runtime.files.manifest import MANIFEST_NAME
from small_models import small_config

from shardconv import cli

TIMEOUT_S = 120

CONTINUES = "\ninterrupted; run the same command again to continue\n"
"""On a line of its own: a terminal shows the keys that interrupted it."""

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 4,
}


def save_large(path: Path, vocab_size: int = 32_000) -> Path:
    """A Llama of some 90 MB in several files: to write it takes a moment, to plan it does not."""
    torch.manual_seed(0)
    config = small_config(**SIZES, vocab_size=vocab_size)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_()
    model.save_pretrained(path, max_shard_size="30MB")
    return path


@dataclass(frozen=True)
class Ended:
    """A process that came to its end."""

    code: int
    errors: str
    """What it printed on standard error."""


@dataclass
class Conversion:
    """One command, which may be run many times."""

    model: Path
    out: Path
    options: tuple[str, ...] = ()

    def start(self, *more: str, max_file_bytes: int | None = None) -> Forked:
        """Begin."""
        command = ["shardconv", "convert", str(self.model), str(self.out), "--no-check"]
        return Forked(cli.main, argv=[*command, *self.options, *more], max_file_bytes=max_file_bytes)

    def run(self, *more: str, max_file_bytes: int | None = None) -> Ended:
        """Begin, and wait for the end."""
        return ended(self.start(*more, max_file_bytes=max_file_bytes))

    def begin(self, *more: str) -> Forked:
        """Begin, and return when it writes; it is stopped then."""
        before = self.written()
        process = self.start(*more)
        limit = time.monotonic() + TIMEOUT_S
        while self.written() == before:
            assert process.poll() is None, ended(process).errors
            assert time.monotonic() < limit, "it never wrote"
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        assert process.poll() is None, "it was done before it could be stopped"
        return process

    def written(self) -> int:
        """A number that changes with what is written."""
        try:
            files = list((self.out / ".partial").glob("*/*.safetensors*"))
            return sum(stats.st_blocks * 512 + stats.st_mtime_ns for stats in map(Path.stat, files))
        except FileNotFoundError:  # it is moved away at this moment
            return -1


def ended(process: Forked) -> Ended:
    """Wait for the end."""
    _, errors = process.communicate(TIMEOUT_S)
    assert process.returncode is not None
    return Ended(process.returncode, errors)


def send(process: Forked, number: signal.Signals) -> Ended:
    """Wake a stopped process with a signal; how it ends."""
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    return ended(process)


def digests(out: Path) -> dict[str, str]:
    """sha256 of all files."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def placed(out: Path) -> dict[str, str]:
    """sha256 of all files but those that are being made."""
    return {path: digest for path, digest in digests(out).items() if not path.startswith(".partial/")}


def looks_complete(out: Path) -> bool:
    """Whether a reader would take it."""
    return (out / MANIFEST_NAME).exists()
