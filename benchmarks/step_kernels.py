#!/usr/bin/env python3
"""Time of the kernels of one decoding step on a GPU: rank 0 of 8 of an 8B model, without the other ranks.

The step is compiled, recorded as a CUDA graph, and replayed. Variants: products of one input as one or apart,
and options of torch's compiler. Prints the time of a replay beside the roofline, and the kernels that take
most of it.

    python benchmarks/step_kernels.py [--fuse] [--options '{"coordinate_descent_tuning": true}'] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lone_rank import Alone, lone_rank
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.inference.generation import DECODER
from synthetic import LLAMA_8B, Shape, step_bytes

COPY_BYTES = 2 << 30
REPLAYS = 50
MOST_KERNELS = 25
SMALL = Shape(64, 128, 8, 8, 512, 2)


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Holds a file's lock, so that variants that compile side by side are timed one by one."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source), 10)


def seconds_of(call: Any, count: int) -> float:
    """Of one call, between events on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count / 1e3


def kernels_of(call: Any, count: int) -> list[dict[str, Any]]:
    """Microseconds and number of each kernel in one call, the slowest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key, "us": event.self_device_time_total / count, "count": event.count / count}
        for event in found.key_averages()
        if event.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row["us"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fuse", action="store_true", help="products of one input as one")
    parser.add_argument("--options", type=json.loads, default={}, help="of torch.compile")
    parser.add_argument("--length", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="on the CPU, to test the code")
    parser.add_argument("--lock", type=Path, help="a file, locked while this is timed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    shape = SMALL if options.small else replace(LLAMA_8B, layers=options.layers)
    changed = torch._inductor.config.patch(options.options)
    with tempfile.TemporaryDirectory() as place, torch.no_grad(), changed:
        model = lone_rank(
            shape, options.tp, Path(place), lambda p: Alone(0, p.mesh, device), device, torch.bfloat16,
            fuse=options.fuse,
        )  # fmt: skip
        begin = time.perf_counter()
        compile_model(model, cuda_graphs=not options.small)
        ids = torch.arange(options.length, device=device)[None] % shape.vocab

        def generate(count: int) -> torch.Tensor:
            return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)

        generate(8)
        row: dict[str, Any] = {"fuse": options.fuse, "options": options.options}
        row["compiled in, s"] = time.perf_counter() - begin
        decoder = vars(model)[DECODER]
        ((_, (replay,)),) = decoder._recorded.values()
        row["attends once"] = decoder._attends_once
        if not options.small:
            with alone(options.lock):
                floor = step_bytes(model, options.length) / bandwidth(device)
                times = {}
                for count in (16, 112):
                    generate(count)
                    begin = time.perf_counter()
                    generate(count)
                    torch.cuda.synchronize()
                    times[count] = time.perf_counter() - begin
                row["token of generate, ms"] = (times[112] - times[16]) / 96 * 1e3
                row["replay, ms"] = seconds_of(replay._graph.replay, REPLAYS) * 1e3
                row["roofline, ms"] = floor * 1e3
                row["kernels"] = kernels_of(replay._graph.replay, 5)
    shown = row.pop("kernels", [])
    print(json.dumps(row))
    total = sum(kernel["us"] for kernel in shown)
    count = sum(kernel["count"] for kernel in shown)
    print(f"{total:9.1f} us in {count:.0f} kernels")
    for kernel in shown[:MOST_KERNELS]:
        print(f"{kernel['us']:9.1f} us {kernel['count']:6.0f} x {kernel['kernel'][:110]}")
    if options.json:
        options.json.write_text(json.dumps(row | {"kernels": shown}, indent=1))


if __name__ == "__main__":
    main()
