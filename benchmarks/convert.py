#!/usr/bin/env python3
"""The write phase of a conversion against ``cp`` and against slicing with safetensors: time and memory.

A llama checkpoint of real shape (random bfloat16 numbers) is copied with ``cp -r``, converted, and sliced the
naive way (``safe_open`` and ``save_file``, all tensors of a rank in memory), alternately, from a warm and
from a cold page cache. Before each of them the previous output is removed and the disk is synced.

- The write phase goes from the entry of the converter's bar "writing" to the end of the conversion.
- "+ sync": until all files that were made are on the disk. The naive way is not synced.
- Ratios are of neighbors in time; every number is a median, with the lowest and the highest in brackets.
- "Peak above start" is the largest memory of the write phase beyond that of the process when it began,
  including pages of mapped files.

    python benchmarks/convert.py [--gigabytes 4] [--tp 2 8] [--runs 3] [--markdown FILE]
    python benchmarks/convert.py --memory-only [--sizes 1 16]
    python benchmarks/convert.py --sparse [400]    hundreds of GB of holes, converted for one rank

``--memory`` is handed to the converter; without it the converter's own default holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from disk import evict, files_of, machine, read_all, require_room, resident_share, sync_files, weight_bytes
from synthetic import LLAMA_405B, Shape, shape_of_size, write_checkpoint

CACHES = ("warm", "cold")
SHARD_BYTES = 10**9
SPARSE_SHARD_BYTES = 5 * 10**9
MAX_SPARSE_OUTPUT = 10 * 10**9
MEASURED = Path(__file__).with_name("measured.py")
Sample = dict[str, Any]


@dataclass
class Bench:
    """A scratch directory, options of the converter, and notes for the reader of the tables."""

    scratch: Path
    convert_options: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        """Where each output is made."""
        return self.scratch / "out"

    def note(self, text: str) -> None:
        """Print a note once, now and under the table."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"note: {text}", file=sys.stderr, flush=True)

    def checkpoint(self, shape: Shape, name: str, **how: Any) -> Path:
        """Make a source."""
        source = self.scratch / name
        tell(f"making {source.name}: {shape.num_bytes / 1e9:.2f} GB, {describe(shape)}")
        write_checkpoint(shape, source, **how)
        return source

    def clear(self) -> None:
        """Remove the last output and wait for the disk, so that nobody pays for it."""
        shutil.rmtree(self.out, ignore_errors=True)
        os.sync()

    def convert(self, source: Path, tp: int, *options: str, tell_cached: bool = False) -> Sample:
        """Convert without the numerical check, which does not belong to writing."""
        arguments = [
            str(source),
            str(self.out),
            "--tp",
            str(tp),
            "--no-check",
            *self.convert_options,
            *options,
        ]
        return self._child("convert", ["--cached"] * tell_cached + arguments)

    def naive(self, source: Path, tp: int) -> Sample:
        """Slice and save, rank by rank."""
        return self._child("naive", [str(source), str(self.out), str(tp)])

    def _child(self, kind: str, arguments: list[str]) -> Sample:
        command = [sys.executable, str(MEASURED), kind, *arguments]
        start = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            reason = (done.stderr.strip() or "no output").splitlines()[-1]
            raise SystemExit(f"error: {kind} failed: {reason.removeprefix('error: ')}")
        result: Sample = json.loads(done.stdout.splitlines()[-1])
        if not result["peak_was_reset"]:
            self.note(
                "/proc/self/clear_refs cannot be written: peaks are of the whole process, an upper bound"
            )
        if result["has_children"]:
            self.note(f"{kind} started processes of its own, whose memory is not in the peak")
        return {**result, "process_s": seconds, "sync_s": sync_files(self.out)}


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe(shape: Shape) -> str:
    return (
        f"hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.heads} heads, "
        f"{shape.kv_heads} kv heads, vocab {shape.vocab}, {shape.layers} layers"
    )


