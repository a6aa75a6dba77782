"""An adapter trains weights that hold several: all experts of a mixture, gates and ups, queries and keys.

Merged models were wrong, or those that were trained before: factors of experts were taken in another order,
or skipped; ranks and scales that differ by layer, and scales by roots, were lost. Reports: unsloth#6930,
unsloth-zoo#647 and Automodel#3834 (experts), axolotl#3673, TensorRT-LLM#1668 and vllm#6909 (scales),
unsloth#3091 and litgpt#1246 (bfloat16).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from small_models import save_random, small_config
from torch import Tensor

import shardconv
from shardconv.converted.adapt import adapt

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
BASES: Mapping[str, tuple[Any, Any]] = {
    "dense": (small_config(), transformers.LlamaForCausalLM),
    "fused": (transformers.Phi3Config(**SIZES, pad_token_id=0), transformers.Phi3ForCausalLM),
    "mixture": (
        transformers.Qwen3MoeConfig(
            **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2
        ),
        transformers.Qwen3MoeForCausalLM,
    ),
    "mixture of in by out": (
        transformers.GptOssConfig(
            **SIZES | {"intermediate_size": 16}, head_dim=8, num_local_experts=6, num_experts_per_tok=2
        ),
        transformers.GptOssForCausalLM,
    ),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(target: Any, **options: Any) -> Any:
    return peft.LoraConfig(target_modules=target, task_type="CAUSAL_LM", **{"r": 4} | options)


CASES: Mapping[str, tuple[str, Any]] = {
    "experts": ("mixture", lora(["q_proj"], target_parameters=EXPERTS)),
    "experts of in by out": ("mixture of in by out", lora(["o_proj"], target_parameters=EXPERTS)),
    "queries and gates": ("fused", lora(["qkv_proj", "gate_up_proj", "down_proj"])),
    "patterns": (
        "dense",
        lora(
            "all-linear",
            rank_pattern={"q_proj": 2, r"1\.mlp\.up_proj": 6},
            alpha_pattern={"down_proj": 5},
            use_rslora=True,
        ),
    ),
}
DTYPES = (torch.float32, torch.bfloat16)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found.clone()


def states(model: Any, path: Path) -> list[Tensor]:
    """With the adapter, merged, and saved."""
    found = [logits(model)]
    merged = model.merge_and_unload()
    found.append(logits(merged))
    merged.save_pretrained(path)
    return found


def on_rank(root: Path) -> dict[tuple[str, torch.dtype], list[Tensor]]:
    found = {}
    for name, (base, _) in CASES.items():
        for dtype in DTYPES:
            model = shardconv_runtime.load(root / f"{base}-out", adapter=root / f"{name}-out", dtype=dtype)
            found[name, dtype] = states(model, root / f"{name}-{dtype}")
    return found


def save_adapter(root: Path, name: str) -> None:
    base, config = CASES[name]
    torch.manual_seed(3)
    model = peft.get_peft_model(BASES[base][1].from_pretrained(root / base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    model.save_pretrained(root / name)


def test_merged_models_are_those_of_one_process(tmp_path: Path) -> None:
    """Each of their weights, and what they return where rounding cannot choose other experts."""
    for base, (config, cls) in BASES.items():
        save_random(config, cls, tmp_path / base)
        shardconv.convert(tmp_path / base, tmp_path / f"{base}-out", tp=2, check=False)
    for name, (base, _) in CASES.items():
        save_adapter(tmp_path, name)
        adapt(tmp_path / f"{base}-out", tmp_path / name, tmp_path / f"{name}-out", check=False)
    ranks = run_processes(2, on_rank, tmp_path)
    for name, (base, _) in CASES.items():
        for dtype in DTYPES:
            cls = BASES[base][1]
            model: Any = cls.from_pretrained(tmp_path / base, dtype=dtype)
            model = peft.PeftModel.from_pretrained(model, tmp_path / name).eval()
            wanted = [logits(model), logits(merged := model.merge_and_unload())]
            ours = cls.from_pretrained(tmp_path / f"{name}-{dtype}").state_dict()
            assert ours.keys() == merged.state_dict().keys()
            for fqn, tensor in merged.state_dict().items():
                assert ours[fqn].dtype == tensor.dtype, (name, fqn)
                rounding = 1e-6 if tensor.dtype == torch.float32 else 1e-2
                assert torch.allclose(ours[fqn], tensor, atol=rounding), (name, dtype, fqn)
            if dtype == torch.float32 or base in ("dense", "fused"):
                rounding = 1e-5 if dtype == torch.float32 else 5e-2
                for found in ranks:
                    for theirs, state in zip(wanted, found[name, dtype], strict=True):
                        assert torch.allclose(state, theirs, atol=rounding * float(theirs.abs().max())), name
