"""Losses that other code puts in place of the model's own, or takes of the head's weights.

Fused losses replace functions of torch and transformers, or multiply by the weights of the head themselves:
each rank would give them its part.
https://github.com/linkedin/Liger-Kernel/issues/723, https://github.com/huggingface/trl/issues/3082
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import save_causal
from one_and_ranks import of_one, of_ranks, require_refused, require_same
from torch import Tensor
from transformers.loss import loss_utils

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 8], [35, 8, 9, 7, 93, 2, 1]])
"""All in the first half of the vocabulary, of which rank 0 has the rows."""


def result(model: Any, loss: Tensor) -> Tensor:
    loss.backward()
    norms = [p.grad.flatten() for n, p in model.named_parameters() if n.endswith("norm.weight")]
    return torch.cat([loss.detach().reshape(1), *norms])


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    is_table = isinstance(owner, dict)
    before = owner[name] if is_table else getattr(owner, name)
    if is_table:
        owner[name] = make(before)
    else:
        setattr(owner, name, make(before))
    try:
        yield
    finally:
        if is_table:
            owner[name] = before
        else:
            setattr(owner, name, before)


def twice(before: Any) -> Any:
    return lambda *args, **kwargs: 2 * before(*args, **kwargs)


def own_function(model: Any) -> Tensor:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        flat = logits[:, :-1].reshape(-1, vocab_size)
        return F.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.2)

    model.loss_function = loss
    return result(model, model(IDS, labels=IDS).loss)


def patched_torch(model: Any) -> Tensor:
    with replaced(F, "cross_entropy", twice):
        return result(model, model(IDS, labels=IDS).loss)


def patched_transformers(model: Any) -> Tensor:
    with replaced(loss_utils, "fixed_cross_entropy", twice):
        return result(model, model(IDS, labels=IDS).loss)


def other_entry(model: Any) -> Tensor:
    with replaced(loss_utils.LOSS_MAPPING, "ForCausalLM", twice):
        return result(model, model(IDS, labels=IDS).loss)


def its_own_again(model: Any) -> Tensor:
    patched_torch(model)
    model.zero_grad()
    return result(model, model(IDS, labels=IDS).loss)


def of_the_heads_weight(model: Any) -> Tensor:
    states = model.model(IDS).last_hidden_state
    logits = states @ model.lm_head.weight.T
    return result(model, F.cross_entropy(logits.flatten(0, 1), IDS.flatten()))


def of_states_alone(model: Any) -> Tensor:
    return result(model, model.model(IDS).last_hidden_state.square().mean())


def hooked_weight(model: Any) -> Tensor:
    model.get_input_embeddings().weight.register_hook(
        lambda gradient: gradient * (torch.arange(len(gradient)) > 5)[:, None]
    )
    return result(model, model(IDS, labels=IDS).loss)


def gradient_of_tokens(model: Any) -> Tensor:
    """Only the row of one token is trained."""
    model(IDS, labels=IDS).loss.backward()
    table, token = model.get_input_embeddings(), torch.tensor([9])
    local, elsewhere = table.rows(token) if hasattr(table, "rows") else (token, token < 0)
    row = table.weight.grad.new_zeros(table.weight.shape[1])
    if not elsewhere.any():
        row += table.weight.grad[local[0]]
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(row)
    return row


RIGHT = (
    own_function,
    patched_torch,
    patched_transformers,
    other_entry,
    its_own_again,
    of_states_alone,
    gradient_of_tokens,
)


@pytest.mark.parametrize("tied", [False, True])
def test_they_get_full_logits_or_are_refused(tied: bool, tmp_path: Path) -> None:
    plain = save_causal("llama", tmp_path / "model", tie_word_embeddings=tied)
    shardconv.convert(plain, tmp_path / "out", tp=2)
    uses = (*RIGHT, of_the_heads_weight, hooked_weight)
    found = of_ranks(tmp_path / "out", uses, training=True)
    require_same(RIGHT, of_one(plain, RIGHT, training=True), found[: len(RIGHT)], 1e-5)
    require_refused((of_the_heads_weight,), found[-2:-1], "lm_head")
    require_refused((hooked_weight,), found[-1:], "embed_tokens")
    if not tied:
        local = of_ranks(tmp_path / "out", (own_function, patched_torch), training=True, gather_logits=False)
        require_refused((own_function, patched_torch), local, "gather_logits=True")
