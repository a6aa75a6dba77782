"""Small models of many layouts, exported, each with the state dict that is to come out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from shardconv_runtime.format.plan import Plan
from small_models import HEADS, HIDDEN, KV_HEADS, MLP, VOCAB, save_random, small_config
from torch import Tensor

import shardconv

_LIKE_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A model and how it is converted."""

    config: Callable[[], Any]
    model_class: str
    tp: int
    dtype: str = "float32"
    experts: str = "tp"


def _experts() -> Any:
    return transformers.Qwen3MoeConfig(
        **_LIKE_LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    )


CASES = {
    "uneven, heads cut": Case(small_config, "LlamaForCausalLM", 3),
    "fewer key/value heads than ranks": Case(small_config, "LlamaForCausalLM", 4, "bfloat16"),
    "tied": Case(lambda: small_config(tie_word_embeddings=True), "LlamaForCausalLM", 2),
    "fused projections": Case(
        lambda: transformers.Phi3Config(**_LIKE_LLAMA), "Phi3ForCausalLM", 2, "bfloat16"
    ),
    "biases of sums": Case(
        lambda: transformers.GPT2Config(vocab_size=VOCAB, n_layer=2, n_head=4, n_embd=32, n_positions=64),
        "GPT2LMHeadModel",
        2,
    ),
    "split experts": Case(_experts, "Qwen3MoeForCausalLM", 2),
    "whole experts": Case(_experts, "Qwen3MoeForCausalLM", 3, "bfloat16", "ep"),
}


@dataclass(frozen=True)
class Exported:
    """A case on disk."""

    model: Path
    out: Path
    directory: Path
    plan: Plan
    state: dict[str, Tensor]
    """Of the source, in the dtype of the plan."""


def convert(case: Case, path: Path) -> Exported:
    """Save a random model and convert it; what is exported goes to ``path / "dir"``."""
    model = save_random(case.config(), getattr(transformers, case.model_class), path / "model")
    plan = shardconv.convert(
        path / "model", path / "out", case.tp, dtype=case.dtype, experts=case.experts, check=False
    )
    dtype = getattr(torch, case.dtype)
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    return Exported(path / "model", path / "out", path / "dir", plan, state)


@dataclass(frozen=True)
class Stored:
    """A chunk as it is on disk."""

    file: str
    name: str
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it is in the whole."""
        return tuple(slice(o, o + size) for o, size in zip(self.offsets, self.tensor.shape, strict=True))


def stored(directory: Path) -> list[Stored]:
    """All chunks of a directory, read without torch's reader."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            assert info.keys() == set(file.keys())
            for name in file.keys():  # noqa: SIM118
                found.append(
                    Stored(path.name, name, tuple(info[name]["saved_offsets"]), file.get_tensor(name))
                )
    return found


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal to the bit, in shape and dtype."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    a, b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected))
    return torch.equal(a, b)


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Two state dicts are equal to the bit."""
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not same(found[name], tensor)]


def require_cover(directory: Path, expected: dict[str, Tensor]) -> None:
    """The chunks have each element of the tensors once, and nothing else."""
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in expected.items()}
    whole = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for chunk in stored(directory):
        assert chunk.tensor.numel() > 0, chunk  # readers know chunks by their offsets
        assert chunk.tensor.dtype == expected[chunk.name].dtype
        counts[chunk.name][chunk.box] += 1
        whole[chunk.name][chunk.box] = chunk.tensor
    assert not [name for name, count in counts.items() if not (count == 1).all()]
    require_same(whole, expected)
