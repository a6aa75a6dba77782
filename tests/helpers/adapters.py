"""Models with adapters of the peft library, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from training_runs import load_unsharded

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 131,
    "attention_bias": True,
    "mlp_bias": True,
}
"""Of a llama with biases on every layer; three ranks do not divide its key/value heads."""


def low_rank(targets: str | list[str] = "all-linear", **options: Any) -> LoraConfig:
    """The config of a low-rank adapter."""
    return LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **{"r": 4, **options})


CONFIGS = {
    "attention": low_rank(["q_proj", "o_proj", "down_proj"], r=8, use_rslora=True),
    "everything": low_rank(
        rank_pattern={"k_proj": 6}, alpha_pattern={"o_proj": 3}, modules_to_save=["lm_head"]
    ),
}
"""Of adapters of different layers; where one wraps a layer of which the ranks' products are summed, the other
may not."""


def save_base(path: Path) -> Path:
    """A random llama in float64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, dtype="float64")
    model = transformers.LlamaForCausalLM(config).to(torch.float64)
    scramble(model)
    model.save_pretrained(path)
    return path


def scramble(model: nn.Module) -> None:
    """Give every parameter that is trained random values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)


def save_adapters(base: Path, path: Path, configs: Mapping[str, LoraConfig] = CONFIGS) -> Any:
    """Save random adapters of a model, each to a directory of its name; the model with them, in eval mode."""
    torch.manual_seed(1)
    model: Any = None
    for name, config in configs.items():
        if model is None:
            model = get_peft_model(load_unsharded(base), config, name)
        else:
            model.add_adapter(name, config)
        model.set_adapter(name)
        scramble(model)
    model.save_pretrained(path)
    return model.eval()


def load_adapter(base: Path, path: Path, *, trainable: bool = False) -> Any:
    """A model in one process with a saved adapter."""
    return PeftModel.from_pretrained(load_unsharded(base), path, is_trainable=trainable).eval()
