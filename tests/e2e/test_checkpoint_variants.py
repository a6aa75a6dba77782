"""Checkpoints as they lie on disks: converted to what ``from_pretrained`` makes of them, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from checkpoint_variants import VARIANTS
from checkpoints import save_causal, save_encoder
from shardconv_runtime import ShardconvError

import shardconv

BASES: dict[str, Callable[[Path], Path]] = {
    "tied": lambda path: save_causal("gpt2", path),
    "untied": lambda path: save_causal("llama", path),
    "encoder": save_encoder,
}
CLASSES = {
    "tied": transformers.AutoModelForCausalLM,
    "untied": transformers.AutoModelForCausalLM,
    "encoder": transformers.AutoModelForMaskedLM,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bases")
    for name, save in BASES.items():
        save(root / name)
    return root


def loaded_by_transformers(base: str, path: Path) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
    """The parameters, None where it fails or draws some at random; and the tensors that it warns of."""
    try:
        model, info = CLASSES[base].from_pretrained(path, output_loading_info=True)
    except Exception:
        return None, []
    return None if info["missing_keys"] else dict(model.state_dict()), sorted(info["unexpected_keys"])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_converted_as_transformers_loads_it(name: str, bases: Path, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    path = tmp_path / "model"
    shutil.copytree(bases / variant.base, path)
    variant.change(path)
    want, unused = loaded_by_transformers(variant.base, path)
    if want is None or variant.refused:
        with pytest.raises(ShardconvError, match=variant.refused or None):
            shardconv.convert(path, tmp_path / "out", tp=2, check=False)
        return
    plan = shardconv.convert(path, tmp_path / "out", tp=2, check=False)
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    found, _ = loaded_by_transformers(variant.base, tmp_path / "merged")
    assert found is not None
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) and found[key].dtype == want[key].dtype for key in want)
    said = " ".join(plan.notes)
    assert ("does not use" in said) == bool(unused)
    assert all(name in said for name in unused[:1])
