"""Code of a model's repository that was written for transformers 4.

Its tied weights are a list of names: https://github.com/huggingface/transformers/issues/44861,
https://github.com/LG-AI-EXAONE/EXAONE-3.5/pull/7, https://github.com/PrimeIntellect-ai/prime-rl/pull/1998
("'list' object has no attribute 'keys'").
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from shardconv_runtime.errors import SourceError
from small_models import save_random, small_config

import shardconv

OLD = """
from transformers import LlamaConfig, LlamaForCausalLM

class OldConfig(LlamaConfig):
    model_type = "old_thing"

class OldModel(LlamaForCausalLM):
    config_class = OldConfig
    {line}
"""
LIST = '_tied_weights_keys = ["lm_head.weight"]'
IMPORTS = "__init__ = lambda self, config: self.prune_heads_of_transformers_4()"


def save(path: Path, line: str) -> Path:
    save_random(small_config(tie_word_embeddings=True), transformers.LlamaForCausalLM, path)
    (path / "modeling_old.py").write_text(OLD.format(line=line))
    config = json.loads((path / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_old.OldConfig", "AutoModelForCausalLM": "modeling_old.OldModel"}
    config |= {"model_type": "old_thing", "architectures": ["OldModel"], "auto_map": auto_map}
    (path / "config.json").write_text(json.dumps(config))
    return path


def convert(source: Path, out: Path) -> Any:
    return shardconv.convert(source, out, tp=2, check=False, trust_remote_code=True)


def plan(source: Path, out: Path) -> Any:
    return shardconv.plan(source, tp=2, check=False, trust_remote_code=True)


@pytest.mark.parametrize("use", [convert, plan])
def test_a_list_of_tied_weights_says_what_to_write(use: Callable[[Path, Path], Any], tmp_path: Path) -> None:
    source = save(tmp_path / use.__name__, LIST)
    with pytest.raises(SourceError, match=r"_tied_weights_keys is a list, .* change it in modeling_old\.py"):
        use(source, tmp_path / "out")


def test_other_code_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match="OldModel, code of the model's repository, fails with transformers"
    ):
        plan(save(tmp_path / "other", IMPORTS), tmp_path / "out")
