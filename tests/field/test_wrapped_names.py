"""A state dict was taken of a wrapper: its names begin with ``_orig_mod.`` or ``module.``, or have it inside.

Reports: pytorch#101107, nanoGPT#325, eole#179, FareedKhan-dev/train-llm-from-scratch#36 (both at once),
accelerate's and Lightning's checkpoints, transformers#29659 (``_orig_module`` of layers).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint.checkpoint_weights import lazy_weights
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.errors import SourceError
from torch import Tensor

import shardconv

Rename = Callable[[str], str]


def inside(pattern: str, wrapper: str) -> Rename:
    return lambda name: re.sub(pattern, rf"\g<0>{wrapper}.", name, count=1)


WRAPPED: Mapping[str, Rename] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "over replicas": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "a trainer's": lambda name: f"actor.module.{name}",
    "compiled inside": inside(r"^model\.", "_orig_mod"),
    "compiled layers": inside(r"layers\.\d+\.", "_orig_mod").__call__,
    "FSDP": lambda name: (
        "_fsdp_wrapped_module."
        + inside(r"layers\.\d+\.", "_fsdp_wrapped_module._checkpoint_wrapped_module")(name)
    ),
    "parallel inside": inside(r"^model\.", "module"),
}


def write(path: Path, source: Path, tensors: Mapping[str, Tensor], *, pickled: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    if pickled:
        torch.save(dict(tensors), path / "pytorch_model.bin")
    else:
        save_file(dict(tensors), path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("name", WRAPPED)
def test_it_is_read_where_it_is_complete_without_the_wrapper(
    name: str, saved_llama: Path, tmp_path: Path
) -> None:
    tensors = load_file(saved_llama / "model.safetensors")
    wrapped = {WRAPPED[name](n): tensor for n, tensor in tensors.items()}
    assert wrapped.keys() != tensors.keys()
    remarks: list[str] = []
    path = write(tmp_path / "model", saved_llama, wrapped, pickled=name == "over replicas")
    found = lazy_weights(resolve(path), remarks.append).tensors
    assert found.keys() == tensors.keys()
    assert all(torch.equal(read_tensor(found[n]), tensor) for n, tensor in tensors.items())  # type: ignore[arg-type]
    assert [remark[:40] for remark in remarks] == ["the checkpoint is that of a wrapped mode"]


def test_it_is_converted(saved_llama: Path, tmp_path: Path) -> None:
    tensors = load_file(saved_llama / "model.safetensors")
    path = write(tmp_path / "model", saved_llama, {f"_orig_mod.{n}": t for n, t in tensors.items()})
    plan = shardconv.convert(path, tmp_path / "out", tp=2, check=False)
    assert any("_orig_mod.lm_head.weight is lm_head.weight" in note for note in plan.notes)
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[n], tensor) for n, tensor in tensors.items())


def test_what_is_ambiguous_is_refused(saved_llama: Path, tmp_path: Path) -> None:
    """Two tensors of one name, two models, and a part of a model."""
    tensors = load_file(saved_llama / "model.safetensors")
    wrapped = {f"_orig_mod.{n}": t for n, t in tensors.items()}
    twice = wrapped | {"lm_head.weight": tensors["lm_head.weight"] + 1}
    two = {f"{model}.{n}": t.clone() for model in ("actor", "critic") for n, t in tensors.items()}
    part = {n: t for n, t in wrapped.items() if "norm" not in n}
    for number, (stored, said) in enumerate(
        [
            (twice, r"was saved of a wrapped model, as the name _orig_mod\..* has a name twice"),
            (two, r"of several models, whose names begin with actor\. and critic\.; save only one of them"),
            (part, r"without the wrapper's part it lacks 21 tensors"),
        ]
    ):
        path = write(tmp_path / str(number), saved_llama, stored)
        with pytest.raises(SourceError, match=said):
            lazy_weights(resolve(path))


def test_other_names_are_what_is_lacking(saved_llama: Path, tmp_path: Path) -> None:
    tensors = load_file(saved_llama / "model.safetensors")
    path = write(
        tmp_path / "model", saved_llama, {n.replace("self_attn", "attention"): t for n, t in tensors.items()}
    )
    with pytest.raises(SourceError, match="lacks 8 tensors"):
        lazy_weights(resolve(path))
