"""Merging: what is written is what transformers saves and loads, whole or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_checkpoints import dense_config, experts_config, save_quantized
from safetensors.torch import load_file, save_file
from shardconv_runtime.errors import CheckpointError, PlanError, ShardconvError, SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import parameter_plans
from small_conversion import Model, crashes, placed
from small_models import hand_plan, make_custom, save_random, small_config

import shardconv
from shardconv.arguments import Writing
from shardconv.exports import saved_layout
from shardconv.writing import job, local_files


def contents(path: Path) -> dict[str, bytes]:
    """All files."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.fixture
def out(llama_dir: Path, tmp_path: Path, hand_solver: None) -> Path:
    """A small Llama for three ranks, uneven."""
    shardconv.convert(llama_dir, tmp_path / "out", 3)
    return tmp_path / "out"


class TestFiles:
    """The directory is that of ``save_pretrained``."""

    def test_one_file(self, llama_dir: Path, out: Path, tmp_path: Path) -> None:
        (llama_dir / "tokenizer.json").write_text("{}")
        shardconv.convert(llama_dir, out, 2, writing=Writing(overwrite=True))
        merged = shardconv.merge(out, tmp_path / "hf")
        assert contents(tmp_path / "hf") == contents(llama_dir)
        num_bytes = sum(t.nbytes for t in load_file(llama_dir / "model.safetensors").values())
        assert dataclasses.astuple(merged) == (21, 1, num_bytes, True, False)

    def test_several_files_and_their_index(self, llama_dir: Path, out: Path, tmp_path: Path) -> None:
        merged = shardconv.merge(out, tmp_path / "hf", max_file_size="20kB")
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert len(files) == merged.num_files > 2
        whole = load_file(llama_dir / "model.safetensors")
        assert index["weight_map"] == {
            name: file for file in files for name in load_file(tmp_path / "hf" / file)
        }
        assert index["weight_map"].keys() == whole.keys()
        assert index["metadata"] == {
            "total_size": sum(tensor.nbytes for tensor in whole.values()),
            "total_parameters": sum(tensor.numel() for tensor in whole.values()),
        }

    def test_the_dtype_is_that_of_the_shards(self, llama_dir: Path, out: Path, tmp_path: Path) -> None:
        shardconv.convert(llama_dir, out, 2, dtype="bfloat16", writing=Writing(overwrite=True))
        shardconv.merge(out, tmp_path / "hf")
        source = load_file(llama_dir / "model.safetensors")
        for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
            assert torch.equal(tensor, source[name].to(torch.bfloat16)), name
        said, config = (json.loads((d / "config.json").read_text()) for d in (llama_dir, tmp_path / "hf"))
        assert config == said | {"dtype": "bfloat16"}

    def test_code_goes_along(self, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_custom(llama_dir)
        shardconv.convert(llama_dir, tmp_path / "out", 2, trust_remote_code=True, check=False)
        with pytest.raises(SourceError, match=r"read its \*\.py files, then pass --trust-remote-code"):
            shardconv.merge(tmp_path / "out", tmp_path / "hf")
        assert not (tmp_path / "hf").exists()
        shardconv.merge(tmp_path / "out", tmp_path / "hf", trust_remote_code=True)
        assert contents(tmp_path / "hf") == contents(llama_dir)


def mixture() -> tuple[Any, type]:
    """Experts that transformers stacks when it loads them."""
    config = transformers.MixtralConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        num_local_experts=4,
    )
    return config, transformers.MixtralForCausalLM


def encoder() -> tuple[Any, type]:
    """A tied model whose first name of the tied tensor is not the one that is saved."""
    config = transformers.XLMRobertaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=50
    )
    return config, transformers.XLMRobertaForMaskedLM