def copy(source: Path, out: Path) -> Sample:
    """``cp -r``, and then the files synced."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    return {"cp_s": time.perf_counter() - start, "sync_s": sync_files(out)}


def prepare(bench: Bench, source: Path, cache: str) -> None:
    """Nothing left of the run before, and the source in the page cache or out of it."""
    bench.clear()
    files = sorted(source.glob("*.safetensors"))
    (read_all if cache == "warm" else evict)(files)
    share = resident_share(files)
    if cache == "warm" and share < 0.99:
        bench.note("less than 99% of the source stayed in the page cache: warm is not warm, memory is short")
    if cache == "cold" and share > 0.01:
        bench.note("eviction does not work here, more than 1% of the source stayed cached: cold is not cold")


def compare(
    bench: Bench, source: Path, tps: Sequence[int], runs: int, naive_runs: int
) -> dict[tuple[int, str], list[Sample]]:
    """A sample of each run for each tp and state of the cache; who goes first changes from run to run."""
    samples: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    for run in range(runs):
        for tp, cache in ((tp, cache) for tp in tps for cache in CACHES):
            tools = _tools(bench, source, tp, with_naive=run < naive_runs)
            sample: Sample = {}
            for name in sorted(tools, reverse=run % 2 == 1):
                prepare(bench, source, cache)
                sample[name] = tools[name]()
            samples[tp, cache].append(sample)
            _check_cold(bench, cache, sample["convert"]["cached_share"])
            _tell_sample(f"run {run + 1}, tp {tp}, {cache}", sample)
    bench.clear()
    return samples


def _tools(bench: Bench, source: Path, tp: int, *, with_naive: bool) -> dict[str, Callable[[], Sample]]:
    naive: dict[str, Callable[[], Sample]] = {"naive": lambda: bench.naive(source, tp)}
    return {
        "cp": lambda: copy(source, bench.out),
        "convert": lambda: _full_conversion(bench, source, tp),
        **(naive if with_naive else {}),
    }


def _full_conversion(bench: Bench, source: Path, tp: int) -> Sample:
    sample = bench.convert(source, tp, tell_cached=True)
    written, wanted = weight_bytes(bench.out), weight_bytes(source)
    if written < wanted * 0.999:  # the headers differ
        raise SystemExit(f"error: convert wrote {written} bytes of {wanted}; its time means nothing")
    return {**sample, "written": written}


def _check_cold(bench: Bench, cache: str, cached_share: float) -> None:
    if cache == "cold" and cached_share > 0.05:
        bench.note(
            "more than 5% of the cold source had been read when the write phase began: its cold times "
            "leave that out"
        )


def _tell_sample(label: str, sample: Sample) -> None:
    cp, converted = sample["cp"], sample["convert"]
    text = (
        f"{label}: cp {cp['cp_s']:.2f} s + sync {cp['sync_s']:.2f} s; "
        f"write phase {converted['phase_s']:.2f} s + sync {converted['sync_s']:.2f} s, "
        f"whole process {converted['process_s']:.2f} s, "
        f"peak {converted['peak_above'] / 1e6:.0f} MB above start"
    )
    if "naive" in sample:
        text += f"; naive {sample['naive']['phase_s']:.2f} s, {sample['naive']['peak_above'] / 1e6:.0f} MB"
    tell(text)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, with the lowest and the highest where there is more than one value."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) < 2 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def comparison_row(tp: int, cache: str, samples: Sequence[Sample]) -> dict[str, str]:
    """One line of the table."""
    cps = [s["cp"] for s in samples]
    converted = [s["convert"] for s in samples]
    naive = [s["naive"] for s in samples if "naive" in s]
    cp, synced = [s["cp_s"] for s in cps], [s["cp_s"] + s["sync_s"] for s in cps]
    phase, durable = [s["phase_s"] for s in converted], [s["phase_s"] + s["sync_s"] for s in converted]
    return {
        "GB": f"{converted[0]['written'] / 1e9:.2f}",
        "tp": str(tp),
        "cache": cache,
        "cp, s": spread(cp),
        "cp + sync, s": spread(synced),
        "write phase, s": spread(phase),
        "write phase + sync, s": spread(durable),
        "ratio to cp": spread([a / b for a, b in zip(phase, cp, strict=True)]),
        "ratio to cp, both + sync": spread([a / b for a, b in zip(durable, synced, strict=True)]),
        "whole process, s": spread([s["process_s"] for s in converted]),
        "naive, s": spread([s["phase_s"] for s in naive]) if naive else "",
        "peak above start, MB": spread([s["peak_above"] / 1e6 for s in converted], 0),
        "naive: peak above start, MB": spread([s["peak_above"] / 1e6 for s in naive], 0) if naive else "",
    }


def memory_row(source: str, tp: int, sample: Sample) -> dict[str, str]:
    """One line about one conversion."""
    return {
        "source": source,
        "tp": str(tp),
        "whole process, s": f"{sample['process_s']:.1f}",
        "write phase, s": f"{sample['phase_s']:.1f}",
        "RSS at start of the write phase, MB": f"{sample['rss_before'] / 1e6:.0f}",
        "peak in it, MB": f"{sample['peak'] / 1e6:.0f}",
        "peak above start, MB": f"{sample['peak_above'] / 1e6:.0f}",
        "peak of the process, MB": f"{sample['process_peak'] / 1e6:.0f}",
    }


def speed_table(bench: Bench, options: argparse.Namespace) -> list[dict[str, str]]:
    """Time and memory against ``cp`` and the naive way."""
    shape = shape_of_size(options.gigabytes * 1e9)
    require_room(bench.scratch, 2.1 * shape.num_bytes)
    source = bench.checkpoint(shape, "source", shard_bytes=SHARD_BYTES)
    bench.note(f"source: llama, bfloat16, {describe(shape)}")
    samples = compare(bench, source, options.tp, options.runs, options.naive_runs)
    return [comparison_row(tp, cache, group) for (tp, cache), group in samples.items()]


def memory_table(bench: Bench, options: argparse.Namespace) -> list[dict[str, str]]:
    """Whether the peak grows with the source."""
    rows = []
    shapes = [shape_of_size(size * 1e9) for size in options.sizes]
    require_room(bench.scratch, 2.1 * max(shape.num_bytes for shape in shapes))
    for shape in shapes:
        size = f"{shape.num_bytes / 1e9:.2f} GB"
        source = bench.checkpoint(shape, "source", shard_bytes=SHARD_BYTES)
        bench.note(f"{size}: {describe(shape)}")
        for tp in options.tp:
            bench.clear()
            sample = _full_conversion(bench, source, tp)
            rows.append(memory_row(size, tp, sample))
            tell(str(rows[-1]))
        shutil.rmtree(source)
    bench.clear()
    return rows


def sparse_table(bench: Bench, options: argparse.Namespace) -> list[dict[str, str]]:
    """A very large source, of holes, planned and converted for one rank."""
    shape = shape_of_size(options.sparse * 1e9, (LLAMA_405B,))
    tp, rank = options.sparse_tp, options.rank
    expected = 1.2 * shape.num_bytes / tp  # more than its part, for replicated tensors
    if expected > MAX_SPARSE_OUTPUT:
        raise SystemExit(f"error: a rank of {tp} is {expected / 1e9:.1f} GB; raise --sparse-tp")
    require_room(bench.scratch, expected)
    source = bench.checkpoint(shape, "sparse", shard_bytes=SPARSE_SHARD_BYTES, sparse=True)
    bench.clear()  # blocks are allocated when the disk is synced
    on_disk = sum(path.stat().st_blocks * 512 for path in files_of(source))
    bench.note(f"source: {on_disk / 1e6:.1f} MB on the disk, holes for the rest; {describe(shape)}")
    sample = bench.convert(source, tp, "--ranks", str(rank))
    stages = ", ".join(f"{name.split(':')[0]} {seconds:.2f} s" for name, seconds in sample["stages"])
    bench.note(f"stages: {stages.replace(f'{bench.scratch}/', '')}")
    row = memory_row(f"{shape.num_bytes / 1e9:.1f} GB", tp, sample)
    return [{**row, "rank": str(rank), "written, GB": f"{weight_bytes(bench.out) / 1e9:.2f}"}]


def render(rows: Sequence[dict[str, str]], notes: Iterable[str]) -> str:
    """A Markdown table with the notes below."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row[column] for column in columns) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def show(text: str, markdown: Path | None) -> None:
    """Print the tables of a benchmark, and write them to a file if one was named."""
    print(text)
    if markdown:
        markdown.write_text(text + "\n")


