"""Layers that predict further tokens are in a checkpoint, and the model of transformers does not have them.

They are lost when the model is saved, while its config still declares them, and an engine that reads the
result looks for them. Reports: unsloth#11042 (Qwen3.5: 15 tensors of 488 lost), mbridge#119.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from quantized_checkpoints import save_quantized
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import SourceError
from small_models import save_random, small_config
from torch import Tensor

import shardconv

EXPERTS = transformers.MixtralConfig(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=101,
    dtype="bfloat16",
)
BASES: Mapping[str, tuple[Any, Any]] = {
    "dense": (small_config(), transformers.LlamaForCausalLM),
    "tied, and both are stored": (small_config(tie_word_embeddings=True), transformers.LlamaForCausalLM),
    "experts": (EXPERTS, transformers.MixtralForCausalLM),
    "packed": (EXPERTS, transformers.MixtralForCausalLM),
}


def save(name: str, path: Path) -> Path:
    """A model of two layers whose checkpoint has a third one."""
    config, cls = BASES[name]
    (save_quantized if name == "packed" else save_random)(config, cls, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors |= {n.replace(".1.", ".2.", 1): t.clone() for n, t in tensors.items() if "layers.1." in n}
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(8, 4)
    if name.startswith("tied"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    return path


def contents(path: Path) -> dict[str, Tensor]:
    """All tensors; bytes, since some dtypes cannot be compared."""
    found = {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
    return {name: torch.atleast_1d(tensor).view(torch.uint8) for name, tensor in found.items()}


def require_equal(found: Path, wanted: Path) -> None:
    ours, theirs = contents(found), contents(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("name", BASES)
def test_what_is_merged_is_what_was_converted(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "source")
    plan = shardconv.convert(source, tmp_path / "out", tp=2, keep_unused=True, check=False)
    assert any("carried along: model.layers.2." in note for note in plan.notes)
    shardconv.verify(tmp_path / "out", against=source)
    shardconv.merge(tmp_path / "out", tmp_path / "merged", max_file_size="50kB")
    require_equal(tmp_path / "merged", source)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == contents(source).keys()
    shardconv.reshard(tmp_path / "out", tmp_path / "one", tp=1, check=False)
    shardconv.merge(tmp_path / "one", tmp_path / "again")
    require_equal(tmp_path / "again", source)


def test_without_the_option_it_is_left_out(tmp_path: Path) -> None:
    source = save("dense", tmp_path / "source")
    plan = shardconv.convert(source, tmp_path / "out", tp=2, check=False)
    assert any("left out: model.layers.2." in note for note in plan.notes)
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    lost = contents(source).keys() - contents(tmp_path / "merged").keys()
    assert lost == {name for name in contents(source) if ".2." in name}


def load_and_save(out: Path, saved: Path) -> Tensor:
    """No rank needs the file; the leader copies it."""
    unused = out / "unused.tensors"
    model = shardconv_runtime.load(out, verify=True)
    assert unused.is_file()
    shardconv_runtime.save(model, saved)
    with torch.no_grad():
        return model(torch.tensor([[5, 9, 2, 77]])).logits


def test_ranks_load_the_model_alone(tmp_path: Path) -> None:
    source = save("dense", tmp_path / "source")
    shardconv.convert(source, tmp_path / "out", tp=2, keep_unused=True, check=False)
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 9, 2, 77]])).logits
    for found in run_processes(2, load_and_save, tmp_path / "out", tmp_path / "saved"):
        assert torch.allclose(found, wanted, atol=1e-5)
    shardconv.merge(tmp_path / "saved", tmp_path / "merged")
    require_equal(tmp_path / "merged", source)


def test_stages(tmp_path: Path) -> None:
    source = save("dense", tmp_path / "source")
    shardconv.convert(source, tmp_path / "out", tp=1, pp=2, keep_unused=True, check=False)
    assert len(list((tmp_path / "out").rglob("unused.tensors"))) == 1
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    require_equal(tmp_path / "merged", source)


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    source = save("dense", tmp_path / "source")
    shardconv.convert(source, tmp_path / "out", tp=2, keep_unused=True, check=False)
    file = tmp_path / "out" / "unused.tensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match=r"unused\.tensors: is damaged: its checksum"):
        shardconv.verify(tmp_path / "out")
    file.unlink()
    with pytest.raises(Exception, match=r"unused\.tensors is missing"):
        shardconv.merge(tmp_path / "out", tmp_path / "merged")


def with_pairs(name: str, path: Path) -> Path:
    """A checkpoint with a tensor of which each byte holds two values (F4)."""
    save_random(small_config(), transformers.LlamaForCausalLM, path)
    tensors = load_file(path / "model.safetensors")
    values = torch.arange(48 * 32, dtype=torch.int32).to(torch.uint8).reshape(48, 32)
    tensors[name] = values.view(torch.float4_e2m1fn_x2)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_pairs_of_4_bits_are_kept_or_left_out(tmp_path: Path) -> None:
    source = with_pairs("model.layers.9.weight", tmp_path / "source")
    plan = shardconv.convert(source, tmp_path / "without", tp=2, check=False)
    assert any("left out: model.layers.9.weight" in note for note in plan.notes)
    shardconv.convert(source, tmp_path / "out", tp=2, keep_unused=True, check=False)
    shardconv.verify(tmp_path / "out", against=source)
    shardconv.reshard(tmp_path / "out", tmp_path / "one", tp=1, check=False)
    shardconv.merge(tmp_path / "one", tmp_path / "merged")
    require_equal(tmp_path / "merged", source)
    with_pairs("model.layers.0.mlp.up_proj.weight", tmp_path / "used")
    with pytest.raises(SourceError, match=r"layers\.0\.mlp\.up_proj\.weight .* two values of 4 bits"):
        shardconv.convert(tmp_path / "used", tmp_path / "never", tp=2, check=False)
