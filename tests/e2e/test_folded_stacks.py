"""Deep models whose layers read more than the layer before them: each layer has the plan of its kind.

The last layers read the keys and values of earlier ones, and each layer reads its part of one tensor by its
number. Such stacks are folded, and the layers that are left out get the plan of the one that represents them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from one_and_ranks import of_one, of_ranks, require_same
from shardconv_runtime.meta.meta_model import build_model
from torch import Tensor
from zoo.models import ZooModel, build

import shardconv
from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.trace_inputs import trace_inputs
from shardconv.tracing.fold import fold

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 43, 2]])
KINDS = ([*["sliding_attention"] * 5, "full_attention"]) * 2
"""The last four share the keys and values of layers 5 and 7."""


def deep(model_type: str, **changes: Any) -> ZooModel:
    sizes = {"num_hidden_layers": len(KINDS), "layer_types": KINDS, "num_kv_shared_layers": 4}
    return build("causal", model_type, **sizes, **changes)


def sharing_keys() -> ZooModel:
    of_layers = {"intermediate_size": [128] * len(KINDS), "activation_sparsity_pattern": [0.0] * len(KINDS)}
    return deep("gemma3n_text", **of_layers)


def reading_parts() -> ZooModel:
    return deep("gemma4_text", enable_moe_block=False)


def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS).logits
    return found


def gradients(model: Any) -> Tensor:
    """What all ranks have of the gradients: those of norms."""
    model(IDS, labels=IDS).loss.backward()
    named = dict(model.named_parameters())
    return torch.cat([p.grad.flatten() for n, p in sorted(named.items()) if n.endswith("layernorm.weight")])


def tokens(model: Any) -> Tensor:
    found: Tensor = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return found


@pytest.mark.parametrize("make", [sharing_keys, reading_parts])
def test_each_layer_has_the_plan_of_its_kind(make: Any, tmp_path: Path) -> None:
    model = make()
    _, tape = trace_inputs(build_model(model.model_class, model.config, torch.float32), RULES)
    assert len(fold(tape).instances) <= 9
    torch.manual_seed(0)
    unsharded = model.model_class(model.config)
    with torch.no_grad():
        for parameter in unsharded.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.dim() == 1))
    unsharded.double().save_pretrained(tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=2, check=False)
    for uses, training in (((logits, tokens), False), ((gradients,), True)):
        one = of_one(tmp_path / "source", uses, training=training)
        ranks = of_ranks(tmp_path / "out", uses, training=training)
        assert not any(outcome.error for outcome in one)
        require_same(uses, one, ranks, tolerance=1e-6)  # their code computes norms and positions in float32
