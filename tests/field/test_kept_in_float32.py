"""A router's correction bias lies in a narrow band at a large offset, and bfloat16 has few values there.

The model's class keeps it in float32 in whatever dtype the model is loaded, and so must everything here that
chooses a dtype. Reports: sglang#31213 (238 biases became 8, and almost all tokens went to other experts),
vllm#50761, Megatron-LM#1482; transformers#39058 has the two lists of names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from quantized_checkpoints import save_quantized
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint.resolve import resolve
from torch.distributed.device_mesh import init_device_mesh

import shardconv
from shardconv.converted.adapt import adapt

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUTED = transformers.DeepseekV3Config(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    vocab_size=101,
    max_position_embeddings=64,
)
MODELS: Mapping[str, tuple[Any, Any]] = {
    # a buffer, in both half precisions
    "router": (ROUTED, transformers.DeepseekV3ForCausalLM),
    # weights, in float16 alone
    "for_float16": (
        transformers.T5Config(
            num_layers=1, d_model=32, d_ff=48, num_heads=4, d_kv=8, vocab_size=101, decoder_start_token_id=0
        ),
        transformers.T5ForConditionalGeneration,
    ),
    # parameters, in both
    "parameters": (
        transformers.Ernie4_5_MoeConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            vocab_size=101,
        ),
        transformers.Ernie4_5_MoeForCausalLM,
    ),
}


def save(name: str, path: Path, dtype: torch.dtype) -> Path:
    """A random model; the biases of routers are as in the report."""
    torch.manual_seed(0)
    config, cls = MODELS[name]
    model = cls._from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.3)
        for each, tensor in model.named_buffers():
            if "bias" in each:
                tensor.copy_(6.8 + 0.25 * torch.rand(tensor.shape))
    model.save_pretrained(path)
    return path


def dtypes_of(model: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def load_all(cells: list[tuple[Path, Path, torch.dtype | None]]) -> list[list[dict[str, torch.dtype]]]:
    """Of a converted directory, of the ordinary model by its plan, and for training."""
    found = []
    for source, out, dtype in cells:
        by_file = shardconv_runtime.load(out, dtype=dtype)
        by_plan = shardconv_runtime.load(source, plan=out, dtype=dtype)
        trained = shardconv_runtime.load(out, dtype=dtype, training=True)
        found.append([dtypes_of(model) for model in (by_file, by_plan, trained)])
    return found


STORED_AND_CONVERTED = (
    *((name, F32, None) for name in MODELS),
    ("router", BF16, None),
    ("router", F32, F16),
)
OTHERS = (("for_float16", F32, F16), ("parameters", F32, BF16))
"""Other models that are converted to another dtype, as the router's."""


