"""Quantized checkpoints, converted and loaded in real processes with their weights packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import library_checkpoints
import plain_kernels
import pytest
import torch
import transformers
from distributed import run_processes
from library_checkpoints import (
    dense_model,
    experts_model,
    save_awq,
    save_bnb,
    save_compressed,
    save_fp8,
    save_gptq,
    save_torchao,
)
from packed_ranks import held_bytes, in_float32
from quantized_checkpoints import dense_config, save_quantized
from safetensors.torch import load_file
from shardconv_runtime.errors import PlanError, ShardconvError
from shardconv_runtime.files.manifest import rank_directory
from shardconv_runtime.files.small_files import stage_directory

import shardconv

IDS = [[1, 5, 60, 7, 50, 3, 8], [9, 2, 6, 33, 1, 0, 4]]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

SAVE: dict[str, Callable[[Path], Any]] = {
    "nf4": lambda path: save_bnb(path, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nested": lambda path: save_bnb(path, load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "int8": lambda path: save_bnb(path, load_in_8bit=True),
    "gptq": lambda path: save_gptq(path, 4, 64, act_order=False),
    "act-order": lambda path: save_gptq(path, 4, 32, act_order=True),
    "awq": lambda path: save_awq(path, 64),
    "torchao": lambda path: save_int8(path),
    "float8-rows": lambda path: save_compressed(path, {".*_proj": FLOAT8_ROWS}),
    "fp8": lambda path: save_fp8(path, dense_model(), (64, 64)),
    "experts": lambda path: save_fp8(path, experts_model(), (16, 16)),
    "whole-experts": lambda path: save_fp8(path, experts_model(), (16, 16)),
}
FLOAT8 = ("fp8", "experts", "whole-experts")
FLOAT8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
PACKAGES = {"torchao": ("torchao",), "float8-rows": ("compressed_tensors",)}
PACKAGES |= dict.fromkeys(("nf4", "nested", "int8"), ("bitsandbytes",)) | dict.fromkeys(FLOAT8, ())
KERNELS = {
    "gptq": {"backend": "gptq_torch"},
    "act-order": {"backend": "gptq_torch"},
    "awq": {"backend": "torch_awq"},
    "float8-rows": {"use_optimized_inference": True},
}
"""Settings that choose kernels: those that compute in the dtype of the activations, where there are such."""
TOLERANCES = {"int8": 0.05, "float8-rows": 0.05, "awq": 2e-3}
"""Some quantize activations token by token; AWQ's kernel computes in float16."""
EXTRA_BYTES = {"nested": 0.1}


def save_int8(path: Path) -> None:
    """By torchao, rows of weights."""
    from torchao.quantization import Int8WeightOnlyConfig

    save_torchao(path, Int8WeightOnlyConfig())


