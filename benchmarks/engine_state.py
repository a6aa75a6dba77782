#!/usr/bin/env python3
"""Time and memory of ``shardconv export --format vllm`` beside ``cp`` of the checkpoint that it makes.

python benchmarks/engine_state.py DIRECTORY --gigabytes 16 --tp 4
python benchmarks/engine_state.py DIRECTORY --gigabytes 6 --tp 4 --warm --repeat 3
python benchmarks/engine_state.py DIRECTORY --sparse --gigabytes 400 --tp 16 --ranks 0

DIRECTORY is made and removed. The copy and the export take turns; they are on disk when their time ends. Each
begins with a checkpoint that is not in memory, where the system lets a program drop that, or, with --warm, in
memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from synthetic import LLAMA_8B, LLAMA_405B, shape_of_size, write_checkpoint

SHARD_BYTES = 5 * 10**9


def timed(command: Sequence[str]) -> float:
    """Seconds of a command and of writing what it left in memory."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    os.sync()
    return time.perf_counter() - start


def recall(directory: Path) -> None:
    """Read files into the page cache."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def processor_seconds() -> float:
    """Of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def forget(directory: Path) -> None:
    """Drop files from the page cache."""
    os.sync()
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_bytes() -> int:
    """Of the largest process that was waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def main() -> None:
    """Measure, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--ranks")
    parser.add_argument("--sparse", action="store_true", help="holes as weights, of the shape of 405B; no cp")
    parser.add_argument("--warm", action="store_true", help="begin with the checkpoint in memory")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--no-copy", action="store_true", help="do not measure cp")
    options = parser.parse_args()
    options.directory.mkdir()
    try:
        candidates = (LLAMA_405B,) if options.sparse else (LLAMA_8B,)
        shape = shape_of_size(options.gigabytes * 1e9, candidates)
        model, target = options.directory / "model", options.directory / "target"
        write_checkpoint(shape, model, shard_bytes=SHARD_BYTES, sparse=options.sparse)
        print(f"checkpoint: {shape.num_bytes / 1e9:.2f} GB, {shape.layers} layers", flush=True)
        for _ in range(options.repeat):
            (recall if options.warm else forget)(model)
            if not options.sparse and not options.no_copy:
                before = processor_seconds()
                seconds = timed(["cp", "-r", str(model), str(target)])
                print(f"cp: {seconds:.1f} s, {processor_seconds() - before:.1f} s of a core", flush=True)
                shutil.rmtree(target)
                (recall if options.warm else forget)(model)
            before = processor_seconds()
            command = [
                sys.executable,
                "-m",
                "shardconv",
                "export",
                str(model),
                str(target),
                "--format",
                "vllm",
            ]
            command += ["--tp", str(options.tp), *(["--ranks", options.ranks] if options.ranks else [])]
            seconds = timed(command)
            written = sum(path.stat().st_size for path in target.rglob("*.safetensors"))
            print(
                f"export: {seconds:.1f} s, {processor_seconds() - before:.1f} s of a core, "
                f"{written / 1e9:.2f} GB written, {peak_bytes() / 1e9:.2f} GB in the largest process",
                flush=True,
            )
            shutil.rmtree(target)
    finally:
        shutil.rmtree(options.directory)


if __name__ == "__main__":
    main()
