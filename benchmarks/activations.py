#!/usr/bin/env python3
"""Bytes that a layer keeps for its backward pass, on many ranks, which are threads of this process.

Models of two depths are planned, and their ranks run forward passes on random weights. The difference is what
a layer keeps: distinct storages that autograd saves, other than those of parameters, on rank 0.

    python benchmarks/activations.py [--tp 2 4 8] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from convert import describe, render, show
from observing import Saved
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.plan import Plan
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import stored_tensors
from shardconv_runtime.training.prepare import TrainingForm, parallelize_for_training
from synthetic import Shape

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan
from shardconv.simulation.random_weights import RandomWeights, fill
from shardconv.simulation.rank_threads import run_ranks

SHAPE = Shape(hidden=512, intermediate=1536, heads=8, kv_heads=8, vocab=1024)
DEPTHS = (2, 4)
TOKENS = 256
DTYPE = torch.bfloat16
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"sequence_parallel": False},
    "sequence parallel": {"sequence_parallel": True},
    "sequence parallel, gathered again": {"sequence_parallel": True, "regather": True},
}


@cache
def planned(tp: int, layers: int) -> Plan:
    """The plan of a model of this depth."""
    return solve_plan(_spec(layers), SolveOptions(tp, sequence_parallel=True, measure=False))


def _spec(layers: int) -> ModelSpec:
    config = transformers.LlamaConfig(**replace(SHAPE, layers=layers).config())
    return ModelSpec("llama", config, transformers.LlamaForCausalLM, "bfloat16")


def saved_bytes(tp: int, layers: int, form: dict[str, Any]) -> int:
    """What rank 0 keeps of a forward pass of one sequence with its loss."""
    plan, spec = planned(tp, layers), _spec(layers)
    full = build_model(spec.model_class, spec.config, DTYPE)
    weights = RandomWeights(plan)
    weights.unsharded(dict(stored_tensors(full)), DTYPE)
    ids = torch.randint(SHAPE.vocab, (1, TOKENS), generator=torch.Generator().manual_seed(0))

    def rank(comm: Communicator) -> int:
        model = parallelize_for_training(copy.deepcopy(full), plan, comm, TrainingForm(**form))
        fill(model, weights.local(comm.rank, DTYPE), gradients=True).train()
        saved = Saved([*model.parameters(), *model.buffers(), ids])
        with saved.watching():
            loss = model(ids, labels=ids, use_cache=False).loss
        del loss
        return saved.num_bytes

    return run_ranks(plan.mesh, rank)[0]


def row(tp: int, name: str) -> dict[str, str]:
    """One line."""
    few, many = (saved_bytes(tp, layers, FORMS[name]) for layers in DEPTHS)
    each = (many - few) / (DEPTHS[1] - DEPTHS[0])
    hidden_states = TOKENS * SHAPE.hidden * DTYPE.itemsize
    return {
        "tp": str(tp),
        "model": name,
        "a layer keeps, bytes of a token": f"{each / TOKENS:.0f}",
        "in hidden states": f"{each / hidden_states:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    rows = [row(tp, name) for tp in options.tp for name in FORMS]
    about = describe(replace(SHAPE, layers=DEPTHS[1]))
    note = f"llama, {about} ({DEPTHS[0]} beside them), bfloat16; {TOKENS} tokens"
    show(render(rows, [note]), options.markdown)


if __name__ == "__main__":
    main()