@pytest.mark.parametrize("in_all_dtypes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dtypes_are_those_of_from_pretrained(in_all_dtypes: bool, tmp_path: Path) -> None:
    """In each cell of what is stored, converted to, and loaded as.

    By default in both half precisions, and where a model was converted from one dtype to another in one.
    """
    cells: list[tuple[Path, Path, torch.dtype | None]] = []
    wanted = []
    for name, stored, converted in (*STORED_AND_CONVERTED, *(OTHERS if in_all_dtypes else ())):
        others = (F32, BF16, F16)
        if not in_all_dtypes:
            others = (
                (BF16, F16) if (stored, converted) == (F32, None) else (BF16 if converted == F16 else F16,)
            )
        source = tmp_path / f"{name}-{stored}"
        if not source.exists():
            save(name, source, stored)
        out = tmp_path / f"{name}-{stored}-{converted}"
        dtype = None if converted is None else str(converted).removeprefix("torch.")
        shardconv.convert(source, out, tp=2, dtype=dtype, check=False)
        for loaded in (None, *others):
            cells.append((source, out, loaded))
            reference = MODELS[name][1].from_pretrained(source, dtype=loaded or converted or stored)
            wanted.append(dtypes_of(reference))
    for found in run_processes(2, load_all, cells):
        for cell, models, reference in zip(cells, found, wanted, strict=True):
            assert all(dtypes == reference for dtypes in models), cell


def route(source: Path, out: Path) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    sharded: dict[str, Any] = {"mesh": mesh, "training": True, "data_parallel": True}
    found = []
    for path, options in ((out, {}), (source, {"plan": out}), (out, sharded)):
        model = shardconv_runtime.load(path, dtype=BF16, **options)
        (bias,) = (t for n, t in model.state_dict().items() if "e_score" in n)
        found.append(bias)
        with torch.no_grad():
            found.append(model(IDS).logits)
    return found


def test_biases_of_a_router_stay_apart(tmp_path: Path) -> None:
    """With the report's numbers, tokens go to the experts to which one process sends them."""
    source = save("router", tmp_path / "source", F32)
    shardconv.convert(source, tmp_path / "out", tp=2, check=False)
    model = MODELS["router"][1].from_pretrained(source, dtype=BF16)
    (bias,) = (t for n, t in model.state_dict().items() if "e_score" in n)
    assert len(bias.unique()) == 8 > len(bias.to(BF16).unique())
    with torch.no_grad():
        logits = model(IDS).logits
    for found in run_processes(2, route, source, tmp_path / "out", start_group=True):
        for own, of_model in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(own, bias)
            assert (of_model - logits).abs().max() < 0.05 * logits.abs().max()


def load_dequantized(out: Path) -> list[dict[str, torch.dtype]]:
    dtypes = (None, BF16, F16, F32)
    return [dtypes_of(shardconv_runtime.load(out, dtype=dtype, dequantize=True)) for dtype in dtypes]


def test_dequantized_weights(tmp_path: Path) -> None:
    save_quantized(ROUTED, transformers.DeepseekV3ForCausalLM, tmp_path / "packed")
    shardconv.convert(tmp_path / "packed", tmp_path / "out", tp=2, check=False)
    load = partial(transformers.DeepseekV3ForCausalLM.from_pretrained, tmp_path / "packed-plain")
    wanted = [dtypes_of(load(dtype=dtype)) for dtype in (BF16, BF16, F16, F32)]
    for found in run_processes(2, load_dequantized, tmp_path / "out"):
        assert found == wanted


def load_with_adapter(out: Path, adapted: Path) -> list[Any]:
    return [
        dtypes_of(shardconv_runtime.load(out, adapter=adapted, dtype=dtype)) for dtype in (None, BF16, F16)
    ]


@pytest.mark.parametrize("saved", [F32, BF16])
def test_tensors_that_an_adapter_was_saved_with(
    saved: torch.dtype, saved_llama: Path, tmp_path: Path
) -> None:
    """Copies of the model's modules, and its biases, have the dtype of the model, and the adapter float32."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM.from_pretrained(saved_llama, dtype=saved)
    config = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["lm_head"], r=4, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    shardconv.convert(saved_llama, tmp_path / "out", tp=2, dtype="bfloat16", check=False)
    adapt(tmp_path / "out", tmp_path / "adapter", tmp_path / "adapted")
    wanted = []
    for dtype in (BF16, BF16, F16):
        model = transformers.LlamaForCausalLM.from_pretrained(saved_llama, dtype=dtype)
        wanted.append(dtypes_of(peft.PeftModel.from_pretrained(model, tmp_path / "adapter")))
    for found in run_processes(2, load_with_adapter, tmp_path / "out", tmp_path / "adapted"):
        assert found == wanted


def test_a_checkpoint_of_two_dtypes_whose_config_names_none(saved_llama: Path, tmp_path: Path) -> None:
    """The weights are in bfloat16, the norms in float32, and float32 comes first in the file: torchtitan and
    others write such files. ``from_pretrained`` takes the first tensor by name."""
    config = json.loads((saved_llama / "config.json").read_text())
    config.pop("dtype")
    stored = load_file(saved_llama / "model.safetensors")
    cases = {
        "norms": {n: t if "norm" in n else t.to(BF16) for n, t in stored.items()},
        "head": {n: t if "lm_head" in n else t.to(BF16) for n, t in stored.items()},
        "all but the head": {n: t.to(F16) if "lm_head" in n else t for n, t in stored.items()},
    }
    for name, tensors in cases.items():
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        assert resolve(path).dtype == str(transformers.LlamaForCausalLM.from_pretrained(path).dtype)[6:], name
    # the same, as several files: those of an index are taken by their names, and the index may say a dtype
    halves = [{n: t for n, t in cases["norms"].items() if ("norm" in n) == first} for first in (True, False)]
    where = {}
    for number, tensors in enumerate(halves):
        where |= dict.fromkeys(tensors, f"model-{number}.safetensors")
        save_file(tensors, path / f"model-{number}.safetensors", {"format": "pt"})
    (path / "model.safetensors").unlink()
    for metadata in ({}, {"dtype": "float16"}):
        index = {"metadata": metadata, "weight_map": where}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert resolve(path).dtype == str(transformers.LlamaForCausalLM.from_pretrained(path).dtype)[6:]
