#!/usr/bin/env python3
"""Conversions that quantize, beside one that does not, and beside the library alone on one weight.

    python benchmarks/quantizing.py --gigabytes 16 fp8 nf4 int8 w4a16   a model of random weights
    python benchmarks/quantizing.py --sparse 400 --tp 64 fp8            rank 0 of a model of holes
    python benchmarks/quantizing.py --gigabytes 2 --kill fp8 fp8        killed and continued: the same files

Seconds are of CPUs, with one thread for each operator. Rates are bytes of the source of quantized weights per
CPU second: of the conversion, without the time of the one that does not quantize, and of the library.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from convert import render, show, tell
from disk import machine
from synthetic import LLAMA_405B, shape_of_size, tensor_bytes, write_checkpoint

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PLAIN = "as it is"
WEIGHT = (4096, 14336)
"""The shape of the weight that the library packs alone."""
SHARES = (0.2, 0.8)
"""Between these shares of the output, a conversion is killed."""


@dataclass(frozen=True)
class Run:
    """A conversion that ended."""

    seconds: float
    """Of the CPUs."""
    wall_s: float
    peak: int
    """Most memory that was resident, in bytes."""


def convert(arguments: Sequence[str], stop_at: int = 0, out: Path | None = None) -> Run:
    """Run ``shardconv convert``; kill it when ``out`` has some bytes."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "shardconv", "convert", *arguments, "--no-check", "--quiet"]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    while stop_at and out is not None and written(out) < stop_at:
        time.sleep(0.2)
        if process.poll() is not None:
            raise SystemExit("error: it ended before it could be killed")
    if stop_at:
        process.send_signal(signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status and not stop_at:
        raise SystemExit(f"error: {' '.join(command)}: status {status}")
    wall = time.perf_counter() - start
    return Run(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024)


def written(out: Path) -> int:
    """Bytes on the disk: unfinished files have their full sizes from the beginning."""
    return sum(path.stat().st_blocks * 512 for path in out.rglob("*") if path.is_file())


def files_of(out: Path) -> dict[str, str]:
    """The sha256 of all files; the manifest, which has the errors of weights, is one of them."""
    sums = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            sums[str(path.relative_to(out))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def library_rate(scheme: str) -> float:
    """Bytes per CPU second that the library packs alone."""
    program = f"""
import time, torch
from shardconv_runtime.packed.formats import format_of_checkpoint, packing_format, settings_of_scheme
settings = settings_of_scheme({scheme!r}, "bfloat16")
model = torch.nn.Module()
import transformers
from shardconv_runtime.meta.meta_model import build_model
config = transformers.LlamaConfig(hidden_size={WEIGHT[0]}, intermediate_size={WEIGHT[1]}, num_hidden_layers=1)
model = build_model(transformers.LlamaForCausalLM, config, torch.bfloat16, None)
chosen = packing_format(settings).choose(model, settings)
each = format_of_checkpoint(chosen.settings, "here")
weight = torch.randn({WEIGHT}).bfloat16()
each.packed(weight[:256], chosen.quantizer)
start = time.process_time()
each.packed(weight, chosen.quantizer)
print(weight.nbytes / (time.process_time() - start))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def row(name: str, run: Run, plain: Run, num_bytes: int, out: Path, *, alone: bool) -> dict[str, str]:
    """The row of a conversion."""
    rest = run.seconds - plain.seconds
    return {
        "": name,
        "CPU time": f"{run.seconds:.0f} s",
        "time": f"{run.wall_s:.0f} s",
        "GB/s per core": "" if name == PLAIN else f"{num_bytes / rest / 1e9:.2f}",
        "library alone": "" if name == PLAIN or not alone else f"{library_rate(name) / 1e9:.2f}",
        "peak memory": f"{run.peak / 1e9:.2f} GB",
        "files": f"{written(out) / 1e9:.1f} GB",
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemes", nargs="+")
    parser.add_argument("--gigabytes", type=float, default=16)
    parser.add_argument("--sparse", type=float, help="GB of a source of holes, of which rank 0 is converted")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument(
        "--kill", metavar="SCHEME", action="append", default=[], help="kill its conversion once, and compare"
    )
    parser.add_argument("--directory", type=Path, help="for files (default: that of temporary files)")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    if options.sparse:
        layer = replace(LLAMA_405B, layers=2).num_bytes - LLAMA_405B.num_bytes
        count = 1 + int((options.sparse * 1e9 - LLAMA_405B.num_bytes) // layer)
        shape = replace(LLAMA_405B, layers=count)
    else:
        shape = shape_of_size(options.gigabytes * 1e9)
    tensors = shape.tensors()
    num_bytes = sum(tensor_bytes(size) for name, size in tensors.items() if name.endswith("_proj.weight"))
    notes = [f"source: llama, bfloat16, {shape.num_bytes / 1e9:.1f} GB, tp {options.tp}"]
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="shardconv-", dir=options.directory) as place:
        source, out = Path(place) / "source", Path(place) / "out"
        write_checkpoint(shape, source, shard_bytes=5 * 10**9, sparse=bool(options.sparse))
        arguments = [str(source), str(out), "--tp", str(options.tp)]
        if options.sparse:
            arguments += ["--ranks", "0"]
            num_bytes //= options.tp
        plain = convert(arguments)
        rows.append(row(PLAIN, plain, plain, num_bytes, out, alone=False))
        if options.kill:
            rows[-1]["killed and continued"] = ""
        tell(str(rows[-1]))
        shutil.rmtree(out)
        for scheme in options.schemes:
            quantized = [*arguments, "--quantize", scheme]
            rows.append(row(scheme, convert(quantized), plain, num_bytes, out, alone=not options.sparse))
            tell(str(rows[-1]))
            if options.kill:
                rows[-1]["killed and continued"] = ""
            if scheme in options.kill:
                expected, total, share = files_of(out), written(out), random.uniform(*SHARES)
                shutil.rmtree(out)
                convert(quantized, int(share * total), out)
                convert(quantized)
                same = "same" if files_of(out) == expected else "DIFFERENT"
                rows[-1]["killed and continued"] = f"{same} (at {share:.0%}, {len(expected)} files)"
                tell(rows[-1]["killed and continued"])
            shutil.rmtree(out)
        notes.insert(0, machine(Path(place)))
    show(render(rows, notes), options.markdown)


if __name__ == "__main__":
    main()
