"""Conversions of a tiny checkpoint without the solver, in milliseconds, and ways to interrupt them."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from shardconv_runtime.checkpoint.stored_leaves import lazy_tensors
from shardconv_runtime.files.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Source,
    rank_directory,
    sha256_checksum,
)
from shardconv_runtime.format.plan import Plan
from small_models import hand_plan, save_random, small_config

from shardconv.reporting.progress import Silent
from shardconv.writing.outputs import WriteOptions, output_at
from shardconv.writing.writer import Origin, write

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 11,
}


class Stages(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def stage(self, text: str) -> None:
        """Keep."""
        self.told.append(text)


@dataclass(frozen=True, eq=False)
class Model:
    """A model directory."""

    path: Path
    config: Any

    @classmethod
    def save(cls, path: Path, **changes: object) -> Model:
        """Save a Llama of less than a thousand parameters."""
        config = small_config(**(TINY | changes))
        save_random(config, transformers.LlamaForCausalLM, path)
        return cls(path, config)

    @property
    def file(self) -> Path:
        """The weights."""
        return self.path / "model.safetensors"

    def convert(
        self,
        out: Path | str,
        *,
        tp: int = 2,
        ranks: Collection[int] | None = None,
        overwrite: bool = False,
        max_file_size: int = 10**9,
        memory: int = 1 << 20,
        progress: Stages | None = None,
    ) -> bool:
        """Convert as the command does, but for resolving and solving; whether ``out`` is complete."""
        owners = None if ranks is None else {rank_directory(rank, tp) for rank in ranks}
        output = output_at(out, overwrite=overwrite, source=self.path, owners=owners)
        return write(
            self._plan(tp),
            lazy_tensors([self.file]),
            output,
            Origin(Source(self.path.name), self.identify(), self._copy_small_files, self.identify),
            WriteOptions(max_file_size, memory, ranks),
            progress or Stages(),
        )

    @lru_cache  # noqa: B019
    def _plan(self, tp: int) -> Plan:
        return hand_plan(self.config, tp)

    def identify(self) -> dict[str, object]:
        """Changes with the weights."""
        return {"files": sha256_checksum(self.file)[-8:]}

    def _copy_small_files(self, directory: Path) -> list[FileEntry]:
        text = (self.path / "config.json").read_bytes()
        (directory / "config.json").write_bytes(text)
        return [FileEntry("config.json", len(text), sha256_checksum(directory / "config.json"))]


def contents(out: Path) -> dict[str, bytes]:
    """All files."""
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def placed(out: Path) -> dict[str, bytes]:
    """All files but those that are being made."""
    return {path: data for path, data in contents(out).items() if not path.startswith(".partial/")}


def looks_complete(out: Path) -> bool:
    """Whether a reader would take it."""
    return (out / MANIFEST_NAME).exists()


CALLS = ("open", "write", "pwrite", "ftruncate", "fsync")
NAMES = ("mkdir", "rmdir", "unlink", "rename", "replace")
"""Functions of ``os`` by which files and names change."""

CRASHED = 77


class Interruption:
    """Dies, as with SIGKILL, ``after`` a call that changes files, or ``half`` through a write."""

    def __init__(self, number: int, when: str) -> None:
        self.number, self.when = number, when
        self.count = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        """Replace the functions of ``os``, for good: this is for a child process."""
        for name in (*CALLS, *NAMES):
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name not in ("write", "pwrite") if self.when == "half" else _only_opens(name, args):
                return function(*args, **kwargs)
            with self._lock:
                self.count += 1
                if self.count != self.number:
                    return function(*args, **kwargs)
                if self.when == "half":
                    function(args[0], args[1][: len(args[1]) // 2], *args[2:])
                else:
                    with suppress(OSError):
                        function(*args, **kwargs)
                os._exit(CRASHED)

        return wrapped


def at_once(works: Sequence[Callable[[], object]]) -> list[int]:
    """Do some work in child processes that begin together; their exit codes."""
    ready, go = os.pipe()
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            gc.freeze()
            code = 1
            try:
                signal.alarm(60)
                os.close(go)
                os.read(ready, 1)
                work()
                code = 0
            except BaseException as error:
                os.write(2, repr(error).encode() + b"\n")
            finally:
                os._exit(code)
        children.append(child)
    os.close(go)
    os.close(ready)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _only_opens(name: str, args: tuple[Any, ...]) -> bool:
    return name == "open" and not args[1] & os.O_CREAT


def crashes(work: Callable[[], object], number: int, when: str) -> bool:
    """Do some work in a child that dies at a call; False if the work was done before it came to that.

    Raises:
        AssertionError: the work failed otherwise.
    """
    child = os.fork()
    if child == 0:
        gc.freeze()  # a search for garbage would copy all memory of the parent
        try:
            signal.alarm(60)
            Interruption(number, when).install()
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode() + b"\n")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, CRASHED), f"exit code {code}"
    return code == CRASHED
