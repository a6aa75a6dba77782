"""Repositories replace some tensors by adding a file, and changing the index alone.

The index says which file has each tensor. Files may hold others too, of the same names or of names that
nobody lists: what an earlier version had, or what a shard of another repository has that is used again.
Reports: colibri#1479 (an overlay was refused as a duplicate), vllm#54230 (stale tensors of shared shards
overwrote the listed ones), mlx-vlm#1464 and #1827 (an index that is behind its files).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint.checkpoint_weights import lazy_weights
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.errors import SourceError
from torch import Tensor

import shardconv

Files = Mapping[str, Mapping[str, Tensor]]
"""Tensors by the names of files."""


def write(
    path: Path, source: Path, files: Files, where: Mapping[str, str], save: Callable[..., Any] = save_file
) -> Path:
    """A checkpoint of several files and an index."""
    path.mkdir()
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    for name, tensors in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        save(dict(tensors), path / name)
    stem = "pytorch_model.bin" if save is torch.save else "model.safetensors"
    (path / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(where)}))
    return path


def read(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a checkpoint, and what is remarked about it."""
    remarks: list[str] = []
    weights = lazy_weights(resolve(path), remarks.append).tensors
    return {name: read_tensor(lazy) for name, lazy in weights.items()}, remarks  # type: ignore[arg-type]


def require_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.fixture(scope="module")
def right(saved_llama: Path) -> dict[str, Tensor]:
    """What is meant."""
    return load_file(saved_llama / "model.safetensors")


@pytest.fixture(scope="module")
def stale(right: dict[str, Tensor]) -> dict[str, Tensor]:
    """What two layers had before."""
    return {name: tensor + 1 for name, tensor in right.items() if "mlp" in name}


@pytest.mark.parametrize("overlay", ["a-overlay", "model-overlay", "overlays/v2/model"])
@pytest.mark.parametrize("save", [save_file, torch.save])
def test_an_overlay_replaces_tensors(
    overlay: str,
    save: Callable[..., Any],
    saved_llama: Path,
    right: dict[str, Tensor],
    stale: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    """Its name may come before or after those of the others, or have folders."""
    suffix = "bin" if save is torch.save else "safetensors"
    base, over = f"model-00001-of-00001.{suffix}", f"{overlay}.{suffix}"
    files = {base: right | stale, over: {name: right[name] for name in stale}}
    where = dict.fromkeys(right, base) | dict.fromkeys(stale, over)
    found, remarks = read(write(tmp_path / "model", saved_llama, files, where, save))
    require_equal(found, right)
    assert remarks == []


def logits(out: Path) -> Tensor:
    with torch.no_grad():
        return shardconv_runtime.load(out)(torch.tensor([[5, 9, 2, 77]])).logits


def test_shards_in_folders_are_converted(saved_llama: Path, right: dict[str, Tensor], tmp_path: Path) -> None:
    """Two of them have the same name."""
    folders = ["part-1/model.safetensors", "part-2/model.safetensors"]
    where = {name: folders[number % 2] for number, name in enumerate(right)}
    files = {folder: {n: right[n] for n, f in where.items() if f == folder} for folder in folders}
    path = write(tmp_path / "model", saved_llama, files, where)
    require_equal(transformers.LlamaForCausalLM.from_pretrained(path).state_dict(), right)
    shardconv.convert(path, tmp_path / "out", tp=2, check=False)
    model = transformers.LlamaForCausalLM.from_pretrained(saved_llama)
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 9, 2, 77]])).logits
    for found in run_processes(2, logits, tmp_path / "out"):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_tensors_that_nobody_lists_are_left_out(
    saved_llama: Path, right: dict[str, Tensor], stale: dict[str, Tensor], tmp_path: Path
) -> None:
    """A shard that was used again has tensors, and scales, of the repository from which it came."""
    shared, own = "shared.safetensors", "own.safetensors"
    leftover = stale | {f"{name}_scale_inv": torch.ones(1) for name in stale}
    files = {shared: {n: t for n, t in right.items() if n not in stale} | leftover, own: {}}
    files[own] = {name: right[name] for name in stale}
    where = {name: own if name in stale else shared for name in right}
    found, remarks = read(write(tmp_path / "model", saved_llama, files, where))
    require_equal(found, right)
    assert len(remarks) == 1
    assert "does not list 6 tensors in them; left out: " in remarks[0]


def test_an_index_that_is_behind_its_files(
    saved_llama: Path, right: dict[str, Tensor], tmp_path: Path
) -> None:
    """Somebody untied the head and saved it, and the index was forgotten: ``from_pretrained`` takes it."""
    file = "model-00001-of-00001.safetensors"
    path = write(
        tmp_path / "model", saved_llama, {file: right}, {n: file for n in right if n != "lm_head.weight"}
    )
    require_equal(transformers.LlamaForCausalLM.from_pretrained(path).state_dict(), right)
    found, remarks = read(path)
    require_equal(found, right)
    assert "does not list 1 tensor in them; taken, since the model lacks some: lm_head.weight" in remarks[0]


def test_a_file_that_lacks_what_the_index_says_of_it(
    saved_llama: Path, right: dict[str, Tensor], tmp_path: Path
) -> None:
    """If one other file has the tensor, it is meant; of two, it cannot be known."""
    one, two, three = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    where = dict.fromkeys(right, one) | {"lm_head.weight": three, "model.norm.weight": three}
    rest = {"model.norm.weight": right["model.norm.weight"]}
    path = write(tmp_path / "model", saved_llama, {one: right, three: rest}, where)
    require_equal(read(path)[0], right)
    where["model.embed_tokens.weight"] = two
    path = write(tmp_path / "other", saved_llama, {one: right, two: right, three: rest}, where)
    with pytest.raises(SourceError, match=r"both .* hold lm_head\.weight; name one of them in .*index\.json"):
        read(path)


@pytest.mark.parametrize("name", ["a/../../b.safetensors", "/etc/b.safetensors", "a//b", "./b", "..\\\\b"])
def test_names_stay_in_the_directory(
    name: str, saved_llama: Path, right: dict[str, Tensor], tmp_path: Path
) -> None:
    path = write(tmp_path / "model", saved_llama, {}, dict.fromkeys(right, name))
    with pytest.raises(SourceError, match="not a file of its directory"):
        resolve(path)
