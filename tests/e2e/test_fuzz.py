"""Converted directories of an attacker: the project's own errors come out, soon, and nothing else happens.

SHARDCONV_FUZZ=N makes N times as many examples, other ones each time.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from hostile import Directory, damaged, examples, header_of, mutated, soon, to_bytes, with_header
from hypothesis import given
from hypothesis import strategies as st
from shardconv_runtime.comm.collectives import ProcessCommunicator
from shardconv_runtime.comm.mesh import used_axes
from shardconv_runtime.files import fingerprint, manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.format.plan_json import of_sequence, require_training
from shardconv_runtime.loading import rank_files
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.training.prepare import TrainingForm, backward_axes, parallelize_for_training

import shardconv
from shardconv.cli.entry import run

SHARDS = {
    1: "common/model-00001-of-00001.safetensors",
    2: "rank-00000-of-00002/model-00001-of-00001.safetensors",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Directory]:
    """A small model for one rank and for two."""
    root = tmp_path_factory.mktemp("fuzz")
    source = save_causal("llama", root / "source")
    for tp in (1, 2):
        shardconv.convert(source, root / f"intact-{tp}", tp=tp, sequence_parallel=tp > 1, check=False)
    found = {tp: Directory(root / f"intact-{tp}", root / f"out-{tp}") for tp in (1, 2)}
    config = transformers.AutoConfig.from_pretrained(root / "intact-2")
    META[:] = [build_model(transformers.LlamaForCausalLM, config, torch.float32)]
    for directory in found.values():
        with contextlib.suppress(AssertionError):  # what is imported late is imported now
            everything(directory)
        everything(directory)
    return found


PACKAGES = [os.path.dirname(os.path.realpath(str(p.__file__))) for p in (shardconv, shardconv_runtime)]


class Watch:
    """What the interpreter is told of files that are opened, modules that are imported, and pickles.

    An audit hook stays until the process ends; it sees nothing while it is off.
    """

    FORBIDDEN = (
        *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
        *("pickle.find_class", "socket.connect", "subprocess.Popen", "os.system"),
    )

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self._opened(os.path.realpath(os.fsdecode(args[0])), args[2])
        elif event in self.FORBIDDEN:
            self.seen.append(f"{event} {args[:2]}")
        elif event == "import" and args[0].partition(".")[0] in ("os", "antigravity", "planted"):
            self.seen.append(f"import {args[0]}")

    def _opened(self, path: str, flags: int) -> None:
        code = (sys.prefix, sys.base_prefix, "/proc", "/sys", "/usr", *PACKAGES)
        is_known = path.startswith((str(self.inside), *code))
        if path != os.devnull and (not is_known or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            self.seen.append(f"open {path} {flags:o}")


WATCH = Watch()


def harmless(directory: Directory, read: Callable[[], object]) -> None:
    """Only the project's errors; soon; nothing else is read, nothing is written, imported or unpickled."""
    WATCH.inside, WATCH.seen = directory.path.resolve(), []
    try:
        soon(read)
    finally:
        WATCH.inside = None
    assert not WATCH.seen, WATCH.seen


def everything(directory: Directory) -> None:
    """All that reads a converted directory before its weights are read."""
    if directory.document("plan.json")["tp"] == 1:
        harmless(directory, lambda: shardconv_runtime.load(directory.path, device="cpu"))
    else:
        harmless(directory, lambda: begin_one_of_two(directory))
        harmless(directory, lambda: build_for_training(directory))
    for command in (["inspect"], ["inspect", "--json"], ["verify"]):
        harmless(directory, lambda command=command: call(directory, command))  # type: ignore[misc]


def begin_one_of_two(directory: Directory) -> None:
    """What a rank does before it speaks to the others, and the building of its model."""
    found = manifest.read(directory.path)
    plan = manifest.read_plan(directory.path, found)
    fingerprint.check_code(plan)
    rank_files.check_files(directory.path, found, plan, 0)
    build(plan, is_trained=False)


def build_for_training(directory: Directory) -> None:
    """The same from the plan alone, in the form of sequence parallelism."""
    plan = plan_json.read(directory.path / "plan.json")
    require_training(plan)
    build(of_sequence(plan), is_trained=True)


