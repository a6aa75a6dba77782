#!/usr/bin/env python3
"""Loading a converted model and computing with it, beside transformers and safetensors.

Three tables. **Start**: what a user waits for in a fresh process that has imported torch and the modules of
the model and has joined its group: the rest of the imports and the first load, then a second one; with and
without compiled modules on the disk, from a warm and a cold page cache, and beside busy processes.

**Loading**: a checkpoint of real shape is converted, and loaded in fresh processes, one for each
rank: by the runtime, by ``safetensors.torch.load_file`` (the same files of the same rank), by transformers'
``from_pretrained`` unsharded, and by the same with tensor parallelism. Loads are from a cold and from a warm
page cache, in an order that changes from round to round. Most of them map files, so that seconds are given
until the load returns and until a byte of every page was read, without imports and the start of the group.

**Steps**: prefill and decode on the CPU over gloo, of the runtime and of transformers' tensor parallelism, in
the same processes, alternately step by step; then of a model converted for one rank beside the unsharded
one. Every number is a median, with the lowest and the highest in brackets; ratios compare neighbors in time.

    python benchmarks/inference.py [--gigabytes 3.5] [--tp 2 4] [--rounds 3] [--markdown FILE]
    python benchmarks/inference.py --small        to see that everything comes out
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert import CACHES, SHARD_BYTES, describe, render, show, spread, tell, versions
from disk import evict, machine, read_all, require_room, resident_share
from ports import free_port
from synthetic import Shape, shape_of_size, write_checkpoint

RANK = Path(__file__).with_name("inference_rank.py")
STEPS_SHAPE = Shape(hidden=1024, intermediate=4096, heads=16, kv_heads=8, vocab=32000, layers=20)
SMALL_SHAPE = Shape(hidden=256, intermediate=1024, heads=8, kv_heads=4, vocab=4000, layers=4)
VARIANTS = {
    "shardconv": "shardconv_runtime.load",
    "plan": "shardconv_runtime.load by a plan, not converted",
    "safetensors": "safetensors load_file",
    "unsharded": "from_pretrained, unsharded",
    "tensor parallel": "from_pretrained, tensor parallelism",
}
STARTED = ("shardconv", "tensor parallel")
START_SHAPES = {
    "wide": Shape(hidden=2048, intermediate=7168, heads=16, kv_heads=8, vocab=32000, layers=14),
    "deep": Shape(hidden=256, intermediate=512, heads=8, kv_heads=4, vocab=1024, layers=126),
}
START_CONDITIONS = {
    "warm": {},
    "cold": {"cache": "cold"},
    "warm, no compiled modules": {"compiled": False},
    "warm, beside 1 busy process": {"busy": 1},
    "warm, beside 2 busy processes": {"busy": 2},
}
"""Of the files of weights, of Python's modules and of the processors; see ``_started``."""
TIME_LIMIT_S = 1200
Sample = dict[str, Any]


