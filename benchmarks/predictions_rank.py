"""One rank of ``predictions.py``: times of a prefill and of tokens, of models with random weights.

predictions_rank.py PROCESSES RESULT          the place among the others comes from RANK
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from lone_rank import lone_rank
from predictions import BATCHES, DTYPE, PROMPT, SHAPES
from shardconv_runtime.comm.collectives import ProcessCommunicator
from shardconv_runtime.format.plan import Plan

TOKENS = 20
PREFILLS = 3


def shortest(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds of the shortest call, and of its thread alone, of the slowest rank each."""
    best, alone = float("inf"), float("inf")
    for _ in range(repeats):
        dist.barrier()
        start, thread_start = time.perf_counter(), time.thread_time()
        call()
        spent = (time.perf_counter() - start, time.thread_time() - thread_start)
        seconds = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        best, alone = min(best, float(seconds[0])), min(alone, float(seconds[1]))
    return best, alone


def main() -> None:
    """Measure all sizes and batches with one number of ranks."""
    count, result, rank = int(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)

    def connect(plan: Plan) -> ProcessCommunicator:
        axes = tuple(range(len(plan.mesh)))
        assert len(axes) < 2, "the ranks are one group"
        return ProcessCommunicator(rank, plan.mesh, {axes: dist.group.WORLD} if axes else {})

    rows: dict[str, tuple[float, float]] = {}
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as directory:
            model = lone_rank(
                shape, count, Path(directory), connect, torch.device("cpu"), DTYPE, fuse=False, rank=rank
            )
        for batch in BATCHES:
            ids = torch.randint(shape.vocab, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                # For the logits of last tokens alone, torch multiplies a view of a batch, which is slow.
                forward = partial(model, ids, use_cache=False)
                rows[f"{name} {batch} forward"] = shortest(forward, PREFILLS)
                cache = transformers.DynamicCache(config=model.config)
                model(ids, past_key_values=cache, use_cache=True)
                token = partial(model, ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                rows[f"{name} {batch} token"] = shortest(token, TOKENS)
        del model
    if rank == 0:
        result.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
