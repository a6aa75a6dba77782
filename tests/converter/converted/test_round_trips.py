"""Nothing is lost on the way: to shards, to other shards, and back to a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import save_causal
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import Declared, declared, plans, random_bytes
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.checkpoint.stored_leaves import lazy_tensors
from shardconv_runtime.files.manifest import Source
from shardconv_runtime.format.plan import Plan
from torch import Tensor
from zoo.models import build

import shardconv
from shardconv.converted import derived_directory, shards
from shardconv.reporting.progress import Silent
from shardconv.writing.outputs import Output, WriteOptions
from shardconv.writing.writer import Origin, write


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal to the bit, in shape and dtype."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    a, b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected))
    return torch.equal(a, b)


def contents(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


class TestAnyLayout:
    """Random tensors, laid out in random ways: trees of dims, meshes, Partial, uneven, overlapping."""

    def write(self, plan: Plan, weights: Mapping[str, LazyTensor], out: Path, limit: int) -> Path:
        """Convert, without a model."""
        origin = Origin(Source("random"), {}, lambda directory: [])
        output = Output.prepare(out, overwrite=False, source=out.parent)
        done = write(plan, weights, output, origin, WriteOptions(limit, 1 << 20), Silent())
        assert done
        return out

    def read(self, out: Path, expected: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
        """The global tensors of a converted directory, which must be these."""
        weights = shards.read(out).weights()
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert same(read_tensor(weights[name]), tensor), name
        return weights

    @pytest.mark.parametrize("count", [20, pytest.param(400, marks=pytest.mark.slow)])
    def test_every_byte_survives_conversion_and_resharding(self, count: int) -> None:
        settings(max_examples=count, deadline=None)(given(st.data())(self.require_every_byte))()

    def require_every_byte(self, data: st.DataObject) -> None:
        """Of any tensors, in any layouts."""
        tensors: list[Declared] = data.draw(declared())
        first, second = data.draw(plans(tensors)), data.draw(plans(tensors))
        limit = data.draw(st.sampled_from((1, 64, 10**9)))
        band = data.draw(st.sampled_from((None, 1, 8, 50)))
        expected = {tensor.name: random_bytes(tensor, seed) for seed, tensor in enumerate(tensors)}
        with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
            path = Path(name)
            save_file(expected, path / "model.safetensors")
            source = lazy_tensors([path / "model.safetensors"])
            weights = self.read(self.write(first, source, path / "first", limit), expected)
            if band is not None:
                patch.setattr(derived_directory, "BAND_BYTES", band)
                weights = {name: derived_directory.gathered(name, tensor) for name, tensor in weights.items()}
            self.read(self.write(second, weights, path / "second", limit), expected)
            direct = self.write(second, source, path / "direct", limit)
            assert contents(path / "second") == contents(direct)


def llama(**changes: Any) -> tuple[Any, type]:
    """The zoo's llama with changes to its config."""
    model = build("causal", "llama", **changes)
    return model.config, model.model_class


