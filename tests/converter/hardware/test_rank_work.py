"""What is counted of a rank agrees with its plan, and with formulas of a llama."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.plan import Plan
from small_models import small_config
from torch import nn

from shardconv.arguments import SolveOptions
from shardconv.hardware.rank_work import (
    CollectiveWork,
    OperatorWork,
    RankWork,
    hosts_bytes,
    rank_work,
    sent_bytes,
    without_fused,
)
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import solve_plan
from shardconv.reporting.summary import summarize
from shardconv.simulation.layer_bypass import Bypass

BATCH, CONTEXT = 3, 20


def counted(config: Any, cls: type[nn.Module], tp: int) -> tuple[Plan, RankWork]:
    """The plan of a model and the work of its rank 0."""
    works: list[RankWork] = []

    def inspect(plan: Plan, model: nn.Module, inputs: TraceInputs, bypassed: Mapping[str, Bypass]) -> None:
        works.append(rank_work(without_fused(plan), model, inputs, bypassed, BATCH, CONTEXT))

    spec = ModelSpec(name="a model", config=config, model_class=cls, dtype="float32")
    return solve_plan(spec, SolveOptions(tp, check=False), inspect=inspect), works[0]


@pytest.mark.parametrize("layers", [2, 6])
def test_operations_of_a_rank_are_those_of_its_matrices(layers: int) -> None:
    """Layers that others represent count, so that the depth is in the result."""
    config = small_config(num_hidden_layers=layers, vocab_size=96)
    _, work = counted(config, transformers.LlamaForCausalLM, 2)
    hidden, wide, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    matrices = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * wide
    tokens = BATCH * CONTEXT
    attention = 4 * BATCH * heads * size * CONTEXT**2 / 2  # half of the pairs, as the mask is causal
    layer = 2 * matrices * tokens + attention
    assert work.prefill.flops == (layers * layer + 2 * hidden * vocab * BATCH) / 2
    assert work.forward is not None
    assert work.forward.flops == (layers * layer + 2 * hidden * vocab * tokens) / 2


def test_a_token_reads_the_weights_and_the_cache_once() -> None:
    config = small_config(num_hidden_layers=4, vocab_size=96)
    _, work = counted(config, transformers.LlamaForCausalLM, 2)
    products = [(e, n) for e, n in work.token.events if isinstance(e, OperatorWork) and e.kind == "product"]
    elements = sum(n * e.elements for e, n in products if e.elements > config.head_dim)
    parameters = counted_matrices(config)
    assert elements == parameters / 2
    (attention,) = {e for e, _ in work.token.events if isinstance(e, OperatorWork) and e.kind == "attention"}
    kept = 2 * BATCH * (CONTEXT + 1) * config.num_key_value_heads * config.head_dim // 2
    query = BATCH * config.num_attention_heads * config.head_dim // 2
    assert attention.num_bytes == pytest.approx(4 * (kept + 2 * query), rel=1e-3)


def counted_matrices(config: transformers.LlamaConfig) -> int:
    """Elements of all matrices except the table of the embeddings."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)


def test_collectives_are_those_of_the_plan() -> None:
    plan, work = counted(small_config(num_hidden_layers=4, vocab_size=96), transformers.LlamaForCausalLM, 2)
    counts = Counter[str]()
    num_bytes = 0
    assert work.forward is not None
    for event, count in work.forward.events:
        if isinstance(event, CollectiveWork):
            assert event.ranks == (0, 1)
            counts[event.op] += count
            num_bytes += count * event.num_bytes
    planned = Counter[str]()
    for collective in summarize(plan).collectives:
        planned[collective.op] += collective.count
    assert counts == planned
    assert num_bytes == BATCH * CONTEXT * sum(each.token_bytes for each in summarize(plan).collectives)


def test_experts_that_no_row_needs_are_not_read() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=128, num_experts_per_tok=2,
    )  # fmt: skip
    _, work = counted(config, transformers.Qwen3MoeForCausalLM, 2)
    stack = 128 * 16 * 32 // 2
    share = 1 - (1 - 1 / 128) ** (BATCH * 2)
    grouped = [
        e.elements for e, _ in work.token.events if isinstance(e, OperatorWork) and e.kind == "product"
    ]
    assert max(grouped) == pytest.approx(2 * share * stack)  # gate and up are one stack


def test_bytes_between_hosts_are_those_of_rings_through_several_of_them() -> None:
    _, work = counted(small_config(num_hidden_layers=4, vocab_size=96), transformers.LlamaForCausalLM, 4)
    assert hosts_bytes(work.token, lambda rank: 0) == 0
    sent = [n * sent_bytes(e) for e, n in work.token.events if isinstance(e, CollectiveWork)]
    assert hosts_bytes(work.token, lambda rank: rank // 2) == 2 * sum(sent)
    assert hosts_bytes(work.token, lambda rank: rank) == 4 * sum(sent)


def test_a_token_does_not_run_the_encoder_again() -> None:
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=2, num_heads=4
    )
    _, work = counted(config, transformers.T5ForConditionalGeneration, 2)
    # Products of two layers of the decoder with one token each; the keys of the encoder are in the cache.
    layer = 2 * BATCH * (6 * 32 * 32 + 2 * 32 * 64)
    assert work.token.flops < 1.5 * (2 * layer + 2 * BATCH * 32 * 96) / 2
    assert work.prefill.flops > 10 * work.token.flops