@dataclass
class Bench:
    """A scratch directory, and notes for the reader of the tables."""

    scratch: Path
    threads: int
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Print a note once, now and under the table."""
        if text not in self.notes:
            self.notes.append(text)
            tell(f"note: {text}")

    def convert(self, source: Path, tp: int) -> Path:
        """The converted directory, synced to disk; without the numerical check."""
        out = source.with_name(f"{source.name}-tp{tp}")
        if not out.exists():
            command = [sys.executable, "-m", "shardconv", "convert", str(source), "--tp", str(tp), str(out)]
            done = subprocess.run(
                [*command, "--no-check", "--quiet"], capture_output=True, text=True, env=_environment()
            )
            if done.returncode:
                raise SystemExit(f"error: convert failed: {_last_line(done.stderr)}")
            os.sync()
        return out

    def ranks(
        self, tp: int, *arguments: str, result: int, env: Mapping[str, str] | None = None
    ) -> list[Sample]:
        """The measurements of each rank, which it writes to argument number ``result``."""
        port = free_port()
        files = [self.scratch / f"result-{rank}.json" for rank in range(tp)]
        children = []
        for rank, file in enumerate(files):
            file.unlink(missing_ok=True)
            command = [sys.executable, str(RANK), *arguments[:result], str(file), *arguments[result:]]
            variables = {
                **_rank_variables(rank, tp, port),
                "OMP_NUM_THREADS": str(self.threads),
                **(env or {}),
            }
            with file.with_suffix(".txt").open("w") as errors:
                children.append(subprocess.Popen(command, stderr=errors, env=_environment() | variables))
        self._wait(children, files)
        return [json.loads(file.read_text()) for file in files]

    def _wait(self, children: Sequence[subprocess.Popen[bytes]], files: Sequence[Path]) -> None:
        deadline = time.monotonic() + TIME_LIMIT_S
        try:
            for rank, (child, file) in enumerate(zip(children, files, strict=True)):
                if child.wait(max(1, deadline - time.monotonic())):
                    why = _last_line(file.with_suffix(".txt").read_text())
                    raise SystemExit(f"error: rank {rank} failed: {why}")
        except subprocess.TimeoutExpired:
            raise SystemExit(f"error: not done after {TIME_LIMIT_S} s") from None
        finally:
            for child in children:
                child.kill()
                child.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _rank_variables(rank: int, tp: int, port: int) -> dict[str, str]:
    """As torchrun sets it; a process alone has none."""
    if tp == 1:
        return {}
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": tp, "LOCAL_WORLD_SIZE": tp, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in names.items()}, "MASTER_ADDR": "127.0.0.1"}


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


# ------------------------------------------------------------------------------------------------ start


def start_table(bench: Bench, options: argparse.Namespace) -> list[dict[str, str]]:
    """The first and the second load of a process, beside the tensor parallelism of transformers."""
    shapes = {"small": SMALL_SHAPE} if options.small else START_SHAPES
    rows = []
    for tp, (name, shape) in itertools.product(options.tp, shapes.items()):
        source = _saved(shape, bench.scratch / name)
        bench.note(f"{name}: llama, float32, {2 * shape.num_bytes / 1e9:.2f} GB, {describe(shape)}")
        directories = dict(zip(STARTED, (bench.convert(source, tp), source), strict=True))
        for condition, how in START_CONDITIONS.items():
            samples: dict[str, list[Sample]] = defaultdict(list)
            for number in range(options.rounds):
                for variant in sorted(STARTED, reverse=number % 2 == 1):
                    sample = _started(bench, variant, directories[variant], tp, **how)
                    samples[variant].append(sample)
                    tell(f"{name}, tp {tp}, {condition}: {variant} {sample['first_s']:.2f} s")
            rows += [_start_row(name, tp, condition, variant, samples) for variant in STARTED]
        for directory in directories.values():
            shutil.rmtree(directory)
    return rows


def _started(
    bench: Bench,
    variant: str,
    directory: Path,
    tp: int,
    *,
    cache: str = "warm",
    compiled: bool = True,
    busy: int = 0,
) -> Sample:
    """One launch; seconds are those of the slowest rank.

    Args:
        cache: whether the files of weights are in the page cache, warm or cold.
        compiled: whether Python finds its modules compiled; if not, it compiles all of them, in each process.
        busy: how many processes compute beside the ranks.
    """
    files = sorted(directory.rglob("*.safetensors"))
    (read_all if cache == "warm" else evict)(files)
    env = (
        {}
        if compiled
        else {"PYTHONPYCACHEPREFIX": str(bench.scratch / "nothing"), "PYTHONDONTWRITEBYTECODE": "1"}
    )
    neighbors = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        found = bench.ranks(tp, "start", variant, str(directory), result=3, env=env)
    finally:
        for neighbor in neighbors:
            neighbor.kill()
            neighbor.wait()
    return {name: max(sample[name] for sample in found) for name in found[0]}


def _start_row(
    model: str, tp: int, condition: str, variant: str, samples: Mapping[str, Sequence[Sample]]
) -> dict[str, str]:
    own, theirs = samples[variant], samples["tensor parallel"]
    firsts = [a["first_s"] / b["first_s"] for a, b in zip(own, theirs, strict=True)]
    seconds = [a["second_s"] / b["second_s"] for a, b in zip(own, theirs, strict=True)]
    return {
        "model": model,
        "tp": str(tp),
        "condition": condition,
        "loader": VARIANTS[variant],
        "first load, s": spread([sample["first_s"] for sample in own], 3),
        "ratio": spread(firsts) if variant == "shardconv" else "",
        "second load, s": spread([sample["second_s"] for sample in own], 3),
        "ratio of the second": spread(seconds) if variant == "shardconv" else "",
    }


# ---------------------------------------------------------------------------------------------- loading


def load_table(bench: Bench, options: argparse.Namespace) -> list[dict[str, str]]:
    """The time in which a rank gets its weights, and the bytes read for it."""
    shape = shape_of_size(options.gigabytes * 1e9)
    require_room(bench.scratch, (1.1 + 1.1 * len(options.tp)) * shape.num_bytes)
    source = bench.scratch / "load"
    tell(f"making a checkpoint of {shape.num_bytes / 1e9:.2f} GB: {describe(shape)}")
    write_checkpoint(shape, source, shard_bytes=SHARD_BYTES)
    bench.note(f"loading: llama, bfloat16, {shape.num_bytes / 1e9:.2f} GB, {describe(shape)}")
    converted = {tp: bench.convert(source, tp) for tp in options.tp}
    samples: dict[tuple[int, str, str], list[Sample]] = defaultdict(list)
    for number in range(options.rounds):
        for tp, cache in ((tp, cache) for tp in options.tp for cache in CACHES):
            for variant in sorted(VARIANTS, reverse=number % 2 == 1):
                ranks = 1 if variant == "unsharded" else tp
                sample = _load(bench, variant, source, converted[tp], ranks, cache)
                samples[tp, cache, variant].append(sample)
                tell(f"round {number + 1}, tp {tp}, {cache}: {variant} {sample['touched_s']:.2f} s")
    shutil.rmtree(source)
    for directory in converted.values():
        shutil.rmtree(directory)
    order = list(VARIANTS)
    keys = sorted(samples, key=lambda key: (key[:2], order.index(key[2])))
    return [_load_row(key, samples[key], samples[*key[:2], "safetensors"]) for key in keys]


def _load(bench: Bench, variant: str, source: Path, converted: Path, ranks: int, cache: str) -> Sample:
    """One launch; seconds are those of the slowest rank."""
    directory = converted if variant in ("shardconv", "safetensors") else source
    files = sorted(directory.rglob("*.safetensors"))
    (read_all if cache == "warm" else evict)(files)
    if cache == "warm" and resident_share(files) < 0.99:
        bench.note("less than 99% of the files stayed in the page cache: warm is not warm, memory is short")
    plan = ("--plan", str(converted / "plan.json")) if variant == "plan" else ()
    found = bench.ranks(ranks, "load", variant, str(directory), *plan, result=3)
    if cache == "cold" and max(sample["cached_share"] for sample in found) > 0.01:
        bench.note("more than 1% of the files was cached when a cold load began: cold is not cold")
    if late := sorted({name for sample in found for name in sample["imported"]}):
        bench.note(f"{VARIANTS[variant]} imported {len(late)} more modules while it loaded, {late[0]} first")
    slowest = max(found, key=lambda sample: sample["touched_s"])
    return {
        **slowest,
        "returned_s": max(sample["returned_s"] for sample in found),
        "read_bytes": max(sample["read_bytes"] for sample in found),
        "all_read_bytes": sum(sample["read_bytes"] for sample in found),
    }


def _load_row(
    key: tuple[int, str, str], samples: Sequence[Sample], floor: Sequence[Sample]
) -> dict[str, str]:
    tp, cache, variant = key
    ratios = [a["touched_s"] / b["touched_s"] for a, b in zip(samples, floor, strict=True)]
    own = variant in ("shardconv", "plan")
    cold = cache == "cold"
    return {
        "tp": "1" if variant == "unsharded" else str(tp),
        "cache": cache,
        "loader": VARIANTS[variant],
        "returns, s": spread([s["returned_s"] for s in samples], 3),
        "of that reading, s": spread([s["reading_s"] for s in samples], 3) if own else "",
        "every page touched, s": spread([s["touched_s"] for s in samples], 3),
        "ratio to safetensors": spread(ratios),
        "tensors of a rank, GB": f"{samples[0]['touched_bytes'] / 1e9:.2f}",
        "files opened, GB": f"{samples[0]['file_bytes'] / 1e9:.2f}",
        "read from disk by a rank, GB": spread([s["read_bytes"] / 1e9 for s in samples]) if cold else "",
        "by all ranks, GB": spread([s["all_read_bytes"] / 1e9 for s in samples]) if cold else "",
        "by calls of read, GB": spread([s["rchar"] / 1e9 for s in samples]),
    }


# ------------------------------------------------------------------------------------------------ steps


def steps_table(bench: Bench, options: argparse.Namespace) -> list[dict[str, str]]:
    """Prefill and decode: two ranks beside transformers' own two, one rank beside the unsharded model."""
    shape = SMALL_SHAPE if options.small else STEPS_SHAPE
    shape = replace(shape, layers=options.layers or shape.layers)
    source = _saved(shape, bench.scratch / "steps")
    bench.note(
        f"steps: llama, float32, {shape.num_bytes / 2e9:.2f} billion parameters, {describe(shape)}; prompt "
        f"of {options.prompt} tokens, {options.tokens} decoded, batch 1, {bench.threads} thread(s) each rank"
    )
    rows = []
    for tp in options.steps_tp:
        converted = bench.convert(source, tp)
        _read_alike([source, converted])
        told = ["steps", str(converted), str(source), "--modes", *options.modes]
        for name in ("prompt", "prefills", "tokens", "threads"):
            told += [f"--{name}", str(getattr(options, name))]
        found = bench.ranks(tp, *told, result=3)[0]  # the ranks wait for each other: rank 0's times count
        rows += [_step_row(tp, name, cell) for name, cell in found.items()]
    return rows


