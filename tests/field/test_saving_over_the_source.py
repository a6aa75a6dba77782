"""A trained model is saved, again and again, to the directory that it was loaded from.

Files that are mapped into memory are overwritten: an error, or zeros, in the file and in the model. Reports:
transformers#37713, SimpleTuner#2714, safetensors#762. Its generation settings have a temperature that greedy
decoding does not use, with which ``GenerationConfig`` refuses to be saved, and a checkpoint is lost:
Qwen3-ASR#210, transformers#29988.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime.errors import ShardconvError
from torch import Tensor

import shardconv

IDS = torch.tensor([[5, 9, 2, 77, 31, 4, 8, 12]])
SETTINGS = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found.clone()


def on_rank(source: Path, out: Path) -> tuple[list[Tensor], list[str]]:
    model: Any = shardconv_runtime.load(source, plan=out)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found = [logits(model)]
    for _ in range(2):
        model.save_pretrained(source)
        found.append(logits(model))
    found.append(logits(shardconv_runtime.load(source, plan=out)))
    own: Any = shardconv_runtime.load(out)
    refusals = []
    for write in (partial(shardconv_runtime.save, own, overwrite=True), own.save_pretrained):
        with pytest.raises(ShardconvError) as error:
            write(out)
        refusals.append(str(error.value))
    return found, refusals


def test_the_model_and_the_files_are_right(saved_llama: Path, tmp_path: Path) -> None:
    """The directory of ranks is refused, which other processes may be reading."""
    source, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(saved_llama, source)
    (source / "generation_config.json").write_text(json.dumps(SETTINGS))
    shardconv.convert(source, out, tp=2, check=False)
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    wanted = logits(model)
    for found, (of_ranks, of_all) in run_processes(2, on_rank, source, out):
        assert "one contains the other; name another directory" in of_ranks
        assert "is a converted directory, from which load would take its shards as before" in of_all
        for ours in found:
            assert torch.allclose(ours, wanted, atol=1e-4)
    again = transformers.LlamaForCausalLM.from_pretrained(source)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert json.loads((source / "generation_config.json").read_text()).items() >= SETTINGS.items()
