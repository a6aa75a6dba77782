#!/usr/bin/env python3
"""From a config to a plan file: how long it takes, stage by stage, and how much memory.

Each configuration is planned for tp 8 by a process of its own, pinned to one core. ``whole process`` is
``shardconv plan DIR --tp 8 -o FILE`` from start to exit, with the proof on numbers and without it
(``--no-check``); the stages are measured inside of another run.
The floor is a process that only imports torch and the modules of transformers for the model.

    python benchmarks/plan.py [--runs 3] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
CONFIGS = {
    **{f"llama, {n} layers": {**LLAMA, "num_hidden_layers": n} for n in (2, 32, 80, 126)},
    "DeepSeek-V3, 671B": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
    },
}

STAGES = """
import json, sys, time
marks = [("import", time.perf_counter())]
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.format import plan_json
tell = lambda name: marks.append((name, time.perf_counter()))
tell("resolving")
spec = resolve(sys.argv[1], need_weights=False)
plan = solve_plan(spec, SolveOptions(8, check=False), progress=tell)
tell("writing")
plan_json.write(plan, sys.argv[2])
tell("end")
print(json.dumps({a: b[1] - t for (a, t), b in zip(marks, marks[1:])}))
"""
FLOOR = """
import importlib, json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
AutoModelForCausalLM._model_mapping[type(config)]
"""


def _pinned(command: list[str]) -> tuple[float, str]:
    """Wall seconds and output of a command on one core."""
    core = {min(os.sched_getaffinity(0))}

    def pin() -> None:
        os.sched_setaffinity(0, core)

    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=env,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    )
    return time.perf_counter() - start, done.stdout


def measure(name: str, runs: int) -> dict[str, float]:
    """The fastest of ``runs`` of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[name]))
        out = str(Path(folder) / "plan.json")
        shardconv = [sys.executable, "-m", "shardconv", "plan", folder, "--tp", "8", "-o", out]
        proven = min(_pinned(shardconv)[0] for _ in range(runs))
        total = min(_pinned([*shardconv, "--no-check"])[0] for _ in range(runs))
        floor = min(_pinned([sys.executable, "-c", FLOOR, folder])[0] for _ in range(runs))
        stages = [json.loads(_pinned([sys.executable, "-c", STAGES, folder, out])[1]) for _ in range(runs)]
    row = {stage: min(s[stage] for s in stages) for stage in stages[0]}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {**row, "whole process": total, "and proven": proven, "floor": floor, "peak MB": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    rows = {name: measure(name, options.runs) for name in CONFIGS}
    columns = list(next(iter(rows.values())))
    lines = ["| config | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = [f"{row[c]:.0f}" if c == "peak MB" else f"{row[c]:.2f} s" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
