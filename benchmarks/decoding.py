#!/usr/bin/env python3
"""What a token costs the host, and how long it takes: ``generate`` here and in transformers.

**Host**: a narrow and deep llama, as one rank of a job whose collectives and graphs cost nothing. What is
left is the time that the host spends around them, for each token. Beside it, of an eager token: operators,
matrix products, collectives, waits for the device and allocations. And the time of a compiled token with the
kernels of its graph, whose collectives cost nothing.

**Calls**: 200 calls of ``generate`` with random lengths and batches, after a warm-up of all their sizes: what
they leave behind.

**Tokens**: ranks over gloo, greedy ``generate``, the runtime and transformers' tensor parallelism in the same
processes, alternately call by call: medians with the lowest and the highest, and the ratio of neighbors.

    python benchmarks/decoding.py [--tp 1 2] [--rounds 30] [--tables host tokens calls] [--markdown FILE]
                                  [--models narrow wide] [--modes eager compiled]   of the table of tokens
    python benchmarks/decoding.py --small        to see that everything comes out
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from convert import render, tell
from disk import machine
from ports import free_port
from synthetic import Shape, write_checkpoint

RANK = Path(__file__).with_name("decoding_rank.py")
NARROW = Shape(hidden=128, intermediate=256, heads=8, kv_heads=4, vocab=1000, layers=32)
WIDE = Shape(hidden=1024, intermediate=4096, heads=16, kv_heads=8, vocab=32000, layers=20)
SMALL = Shape(hidden=64, intermediate=128, heads=4, kv_heads=2, vocab=200, layers=2)
TIME_LIMIT_S = 1500
COUNTS = ("operators", "products", "collectives", "waits", "allocations")
TABLES = ("host", "tokens", "calls")
MODELS = ("narrow", "wide")
MODES = ("eager", "compiled")
Result = dict[str, Any]


def run_ranks(scratch: Path, tp: int, ranks: int, *arguments: str) -> list[Result]:
    """What each process of ``decoding_rank.py`` measured."""
    port = free_port()
    results = [scratch / f"result-{rank}.json" for rank in range(ranks)]
    children = []
    for rank, result in enumerate(results):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1"}
        if tp > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": tp, "LOCAL_WORLD_SIZE": tp}
            env |= {name: str(value) for name, value in {**names, "MASTER_PORT": port}.items()}
        command = [sys.executable, str(RANK), *arguments, "--result", str(result)]
        with result.with_suffix(".txt").open("w") as errors:
            children.append(subprocess.Popen(command, env=env, stderr=errors))
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        for rank, child in enumerate(children):
            if child.wait(max(1, deadline - time.monotonic())):
                why = results[rank].with_suffix(".txt").read_text().strip().splitlines()[-1:]
                raise SystemExit(f"error: rank {rank} failed: {' '.join(why)}")
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [json.loads(result.read_text()) for result in results]


def prepare(scratch: Path, name: str, shape: Shape, tps: list[int]) -> Path:
    """A checkpoint, and beside it what it is converted to."""
    source = scratch / name
    write_checkpoint(shape, source, shard_bytes=1 << 30)
    for tp in tps:
        command = [sys.executable, "-m", "shardconv", "convert", str(source), "--tp", str(tp)]
        out = source.with_name(f"{name}-tp{tp}")
        done = subprocess.run([*command, str(out), "--no-check", "--quiet"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: convert failed: {done.stderr.strip()}")
    return source


def host_rows(scratch: Path, shape: Shape, tp: int, rounds: int) -> list[dict[str, str]]:
    """Time and counts for each token, of one rank of ``tp``."""
    source = scratch / "narrow"
    options = [str(source), f"{source}-tp{tp}", "--tp", str(tp), "--rounds", str(rounds)]
    (found,) = run_ranks(scratch, tp, 1, "host", *options)
    (times,) = run_ranks(scratch, tp, 1, "kernels", *options)
    found |= times
    rows = []
    for name, result in found.items():
        row = {"tp": str(tp), "what": name, "ms a token": "", "x transformers": ""}
        if "ms" in result:
            theirs = found[name.replace("shardconv", "transformers")]
            row["ms a token"] = spread(result["ms"])
            row["x transformers"] = f"{middle(result) / middle(theirs):.2f}"
        rows.append(row | {count: str(result[count]) if count in result else "" for count in COUNTS})
    return rows


def token_rows(scratch: Path, name: str, tp: int, rounds: int, modes: list[str]) -> list[dict[str, str]]:
    """Milliseconds for each token of ``generate``, of the slowest rank."""
    source = scratch / name
    options = ["tokens", str(source), f"{source}-tp{tp}", "--tp", str(tp), "--rounds", str(rounds)]
    ranks = run_ranks(scratch, tp, tp, *options, "--modes", *modes)
    rows = []
    for mode in modes:
        slowest = {
            side: [max(samples) for samples in zip(*(rank[mode][side] for rank in ranks), strict=True)]
            for side in ("shardconv", "transformers")
        }
        ratios = [a / b for a, b in zip(slowest["shardconv"], slowest["transformers"], strict=True)]
        row = {"model": name, "tp": str(tp), "what": mode}
        row |= {f"{side}, ms a token": spread(samples) for side, samples in slowest.items()}
        rows.append(row | {"ratio": spread(ratios)})
    return rows


def call_rows(scratch: Path, tp: int, rounds: int) -> list[dict[str, str]]:
    """What calls of random sizes leave behind, on rank 0."""
    source = scratch / "narrow"
    options = ["calls", str(source), f"{source}-tp{tp}", "--tp", str(tp), "--rounds", str(rounds)]
    found = run_ranks(scratch, tp, tp, *options)[0]
    return [
        {
            "tp": str(tp),
            "calls of generate": str(part["calls"]),
            "recordings": str(part["recordings"]),
            "graphs": str(part["graphs"]),
            "buffers, MB": f"{part['buffers'] / 1e6:.1f}",
            "memory of the process, MB": f"{part['resident'] / 1e6:.0f}",
            "peak, MB": f"{part['peak'] / 1e6:.0f}",
        }
        for part in found["parts"]
    ]


def middle(result: Result) -> float:
    """The median time."""
    return statistics.median(result["ms"])


def spread(samples: list[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(samples):.3g} [{min(samples):.3g}-{max(samples):.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--layers", type=int, default=NARROW.layers, help="of the narrow model (default 32)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    shapes = {
        "narrow": SMALL if options.small else replace(NARROW, layers=options.layers),
        "wide": SMALL if options.small else WIDE,
    }
    rounds = 3 if options.small else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        texts = [machine(scratch)]
        for name, shape in shapes.items():
            if name not in options.models:
                continue
            tell(f"{name}: {asdict(shape)}")
            prepare(scratch, name, shape, options.tp)
        for table in options.tables:
            if table == "host":
                rows = [row for tp in options.tp for row in host_rows(scratch, shapes["narrow"], tp, rounds)]
            elif table == "tokens":
                cases = [(name, tp) for tp in options.tp for name in options.models]
                rows = [
                    row for name, tp in cases for row in token_rows(scratch, name, tp, rounds, options.modes)
                ]
            else:
                rows = call_rows(scratch, max(options.tp), min(rounds, 20))
            texts.append(render(rows, ()))
            tell(texts[-1])
    text = "\n\n".join(texts) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
