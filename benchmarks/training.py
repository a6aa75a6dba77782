#!/usr/bin/env python3
"""Memory, communication and time of a training step, beside transformers' own tensor parallelism.

A llama is made and converted, and takes steps in processes of torchrun: gloo on the CPU, and nccl where
there is a GPU for each rank. Every variant is measured with and without activation checkpointing
(``gradient_checkpointing_enable``), and its gradients are compared with those of the unsharded float32
model. Two tables:

**Memory and time.** *Saved* is the memory that the forward pass keeps for the backward pass: distinct
storages other than those of parameters. *Peak above the weights* is of a full step, including gradients: as
CUDA counts it, on the CPU the storages that operators return, without their internal allocations. Times are
medians of rounds in which the variants alternate.

**Communication.** Calls and bytes of each collective, by rank and step. *Payload* is the full tensor:
summed, gathered, or before it is scattered. *On the wire* is the number of bytes that a rank sends in a ring:
``2 (p - 1) / p`` of the payload for all_reduce, ``(p - 1) / p`` for the others. *Expected* comes from the
shape of the model alone.

    python benchmarks/training.py [--tp 2] [--dtypes float32 bfloat16] [--markdown FILE] [--json FILE]
    python benchmarks/training.py --small        to see that everything comes out
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from convert import describe, render, show, spread, tell, versions
from disk import machine
from inference import SAVE
from observing import COLLECTIVES, total
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from synthetic import Shape
from training_rank import OURS, THEIRS, UNSHARDED, key

RANK = Path(__file__).with_name("training_rank.py")
SHAPE = Shape(hidden=512, intermediate=1536, heads=8, kv_heads=4, vocab=32768, layers=4)
SMALL_SHAPE = Shape(hidden=64, intermediate=160, heads=8, kv_heads=4, vocab=256, layers=2)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
STATISTICS_BYTES = 3 * 4
"""Of a token, exchanged by each rank for a loss of sharded logits."""
TIME_LIMIT_S = 3600
Sample = dict[str, Any]
Sent = Mapping[str, Mapping[str, Sequence[int]]]
"""Payload bytes of each call, by direction and collective."""


@dataclass(frozen=True)
class Job:
    """The settings of all rows of one launch."""

    device: str
    dtype: str
    tp: int
    shape: Shape
    num_tokens: int
    """Of the full batch."""


@dataclass
class Bench:
    """A scratch directory, the options, and notes for the reader of the tables."""

    scratch: Path
    options: argparse.Namespace
    notes: list[str] = field(default_factory=list)

    def launch(self, job: Job, kind: str, num_ranks: int, *arguments: str) -> list[dict[str, Sample]]:
        """The measurements of each rank."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_ranks), str(RANK), kind, str(self.scratch / "model")]
        command += [str(self.scratch), *arguments, "--device", job.device, "--dtype", job.dtype]
        for name in ("batch", "tokens", "rounds", "threads"):
            command += [f"--{name}", str(getattr(self.options, name))]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.options.threads)}
        subprocess.run(command, check=True, env=env, timeout=TIME_LIMIT_S, stdout=sys.stderr)
        return [json.loads((self.scratch / f"{kind}-{rank}.json").read_text()) for rank in range(num_ranks)]

    def convert(self, tp: int) -> Path:
        """The model for ``tp`` ranks, with the numerical check, which a loss of sharded logits requires."""
        out = self.scratch / f"tp{tp}"
        if not out.exists():
            command = [sys.executable, "-m", "shardconv", "convert", str(self.scratch / "model")]
            command += ["--tp", str(tp), "--sequence-parallel", "--quiet", str(out)]
            subprocess.run(command, check=True)
        return out


def without_parallel_loss(converted: Path) -> Path:
    """The same directory with a plan whose logits are gathered for the model's own loss."""
    out = converted.with_name(f"{converted.name}-gathered-logits")
    if out.exists():
        return out
    shutil.copytree(converted, out, copy_function=os.link)
    found = manifest.read(converted)
    plan = manifest.read_plan(converted, found)
    if plan.training is None or plan.mesh != (plan.tp,) or not plan.training.parallel_loss:
        raise SystemExit(f"error: the plan for tp {plan.tp} is not one of a single mesh axis, to be trained")
    text = plan_json.dumps(replace(plan, training=replace(plan.training, parallel_loss=False)))
    for name in (manifest.PLAN_NAME, manifest.MANIFEST_NAME):
        (out / name).unlink()  # it is the same file as that of the other directory
    (out / manifest.PLAN_NAME).write_text(text)
    manifest.write(replace(found, plan_sha256=plan_json.sha256(text)), out)
    return out


