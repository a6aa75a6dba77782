"""Whether ranks generate the tokens that the unsharded model generates, from a plan solved on a prefill."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import parallelize, stored_tensors
from torch import Tensor

from shardconv.simulation.model_runs import Float64
from shardconv.simulation.random_weights import fill, local_weights
from shardconv.simulation.rank_threads import run_ranks

from .measure import random_weight
from .models import ZooModel

NEW_TOKENS = 6
CACHES = ("dynamic", "static")


def generates(plan: Plan, model: ZooModel, cache: str, seed: int = 11) -> str:
    """Greedy tokens of every rank against those of the unsharded model.

    Returns:
        ``same``, ``different: …``, or ``unsupported: …`` where the unsharded model itself cannot.
    """
    outcome = ""
    for dtype in (torch.float64, torch.float32):  # some code cannot compute in float64
        outcome = _generates(plan, model, cache, seed, dtype)
        if not outcome.startswith("unsupported"):
            break
    return outcome


def _generates(plan: Plan, model: ZooModel, cache: str, seed: int, dtype: torch.dtype) -> str:
    whole = build_model(model.model_class, copy.deepcopy(model.config), dtype)
    if not getattr(whole, "can_generate", lambda: False)():
        return "unsupported: the class has no generate"
    if hasattr(whole, "set_experts_implementation"):
        whole.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    entries = parameter_plans(plan)
    weights = {n: random_weight(t, generator) for n, t in stored_tensors(whole) if n in entries}
    try:
        want = _tokens(fill(copy.deepcopy(whole), weights).eval(), cache, dtype)
    except Exception as error:
        return f"unsupported: {type(error).__name__}: {' '.join(str(error).split())[:160]}"

    def rank(comm: Communicator) -> Tensor:
        local = parallelize(copy.deepcopy(whole), plan, comm)
        return _tokens(fill(local, local_weights(weights, plan, comm.rank)).eval(), cache, dtype)

    try:
        results = run_ranks(plan.mesh, rank)
    except Exception as error:
        return f"different: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "same" if all(torch.equal(got, want) for got in results) else "different: other tokens"


def _tokens(model: Any, cache: str, dtype: torch.dtype) -> Tensor:
    """Prompt and new tokens ``[2, S + T]`` of a batch with left padding."""
    ids = torch.tensor([[11, 245, 3, 77, 130, 9, 201], [0, 0, 0, 88, 5, 254, 19]])
    mask = (ids != 0).long()
    options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    with torch.inference_mode(), Float64() if dtype == torch.float64 else nullcontext():
        tokens: Tensor = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            disable_compile=True,
            **options,
        )
    return tokens
