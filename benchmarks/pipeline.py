#!/usr/bin/env python3
"""Stages beside tensor parallelism over a slow network: continuous batching on two hosts.

Processes over gloo, half of them in each of two network namespaces, between which packets take a while
(``slow_link.py``). A llama is sharded over all of them, and cut into two stages; both answer the same
requests at once, the stages with 1, 2 and 4 microbatches in flight, in turns. Tokens per second are of all
new tokens, from the first request to the last answer; numbers are medians over rounds, with the lowest and
the highest in brackets. A second table has the bytes that each process holds, reads from a cold cache and
sends for each token, beside what the plan says.

Stages that compute at the same time need cores of their own. Where these are too few, ``--device-ms`` has
every process sleep in place of computing, as it would wait for a device: so long for each token, for its part
of the layers, all of them on four ranks or half of them on two. The model is a tiny one then.

    python benchmarks/pipeline.py [--rounds 3] [--markdown FILE]     as root
    python benchmarks/pipeline.py --device-ms 0.5                    devices that are slept for
    python benchmarks/pipeline.py --small                            to see that everything comes out
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
from typing import Any

from convert import describe, render, show, spread, tell, versions
from disk import evict, files_of, machine, sync_files
from inference import SAVE
from pipeline_rank import MICROBATCHES
from shardconv_runtime.format.plan import Plan
from slow_link import ADDRESSES, DEVICE, on_host, two_hosts
from synthetic import Shape

import shardconv
from shardconv.reporting.plan_lines import crossing_bytes, stage_bytes

RANK = Path(__file__).with_name("pipeline_rank.py")
SHAPE = Shape(hidden=512, intermediate=2048, heads=8, kv_heads=4, vocab=8000, layers=8)
SMALL_SHAPE = Shape(hidden=64, intermediate=128, heads=8, kv_heads=4, vocab=500, layers=2)
PP = 2
DELAYS_MS = (0.0, 1.0, 5.0)
PORT = 29712
TIME_LIMIT_S = 1200


def ways(tp: int) -> dict[str, str]:
    """What is measured, and how it is called."""
    staged = {f"pp {number}": f"pp {PP} x tp {tp}, {number} microbatch(es)" for number in MICROBATCHES}
    return {"tp": f"tp {tp * PP}", **staged}


def make(shape: Shape, tp: int, scratch: Path) -> tuple[Path, Path, list[Plan]]:
    """A model, sharded and in stages; the plans."""
    tell(f"making a float32 model: {describe(shape)}")
    source = scratch / "source"
    subprocess.run([sys.executable, "-c", SAVE, json.dumps(shape.config()), str(source)], check=True)
    sharded, staged = scratch / "sharded", scratch / "staged"
    plans = [
        shardconv.convert(source, sharded, tp * PP, check=False),
        shardconv.convert(source, staged, tp, pp=PP, check=False),
    ]
    return sharded, staged, plans


def run(sharded: Path, staged: Path, delay_ms: float, options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 found with this delay."""
    result = sharded.parent / "result.json"
    for directory in (sharded, staged):
        sync_files(directory)
        evict(files_of(directory))
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": DEVICE,
    }
    told = [str(RANK), str(sharded), str(staged), str(result)]
    for name in ("requests", "prompt", "tokens", "rounds", "device_ms"):
        told += [f"--{name}", str(getattr(options, name))]
    with two_hosts(delay_ms):
        agents = []
        for number in range(PP):
            launch = ["--nnodes", str(PP), "--node-rank", str(number), "--nproc-per-node", str(options.tp)]
            meet = ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
            command = [*on_host(number), sys.executable, "-m", "torch.distributed.run"]
            agents.append(subprocess.Popen([*command, *launch, *meet, *told], env=env))
        try:
            codes = [agent.wait(TIME_LIMIT_S) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    if any(codes):
        raise SystemExit(f"error: torchrun ended with {codes}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def speed_table(found: dict[float, dict[str, Any]], tp: int, num_tokens: int) -> list[dict[str, str]]:
    """A row for each way, a column for each delay."""
    rows = []
    for way, name in ways(tp).items():
        row = {"answered by": name}
        for delay, result in found.items():
            rates = [num_tokens / seconds for seconds in result["seconds"][way]]
            row[f"tokens / s, {delay:g} ms"] = spread(rates, 1)
        row["same tokens"] = "yes" if all(result["same"][way] for result in found.values()) else "no"
        rows.append(row)
    return rows


def bytes_table(result: dict[str, Any], tp: int, plans: list[Plan]) -> list[dict[str, str]]:
    """A row for each process."""
    sent = sum(crossing_bytes(plans[1]).values())
    rows = []
    for rank, measured in enumerate(result["bytes"]):
        stage, place = divmod(rank, tp)
        bytes_planned = {"tp": stage_bytes(plans[0])[0][rank], "pp": stage_bytes(plans[1])[stage][place]}
        row = {"process": f"{rank}, stage {stage}"}
        for name, planned in bytes_planned.items():
            label = f"tp {tp * PP}" if name == "tp" else f"pp {PP} x tp {tp}"
            row[f"{label}: planned"] = f"{planned:,}"
            row[f"{label}: held"] = f"{measured[name]['held']:,}"
            row[f"{label}: read"] = f"{measured[name]['read']:,}"
        row["sent a token: planned"] = f"{sent if stage + 1 < PP else 0:,}"
        row["sent a token"] = f"{measured['pp']['sent']:,.0f}"
        rows.append(row)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks on each host (default 2)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="most tokens (default 32)")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each request (default 24)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_MS, help="in ms, one way (0 1 5)")
    parser.add_argument("--device-ms", type=float, default=0.0, help="slept for each token, see above")
    parser.add_argument("--small", action="store_true", help="a tiny model, 6 requests, one round")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    if options.small:
        options.requests, options.rounds, options.tokens = 6, 1, 4
    return options


def main() -> None:
    options = parse_arguments()
    shape = SMALL_SHAPE if options.small or options.device_ms else SHAPE
    with tempfile.TemporaryDirectory(prefix="shardconv-") as scratch:
        start, load = time.monotonic(), os.getloadavg()[0]
        sharded, staged, plans = make(shape, options.tp, Path(scratch))
        found = {delay: run(sharded, staged, delay, options) for delay in options.delays}
        trips = ", ".join(f"{delay:g} ms: {r['round_trip_ms']:.2f} ms" for delay, r in found.items())
        notes = [
            f"{machine(Path(scratch))}, {versions('torch', 'transformers')}",
            f"llama, float32, {describe(shape)}, 1 thread each rank; {options.requests} requests at once, "
            f"prompts of 8 to {options.prompt} tokens, {options.tokens} new ones; {options.rounds} round(s)",
            *([f"{options.device_ms} ms are slept for each token"] if options.device_ms else []),
            f"round trips of a packet between the hosts, {trips}",
            f"load of the machine {load:.1f} before; {time.monotonic() - start:.0f} s in all",
        ]
    speeds = speed_table(found, options.tp, options.requests * options.tokens)
    sizes = bytes_table(found[options.delays[0]], options.tp, plans)
    show(render(speeds, notes) + "\n\n" + render(sizes, []), options.markdown)


if __name__ == "__main__":
    main()
