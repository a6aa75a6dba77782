"""Checkpoints as they lie on disks: models in the ways in which people and old versions wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SINGLE, PICKLED = "model.safetensors", "pytorch_model.bin"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Variant:
    """A change of a checkpoint that ``save_pretrained`` wrote."""

    base: str
    """Which model: ``BASES`` of the test."""
    change: Callable[[Path], None]
    refused: str = ""
    """What our error says where transformers loads with a warning; "" where both do alike."""


VARIANTS: dict[str, Variant] = {}


def variant(*bases: str, refused: str = "") -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(change: Callable[[Path], None]) -> Callable[[Path], None]:
        for base in bases:
            VARIANTS[f"{base}: {change.__name__}"] = Variant(base, change, refused)
        return change

    return add


def on_tensors(change: Callable[[Tensors], Tensors | None]) -> Callable[[Path], None]:
    """Change the tensors of the single file."""

    def apply(path: Path) -> None:
        tensors = load_file(path / SINGLE)
        save_file(change(tensors) or tensors, path / SINGLE, {"format": "pt"})

    apply.__name__ = change.__name__
    return apply


def as_pickle(path: Path, tensors: Mapping[str, Any]) -> None:
    torch.save(dict(tensors), path / PICKLED)
    (path / SINGLE).unlink(missing_ok=True)


def in_config(path: Path, **values: Any) -> None:
    """Set values of the config; None removes."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): tensor for name, tensor in tensors.items()}


@variant("tied", "untied", "encoder")
def as_saved(path: Path) -> None: ...