# ------------------------------------------------------------------------------------------------- theory


def expected(job: Job, name: str, recompute: bool) -> dict[str, dict[str, list[int]]]:
    """The bytes that a rank sends in a step, from the shape of the model alone.

    Activations pass 2 L + 1 times from a block that reduces (the embedding, then attention and MLP of each
    layer) to the one that needs the sum (attention and MLP of each layer, then the logits).

    Args:
        job: the model and its batch.
        name: of the variant.
        recompute: layers are computed again, up to the last tensor that is needed: not their last reduction.

    Returns:
        Payload bytes by direction and collective.
    """
    layers = job.shape.layers
    states = job.num_tokens * job.shape.hidden * DTYPE_BYTES[job.dtype]
    options = OURS.get(name, {})
    if options.get("parallel_loss"):
        logits = job.num_tokens * STATISTICS_BYTES * job.tp
    else:
        logits = job.num_tokens * job.shape.vocab * DTYPE_BYTES[job.dtype]
    each = [states] * (2 * layers + 1)
    again = [states] * (layers * recompute)
    regathered = [states] * (2 * layers * (not recompute and options.get("regather", False)))
    if options.get("sequence_parallel"):
        norms = [job.shape.hidden * 4] * len(each)  # gradients are summed in float32
        return {
            "forward": {"all_reduce": [], "all_gather": [*each, logits], "reduce_scatter": each},
            "backward": {
                "all_reduce": norms,
                "all_gather": [*each, *again, *again, *regathered],
                "reduce_scatter": [*each, *again],
            },
        }
    inputs = [states] * (5 * layers + 1) if name == THEIRS else each  # theirs: of each matrix by itself
    return {
        "forward": {"all_reduce": each, "all_gather": [logits], "reduce_scatter": []},
        "backward": {"all_reduce": [*inputs, *again], "all_gather": [], "reduce_scatter": []},
    }


# ------------------------------------------------------------------------------------------------- tables


def memory_row(job: Job, name: str, samples: Sequence[Sample], plain: Sample | None) -> dict[str, str]:
    """One line; of several ranks, the largest values."""
    first = samples[0]
    row = {"device": job.device, "dtype": job.dtype, "tp": str(len(samples)), "model": name}
    failed = first.get("error", "")
    rounds = [] if failed else list(zip(*(sample["seconds"] for sample in samples), strict=True))
    saved = math.nan if failed else max(sample["saved_bytes"] for sample in samples)
    return row | {
        "weights, MB": "" if failed else _mb(first["weight_bytes"]),
        "saved, MB": failed or _mb(saved),
        "ratio to plain": f"{saved / plain['saved_bytes']:.2f}" if plain and not failed else "",
        "peak above the weights, MB": "" if failed else _mb(max(sample["peak_bytes"] for sample in samples)),
        "a step, s": spread([max(times) for times in rounds]) if rounds else "",
        "difference of gradients": ""
        if failed
        else f"{max(sample['gradient_difference'] for sample in samples):.0e}",
    }


def traffic_rows(job: Job, name: str, recompute: bool, sent: Sent) -> list[dict[str, str]]:
    """A line for each direction."""
    theory = expected(job, name, recompute)
    rows = []
    for direction, sizes in sent.items():
        row = {"device": job.device, "dtype": job.dtype, "tp": str(job.tp), "model": key(name, recompute)}
        row["direction"] = direction
        for kind in COLLECTIVES:
            row[kind] = f"{len(sizes[kind])}: {_mb(sum(sizes[kind]))}" if sizes[kind] else ""
        row["on the wire, MB"] = _mb(total(sizes, job.tp))
        row["expected, MB"] = _mb(total(theory[direction], job.tp))
        row["differs by, bytes"] = f"{total(sizes, job.tp) - total(theory[direction], job.tp):.0f}"
        rows.append(row)
    return rows


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f}"


