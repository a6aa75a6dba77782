"""Which linear layers are found to be one product."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import transformers
from checkpoints import CONFIGS, ENCODER
from shardconv_runtime.format.fused_groups import fused_groups
from shardconv_runtime.format.plan import FusedPlan, Plan
from small_models import small_config
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import shardconv
from shardconv.planning.fused_layers import as_entries, without_groups

QKV = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")


def plan_of(config: Any, tp: int) -> Plan:
    return shardconv.plan(config, tp, check=True)


def kinds(plan: Plan) -> set[tuple[str, ...]]:
    """The last components of the members of each group."""
    return {tuple(fqn.rpartition(".")[2] for fqn in group) for group in fused_groups(plan)}


def causal(name: str, **changes: Any) -> Any:
    config = transformers.CONFIG_MAPPING[name](**CONFIGS[name] | {"pad_token_id": 0} | changes)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
    return config


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("llama", {"num_key_value_heads": 1}, {QKV, GATED}),
        ("qwen2", {}, {QKV, GATED}),
        ("mixtral", {}, {QKV}),
        ("phi3", {}, set()),
        ("gpt2", {}, set()),
        pytest.param("llama", {}, {QKV, GATED}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_groups_of_models(name: str, changes: Any, found: set[tuple[str, ...]], tp: int) -> None:
    assert kinds(plan_of(causal(name, **changes), tp)) == found


def test_layers_share_an_entry() -> None:
    plan = plan_of(causal("llama"), 2)
    attention = tuple((f"model.layers.{{0,1}}.self_attn.{name}",) for name in QKV)
    assert FusedPlan(attention) in plan.fused
    assert len(plan.fused) == 2


def test_low_rank_projections_are_replicated_and_fused() -> None:
    config = transformers.DeepseekV3Config(
        **CONFIGS["llama"] | {"num_key_value_heads": 8}, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_group=1, topk_group=1, first_k_dense_replace=1,
        architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    assert ("q_a_proj", "kv_a_proj_with_mqa") in kinds(plan_of(config, 1))
    assert GATED in kinds(plan_of(config, 2))


def test_cross_attention_is_fused_without_its_queries() -> None:
    config = transformers.BartConfig(
        vocab_size=100, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        architectures=["BartForConditionalGeneration"],
    )  # fmt: skip
    groups = fused_groups(plan_of(config, 2))
    cross = "model.decoder.layers.0.encoder_attn."
    assert (f"{cross}k_proj", f"{cross}v_proj") in groups
    assert len(groups) == 3


def test_an_encoder() -> None:
    config = transformers.BertConfig(**ENCODER, architectures=["BertForMaskedLM"])
    assert kinds(plan_of(config, 2)) == {("query", "key", "value")}


class ProductsConfig(transformers.LlamaConfig):
    """For models whose code is below."""

    model_type = "products"


class Mixed(nn.Module):
    """Layers that look alike, and only two of which may be fused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.late, self.twice, self.other = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        self.biased = nn.Linear(width, width)
        self.special = type("Special", (nn.Linear,), {})(width, width, False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.special(x) + self.twice(x) + self.b(x) + self.biased(x) + self.other(x + 1)
        z = x.clone()
        self.other(z)
        z += 1
        return y + self.twice(z) + self.late(z)


class Gated(nn.Module):
    """A product of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) * self.up(x)


class Viewed(nn.Module):
    """Heads become a part of the batch by ``view``, for which the parts of a product are too far apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.mlp = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = x.transpose(0, 1).contiguous()
        q, k = (layer(y).view(length, batch * 4, width // 4) for layer in (self.q, self.k))
        return x + (q * k).view(length, batch, width).transpose(0, 1) + self.mlp(x)


class Products(transformers.PreTrainedModel):
    """A stack of blocks of one kind."""

    config_class = ProductsConfig
    block: type[nn.Module] = Mixed

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            type(self).block(config.hidden_size)  # type: ignore[call-arg]
            for _ in range(config.num_hidden_layers)
        )
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("block", "pair"), [(Mixed, ("a", "b")), (Viewed, ("mlp.gate", "mlp.up"))])
def test_only_plain_layers_that_are_called_once_with_one_tensor(
    block: type[nn.Module], pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whose results the code can use: others are left out, and the model is planned."""
    monkeypatch.setattr(Products, "block", block)
    transformers.AutoConfig.register("products", ProductsConfig, exist_ok=True)
    transformers.AutoModel.register(ProductsConfig, Products, exist_ok=True)
    values = small_config().to_dict() | {"model_type": "products", "num_hidden_layers": 4}
    plan = shardconv.plan(ProductsConfig(**values | {"architectures": ["Products"]}), 1, check=True)
    assert plan.fused == (FusedPlan(tuple((f"blocks.{{0..3}}.{name}",) for name in pair)),)


def test_groups_that_cannot_share_an_entry() -> None:
    groups = [("l.0.a", "l.0.b"), ("l.10.a", "l.10.b"), ("l.2.a", "l.2.b"), ("x.a", "x.b")]
    entries = as_entries(groups)
    assert entries == (
        FusedPlan((("l.{0,2,10}.a",), ("l.{0,2,10}.b",))),
        FusedPlan((("x.a",), ("x.b",))),
    )
    crossed = [("l.0.a.1", "l.0.b.2"), ("l.1.a.0", "l.1.b.1")]
    for entry in as_entries(crossed):
        assert all(math.prod(map(len, member)) for member in entry.members)
    plan = replace(plan_of(causal("llama"), 2), fused=as_entries(crossed))
    assert set(fused_groups(plan)) == set(crossed)


def test_groups_of_alike_modules_are_left_out_together() -> None:
    plan = plan_of(causal("llama"), 2)
    assert kinds(without_groups(plan, "model.layers.0.self_attn")) == {GATED}
    assert kinds(without_groups(plan, "model.layers.1.self_attn.q_proj")) == {GATED}
    assert kinds(without_groups(plan, "model.norm")) == set()
