"""Checkpoints hold more than parameters: buffers of old versions, views, other dtypes, other files.

Reports: transformers#35255, TinyLlama#127 and llama2.c#266 (``rotary_emb.inv_freq`` of each layer),
ComfyUI#15599 and ComfyUI#15602 (bytes after the last tensor), accelerate#2698 (a second file of weights).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import SourceError
from torch import Tensor

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
WEIGHTS = "model.safetensors"
Stored = dict[str, Tensor]


def old_buffers(path: Path) -> None:
    """Their values are not those of this version."""
    stored = load_file(path / WEIGHTS)
    layers = {name.split(".")[2] for name in stored if ".layers." in name}
    for layer in layers:
        stored[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        stored[f"model.layers.{layer}.self_attn.masked_bias"] = torch.tensor(-1e4)
    save_file(stored | {"model.rotary_emb.inv_freq": torch.ones(4)}, path / WEIGHTS, {"format": "pt"})


def views(path: Path) -> None:
    """A pickle with parts of a larger tensor, transposed and expanded ones, and parameters."""
    stored: dict[str, Any] = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    head = stored["lm_head.weight"]
    stored["lm_head.weight"] = torch.stack((head * 2, head, head * 3))[1]
    stored["model.norm.weight"] = torch.full((1,), 0.5).expand(stored["model.norm.weight"].shape)
    for name, tensor in stored.items():
        if "q_proj" in name:
            stored[name] = tensor.t().contiguous().t()
        if "up_proj" in name:
            stored[name] = torch.nn.Parameter(tensor)
    torch.save(stored, path / "pytorch_model.bin")


def dtypes(path: Path) -> None:
    stored = load_file(path / WEIGHTS)
    for name, tensor in stored.items():
        if "norm" in name:
            stored[name] = tensor.double()
        elif "layers.0" in name:
            stored[name] = tensor.bfloat16()
        elif "layers.1" in name:
            stored[name] = tensor.half()
    save_file(stored, path / WEIGHTS, {"format": "pt"})


def other_files(path: Path) -> None:
    """With other values under the same names."""
    others = {name: tensor * 2 for name, tensor in load_file(path / WEIGHTS).items()}
    torch.save(others, path / "pytorch_model.bin")
    save_file(others, path / "model.fp16.safetensors")
    save_file(others, path / "consolidated.safetensors")


CASES: Mapping[str, Callable[[Path], None]] = {
    "old buffers": old_buffers,
    "views": views,
    "dtypes": dtypes,
    "other files": other_files,
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def on_rank(root: Path) -> dict[str, list[Tensor]]:
    return {
        name: [
            logits(shardconv_runtime.load(root / f"{name}-out")),
            logits(shardconv_runtime.load(root / name, plan=root / f"{name}-out")),
        ]
        for name in CASES
    }


def test_parameters_are_those_of_from_pretrained(saved_llama: Path, tmp_path: Path) -> None:
    """From files, and by a plan."""
    for name, change in CASES.items():
        shutil.copytree(saved_llama, tmp_path / name)
        change(tmp_path / name)
        shardconv.convert(tmp_path / name, tmp_path / f"{name}-out", tp=2, check=False)
    ranks = run_processes(2, on_rank, tmp_path)
    for name in CASES:
        wanted = logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / name))
        for found in ranks:
            for ours in found[name]:
                assert torch.allclose(ours, wanted, atol=1e-5), name


def test_bytes_after_the_last_tensor_are_named(saved_llama: Path, tmp_path: Path) -> None:
    """As from_pretrained does it, which says that metadata is incomplete."""
    shutil.copytree(saved_llama, tmp_path / "longer")
    with (tmp_path / "longer" / WEIGHTS).open("ab") as file:
        file.write(bytes(64))
    with pytest.raises(SourceError, match=r"model.safetensors: .* bytes, the file holds \d+ of them"):
        shardconv.convert(tmp_path / "longer", tmp_path / "out", tp=2, check=False)