def _read_alike(directories: Sequence[Path]) -> None:
    """Drop files from the page cache and read them again.

    What was just written is there in pieces as it was written. Some kernels map large ones with fewer page
    tables, so that the products of the same matrix take some percent less or more.
    """
    files = [path for directory in directories for path in directory.rglob("*.safetensors")]
    evict(files)
    read_all(files)


SAVE = """
import json, sys, torch, transformers
transformers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
fields = json.loads(sys.argv[1])
fields["torch_dtype"] = "float32"
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).float()
model.save_pretrained(sys.argv[2])
"""


def _saved(shape: Shape, path: Path) -> Path:
    """A float32 model of random weights."""
    tell(f"making a float32 model: {describe(shape)}")
    subprocess.run([sys.executable, "-c", SAVE, json.dumps(shape.config()), str(path)], check=True)
    return path


def _step_row(tp: int, name: str, cell: Sample) -> dict[str, str]:
    ours, theirs = cell["shardconv"], cell["transformers"]
    both = isinstance(ours, list) and isinstance(theirs, list)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if both else []
    return {
        "tp": str(tp),
        "step": name,
        "beside": "transformers, tensor parallelism" if tp > 1 else "transformers, unsharded model",
        "shardconv, ms": _milliseconds(ours),
        "transformers, ms": _milliseconds(theirs),
        "ratio": spread(ratios, 3) if both else "",
        "95% of the median": _median_interval(ratios),
        "ahead": f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}" if both else "",
        "ratio of the fastest": f"{min(ours) / min(theirs):.3f}" if both else "",
        "warm-up, s": f"{cell['shardconv first_s']:.1f}, {cell['transformers first_s']:.1f}",
        "largest difference of logits": f"{cell['difference']:.0e}" if "difference" in cell else "",
    }


