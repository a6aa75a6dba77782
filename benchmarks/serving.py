#!/usr/bin/env python3
"""Requests that arrive over time: continuous batching beside one request after another.

A converted llama at two ranks on the CPU, over gloo, gets 64 requests at random times, with prompts and
answers of different lengths. The manager of continuous batching answers them together, ``generate`` one
after another; both are those of the runtime and those of transformers' tensor parallelism, in the same
processes, in turns. Tokens per second are of all new tokens, from the first arrival to the last answer; the
latency of a request is from its arrival to its last token. Numbers are medians over rounds, with the lowest
and the highest in brackets.

    python benchmarks/serving.py [--rounds 3] [--markdown FILE]
    python benchmarks/serving.py --small          to see that everything comes out
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from convert import describe, render, show, spread, tell, versions
from disk import machine
from inference import SAVE
from synthetic import Shape

RANK = Path(__file__).with_name("serving_rank.py")
SHAPE = Shape(hidden=512, intermediate=2048, heads=8, kv_heads=4, vocab=8000, layers=4)
SMALL_SHAPE = Shape(hidden=64, intermediate=128, heads=8, kv_heads=4, vocab=500, layers=2)
TP = 2
VARIANTS = {
    "batched": "shardconv, continuous batching",
    "one by one": "shardconv, generate",
    "transformers batched": "transformers, continuous batching",
    "transformers one by one": "transformers, generate",
}
TIME_LIMIT_S = 900


def run(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make and convert a model, and measure in two processes."""
    shape = SMALL_SHAPE if options.small else SHAPE
    source, converted, result = scratch / "source", scratch / "converted", scratch / "result.json"
    tell(f"making a float32 model: {describe(shape)}")
    subprocess.run([sys.executable, "-c", SAVE, json.dumps(shape.config()), str(source)], check=True)
    convert = [
        "-m",
        "shardconv",
        "convert",
        str(source),
        "--tp",
        str(TP),
        str(converted),
        "--no-check",
        "--quiet",
    ]
    subprocess.run([sys.executable, *convert], check=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(TP)]
    told = [str(RANK), str(converted), str(source), str(result)]
    for name in ("requests", "prompt", "tokens", "rounds", "gap"):
        told += [f"--{name}", str(getattr(options, name))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([sys.executable, *torchrun, *told], check=True, env=env, timeout=TIME_LIMIT_S)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def table(found: dict[str, Any], num_requests: int) -> list[dict[str, str]]:
    """A row for each variant; ratios are of neighbors in time."""
    return [row(found, name, num_requests) for name in VARIANTS]


def row(found: dict[str, Any], name: str, num_requests: int) -> dict[str, str]:
    rounds, ours = found["rounds"][name], found["rounds"]["batched"]
    if isinstance(rounds, str):
        return {"answered by": VARIANTS[name], "tokens / s": rounds}
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(rounds, ours, strict=True)]
    return {
        "answered by": VARIANTS[name],
        "tokens / s": spread([found["tokens"] / r["seconds"] for r in rounds], 1),
        "seconds": spread([r["seconds"] for r in rounds], 1),
        "median latency, s": spread([median(r["latencies"]) for r in rounds], 2),
        "time, in that of the first row": "" if name == "batched" else spread(ratios),
        "same tokens as shardconv, generate": f"{found['same'][name]} of {num_requests}",
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--gap", type=float, default=0.05, help="mean seconds between arrivals (0.05)")
    parser.add_argument("--prompt", type=int, default=64, help="most tokens (default 64)")
    parser.add_argument("--tokens", type=int, default=24, help="most new tokens (default 24)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny model, 8 requests, one round")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    if options.small:
        options.requests, options.rounds = 8, 1
    return options


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="shardconv-") as scratch:
        start, load = time.monotonic(), os.getloadavg()[0]
        found = run(Path(scratch), options)
        notes = [
            f"{machine(Path(scratch))}, {versions('torch', 'transformers')}",
            f"llama, float32, {describe(SMALL_SHAPE if options.small else SHAPE)}, tp {TP}, 1 thread each "
            f"rank; {options.requests} requests, one in {options.gap} s on average, prompts of 8 to "
            f"{options.prompt} tokens, 8 to {options.tokens} new ones; {options.rounds} round(s)",
            f"load of the machine {load:.1f} before; {time.monotonic() - start:.0f} s in all",
        ]
    show(render(table(found, options.requests), notes), options.markdown)


if __name__ == "__main__":
    main()
