#!/usr/bin/env python3
"""Loading for FSDP2: what each process reads and holds, in parts, split afterwards, and by transformers.

A llama of random bfloat16 numbers is converted, and loaded by ``tp * dp`` processes over gloo, from a cold
page cache. Ways take turns. *Through buffers* reads as for a GPU, into memory of the host in its place, and
nothing ahead; otherwise files are mapped, and every page is touched before the clock stops.

    python benchmarks/fsdp_loading.py [--gigabytes 3] [--tp 2] [--dp 2] [--runs 3] [--markdown FILE]
    python benchmarks/fsdp_loading.py --sparse [800]    hundreds of GB of holes, mapped and not touched
    python benchmarks/fsdp_loading.py --sparse 1500 --tp 8 --dp 64 --one    one of many, through buffers
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert import render, show
from disk import evict, files_of, machine, require_room, sync_files
from fsdp_loading_rank import IN_PARTS, SPLIT, THEIRS
from shardconv_runtime.files import manifest
from shardconv_runtime.files.manifest import OF_PIECES, FileEntry, Manifest, Source
from shardconv_runtime.files.shard_files import MAX_FILE_SIZE, sample_checksum, shard_files
from shardconv_runtime.files.small_files import entry_of
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import Plan
from synthetic import LLAMA_8B, LLAMA_405B, Shape, shape_of_size, write_checkpoint

RANK = Path(__file__).with_name("fsdp_loading_rank.py")
SHAPE = replace(LLAMA_8B, vocab=32000)
BUFFERS = "--through-buffers"
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "load(data_parallel=True)": (IN_PARTS, ()),
    "load, then data_parallel": (SPLIT, ()),
    "load(data_parallel=True), through buffers": (IN_PARTS, (BUFFERS,)),
    "load, then data_parallel, through buffers": (SPLIT, (BUFFERS,)),
    "from_pretrained, then fully_shard": (THEIRS, ()),
}
Sample = dict[str, Any]


def run(way: str, directory: Path, options: argparse.Namespace, *arguments: str) -> list[Sample]:
    """The measurements of each process."""
    num_processes = options.tp * options.dp
    command = [sys.executable]
    if options.one:
        arguments = (*arguments, "--one-of", str(num_processes))
    else:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    with tempfile.TemporaryDirectory() as result:
        command += [str(RANK), way, str(directory), result, "--tp", str(options.tp), *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
        return [json.loads(path.read_text()) for path in sorted(Path(result).iterdir())]


def row(name: str, rounds: list[list[Sample]]) -> dict[str, str]:
    """Medians of the rounds; of the process with the most, and of all together."""

    def most(key: str) -> float:
        return statistics.median(max(sample[key] for sample in ranks) for ranks in rounds)

    def together(key: str) -> float:
        return statistics.median(sum(sample[key] for sample in ranks) for ranks in rounds)

    return {
        "way": name,
        "returns, s": f"{most('returned_s'):.2f}",
        "every page touched, s": f"{most('touched_s'):.2f}",
        "held by a process, GB": f"{most('held_bytes') / 1e9:.3f}",
        "peak above start, GB": f"{most('peak_above') / 1e9:.3f}",
        "read from disk by a process, GB": f"{most('read_bytes') / 1e9:.3f}",
        "by all processes, GB": f"{together('read_bytes') / 1e9:.3f}",
        "by calls of read, by all, GB": f"{together('rchar') / 1e9:.3f}",
    }


def table(scratch: Path, options: argparse.Namespace) -> list[dict[str, str]]:
    """All ways to load a model of random numbers."""
    shape = shape_of_size(options.gigabytes * 1e9, (SHAPE,))
    require_room(scratch, 2.2 * shape.num_bytes)
    write_checkpoint(shape, scratch / "model", shard_bytes=10**9)
    paths = [str(scratch / "model"), str(scratch / "out")]
    command = [sys.executable, "-m", "shardconv", "convert", *paths, "--tp", str(options.tp)]
    subprocess.run([*command, "--no-check", "--quiet"], check=True)
    sync_files(scratch)
    rounds: dict[str, list[list[Sample]]] = {name: [] for name in WAYS}
    for _ in range(options.runs):
        for name, (way, arguments) in WAYS.items():
            evict(files_of(scratch))
            source = scratch / ("model" if way == THEIRS else "out")
            rounds[name].append(run(way, source, options, *arguments))
    return [row(name, found) for name, found in rounds.items()]


def sparse_table(scratch: Path, options: argparse.Namespace) -> list[dict[str, str]]:
    """A converted directory of holes, loaded in parts."""
    shape = shape_of_size(options.sparse * 1e9, (LLAMA_405B,))
    out = write_holes(shape, scratch, options.tp)
    samples = run(IN_PARTS, out, options, BUFFERS if options.one else "--untouched")
    return [{"source": f"{shape.num_bytes / 1e9:.1f} GB", **row("load(data_parallel=True)", [samples])}]


def write_holes(shape: Shape, scratch: Path, tp: int) -> Path:
    """A converted directory whose shards have headers, and holes for the tensors."""
    config, out = scratch / "config", scratch / "out"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(shape.config()))
    out.mkdir()
    command = [sys.executable, "-m", "shardconv", "plan", str(config), "--tp", str(tp), "--no-check"]
    command += ["--json", "-o", str(out / manifest.PLAN_NAME)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (out / "config.json").write_text(json.dumps(shape.config()))
    plan = plan_json.read(out / manifest.PLAN_NAME)
    entries = sorted([entry_of(out, Path("config.json")), *_shards(plan, out)], key=lambda e: e.path)
    digest = manifest.sha256_of(out / manifest.PLAN_NAME)
    manifest.write(Manifest(tp, digest, Source("holes"), {}, tuple(entries)), out)
    return out


def _shards(plan: Plan, out: Path) -> Iterator[FileEntry]:
    for shard in shard_files(plan, (None, *range(plan.tp)), MAX_FILE_SIZE):
        path = out / shard.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(shard.layout.header)
        os.truncate(path, shard.layout.num_bytes)
        yield FileEntry(
            shard.path, shard.layout.num_bytes, f"{OF_PIECES}:00000000", shard.rank, sample_checksum(path)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=3, help="size of the model (default 3)")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sparse", type=float, nargs="?", const=800, metavar="GB", help="a model of holes")
    parser.add_argument("--one", action="store_true", help="with --sparse: the others are not there")
    parser.add_argument("--directory", type=Path, help="where files are written, else the system's choice")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardconv-", dir=options.directory) as scratch:
        make = table if options.sparse is None else sparse_table
        rows = make(Path(scratch), options)
        show(render(rows, [machine(Path(scratch)), f"tp {options.tp} x dp {options.dp}"]), options.markdown)


if __name__ == "__main__":
    main()