def measure(bench: Bench, job: Job) -> tuple[list[dict[str, str]], list[dict[str, str]], list[Sample]]:
    """Lines of both tables, and all measurements."""
    unsharded = bench.launch(job, "unsharded", 1)
    converted = bench.convert(job.tp)
    gathered = str(without_parallel_loss(converted))
    paths = ["--converted", str(converted), "--gathered-logits", gathered]
    found = bench.launch(job, "ranks", job.tp, *paths, "--variants", *bench.options.variants)
    memory, traffic, samples = [], [], []
    names = [(UNSHARDED, unsharded), *((name, found) for name in bench.options.variants)]
    for name, ranks in names:
        for recompute in (False, True):
            row = key(name, recompute)
            if row not in ranks[0]:
                continue  # it failed, and has a single row
            alike = [rank[row] for rank in ranks]
            memory.append(memory_row(job, row, alike, found[0].get("plain")))
            samples.append(
                {"device": job.device, "dtype": job.dtype, "tp": job.tp, "model": row, "ranks": alike}
            )
            if "error" in alike[0] or name == UNSHARDED:
                continue
            if any(other["sent"] != alike[0]["sent"] for other in alike):
                bench.notes.append(f"{row}: the ranks send different bytes, rank 0 is shown")
            traffic += traffic_rows(job, name, recompute, alike[0]["sent"])
            samples[-1]["expected"] = expected(job, name, recompute)
    return memory, traffic, samples


def absent(job: Job, rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A line without measurements."""
    known = {"device": job.device, "dtype": job.dtype, "tp": str(job.tp), "model": "no GPU was available"}
    return {column: known.get(column, "") for column in rows[0]}


# --------------------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[2])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPE_BYTES)
    parser.add_argument("--variants", nargs="+", default=[*OURS, THEIRS], choices=[*OURS, THEIRS])
    parser.add_argument("--layers", type=int, help="of the model (default 4)")
    parser.add_argument("--batch", type=int, default=2, help="sequences (default 2)")
    parser.add_argument("--tokens", type=int, help="of a sequence (default 1024)")
    parser.add_argument("--rounds", type=int, help="of steps that are timed (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default 1)")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--directory", type=Path, help="for the models (default: temporary files)")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    if options.tokens is None:
        options.tokens = 64 if options.small else 1024
    if options.rounds is None:
        options.rounds = 1 if options.small else 3
    return options


def main() -> None:
    options = parse_arguments()
    shape = SMALL_SHAPE if options.small else SHAPE
    shape = replace(shape, layers=options.layers or shape.layers)
    memory: list[dict[str, str]] = []
    traffic: list[dict[str, str]] = []
    samples: list[Sample] = []
    start, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shardconv-", dir=options.directory) as scratch:
        bench = Bench(Path(scratch), options)
        source = bench.scratch / "model"
        tell(f"making a float32 model: {describe(shape)}")
        subprocess.run([sys.executable, "-c", SAVE, json.dumps(shape.config()), str(source)], check=True)
        without_gpus = []
        for device in ("cpu", "cuda"):
            for dtype, tp in ((dtype, tp) for dtype in options.dtypes for tp in options.tp):
                job = Job(device, dtype, tp, shape, options.batch * options.tokens)
                if device == "cuda" and torch.cuda.device_count() < tp:
                    without_gpus.append(job)
                    continue
                lines = measure(bench, job)
                memory += lines[0]
                traffic += lines[1]
                samples += lines[2]
        bench.notes += [
            f"{machine(bench.scratch)}, {versions('torch', 'transformers')}",
            f"llama, {describe(shape)}; batch {options.batch} x {options.tokens} tokens, {options.threads} "
            "thread(s) each rank; collectives as calls: payload in MB, MB of 1e6 bytes",
            f"load of the machine {load:.1f} before; {time.monotonic() - start:.0f} s in all",
        ]
    memory += [absent(job, memory) for job in without_gpus]
    traffic += [absent(job, traffic) for job in without_gpus]
    text = "\n\n".join([render(memory, ()).rstrip(), render(traffic, bench.notes)])
    show(text, options.markdown)
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
