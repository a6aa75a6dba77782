"""Adapters that are put into models on meta: what peft would have made of them in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from adapters import CONFIGS, SMALL, low_rank, save_adapters, save_base, scramble
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from shardconv_runtime.adapters.adapter_files import write_adapter
from shardconv_runtime.adapters.attaching import Adapter, attach, read_config
from shardconv_runtime.errors import SourceError
from shardconv_runtime.meta.meta_model import build_model
from shardconv_runtime.parallel.build import stored_tensors
from torch import nn

CONFIG = transformers.LlamaConfig(**SMALL)


def saved(directory: Path) -> Adapter:
    return Adapter(read_config(directory), str(directory))


def meta_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return build_model(transformers.LlamaForCausalLM, CONFIG, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [*CONFIGS.values(), low_rank(["q_proj", "embed_tokens"])])
def test_a_new_adapter_has_the_weights_that_peft_draws(config: LoraConfig, dtype: torch.dtype) -> None:
    model = meta_model(dtype)
    before = dict(stored_tensors(model))
    attached = attach(model, {"default": Adapter(config, seed=3)}, trainable=True)
    whole = transformers.LlamaForCausalLM(CONFIG).to(dtype)
    torch.manual_seed(3)
    wanted = get_peft_model(whole, config)
    theirs = dict(stored_tensors(whole))
    assert theirs.keys() == dict(stored_tensors(model)).keys()
    for name, tensor in attached.tensors.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.dtype == theirs[name].dtype
    for name, tensor in stored_tensors(model):
        assert tensor.is_meta
        assert (tensor.shape, tensor.dtype) == (theirs[name].shape, theirs[name].dtype)
        is_base = name in attached.base_names
        assert is_base != (name in attached.tensors or name in attached.copies)
        assert not is_base or tensor is before[attached.base_names[name]]
    asked = {n: p.requires_grad for n, p in attached.wrapper.named_parameters()}
    assert asked == {n: p.requires_grad for n, p in wanted.named_parameters()}


def test_copies_of_modules_are_told_from_new_parameters() -> None:
    config = low_rank(["q_proj"], modules_to_save=["lm_head"])
    attached = attach(meta_model(), {"mine": Adapter(config)}, trainable=True)
    assert attached.copies == {"lm_head.modules_to_save.mine.weight": "lm_head.weight"}
    assert attached.base_names["lm_head.original_module.weight"] == "lm_head.weight"
    assert "lm_head.modules_to_save.mine.weight" not in attached.tensors


def test_a_saved_adapter_is_what_peft_loads(tmp_path: Path) -> None:
    trained = save_adapters(save_base(tmp_path / "base"), tmp_path / "adapters")
    model = meta_model(torch.float64)
    sources = {
        n: Adapter(read_config(tmp_path / "adapters" / n), str(tmp_path / "adapters" / n)) for n in CONFIGS
    }
    attached = attach(model, sources, trainable=False)
    theirs = dict(stored_tensors(trained.get_base_model()))
    assert attached.tensors.keys() == theirs.keys() - attached.base_names.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in attached.tensors.items())
    assert not any(p.requires_grad for p in attached.wrapper.parameters())


def test_what_is_written_is_what_peft_writes(tmp_path: Path) -> None:
    trained = save_adapters(
        save_base(tmp_path / "base"), tmp_path / "theirs", {"default": CONFIGS["everything"]}
    )
    tensors = {n: t for n, t in stored_tensors(trained.get_base_model()) if "default" in n}
    write_adapter(trained, "default", tensors, tmp_path / "ours")
    files = [tmp_path / side / "adapter_model.safetensors" for side in ("ours", "theirs")]
    assert len({file.read_bytes() for file in files}) == 1
    ours, theirs = (PeftConfig.from_pretrained(file.parent).to_dict() for file in files)
    assert ours == theirs


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (low_rank(["q_proj"], use_dora=True), "is initialized from the weights of the model"),
        (low_rank(["q_proj"], init_lora_weights="pissa"), "is initialized from the weights of the model"),
        (low_rank(["nothing"]), "peft .* refuses it for this model .*nothing"),
        (
            PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            "adds tokens, not parameters",
        ),
    ],
)
def test_adapters_that_need_the_whole_model_are_refused(config: PeftConfig, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        attach(meta_model(), {"default": Adapter(config)}, trainable=True)


def test_an_adapter_that_changes_the_model_is_refused(tmp_path: Path) -> None:
    config = low_rank(["q_proj"], init_lora_weights="pissa")
    get_peft_model(transformers.LlamaForCausalLM(CONFIG), config).save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="it changes weights of the model itself"):
        attach(meta_model(), {"default": saved(tmp_path)}, trainable=False)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    larger = transformers.LlamaConfig(**{**SMALL, "hidden_size": 96})
    other = get_peft_model(transformers.LlamaForCausalLM(larger), low_rank())
    other.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="size mismatch"):
        attach(meta_model(), {"default": saved(tmp_path)}, trainable=False)


def test_an_incomplete_adapter_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(transformers.LlamaForCausalLM(CONFIG), low_rank())
    scramble(model)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    dropped = min(tensors)
    save_file({n: t for n, t in tensors.items() if n != dropped}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(SourceError, match="no file of the adapter has it"):
        attach(meta_model(), {"default": saved(tmp_path)}, trainable=False)


def test_other_adapters_of_layers_are_taken() -> None:
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    attached = attach(meta_model(), {"default": Adapter(config)}, trainable=True)
    assert len(attached.tensors) == 4