def require_packages(kind: str) -> None:
    """Skip a test whose libraries are missing; importing them here would start threads, before a fork."""
    for package in PACKAGES.get(kind, ("gptqmodel", "optimum")):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def unsharded_calls(kind: str, path: Path) -> tuple[Any, ...]:
    """Runs in a process of its own: a quantized checkpoint of 3 and 5 groups of 64, its logits and tokens."""
    SAVE[kind](path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= KERNELS.get(kind, {})
    (path / "config.json").write_text(json.dumps(config))
    plain_kernels.use_those_of_cpus()
    return _calls(in_float32(path))


def unsharded_calls_of_two_layers(kind: str, path: Path) -> tuple[Any, ...]:
    """Runs in a process of its own: see ``unsharded_calls``."""
    library_checkpoints.NUM_LAYERS = 2
    return unsharded_calls(kind, path)


def calls_of_rank(path: Path) -> tuple[Any, ...]:
    """Runs on each rank: logits, tokens and memory."""
    import shardconv_runtime

    plain_kernels.use_those_of_cpus()
    held = held_bytes(shardconv_runtime.load(path))
    return *_calls(shardconv_runtime.load(path, dtype="float32")), held


def _calls(model: Any) -> tuple[Any, Any]:
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    ids = torch.tensor(IDS)
    with torch.no_grad():
        logits = model(ids).logits
    return logits, model.generate(ids, **OPTIONS)


def stored_bytes(out: Path, rank: int, tp: int) -> int:
    """Of the tensors in a rank's files and in those that all ranks share."""
    folders = (out / "common", out / rank_directory(rank, tp))
    files = [file for folder in folders for file in folder.glob("*.safetensors")]
    return sum(tensor.nbytes for file in files for tensor in load_file(file).values())


def saved_alone(path: Path) -> str:
    """Runs on one rank: what is said of saving a packed model, whose config is the plain model's."""
    import shardconv_runtime

    plain_kernels.use_those_of_cpus()
    model = shardconv_runtime.load(path)
    with pytest.raises(PlanError) as error:
        model.save_pretrained(path.parent / "saved")
    return str(error.value)


@pytest.mark.formats
def test_a_packed_model_on_one_rank_is_not_saved(tmp_path: Path) -> None:
    SAVE["fp8"](tmp_path / "q")
    shardconv.convert(tmp_path / "q", tmp_path / "out", 1, check=False)
    (found,) = run_processes(1, saved_alone, tmp_path / "out")
    assert "weights are packed" in found
    assert not (tmp_path / "saved").exists()


@pytest.mark.formats
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", SAVE)
def test_packed_weights_give_the_results_of_the_unsharded_model(kind: str, tp: int, tmp_path: Path) -> None:
    require_packages(kind)
    expected, tokens = run_processes(1, unsharded_calls, kind, tmp_path / "q")[0]
    shardconv.convert(
        tmp_path / "q", tmp_path / "out", tp, experts="ep" if kind == "whole-experts" else "tp", check=False
    )
    found = run_processes(tp, calls_of_rank, tmp_path / "out")
    for rank, (logits, drawn, held) in enumerate(found):
        error = float((logits - expected).abs().max() / expected.abs().max())
        overhead = held / stored_bytes(tmp_path / "out", rank, tp)
        print(f"{kind} tp {tp} rank {rank}: {error:.1e}, memory {overhead:.4f}, {torch.equal(drawn, tokens)}")
        assert error <= TOLERANCES.get(kind, 1e-5)
        assert kind in TOLERANCES or torch.equal(drawn, tokens)
        assert overhead <= 1.02 + EXTRA_BYTES.get(kind, 0)
        assert torch.equal(drawn, found[0][1])


def refusals_of_rank(path: Path) -> dict[str, str]:
    """Runs on each rank: what cannot be done with packed weights, and what is said about it."""
    import shardconv_runtime

    model = shardconv_runtime.load(path)
    calls = {
        "training": lambda: shardconv_runtime.load(path, training=True),
        "compile": lambda: shardconv_runtime.load(path, compile=True),
        "save": lambda: shardconv_runtime.save(model, path.parent / "saved"),
        "save_pretrained": lambda: model.save_pretrained(path.parent / "saved"),
    }
    return {name: _error(call) for name, call in calls.items()}


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.formats
def test_what_packed_weights_do_not_allow_is_refused(tmp_path: Path) -> None:
    require_packages("nf4")
    run_processes(1, unsharded_calls, "nf4", tmp_path / "q")
    shardconv.convert(tmp_path / "q", tmp_path / "out", 2, check=False)
    for found in run_processes(2, refusals_of_rank, tmp_path / "out"):
        assert all("dequantize=True" in text for text in found.values()), found
    assert not (tmp_path / "saved").exists()


def error_of_rank(path: Path) -> str:
    """Runs on each rank."""
    import shardconv_runtime

    return _error(lambda: shardconv_runtime.load(path))


def test_a_device_without_kernels_is_told_before_anything_is_read(tmp_path: Path) -> None:
    save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
    for text in run_processes(2, error_of_rank, tmp_path / "out"):
        assert "fp8" in text
        assert "dequantize=True" in text


def error_of_mixed_ranks(path: Path) -> str:
    """Runs on each rank: one dequantizes, the other does not."""
    import shardconv_runtime
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        shardconv_runtime.load(path, dequantize=dist.get_rank() == 0)
    except ShardconvError as error:
        return str(error)
    return ""


def test_all_ranks_dequantize_or_none(tmp_path: Path) -> None:
    save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
    for text in run_processes(2, error_of_mixed_ranks, tmp_path / "out"):
        assert "the ranks must load the same form" in text
        assert "dequantize=True" in text


ON_STAGES = ("nf4", "gptq", "float8-rows", "experts")
"""By bitsandbytes, gptqmodel, compressed-tensors and transformers itself; the others are slow tests."""


@pytest.mark.formats
@pytest.mark.parametrize(
    "kind", [kind if kind in ON_STAGES else pytest.param(kind, marks=pytest.mark.slow) for kind in SAVE]
)
def test_packed_weights_on_stages(kind: str, tmp_path: Path) -> None:
    """Each stage holds its own layers, packed, and nothing of the others'."""
    require_packages(kind)
    expected, tokens = run_processes(1, unsharded_calls_of_two_layers, kind, tmp_path / "q")[0]
    out = tmp_path / "out"
    shardconv.convert(
        tmp_path / "q", out, 2, pp=2, experts="ep" if kind == "whole-experts" else "tp", check=False
    )
    found = run_processes(4, calls_of_rank, out)
    for rank, (logits, drawn, held) in enumerate(found):
        error = float((logits - expected).abs().max() / expected.abs().max())
        overhead = held / stored_bytes(out / stage_directory(rank // 2, 2), rank % 2, 2)
        print(f"{kind} rank {rank}: {error:.1e}, memory {overhead:.4f}, {torch.equal(drawn, tokens)}")
        assert error <= TOLERANCES.get(kind, 1e-5)
        assert kind in TOLERANCES or torch.equal(drawn, tokens)
        assert overhead <= 1.02 + EXTRA_BYTES.get(kind, 0)
        assert torch.equal(drawn, found[0][1])