def of_the_zoo(model_type: str, family: str = "causal") -> tuple[Any, type]:
    """Any model of the zoo."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    model = build(family, model_type)
    return model.config, model.model_class


MODELS = {
    "fewer key/value heads than ranks, uneven vocabulary": lambda: llama(
        num_key_value_heads=1, vocab_size=101
    ),
    "tied": lambda: llama(tie_word_embeddings=True),
    "tied, the first name is not the one that is saved": lambda: of_the_zoo("xlm-roberta"),
    "linear layers stored transposed": lambda: of_the_zoo("gpt2"),
    "fused projections": lambda: of_the_zoo("phi3"),
    "heads interleaved in one projection": lambda: of_the_zoo("bloom"),
    "experts one by one": lambda: of_the_zoo("mixtral"),
    "experts one by one, and shared ones": lambda: of_the_zoo("deepseek_v3"),
    "experts whose rows are computed": lambda: of_the_zoo("inkling2_text"),
    "encoder and decoder": lambda: of_the_zoo("t5", "seq2seq"),
    "images": lambda: of_the_zoo("qwen2_vl", "other"),
}
SHOWN_BY_OTHERS = (
    "tied",
    "fused projections",
    "heads interleaved in one projection",
    "experts one by one",
)
"""Slow tests: a mechanism of theirs is met in another model, beside more."""


def save(
    path: Path, config: Any, model_class: type, dtype: torch.dtype = torch.float32, limit: str = "5GB"
) -> Path:
    """Save a model whose parameters are all random, norms and biases too; return ``path``."""
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=dtype)  # type: ignore[attr-defined]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.5)
    model.save_pretrained(path, max_shard_size=limit)
    return path


class TestModels:
    """Real models: what save_pretrained wrote comes back as it was."""

    def require_round_trip(self, model: Path, tmp_path: Path) -> None:
        """Convert, merge; convert, reshard, merge; each gives the same files."""
        source = contents(model)
        shardconv.convert(model, tmp_path / "2", 2, check=False)
        shardconv.merge(tmp_path / "2", tmp_path / "merged")
        assert contents(tmp_path / "merged") == source
        shardconv.reshard(tmp_path / "2", tmp_path / "3", 3, check=False)
        shardconv.merge(tmp_path / "3", tmp_path / "merged again")
        assert contents(tmp_path / "merged again") == source
        shardconv.convert(model, tmp_path / "direct", 3, check=False)
        assert contents(tmp_path / "3") == contents(tmp_path / "direct")

    @pytest.mark.parametrize(
        "kind", [pytest.param(k, marks=pytest.mark.slow) if k in SHOWN_BY_OTHERS else k for k in MODELS]
    )
    def test_the_files_come_back(self, kind: str, tmp_path: Path) -> None:
        self.require_round_trip(save(tmp_path / "model", *MODELS[kind]()), tmp_path)

    def test_those_of_half_precision(self, tmp_path: Path) -> None:
        self.require_round_trip(save(tmp_path / "model", *llama(), torch.bfloat16), tmp_path)

    def test_whole_experts_stay_whole(self, tmp_path: Path) -> None:
        model = save(tmp_path / "model", *of_the_zoo("mixtral"))
        shardconv.convert(model, tmp_path / "2", 2, check=False, experts="ep")
        plan = shardconv.reshard(tmp_path / "2", tmp_path / "4", 4, check=False)
        assert plan.experts == "ep"
        shardconv.convert(model, tmp_path / "direct", 4, check=False, experts="ep")
        assert contents(tmp_path / "4") == contents(tmp_path / "direct")
        shardconv.merge(tmp_path / "4", tmp_path / "merged")
        assert contents(tmp_path / "merged") == contents(model)

    def test_pickled_weights_come_back_as_safetensors(self, tmp_path: Path) -> None:
        model = save(tmp_path / "model", *llama())
        expected = contents(model)
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
        shardconv.convert(model, tmp_path / "2", 2, check=False)
        shardconv.merge(tmp_path / "2", tmp_path / "merged")
        assert contents(tmp_path / "merged") == expected

    def test_a_divided_checkpoint_comes_back_divided(self, tmp_path: Path) -> None:
        model = save(tmp_path / "model", *llama(), limit="100KB")
        expected = contents(model)
        assert len(expected) > 5
        shardconv.convert(model, tmp_path / "2", 2, check=False)
        shardconv.merge(tmp_path / "2", tmp_path / "merged", max_file_size="100kB")
        assert contents(tmp_path / "merged") == expected


def test_one_rank_has_no_sequence_parallel_form(tmp_path: Path) -> None:
    """It is not refused for want of one: there is nothing to shard."""
    source = save_causal("llama", tmp_path / "model")
    shardconv.convert(source, tmp_path / "out", 2, sequence_parallel=True, check=False)
    for tp in (1, 2):
        plan = shardconv.reshard(tmp_path / "out", tmp_path / str(tp), tp, check=False)
        assert plan.training is not None
        assert (plan.training.sequence is not None) == (tp > 1)
