"""A checkpoint of a causal model's inner part: the error says which class it is of.

Embedding models are saved so, with the config of the causal model. To download it again cannot help.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import SourceError
from small_models import save_random, small_config

import shardconv


def test_the_class_without_a_head_is_named(tmp_path: Path) -> None:
    config = small_config(tie_word_embeddings=False)
    save_random(config, transformers.LlamaForCausalLM, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    head = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(head, file, metadata={"format": "pt"})
    with pytest.raises(SourceError, match="if it was saved without its head, name LlamaModel"):
        shardconv.convert(tmp_path / "base", tmp_path / "out", tp=2, check=False)
    path = tmp_path / "base" / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "LlamaModel"))
    shardconv.convert(tmp_path / "base", tmp_path / "out", tp=2, check=False)
    inside = {name: t for name, t in tensors.items() if "layers.1." not in name}
    save_file(inside, file, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"; download it again, or correct config\.json$"):
        shardconv.convert(tmp_path / "base", tmp_path / "other", tp=2, check=False)