# Tied weights.
@variant("tied")
@on_tensors
def head_stored_too(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()


@variant("tied")
@on_tensors
def head_with_other_values(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1


@variant("tied")
def pickled_with_shared_storage(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    as_pickle(path, tensors | {"lm_head.weight": tensors["transformer.wte.weight"]})


@variant("tied")
def pickled_with_a_copy(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    as_pickle(path, tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()})


@variant("tied")
def pickled_with_another_head(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    as_pickle(path, tensors | {"lm_head.weight": tensors["transformer.wte.weight"] * 2})


@variant("tied")
@on_tensors
def only_the_head_is_stored(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")


# Names.
@variant("tied")
@on_tensors
def without_the_prefix(tensors: Tensors) -> Tensors:
    return renamed(tensors, lambda name: name.removeprefix("transformer."))


@variant("untied")
@on_tensors
def without_the_prefix_of_the_base(tensors: Tensors) -> Tensors:
    return renamed(tensors, lambda name: name.removeprefix("model."))


@variant("encoder")
@on_tensors
def gamma_and_beta(tensors: Tensors) -> Tensors:
    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return renamed(tensors, old)


# Buffers and heads of other times and tasks.
@variant("untied")
@on_tensors
def with_frequencies(tensors: Tensors) -> None:
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


@variant("tied")
@on_tensors
def with_masks(tensors: Tensors) -> None:
    for layer in range(2):
        tensors[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


@variant("encoder")
@on_tensors
def with_positions(tensors: Tensors) -> None:
    tensors["bert.embeddings.position_ids"] = torch.arange(128)[None]


@variant("encoder")
@on_tensors
def with_heads_of_another_task(tensors: Tensors) -> None:
    tensors["cls.seq_relationship.weight"] = torch.ones(2, 64)
    tensors["cls.seq_relationship.bias"] = torch.ones(2)
    tensors["bert.pooler.dense.weight"] = torch.ones(64, 64)
    tensors["bert.pooler.dense.bias"] = torch.ones(64)


@variant("untied")
@on_tensors
def with_a_layer_more(tensors: Tensors) -> None:
    layer = {n.replace(".1.", ".2."): t.clone() for n, t in tensors.items() if ".layers.1." in n}
    tensors.update(layer)


@variant("untied", refused="although it uses others of the same module")
@on_tensors
def with_biases_that_the_config_denies(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


@variant("untied", refused="although it uses others of the same module")
@on_tensors
def with_scales_that_the_config_denies(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)


@variant("untied")
@on_tensors
def with_empty_tensors(tensors: Tensors) -> None:
    tensors["extra.empty"] = torch.empty(0, 4)


@variant("untied")
@on_tensors
def without_the_head(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


@variant("untied")
@on_tensors
def without_a_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


@variant("untied")
@on_tensors
def with_a_larger_vocabulary(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.cat([tensors["lm_head.weight"]] * 2)


# Storage and dtypes.
@variant("untied")
def views_of_one_storage(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    whole = torch.cat([tensors[name] for name in names])
    parts = whole.split([len(tensors[name]) for name in names])
    as_pickle(path, tensors | dict(zip(names, parts, strict=True)))


@variant("untied")
def transposed_storage(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    as_pickle(path, {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in tensors.items()})


@variant("untied", "encoder")
@on_tensors
def mixed_dtypes(tensors: Tensors) -> Tensors:
    return {name: t.bfloat16() if t.dim() == 2 else t.float() for name, t in tensors.items()}


@variant("untied")
@on_tensors
def half_precision_under_another_config(tensors: Tensors) -> Tensors:
    return {name: t.half() for name, t in tensors.items()}


@variant("untied")
def no_dtype_in_the_config(path: Path) -> None:
    in_config(path, dtype=None)


@variant("untied")
def old_key_of_the_dtype(path: Path) -> None:
    in_config(path, dtype=None, torch_dtype="float32")


@variant("untied")
def pickled_in_bfloat16(path: Path) -> None:
    as_pickle(path, {name: t.bfloat16() for name, t in load_file(path / SINGLE).items()})
    in_config(path, dtype="bfloat16")


@variant("untied")
def parameters_that_require_gradients(path: Path) -> None:
    as_pickle(path, {name: torch.nn.Parameter(t) for name, t in load_file(path / SINGLE).items()})


@variant("untied")
def nested_pickle(path: Path) -> None:
    as_pickle(path, {"state_dict": load_file(path / SINGLE)})


@variant("untied")
def safetensors_without_metadata(path: Path) -> None:
    save_file(load_file(path / SINGLE), path / SINGLE)


# Files.
def divided(path: Path, *, pickled: bool = False) -> dict[str, str]:
    """Divide the tensors into two files with an index; where each tensor is."""
    tensors = load_file(path / SINGLE)
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    names = sorted(tensors)
    files = {f"{stem}-0000{i + 1}-of-00002.{suffix}": names[i::2] for i in range(2)}
    for file, held in files.items():
        part = {name: tensors[name] for name in held}
        torch.save(part, path / file) if pickled else save_file(part, path / file, {"format": "pt"})
    (path / SINGLE).unlink()
    where = {name: file for file, held in files.items() for name in held}
    write_index(path, where, f"{stem}.{suffix}.index.json")
    return where


def write_index(path: Path, where: Mapping[str, str], name: str = f"{SINGLE}.index.json") -> None:
    (path / name).write_text(json.dumps({"metadata": {}, "weight_map": dict(where)}))


@variant("tied", "untied")
def two_files(path: Path) -> None:
    divided(path)


@variant("tied", "untied")
def two_pickled_files(path: Path) -> None:
    divided(path, pickled=True)


@variant("untied")
def index_of_tensors_that_are_not_there(path: Path) -> None:
    write_index(path, divided(path) | {"model.layers.7.mlp.weight": "model-00001-of-00002.safetensors"})


@variant("untied")
def index_without_some_tensors(path: Path) -> None:
    where = divided(path)
    write_index(path, {name: file for name, file in where.items() if "norm" not in name})


@variant("untied")
def index_of_a_file_that_is_not_there(path: Path) -> None:
    write_index(path, divided(path) | {"more": "model-00003-of-00002.safetensors"})


@variant("untied")
def file_that_no_index_names(path: Path) -> None:
    divided(path)
    save_file({"model.norm.weight": torch.zeros(64)}, path / "model-00009-of-00009.safetensors")


@variant("untied")
def one_tensor_in_two_files(path: Path) -> None:
    where = divided(path)
    first, second = sorted(set(where.values()))
    moved = load_file(path / first)
    name = next(iter(moved))
    save_file(load_file(path / second) | {name: moved[name]}, path / second, {"format": "pt"})


@variant("untied")
def several_formats(path: Path) -> None:
    torch.save({n: t + 1 for n, t in load_file(path / SINGLE).items()}, path / PICKLED)


@variant("untied")
def a_file_and_an_index(path: Path) -> None:
    tensors = load_file(path / SINGLE)
    divided(path)
    save_file({name: t + 1 for name, t in tensors.items()}, path / SINGLE, {"format": "pt"})


@variant("untied")
def truncated(path: Path) -> None:
    (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:-10])


@variant("untied")
def no_weights(path: Path) -> None:
    (path / SINGLE).unlink()


# Configs.
@variant("tied", "untied")
def no_architecture(path: Path) -> None:
    in_config(path, architectures=None)


@variant("tied")
def saved_by_the_base_model(path: Path) -> None:
    on_tensors(lambda tensors: renamed(tensors, lambda name: name.removeprefix("transformer.")))(path)
    in_config(path, architectures=["GPT2LMHeadModel"])


@variant("tied")
def tied_no_more(path: Path) -> None:
    in_config(path, tie_word_embeddings=False)
