"""Small models on disk, and a plan for them that is written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import transformers
from boundaries import boundary
from shardconv_runtime.format.dims import Dim, Leaf, Product
from shardconv_runtime.format.names import compress
from shardconv_runtime.format.plan import (
    AttributeOverride,
    CodeInfo,
    LogitsInfo,
    ModelInfo,
    ModulePlan,
    ParameterPlan,
    Plan,
)

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB = 4, 2, 8, 32, 48, 101


def small_config(**changes: object) -> transformers.LlamaConfig:
    """A Llama of about 20 thousand parameters."""
    values = {
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**(values | changes))


def save_random(config: transformers.PreTrainedConfig, cls: type, path: Path) -> torch.nn.Module:
    """Save a model whose parameters are all random, norms and biases too."""
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.save_pretrained(path)
    return model


def hand_plan(config: transformers.LlamaConfig, tp: int, dtype: str = "float32") -> Plan:
    """The well-known plan of a Llama: heads and MLP sharded, the vocabulary too, norms replicated."""
    layers = range(config.num_hidden_layers)
    hd, hidden = config.head_dim, config.hidden_size
    heads = Product((Leaf(config.num_attention_heads, (0,)), Leaf(hd)))
    kv = Product((Leaf(config.num_key_value_heads, (0,)), Leaf(hd)))
    mlp, vocab = Leaf(config.intermediate_size, (0,)), Leaf(config.vocab_size, (0,))
    whole = Leaf(hidden)

    def names(*suffixes: str) -> tuple[str, ...]:
        return compress(f"model.layers.{i}.{suffix}" for i in layers for suffix in suffixes)

    def parameter(patterns: tuple[str, ...], *dims: Dim, reason: str = "") -> ParameterPlan:
        return ParameterPlan(patterns, dims, dtype, reason=reason)

    attn, ffn = "self_attn.", "mlp."
    parameters = (
        parameter(("model.embed_tokens.weight",), vocab, whole),
        parameter(names(attn + "q_proj.weight"), heads, whole),
        parameter(names(attn + "k_proj.weight", attn + "v_proj.weight"), kv, whole),
        parameter(names(attn + "o_proj.weight"), whole, heads),
        parameter(names(ffn + "gate_proj.weight", ffn + "up_proj.weight"), mlp, whole),
        parameter(names(ffn + "down_proj.weight"), whole, mlp),
        parameter(
            (*names("input_layernorm.weight", "post_attention_layernorm.weight"), "model.norm.weight"),
            whole,
            reason="its dim is normalised, and sharding it would cost more than it saves",
        ),
        parameter(("lm_head.weight",), vocab, whole),
    )
    reduce = boundary("output", "all_reduce", axes=(0,), per_token=hidden)
    gather = boundary("output", "all_gather", dim=-1, layout=vocab, per_token=config.vocab_size)
    ids = boundary("input.input", "local_rows", layout=vocab)
    modules = (
        ModulePlan(
            ("model.embed_tokens",),
            "vocab",
            inputs=(ids,),
            outputs=(boundary("output", "zero_out_of_shard"), reduce),
        ),
        ModulePlan(names(attn + "q_proj", attn + "k_proj", attn + "v_proj"), "column"),
        ModulePlan(names(attn + "o_proj"), "row", outputs=(reduce,)),
        ModulePlan(names(ffn + "gate_proj", ffn + "up_proj"), "column"),
        ModulePlan(names(ffn + "down_proj"), "row", outputs=(reduce,)),
        ModulePlan(
            names("self_attn"),
            "boundary",
            overrides=(AttributeOverride("num_heads", HEADS, (math.ceil(HEADS / tp),)),),
        ),
        ModulePlan(("lm_head",), "vocab", outputs=(gather,)),
    )
    return Plan(
        tp=tp,
        mesh=(tp,),
        model=ModelInfo(
            "transformers.models.llama.modeling_llama:LlamaForCausalLM", dtype, _num_parameters(config)
        ),
        code=CodeInfo(torch.__version__, transformers.__version__, (), "0" * 64),
        parameters=parameters,
        modules=modules,
        logits=LogitsInfo("lm_head", "output"),
        notes=("this plan was written by hand",),
    )


def _num_parameters(config: transformers.LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())


def make_custom(path: Path) -> None:
    """Turn a Llama directory into one whose classes are in the directory itself."""
    (path / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\n\nclass MyConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (path / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_mine import MyConfig\n\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    config = json.loads((path / "config.json").read_text()) | {
        "model_type": "mine",
        "architectures": ["MyModel"],
        "auto_map": {
            "AutoConfig": "configuration_mine.MyConfig",
            "AutoModelForCausalLM": "modeling_mine.MyModel",
        },
    }
    (path / "config.json").write_text(json.dumps(config))
