#!/usr/bin/env python3
"""Starting with a model that was not converted: ``load(MODEL)`` beside ``from_pretrained(tp_plan="auto")``.

A checkpoint of real shape is loaded by fresh processes, one for each rank, in turns: by ``load`` with an
empty cache of plans (the first start), by ``load`` with the plan of the start before (the second start), by
``load`` of the converted model, and by transformers with its own tensor parallelism. Shown are the seconds
from the start of a process until it has the logits of 8 tokens, with all imports; the seconds of the load
itself; the bytes that rank 0 asked the system for or has mapped into its memory; and its peak memory.
Medians, with the lowest and the highest in brackets.

    python benchmarks/first_start.py [--gigabytes 2] [--tp 2] [--rounds 3] [--cold] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from disk import evict, machine
from ports import free_port
from synthetic import shape_of_size, write_checkpoint

VARIANTS = {
    "first": "`load(MODEL)`, first start",
    "second": "`load(MODEL)`, second start",
    "converted": "`load` of the converted model",
    "transformers": '`from_pretrained(tp_plan="auto")`',
}


def rank(variant: str, directory: str) -> None:
    """Load on this rank, compute, and print the measured values as JSON on rank 0."""
    began = float(os.environ["STARTED"])
    import torch

    if variant == "transformers":
        import torch.distributed as dist
        import transformers
        from transformers.distributed import DistributedConfig

        dist.init_process_group("gloo")
        start = time.monotonic()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", distributed_config=DistributedConfig(tp_plan="auto")
        ).eval()
    else:
        import shardconv_runtime

        start = time.monotonic()
        model = shardconv_runtime.load(directory, device="cpu")
    loaded = time.monotonic()
    with torch.inference_mode():
        model(torch.arange(8)[None]).logits  # noqa: B018
    done = time.monotonic()
    if os.environ["RANK"] == "0":
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        values = {
            "start_s": done - began,
            "load_s": loaded - start,
            "read_bytes": int(counters["rchar"]) + _mapped(),
            "peak_bytes": usage.ru_maxrss * 1024,
        }
        print("MEASURED " + json.dumps(values), flush=True)


def _mapped() -> int:
    """Return the bytes of mapped weight files that this process has touched."""
    touched, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split(" ", 1)[0].count("-") == 1 and not line.endswith("kB"):
            is_weights = line.endswith(".safetensors")
        elif is_weights and line.startswith("Rss:"):
            touched += int(line.split()[1]) * 1024
    return touched


def measure(variant: str, directory: Path, tp: int, cache: Path) -> dict[str, Any]:
    """Return the values of rank 0 of one start in fresh processes."""
    port = free_port()
    common = {
        **os.environ,
        "WORLD_SIZE": str(tp),
        "LOCAL_WORLD_SIZE": str(tp),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "SHARDCONV_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "STARTED": str(time.monotonic()),
    }
    command = [sys.executable, __file__, "--as-rank", variant, str(directory)]
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(tp)
    ]
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{variant} failed:\n{outputs[0][1][-2000:]}")
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("MEASURED "))
    values: dict[str, Any] = json.loads(line.removeprefix("MEASURED "))
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank(*options.as_rank)
        return
    root = Path(tempfile.mkdtemp(prefix="first-start-"))
    try:
        model, out, cache = root / "model", root / "out", root / "cache"
        shape = shape_of_size(options.gigabytes * 1e9)
        write_checkpoint(shape, model, shard_bytes=5 * 10**9)
        import shardconv

        shardconv.convert(model, out, options.tp, check=False)
        runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.rounds):
            for variant, measured in runs.items():
                if variant == "first":
                    shutil.rmtree(cache, ignore_errors=True)
                directory = out if variant == "converted" else model
                if options.cold:
                    evict([*model.glob("*.safetensors"), *out.rglob("*.safetensors")])
                measured.append(measure(variant, directory, options.tp, cache))
        text = table(runs, f"{options.gigabytes:g} GB, tp {options.tp}, {machine(root)}")
    finally:
        shutil.rmtree(root)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")


def table(runs: dict[str, list[dict[str, Any]]], title: str) -> str:
    """Return the table of all variants, with the ratio to transformers."""
    theirs = statistics.median(values["start_s"] for values in runs["transformers"])
    lines = [title, "", "| | process to logits, s | of theirs | load, s | bytes of rank 0, GB | peak, GB |"]
    lines.append("|---|---|---|---|---|---|")
    for variant, name in VARIANTS.items():
        seconds = [values["start_s"] for values in runs[variant]]
        middle = {key: statistics.median(v[key] for v in runs[variant]) for key in runs[variant][0]}
        lines.append(
            f"| {name} | {middle['start_s']:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
            f"| {middle['start_s'] / theirs:.2f} | {middle['load_s']:.2f} | {middle['read_bytes'] / 1e9:.2f} "
            f"| {middle['peak_bytes'] / 1e9:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
