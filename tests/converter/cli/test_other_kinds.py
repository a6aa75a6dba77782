"""What people name that is no transformers model: told what it is, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import save_causal
from shardconv_runtime.errors import ShardconvError

import shardconv
from shardconv.cli.entry import run

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal("llama", tmp_path_factory.mktemp("kinds") / "model")


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def adapter(path: Path) -> None:
    empty(path)
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))


def adapter_beside_the_model(path: Path) -> None:
    (path / "adapter_config.json").write_text("{}")


def pipeline(path: Path) -> None:
    empty(path)
    (path / "model_index.json").write_text("{}")
    (path / "text_encoder").mkdir()
    (path / "text_encoder" / "config.json").write_text("{}")


def gguf(path: Path) -> None:
    empty(path)
    (path / "model-Q4.gguf").touch()


def gguf_with_a_config(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model-Q4.gguf").touch()


def pointer(path: Path) -> None:
    (path / "model.safetensors").write_text(POINTER)


def pointer_to_the_config(path: Path) -> None:
    (path / "config.json").write_text(POINTER)


def converted(path: Path) -> None:
    (path / "manifest.json").write_text("{}")
    (path / "plan.json").write_text("{}")


KINDS: dict[Callable[[Path], None], str] = {
    adapter: r"PEFT adapter of org/base.*merge_and_unload",
    adapter_beside_the_model: r"PEFT adapter of its base model.*merge_and_unload",
    pipeline: r"diffusers pipeline.*text_encoder",
    gguf: r"GGUF files \(model-Q4\.gguf\)",
    gguf_with_a_config: r"GGUF files",
    pointer: r"model\.safetensors is a pointer of Git LFS.*git lfs pull",
    pointer_to_the_config: r"config\.json is a pointer of Git LFS.*git lfs pull",
    converted: r"is a converted directory; `shardconv reshard`",
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_other_kinds_are_refused_by_name(make: Callable[[Path], None], model: Path, tmp_path: Path) -> None:
    path = tmp_path / "named"
    shutil.copytree(model, path)
    make(path)
    with pytest.raises(ShardconvError, match=KINDS[make]):
        shardconv.convert(path, tmp_path / "out", tp=2)


def test_modules_beside_the_model_are_named(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "named"
    shutil.copytree(model, path)
    kinds = ("Transformer", "Pooling", "Dense")
    listed = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(listed))
    plan = shardconv.convert(path, tmp_path / "out", tp=2, check=False)
    assert any("(Pooling, Dense) were not" in note for note in plan.notes)


def said(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments.split()) in (2, 3, 5)
    lines = capsys.readouterr().err.splitlines()
    return next(line for line in lines if line.startswith("error: "))


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "shardconv convert org/name out/ --tp 2" in capsys.readouterr().out


def test_errors_of_places(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    assert "there is no such directory" in said(f"inspect {tmp_path / 'nope'}", capsys)
    assert "is a link to nothing" in said(f"inspect {dangling}", capsys)
    assert "config.json: " in said(f"inspect {model / 'config.json'}", capsys)
    assert "mend the link" in said(f"convert {dangling} --tp 2 {tmp_path / 'out'}", capsys)
    assert "does not exist, or cannot" in said(f"plan {model} --tp 2 -o {tmp_path / 'no' / 'p.json'}", capsys)


@pytest.mark.parametrize("tp", [100_000, 4097])
def test_a_tp_beyond_the_format_is_refused_at_once(
    tp: int, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "from 1 to 4,096" in said(f"plan {model} --tp {tp}", capsys)


def test_a_tp_beyond_the_dims_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no dim of its parameters is larger than 256" in said(f"plan {model} --tp 257", capsys)


def test_another_model_to_compare_with_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shardconv.convert(model, tmp_path / "out", tp=2, check=False)
    other = save_causal("gpt2", tmp_path / "other")
    text = said(f"verify {tmp_path / 'out'} --against {other} -q", capsys)
    assert "is a GPT2LMHeadModel, and a LlamaForCausalLM was converted" in text