def _median_interval(ratios: Sequence[float]) -> str:
    """What holds the median of such ratios in 95 of 100 cases, whatever their distribution; empty for few.

    Two order statistics of the sample: that the median lies between the k-th from below and the k-th from
    above fails with twice the probability of fewer than k heads in as many throws of a coin.
    """
    ratios = sorted(ratios)
    outside, cut = 0.0, 0
    for heads in range(len(ratios) // 2):
        outside += math.comb(len(ratios), heads) / 2 ** len(ratios)
        if 2 * outside > 0.05:
            break
        cut = heads + 1
    return f"{ratios[cut - 1]:.3f} to {ratios[-cut]:.3f}" if cut else ""


def _milliseconds(values: Sequence[float] | str) -> str:
    """Of all steps; or why there are none."""
    return values if isinstance(values, str) else spread([1000 * value for value in values], 1)


# ------------------------------------------------------------------------------------------------- main

TABLES = {"start": start_table, "load": load_table, "steps": steps_table}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, help="of the checkpoint that is loaded (default 3.5)")
    parser.add_argument("--tp", type=int, nargs="+", default=[2], help="to load with (default 2)")
    parser.add_argument("--rounds", type=int, help="of loading (default 3)")
    parser.add_argument("--layers", type=int, help="of the model that takes steps (default 20)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--prefills", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=40, help="decoded (default 40)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default 1)")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument(
        "--steps-tp", type=int, nargs="+", default=[2, 1], help="ranks of steps (default 2 1)"
    )
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: temporary files)")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    if options.gigabytes is None:
        options.gigabytes = 0.4 if options.small else 3.5
    if options.rounds is None:
        options.rounds = 1 if options.small else 3
    return options


def _command(options: argparse.Namespace) -> str:
    """The command line without paths."""
    paths = {str(path) for path in (options.directory, options.markdown) if path}
    arguments = [text for text in sys.argv[1:] if text not in paths | {"--directory", "--markdown"}]
    return " ".join(["python", "benchmarks/inference.py", *arguments])


def main() -> None:
    options = parse_arguments()
    texts = []
    for name in options.tables:
        with tempfile.TemporaryDirectory(prefix="shardconv-", dir=options.directory) as scratch:
            bench = Bench(Path(scratch), options.threads)
            bench.note(f"`{_command(options)}`")
            bench.note(f"{machine(bench.scratch)}, {versions('torch', 'transformers', 'safetensors')}")
            start, load = time.monotonic(), os.getloadavg()[0]
            rows = TABLES[name](bench, options)
            bench.note(f"load of the machine {load:.1f} before; {time.monotonic() - start:.0f} s in all")
            texts.append(render(rows, bench.notes))
    text = "\n\n".join(texts)
    show(text, options.markdown)


if __name__ == "__main__":
    main()
