#!/usr/bin/env python3
"""Where the time of a start goes: from the start of the process to the first token, stage by stage.

A llama of many layers and little width is converted, and loaded by fresh processes, as many as ``--tp``.
Shown is rank 0, the median of the runs. torch, transformers and the file of the model are imported before
``load``, so that each has a line of its own; the floor is a process that does nothing else.

    python benchmarks/start.py [--layers 32] [--tp 1] [--runs 5] [--profile] [--markdown FILE]

``--profile`` prints, for one more run, the functions in which ``load`` spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ports import free_port
from synthetic import Shape, write_checkpoint

MODELING = "transformers.models.llama.modeling_llama"
STAGES = {
    ("loading.load", "_find_checked"): "check of files and fingerprint",
    ("loading.load", "ReadAhead"): "start of reading ahead",
    ("loading.load", "_launch"): "process group",
    ("comm.agreement", "agree"): "agreement of the ranks",
    ("comm.mesh", "connect"): "subgroups",
    ("loading.checked_source", "read_config"): "config",
    ("loading.checked_source", "build_model"): "build",
    ("loading.model_transforms", "parallelize"): "parallelize",
    ("loading.rank_files", "fill"): "read",
    ("loading.model_transforms", "prepare_generation"): "generation config",
}
"""Functions of the runtime that ``load`` calls one after the other, and the names of their lines."""


class Marks:
    """Seconds by stage; the time between the stages is the last line but one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a function; its time is added to that of the stage."""
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin

    def wrap(self, module: Any, name: str, stage: str) -> None:
        """Time each call of a function, where its module looks it up."""
        function = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: self.timed(stage, function, *args, **kwargs))


def start(directory: str, profile: bool) -> None:
    """Load and make one token; print the seconds of each stage as a line of JSON."""
    began = float(os.environ["STARTED"])
    marks = Marks()
    marks.seconds["start of the interpreter"] = time.monotonic() - began
    marks.timed("import torch", importlib.import_module, "torch")
    marks.timed("import transformers", _import_transformers)
    marks.timed("import the model's file", importlib.import_module, MODELING)
    loading = marks.timed("import the runtime", importlib.import_module, "shardconv_runtime.loading.load")
    for (module, name), stage in STAGES.items():
        marks.wrap(importlib.import_module(f"shardconv_runtime.{module}"), name, stage)
    before = sum(marks.seconds.values())
    profiler = cProfile.Profile()
    load = profiler.runcall if profile else lambda function, *args, **kwargs: function(*args, **kwargs)
    model = marks.timed("load", load, loading.load, directory, device="cpu")
    total = marks.seconds.pop("load")
    marks.seconds["rest of load"] = before + total - sum(marks.seconds.values())
    marks.timed("first forward pass", _first_token, model)
    marks.seconds["total"] = time.monotonic() - began
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(marks.seconds))
        if profile:
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)


def _import_transformers() -> None:
    from transformers import AutoConfig, GenerationConfig

    for name in (AutoConfig, GenerationConfig):
        assert name is not None, "transformers imports a name when it is asked for"


def _first_token(model: Any) -> None:
    import torch

    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1].argmax().item()


def floor() -> None:
    """Import the modules that every way to load the model needs."""
    importlib.import_module("torch")
    importlib.import_module(MODELING)
    print(json.dumps({"total": time.monotonic() - float(os.environ["STARTED"])}))


def run(arguments: list[str], num_ranks: int) -> tuple[dict[str, float], str]:
    """Start a process for each rank; return the output of rank 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "STARTED": str(time.monotonic())}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start compiles nothing
    if num_ranks > 1:
        port = str(free_port())
        world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        env |= {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = [process.communicate() for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit("\n".join(error for _, error in outputs))
    return json.loads(outputs[0][0]), outputs[0][1]


def convert(directory: Path, layers: int, tp: int) -> Path:
    """A converted model of ``layers`` layers."""
    shape = Shape(hidden=256, intermediate=512, heads=8, kv_heads=4, vocab=1024, layers=layers)
    write_checkpoint(shape, directory / "model", shard_bytes=1 << 30)
    paths = [str(directory / "model"), str(directory / "out")]
    command = [sys.executable, "-m", "shardconv", "convert", *paths, "--tp", str(tp)]
    subprocess.run([*command, "--no-check", "--quiet"], check=True)
    return directory / "out"


def table(starts: list[dict[str, float]], floors: list[dict[str, float]]) -> str:
    """Medians; shares are those of the medians."""
    rows = {stage: statistics.median(s[stage] for s in starts) for stage in starts[0]}
    rows["floor: import torch and the model's file"] = statistics.median(f["total"] for f in floors)
    lines = ["| stage | ms |", "|---|---|"]
    return "\n".join([*lines, *(f"| {stage} | {1000 * seconds:.0f} |" for stage, seconds in rows.items())])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = str(convert(Path(folder), options.layers, options.tp))
        run(["start", out], options.tp)
        starts, floors = [], []
        for _ in range(options.runs):
            starts.append(run(["start", out], options.tp)[0])
            floors.append(run(["floor"], 1)[0])
        lines = table(starts, floors)
        print(lines)
        if options.markdown:
            options.markdown.write_text(lines + "\n")
        if options.profile:
            print(run(["start", out, "profile"], options.tp)[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        start(sys.argv[2], "profile" in sys.argv[3:])
    elif sys.argv[1:2] == ["floor"]:
        floor()
    else:
        main()
