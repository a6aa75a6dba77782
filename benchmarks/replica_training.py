#!/usr/bin/env python3
"""Training steps of tensor parallelism times FSDP2, beside transformers' own, in the same processes.

A llama is made and converted, and takes steps on a mesh of tp 2 x dp 2: forward, backward, clipping, AdamW.
The variants take turns in an order that changes from round to round. Each replica has its own batch.

- *A step* is the time of the slowest process; *tokens/s* counts the tokens of all replicas.
- *Sent* is the bytes that all processes send in a step, as the loopback interface counts them.
- *Peak* is the resident memory of a step above its start, in the process where it is largest.
- *Losses* are those of the last step, which the variants take with the same data.

    python benchmarks/replica_training.py [--layers 8] [--tokens 256] [--rounds 10] [--markdown FILE]
    python benchmarks/replica_training.py --small        to see that everything comes out
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from convert import describe, render, show, spread, tell
from disk import machine
from inference import SAVE
from measured import Phase
from synthetic import Shape
from torch import Tensor

SHAPE = Shape(hidden=512, intermediate=1536, heads=8, kv_heads=4, vocab=8000, layers=8)
TP, DP = 2, 2
MAX_NORM = 1.0
OURS = {"shardconv": False, "shardconv, sequence parallel": True}
"""Variants, and whether they shard the sequence."""
THEIRS = "transformers, FSDP2 x TP"


class Subject:
    """A model on the mesh, and the steps that it takes."""

    def __init__(self, model: Any, clip: Callable[[Any], object]) -> None:
        self.model = model.train()
        self.clip = clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, ids: Tensor) -> float:
        """Take one step on the replica's batch ``[B, S]``; return its loss."""
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.clip(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def load_ours(converted: Path, sequence_parallel: bool) -> Subject:
    import shardconv_runtime
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    model = shardconv_runtime.load(
        converted, mesh=mesh, training=True, sequence_parallel=sequence_parallel, data_parallel=True
    )
    return Subject(model, lambda model: shardconv_runtime.clip_grad_norm(model, MAX_NORM))


def load_theirs(source: Path) -> Subject:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=TP, fsdp_size=DP)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, distributed_config=config
    )
    return Subject(model, clip_on_each_mesh)


def clip_on_each_mesh(model: Any) -> None:
    """Clip gradients of DTensors on different meshes, which ``torch.nn.utils.clip_grad_norm_`` refuses."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in found]).full_tensor() for found in by_mesh.values()
    ]
    for found in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(found, MAX_NORM, torch.stack(norms).norm())


def sent_bytes() -> int:
    """Return the bytes that this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def run_rank(options: argparse.Namespace) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    subjects: dict[str, Subject] = {
        name: load_ours(options.scratch / "out", sequence) for name, sequence in OURS.items()
    }
    found: dict[str, dict[str, Any]] = {}
    try:
        subjects[THEIRS] = load_theirs(options.scratch / "model")
    except Exception as error:  # the same on all ranks: it loads without messages
        found[THEIRS] = {"error": f"{type(error).__name__}: {error}"[:200]}
    for name in subjects:
        found[name] = {"seconds": [], "sent": 0, "peak": 0, "loss": 0.0}
    vocab = json.loads((options.scratch / "model" / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(rank // TP)
    for number in range(options.rounds + 1):  # the first one warms up
        ids = torch.randint(vocab, (options.batch, options.tokens), generator=generator)
        for name in sorted(subjects, reverse=number % 2 == 1):
            gc.collect()
            before = sent_bytes()
            dist.barrier()
            phase = Phase.begin()
            loss = subjects[name].step(ids)
            step = phase.end()
            dist.barrier()
            row = found[name]
            row["sent"], row["loss"] = sent_bytes() - before, loss
            if number:
                row["seconds"].append(step["phase_s"])
                row["peak"] = max(row["peak"], step["peak_above"])
            dist.barrier()
    (options.scratch / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(ranks: list[dict[str, dict[str, Any]]], num_tokens: int) -> list[dict[str, str]]:
    """A line for each variant; ratios compare neighbors in time."""

    def steps(name: str) -> list[float]:
        return [max(times) for times in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)]

    rows = []
    theirs = steps(THEIRS) if "error" not in ranks[0][THEIRS] else []
    for name in (*OURS, THEIRS):
        if "error" in ranks[0][name]:
            rows.append({**dict.fromkeys(rows[0], ""), "variant": name, "a step, s": ranks[0][name]["error"]})
            continue
        own = steps(name)
        ratios = [a / b for a, b in zip(own, theirs, strict=True)] if theirs else []
        losses = statistics.mean(rank[name]["loss"] for rank in ranks)
        rows.append({
            "variant": name,
            "a step, s": spread(own, 3),
            "ratio to transformers": spread(ratios, 3) if ratios else "",
            "tokens/s": f"{num_tokens / statistics.median(own):.0f}",
            "sent, MB": f"{max(rank[name]['sent'] for rank in ranks) / 1e6:.1f}",
            "peak, MB": f"{max(rank[name]['peak'] for rank in ranks) / 1e6:.0f}",
            "loss": f"{losses:.6f}",
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a replica (default 2)")
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence (default 256)")
    parser.add_argument("--rounds", type=int, default=10, help="that are timed (default 10)")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    shape = replace(SHAPE, layers=2 if options.small else options.layers)
    if options.small:
        options.tokens, options.rounds = 32, 2
    with tempfile.TemporaryDirectory(prefix="shardconv-") as scratch:
        source, out = Path(scratch) / "model", Path(scratch) / "out"
        tell(f"making a float32 model: {describe(shape)}")
        subprocess.run([sys.executable, "-c", SAVE, json.dumps(shape.config()), str(source)], check=True)
        command = [sys.executable, "-m", "shardconv", "convert", str(source), "--tp", str(TP)]
        subprocess.run([*command, "--sequence-parallel", "--quiet", str(out)], check=True)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(TP * DP),
        ]
        command += [__file__, "--scratch", scratch]
        for name in ("batch", "tokens", "rounds"):
            command += [f"--{name}", str(getattr(options, name))]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, timeout=1800, stdout=sys.stderr)
        ranks = [json.loads((Path(scratch) / f"rank-{rank}.json").read_text()) for rank in range(TP * DP)]
        notes = [
            f"{machine(Path(scratch))}, torch {torch.__version__}, transformers {transformers.__version__}",
            f"llama, float32, {describe(shape)}; {options.batch} x {options.tokens} tokens for each of {DP} "
            "replicas, 1 thread each process",
        ]
    show(render(table(ranks, DP * options.batch * options.tokens), notes), options.markdown)


if __name__ == "__main__":
    main()
