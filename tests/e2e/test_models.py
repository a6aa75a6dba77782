"""Converted models in real processes: the logits, tokens and collectives that they must have.

Each type is converted for some ranks (numbers that divide nothing, or exceed the heads, too), loaded by as
many gloo processes and compared with the model that transformers loads from the same checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, EXPERT_TYPES, KV_HEADS, LAYERS, VOCAB, save_causal
from distributed import run_processes
from measured_models import NEW_TOKENS, Measured, measure_rank, measure_unsharded
from torch import Tensor

import shardconv

CASES = [
    ("gemma2", 2),  # windows, soft caps, norms behind the blocks
    ("olmo2", 2),  # norms over a sharded dim
    ("phi3", 2),  # fused matrices of segments
    ("bloom", 2),  # heads interleaved in one matrix, biases
    ("gpt2", 3),  # 8 heads and 256 rows: uneven shares
    ("mixtral", 3),  # shares of expert matrices that its kernel takes
    ("llama", 4, 2),  # 2 key/value heads: each on two ranks
]
OTHERS = [(model_type, tp) for model_type in CONFIGS for tp in (1, 2, 4) if (model_type, tp) not in CASES]
OTHERS += [("gemma2", 3), ("llama", 8)]
"""Types and numbers of ranks that show what others show above: these tests are slow ones."""
MANY_PER_LAYER = {"olmo2": 4}
"""All_reduces of a layer where they are not one for attention and one for the MLP: a norm across the heads
of the queries and one across those of the keys each add their statistic."""

COMPUTES_IN_FLOAT32 = ("olmo2",)
"""Float64 models whose sums over a sharded dim are float32 all the same."""


@dataclass(frozen=True)
class Case:
    """One type at one tp: what its ranks and the unsharded model measured."""

    model_type: str
    tp: int
    kv_heads: int
    unsharded: Measured
    ranks: list[Measured]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Measured]]:
    """Gives the checkpoint of a type, and what the unsharded model does."""

    @cache
    def make(model_type: str, kv_heads: int) -> tuple[Path, Measured]:
        changes = {} if kv_heads == KV_HEADS else {"num_key_value_heads": kv_heads}
        path = save_causal(model_type, tmp_path_factory.mktemp("checkpoint") / model_type, **changes)
        return path, measure_unsharded(path, model_type in EXPERT_TYPES)

    return make


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)],
    ids=lambda case: "-".join(map(str, case)),
)
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Callable[[str, int], tuple[Path, Measured]],
) -> Case:
    """Converts a type, and runs it."""
    model_type, tp, kv_heads = (*request.param, KV_HEADS)[:3]
    path, unsharded = checkpoint(model_type, kv_heads)
    out = tmp_path_factory.mktemp("converted") / "out"
    shardconv.convert(path, out, tp=tp, check=False)
    ranks = run_processes(tp, measure_rank, out, model_type in EXPERT_TYPES)
    return Case(model_type, tp, kv_heads, unsharded, ranks)


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert want.isfinite().all()
    return float((got - want).abs().max() / want.abs().max())


def test_logits_in_float64(case: Case) -> None:
    """Of the model as it is, and of the model with its own casts to float32 left out."""
    for rank in case.ranks:
        assert rank.double.dtype == rank.exact.dtype == torch.float64
        assert error(rank.double, case.unsharded.double) < (
            1e-6 if case.model_type in COMPUTES_IN_FLOAT32 else 1e-9
        )
        assert error(rank.exact, case.unsharded.exact) < 1e-9


def test_logits_in_float32(case: Case) -> None:
    for rank in case.ranks:
        assert rank.single.dtype == torch.float32
        assert error(rank.single, case.unsharded.single) < 1e-4


def test_greedy_tokens(case: Case) -> None:
    new = case.unsharded.greedy[:, -NEW_TOKENS:]
    assert len(new.unique()) > 4, "the tokens must depend on what came before"
    for rank in case.ranks:
        assert torch.equal(rank.greedy, case.unsharded.greedy)


def test_sampled_tokens(case: Case) -> None:
    """All ranks draw what rank 0 would have drawn alone."""
    assert not torch.equal(case.unsharded.sampled, case.unsharded.greedy)
    for rank in case.ranks:
        assert torch.equal(rank.sampled, case.unsharded.sampled)


def test_collectives(case: Case) -> None:
    """Counted while the model runs, in total and in each attention block and MLP."""
    for rank in case.ranks:
        if case.tp == 1:
            assert not rank.collectives
            continue
        per_layer = MANY_PER_LAYER.get(case.model_type, 2)
        assert rank.collectives == {"all_reduce": 1 + per_layer * LAYERS, "all_gather_into_tensor": 1}
        used = dict(rank.by_module)
        assert used.pop("lm_head") == {"all_gather_into_tensor": 1}
        in_layers = [used.pop(name) for name in list(used) if any(part.isdigit() for part in name.split("."))]
        wanted = [{"all_reduce": per_layer - 1}, {"all_reduce": 1}] * LAYERS
        assert in_layers == wanted, "one for attention (and those of its norms), one for the MLP"
        assert list(used.values()) == [Counter(all_reduce=1)], "one for the embeddings"


def test_sharded_bytes(case: Case) -> None:
    """One rank holds each byte of the parameters with two or more dims, routers and positions included."""
    unsharded = case.unsharded.sizes
    held = {name: sum(rank.sizes[name] for rank in case.ranks) for name in unsharded}
    assert all(held[name] >= unsharded[name] for name in unsharded)
    once = sum(size for name, size in unsharded.items() if held[name] == size)
    if case.tp <= case.kv_heads:
        assert once >= 0.97 * sum(unsharded.values())
        return
    shared = {name for name in unsharded if held[name] != unsharded[name]}
    assert all(name.endswith(("k_proj.weight", "v_proj.weight")) for name in shared)
    assert all(held[name] * case.kv_heads == unsharded[name] * case.tp for name in shared)


def test_gather_logits_false(case: Case) -> None:
    """Each rank keeps its shard of the vocabulary, and refuses labels."""
    if case.tp == 1:
        assert case.ranks[0].shard is None, "the plan of one rank gathers nothing"
        return
    shards = [rank.shard for rank in case.ranks if rank.shard is not None]
    assert {s.shape[-1] for s in shards} <= {VOCAB // case.tp, VOCAB // case.tp + 1}
    assert error(torch.cat(shards, -1), case.unsharded.single) < 1e-4
    assert all("gather_logits=True" in rank.refusal for rank in case.ranks)
