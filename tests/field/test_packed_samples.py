"""Samples packed into one row, told by positions that begin anew: the loss of the same call in one process.

transformers masks such samples from each other in a call without a cache, and does not in one with a cache,
which is the default. Sequence parallelism and recomputation turn the cache off inside, so that the same call
gave another loss (4.98 in place of 5.60).
https://github.com/huggingface/transformers/pull/39194, https://github.com/huggingface/transformers/pull/46634
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from shardconv_runtime import Training
from torch import Tensor

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])


def loss(model: Any, length: int = 10, **given: Any) -> Tensor:
    ids = IDS[:, :length]
    return model(ids, **{"position_ids": PACKED[:, :length], "labels": ids} | given).loss


def packed(model: Any) -> Tensor:
    return loss(model)


def packed_without_cache(model: Any) -> Tensor:
    return loss(model, use_cache=False)


def packed_with_cache(model: Any) -> Tensor:
    return loss(model, use_cache=True)


def config_without_cache(model: Any) -> Tensor:
    model.config.use_cache = False
    return loss(model)


def an_odd_length(model: Any) -> Tensor:
    return loss(model, 9)


def an_odd_length_without_cache(model: Any) -> Tensor:
    return loss(model, 9, use_cache=False)


def masked_too(model: Any) -> Tensor:
    return loss(model, use_cache=False, attention_mask=torch.ones_like(IDS))


def one_row_of_positions_for_two(model: Any) -> Tensor:
    ids = torch.cat((IDS, IDS + 1))[:, :9]
    return model(ids, position_ids=PACKED[:, :9], labels=ids).loss


def embeddings(model: Any) -> Tensor:
    embeds = model.get_input_embeddings()(IDS).detach()
    return model(inputs_embeds=embeds, position_ids=PACKED, labels=IDS).loss


def recomputed_by_transformers(model: Any) -> Tensor:
    """Which makes no cache there either."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return loss(model.train())


def no_positions(model: Any) -> Tensor:
    return loss(model, 9, position_ids=None)


def gradient(model: Any) -> Tensor:
    loss(model, 9).backward()
    weight = dict(model.named_parameters())["model.norm.weight"]
    assert weight.grad is not None
    return weight.grad


USES = (
    packed,
    packed_without_cache,
    packed_with_cache,
    config_without_cache,
    an_odd_length,
    an_odd_length_without_cache,
    masked_too,
    one_row_of_positions_for_two,
    recomputed_by_transformers,
    no_positions,
    gradient,
)


def recomputed(model: Any) -> Tensor:
    return loss(shardconv_runtime.checkpoint_activations(model))


def recomputed_without_cache(model: Any) -> Tensor:
    return loss(shardconv_runtime.checkpoint_activations(model), use_cache=False)


def offsets(model: Any) -> Tensor:
    ends = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
    return loss(model, 9, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=4, max_length_k=4)


def in_passes(model: Any) -> Tensor:
    with torch.no_grad():
        return loss(model.eval())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama, converted for two ranks into "out"."""
    root = tmp_path_factory.mktemp("llama")
    plain = save_causal("llama", root / "model")
    shardconv.convert(plain, root / "out", tp=2, sequence_parallel=True)
    return root


def test_the_loss_is_that_of_one_process(llama: Path) -> None:
    one = of_one(llama / "model", (*USES, embeddings), training=True)
    values = {use.__name__: outcome.value for use, outcome in zip(USES, one, strict=False)}
    assert abs(values["packed"] - values["packed_without_cache"]) > 0.01, "packing is told apart"
    # Losses of the unsharded model are in float32.
    require_same((*USES, embeddings), one, of_ranks(llama / "out", (*USES, embeddings), training=True), 1e-6)
    sharded = of_ranks(llama / "out", (*USES, offsets), training=True, sequence_parallel=True)
    require_same(USES, one[:-1], sharded[:-1], 1e-6)
    require_refused((offsets,), sharded[-1:], "cu_seq_lens_q (4,) cannot be padded")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed(llama: Path, sequence_parallel: bool) -> None:
    one = of_one(llama / "model", (packed, packed_without_cache), training=True)
    uses = (recomputed, recomputed_without_cache)
    ranks = of_ranks(llama / "out", uses, training=True, sequence_parallel=sequence_parallel)
    require_same(uses, one, ranks, 1e-6)


def test_several_stages_in_each_process(tmp_path: Path) -> None:
    """A call without gradients runs one pass for each stage, without a cache."""
    source = save_causal("llama", tmp_path / "model", num_hidden_layers=4)
    shardconv.convert(source, tmp_path / "out", tp=1, pp=4, check=False)
    ranks = of_ranks(tmp_path / "out", (in_passes,), training=Training(stages_per_process=2))
    require_same((in_passes,), of_one(source, (in_passes,)), ranks, 1e-6)