def build(plan: Plan, is_trained: bool) -> None:
    assert used_axes(plan, backward_axes(plan) if is_trained else ()) is not None
    comm = ProcessCommunicator(0, plan.mesh, {})  # nobody talks
    if is_trained:
        parallelize_for_training(copy.deepcopy(META[0]), plan, comm, TrainingForm(gather_logits=False))
    else:
        parallelize(copy.deepcopy(META[0]), plan, comm)


META: list[Any] = []
"""The model without its parameters."""


def call(directory: Directory, command: list[str]) -> None:
    """A command ends with 0, or with 2 and one line that says why."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*command, str(directory.path)])
    errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    assert code in (0, 2, 3, 5), err.getvalue()
    assert len(errors) == (1 if code else 0), err.getvalue()
    assert "then try again" not in err.getvalue(), err.getvalue()  # that is an OSError
    shown = err.getvalue() if "--json" in command else out.getvalue() + err.getvalue()
    assert all(c.isprintable() or c == "\n" for c in shown)


@pytest.fixture(params=[pytest.param(0.4, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def share(request: pytest.FixtureRequest) -> float:
    """Of the examples: the first ones, or all."""
    found: float = request.param
    return found


@pytest.mark.parametrize(("tp", "count"), [(1, 50), (2, 100)])
def test_plans(converted: dict[int, Directory], tp: int, count: int, share: float) -> None:
    directory = converted[tp]

    @examples(share * count)
    @given(mutated(directory.document("plan.json")))
    def check(plan: Any) -> None:
        directory.put("plan.json", to_bytes(plan))
        everything(directory)

    check()
    directory.restore()


@pytest.mark.parametrize(("tp", "count"), [(1, 30), (2, 60)])
def test_manifests(converted: dict[int, Directory], tp: int, count: int, share: float) -> None:
    directory = converted[tp]

    @examples(share * count)
    @given(mutated(directory.document("manifest.json")))
    def check(found: Any) -> None:
        directory.put_manifest(found)
        everything(directory)

    check()
    directory.restore()


@pytest.mark.parametrize(("tp", "count"), [(1, 30), (2, 40)])
def test_headers(converted: dict[int, Directory], tp: int, count: int, share: float) -> None:
    directory, name = converted[tp], SHARDS[tp]
    data = (directory.intact / name).read_bytes()

    @examples(share * count)
    @given(mutated(header_of(data)))
    def check(header: Any) -> None:
        directory.put(name, with_header(data, to_bytes(header)))
        everything(directory)

    check()
    directory.restore(name)


@pytest.mark.parametrize("name", ["plan.json", "manifest.json", SHARDS[2], "config.json"])
def test_bytes(converted: dict[int, Directory], name: str, share: float) -> None:
    directory = converted[2]
    data = (directory.intact / name).read_bytes()

    @examples(share * 30)
    @given(damaged(data[:5000]), st.booleans())
    def check(begin: bytes, hides: bool) -> None:
        if hides and name != "manifest.json":
            directory.put(name, begin + data[5000:])
        else:
            (directory.path / name).write_bytes(begin + data[5000:])
        everything(directory)

    check()
    directory.restore(name)


def test_configs(converted: dict[int, Directory], share: float) -> None:
    """Sizes aside: a config may ask for a model of any size, see docs/security.md."""
    directory = converted[1]

    @examples(share * 60)
    @given(mutated(directory.document("config.json")))
    def check(config: Any) -> None:
        if largest(config) < 300:
            directory.put("config.json", to_bytes(config))
            everything(directory)

    check()
    directory.restore("config.json")


@pytest.mark.parametrize("name", ["generation_config.json"])
def test_generation_configs(converted: dict[int, Directory], name: str, share: float) -> None:
    directory = converted[1]
    if not (directory.intact / name).is_file():
        pytest.skip("the model has none")

    @examples(share * 30)
    @given(mutated(directory.document(name)))
    def check(config: Any) -> None:
        directory.put(name, to_bytes(config))
        everything(directory)

    check()
    directory.restore(name)


def largest(value: Any) -> float:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return max((largest(item) for item in items), default=0)
    return abs(value) if isinstance(value, int | float) else 0