def versions(*names: str) -> str:
    """The installed versions of Python and of packages."""
    found = (f"{name} {version(name)}" for name in names)
    return f"CPython {sys.version.split()[0]}, {', '.join(found)}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the source (default 4)")
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--naive-runs", type=int, default=1, help="of the naive way (default 1)")
    parser.add_argument("--memory", help="the converter's buffer budget, as 512MiB")
    parser.add_argument(
        "--directory", type=Path, help="on the disk to measure (default: that of temporary files)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    parser.add_argument("--memory-only", action="store_true", help="peak memory for several sizes")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16], help="GB, for --memory-only")
    parser.add_argument("--sparse", type=float, nargs="?", const=400, metavar="GB", help="one rank of holes")
    parser.add_argument("--sparse-tp", type=int, default=64)
    parser.add_argument("--rank", type=int, default=3, help="which one, for --sparse")
    options = parser.parse_args()
    if options.memory_only and options.sparse is not None:
        parser.error("--memory-only and --sparse are two modes; give one")
    if options.runs < 1:
        parser.error("--runs must be 1 or more")
    return options


def main() -> None:
    options = parse_arguments()
    table = speed_table
    if options.memory_only or options.sparse is not None:
        table = memory_table if options.memory_only else sparse_table
    with tempfile.TemporaryDirectory(prefix="shardconv-", dir=options.directory) as scratch:
        bench = Bench(Path(scratch), ["--memory", options.memory] if options.memory else [])
        bench.note(machine(bench.scratch))
        bench.note(f"budget of the converter: {options.memory or 'its default'}")
        show(render(table(bench, options), bench.notes), options.markdown)


if __name__ == "__main__":
    main()
