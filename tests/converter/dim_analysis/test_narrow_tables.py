"""An embedding is sharded where that saves more than its reduction costs, and else replicated."""

from __future__ import annotations

import pytest
import transformers

import shardconv

WIDTH = 128


def embedding_reductions(vocab_size: int, *, tied: bool) -> int:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=16,  # so that the small table is less than a hundredth of the model
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
    )
    plan = shardconv.plan(config, tp=2, check=False)
    return sum(
        boundary.op == "all_reduce"
        for module in plan.modules
        for boundary in module.outputs
        if any("embed" in name for name in module.names)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_of_few_rows_costs_no_collective(tied: bool) -> None:
    assert embedding_reductions(WIDTH // 2, tied=tied) == 0
    assert embedding_reductions(WIDTH * 8, tied=tied) == 1