@pytest.mark.parametrize(
    "make",
    [
        mixture,
        encoder,
        lambda: (small_config(tie_word_embeddings=True), transformers.LlamaForCausalLM),
        lambda: (
            transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=50),
            transformers.GPT2Model,
        ),
    ],
)
def test_transformers_loads_it_as_the_model_it_was(
    make: Callable[[], tuple[Any, type]], tmp_path: Path
) -> None:
    model = save_random(*make(), tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
    shardconv.merge(tmp_path / "out", tmp_path / "hf")
    loaded, info = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info.values()), info
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def bits(tensor: torch.Tensor) -> bytes:
    """All bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class TestBlocks:
    """Block-scaled float8: values and factors come back as they were."""

    @pytest.mark.parametrize("tp", [2, 4])
    @pytest.mark.parametrize("kind", ["experts", "dense"])
    def test_values_and_factors(self, kind: str, tp: int, tmp_path: Path) -> None:
        config, cls = {
            "experts": (experts_config(), transformers.DeepseekV3ForCausalLM),
            "dense": (dense_config(), transformers.Qwen3ForCausalLM),
        }[kind]
        save_quantized(config, cls, tmp_path / "model")
        shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
        if tp != 2:
            shardconv.reshard(tmp_path / "out", tmp_path / "other", tp, check=False)
        shardconv.merge(tmp_path / ("out" if tp == 2 else "other"), tmp_path / "hf")
        source = load_file(tmp_path / "model" / "model.safetensors")
        found = load_file(tmp_path / "hf" / "model.safetensors")
        assert found.keys() == source.keys()
        assert sum(name.endswith("_scale_inv") for name in found) >= 14
        for name, tensor in source.items():
            # What transformers loads in float32; the gates of experts are among it since 5.24.
            in_float32 = any(part in name for part in cls._keep_in_fp32_modules_strict or ())
            kept = tensor.float() if in_float32 else tensor
            assert (found[name].dtype, found[name].shape) == (kept.dtype, kept.shape), name
            assert bits(found[name]) == bits(kept), name
        configs = [json.loads((tmp_path / where / "config.json").read_text()) for where in ("model", "hf")]
        assert configs[0] == configs[1]
        assert "quantization_config" in configs[1]

    def test_a_layout_that_takes_blocks_apart_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
        shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
        name = "model.layers.0.mlp.up_proj.weight"

        def split(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            upper, lower = state.pop(name).split([24, 72])
            return state | {f"{name}.upper": upper, f"{name}.lower": lower}

        monkeypatch.setattr(saved_layout, "revert_weight_conversion", split)
        monkeypatch.setattr("shardconv.exports.saved_layout.require_loadable", lambda *args: None)
        with pytest.raises(
            SourceError, match=rf"{name}\.upper would be saved with parts of its packed steps"
        ):
            shardconv.merge(tmp_path / "out", tmp_path / "hf")
        assert not (tmp_path / "hf").exists()


def test_what_the_class_does_not_save_is_left_out(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a class computes it when it is loaded, positions say."""
    cls = transformers.LlamaForCausalLM
    monkeypatch.setattr(cls, "_keys_to_ignore_on_save", ["lm_head.weight"])
    with pytest.raises(SourceError, match=r"1 missing keys, as lm_head\.weight"):
        shardconv.merge(out, tmp_path / "hf")
    monkeypatch.setattr(cls, "_keys_to_ignore_on_load_missing", [r"lm_head\.weight"])
    shardconv.merge(out, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(found) == 20
    assert "lm_head.weight" not in found


class TestRefused:
    """What cannot be merged is refused before anything is written."""

    def refused(self, out: Path, message: str, error: type[ShardconvError] = SourceError) -> None:
        hf = out.parent / "hf"
        with pytest.raises(error, match=message):
            shardconv.merge(out, hf)
        assert not hf.exists() or not any(hf.glob("*"))

    def test_a_directory_that_is_not_empty(self, out: Path, tmp_path: Path, llama_dir: Path) -> None:
        assert shardconv.merge(out, llama_dir).was_complete  # it holds the files that would be written
        (llama_dir / "generation_config.json").write_text("{}")
        before = contents(llama_dir)
        with pytest.raises(ShardconvError, match=r"conversion \(generation_config.json changed\); name ano"):
            shardconv.merge(out, llama_dir)
        assert contents(llama_dir) == before
        with pytest.raises(ShardconvError, match="is a file"):
            shardconv.merge(out, llama_dir / "config.json")

    @pytest.mark.parametrize("inside", [".", "hf", "common/hf"])
    def test_a_place_in_the_directory_that_is_read(self, out: Path, inside: str) -> None:
        before = contents(out)
        with pytest.raises(ShardconvError, match="which is read; name a directory outside of it"):
            shardconv.merge(out, out / inside)
        assert contents(out) == before

    def test_an_incomplete_directory(self, out: Path) -> None:
        shard = out / manifest.shard_path(1, 3, 0, 1)
        shard.rename(out.parent / "kept")
        self.refused(out, "rank-00001", CheckpointError)
        (out / "manifest.json").unlink()
        self.refused(out, "is not a converted model", CheckpointError)

    def test_a_small_file_that_was_changed(self, out: Path) -> None:
        text = (out / "config.json").read_text()
        changed = text.replace('"initializer_range": 0.02', '"initializer_range": 0.03')
        assert changed != text
        (out / "config.json").write_text(changed)
        with pytest.raises(CheckpointError, match=r"config\.json was changed since it was written"):
            shardconv.merge(out, out.parent / "hf")
        assert {path.name for path in (out.parent / "hf").iterdir()} == {".partial"}

    def test_a_config_of_another_class(self, out: Path) -> None:
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
        found = manifest.read(out)
        size = (out / "config.json").stat().st_size
        files = [
            dataclasses.replace(entry, num_bytes=size) if entry.path == "config.json" else entry
            for entry in found.files
        ]
        manifest.write(dataclasses.replace(found, files=tuple(files)), out)
        self.refused(out, r"was planned as .*:LlamaForCausalLM, and its config.json now gives", PlanError)

    def test_a_tensor_that_the_model_has_not(self, out: Path) -> None:
        text = (out / "config.json").read_text()
        assert '"num_hidden_layers": 2' in text
        (out / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
        self.refused(out, r"holds model\.layers\.1\..*, which the model lacks in this environment")

    def test_a_parameter_that_the_plan_has_not(self, out: Path) -> None:
        text = (out / "config.json").read_text()
        (out / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
        self.refused(out, r"the plan does not name model\.layers\.2\..* of transformers")


class TestLayoutsThatDoNotComeBack:
    """Should transformers save a model in a way that it does not load, nothing is written."""

    def refused(self, out: Path, patch: pytest.MonkeyPatch, change: Callable[..., Any], message: str) -> None:
        def revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            tensors = dict(state)
            change(tensors)
            return tensors

        patch.setattr(saved_layout, "revert_weight_conversion", revert)
        with pytest.raises(SourceError, match=message):
            shardconv.merge(out, out.parent / "hf")
        assert not (out.parent / "hf").exists()

    def test_a_name_is_lost(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        message = r"would not load the LlamaForCausalLM that it saves: 1 missing keys, as lm_head\.weight"
        self.refused(out, monkeypatch, lambda state: state.pop("lm_head.weight"), message)

    def test_a_name_is_new(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def add(state: dict[str, torch.Tensor]) -> None:
            state["extra"] = state["lm_head.weight"]

        self.refused(out, monkeypatch, add, "1 unexpected keys, as extra")

    def test_two_are_swapped(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def swap(state: dict[str, torch.Tensor]) -> None:
            a, b = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
            state[a], state[b] = state[b], state[a]

        self.refused(out, monkeypatch, swap, r"2 parameters that differ, as model\.layers\.0\.self_attn\.k")

    def test_rows_are_rolled(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def roll(state: dict[str, torch.Tensor]) -> None:
            weight = state["lm_head.weight"]
            state["lm_head.weight"] = torch.cat([weight[1:], weight[:1]])

        self.refused(out, monkeypatch, roll, r"1 parameters that differ, as lm_head\.weight")

    def test_values_are_computed_and_others(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def negate(state: dict[str, torch.Tensor]) -> None:
            state["lm_head.weight"] = -state["lm_head.weight"]

        self.refused(out, monkeypatch, negate, r"1 parameters that differ, as lm_head\.weight")

    def test_a_dtype_is_another(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def widen(state: dict[str, torch.Tensor]) -> None:
            state["lm_head.weight"] = state["lm_head.weight"].half()

        self.refused(out, monkeypatch, widen, r"1 parameters that differ, as lm_head\.weight")

    def test_a_shape_is_another(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def cut(state: dict[str, torch.Tensor]) -> None:
            state["lm_head.weight"] = state["lm_head.weight"][:7]

        self.refused(out, monkeypatch, cut, r"1 mismatched keys, as .*lm_head\.weight")

    def test_what_is_computed_and_the_same_is_written(
        self, out: Path, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def flip_twice(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.flip(0).flip(0) for name, tensor in state.items()}

        monkeypatch.setattr(saved_layout, "revert_weight_conversion", flip_twice)
        shardconv.merge(out, tmp_path / "hf")
        found, source = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", llama_dir))
        assert found.keys() == source.keys()
        assert all(torch.equal(found[name], source[name]) for name in source)

    def test_transformers_fails(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(state: dict[str, torch.Tensor]) -> None:
            raise RuntimeError("no way back")

        message = "cannot save a LlamaForCausalLM: no way back; try another version"
        self.refused(out, monkeypatch, fail, message)


class TestInterrupted:
    """A merge that was killed goes on; until it is done nothing loads the directory."""

    def test_while_writing(self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write, calls = local_files.LocalFiles.put, itertools.count()

        def failing(*args: Any) -> None:
            if next(calls) >= 25:
                raise OSError(28, "No space left on device")
            write(*args)

        with monkeypatch.context() as patch:
            patch.setattr(local_files.LocalFiles, "put", failing)
            with pytest.raises(ShardconvError, match="No space left on device"):
                shardconv.merge(out, tmp_path / "hf", max_file_size=1)
        assert {path.name for path in (tmp_path / "hf").iterdir()} == {".partial"}
        done = next(calls)
        with monkeypatch.context() as patch:
            patch.setattr(local_files.LocalFiles, "put", lambda *args: next(calls) and write(*args))
            shardconv.merge(out, tmp_path / "hf", max_file_size=1)
        again = next(calls) - done
        shardconv.merge(out, tmp_path / "expected", max_file_size=1)
        assert contents(tmp_path / "hf") == contents(tmp_path / "expected")
        with monkeypatch.context() as patch:
            calls = itertools.count(1)
            patch.setattr(local_files.LocalFiles, "put", lambda *args: next(calls) and write(*args))
            shardconv.merge(out, tmp_path / "whole", max_file_size=1)
        assert again < next(calls) - 11, "finished files are not written again"

    def test_while_placing(self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shardconv.merge(out, tmp_path / "expected", max_file_size="20kB")
        expected = contents(tmp_path / "expected")
        move = job._move
        for number in range(len(expected)):
            hf, calls = tmp_path / f"hf{number}", itertools.count()

            def dying(*args: Any, number: int = number, calls: Any = calls) -> None:
                if next(calls) == number:
                    raise KeyboardInterrupt
                move(*args)

            with monkeypatch.context() as patch:
                patch.setattr(job, "_move", dying)
                with pytest.raises(KeyboardInterrupt):
                    shardconv.merge(out, hf, max_file_size="20kB")
            assert len(list(hf.iterdir())) == number + 1
            assert not (hf / "config.json").exists()
            shardconv.merge(out, hf, max_file_size="20kB")
            assert contents(hf) == expected

    @pytest.mark.parametrize("step", [6, pytest.param(2, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("when", ["after", "half"])
    def test_at_any_moment(self, tmp_path: Path, when: str, step: int) -> None:
        tiny, out, hf = Model.save(tmp_path / "model"), tmp_path / "out", tmp_path / "hf"
        tiny.convert(out)

        def merge() -> object:
            return shardconv.merge(out, hf, max_file_size="500")

        merge()
        expected = contents(hf)
        number, seen = 1, set()
        while True:
            shutil.rmtree(hf)
            if not crashes(merge, number, when):
                break
            state = job.read_state(hf / ".partial")
            number += 12 if state is None or state.moves is None else step
            seen.add(looks_complete := (hf / "config.json").exists())
            assert not looks_complete or placed(hf) == expected
            if not looks_complete or (hf / ".partial" / "job.json").exists():
                merge()
            assert placed(hf) == expected
        assert number > 20
        assert seen == ({True, False} if when == "after" else {False})

    def test_another_directory_begins_anew(
        self, out: Path, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["shardconv.exports.merge"], "_finish", lambda *args: None)
            shardconv.merge(out, tmp_path / "hf")
        assert {path.name for path in (tmp_path / "hf").iterdir()} == {".partial"}
        tensors = load_file(llama_dir / "model.safetensors")
        save_file({n: t + 1 for n, t in tensors.items()}, llama_dir / "model.safetensors", {"format": "pt"})
        shardconv.convert(llama_dir, out, 3, writing=Writing(overwrite=True))
        shardconv.merge(out, tmp_path / "hf")
        assert contents(tmp_path / "hf") == contents(llama_dir)

    def test_another_process_was_first(
        self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        divided = saved_layout.divided_into_files

        def overtaken(*args: Any) -> Any:
            (tmp_path / "hf").mkdir()
            (tmp_path / "hf" / "config.json").write_text("another's")
            return divided(*args)

        monkeypatch.setattr(saved_layout, "divided_into_files", overtaken)
        with pytest.raises(ShardconvError, match=r"DST .* was written to by others meanwhile"):
            shardconv.merge(out, tmp_path / "hf")
        assert (tmp_path / "hf" / "config.json").read_text() == "another's"
        assert not (tmp_path / "hf" / "model.safetensors").exists()


def test_the_hand_made_plan_is_uneven(out: Path) -> None:
    plan = plan_json.read(out / "plan.json")
    assert plan == hand_plan(small_config(), 3)
    assert parameter_plans(plan)["lm_head.weight"].dims[0].size % 3
