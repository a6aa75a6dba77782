"""Files that are not weights are copied by what they are, not by a list of names.

Elsewhere a converter knows ``tokenizer.json`` and forgets the rest. Reports: transformers.js#11 (the
tokenizer and the processor of Whisper), faster-whisper#464 (``normalizer.json``),
Qwen3-VL#1488 (``chat_template.json``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from hub_server import HubServer
from shardconv_runtime.checkpoint.resolve import files_left_out, resolve
from shardconv_runtime.files.small_files import SMALL_BYTES, choose_files
from shardconv_runtime.format import plan_json
from small_models import save_random, small_config

import shardconv

SMALL = [
    *("chat_template.json", "normalizer.json", "bpe.codes", "word_shape.json", "word_pronunciation.json"),
    *("byte_maps.json", "dict.txt", "emoji.json", "target_vocab.json", "prophetnet.tokenizer"),
    *("audio_tokenizer_config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json"),
    *("speaker/embeddings/en.npz", "a[1].txt"),
]
LEFT_OUT = {
    "2_Dense/model.safetensors": "weights",
    "training_args.bin": "weights",
    "modeling_own.py": "code",
    "README.md": "card",
    "checkpoint-5/config.json": "another checkpoint",
    "tp-4/tokenizer.json": "another checkpoint",
    "common/notes.txt": "a name",
}
HIDDEN = [".gitattributes", ".cache/huggingface/x.json", "flax_model.msgpack.index.json"]
MARKS = ["checkpoint-5/trainer_state.json", "tp-4/manifest.json"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("source")
    save_random(small_config(), transformers.LlamaForCausalLM, found)
    for name in [*SMALL, *LEFT_OUT, *HIDDEN, *MARKS]:
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(f'{{"of": "{name}"}}')
    return found


def files_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def require_all(directory: Path, where: str) -> None:
    there = files_in(directory)
    assert not set(SMALL) - there, where
    assert not {*LEFT_OUT, *HIDDEN} & there, where
    assert all(f'"{name}"' in (directory / name).read_text() for name in SMALL), where


def test_they_go_through_every_operation(source: Path, tmp_path: Path) -> None:
    shardconv.convert(source, tmp_path / "out", tp=2, check=False)
    require_all(tmp_path / "out", "convert")
    notes = " ".join(plan_json.read(tmp_path / "out" / "plan.json").notes)
    assert "files that are not copied: 2_Dense/model.safetensors (weights or an archive)" in notes
    shardconv.merge(tmp_path / "out", tmp_path / "merged")
    require_all(tmp_path / "merged", "merge")
    shardconv.reshard(tmp_path / "out", tmp_path / "one", tp=1, check=False)
    require_all(tmp_path / "one", "reshard")
    left_out = files_left_out(resolve(source))
    assert {name: why.split(" or ")[0] for name, why in left_out.items()}.keys() == {*LEFT_OUT, *MARKS}
    assert all(LEFT_OUT[name] in left_out[name] for name in LEFT_OUT)


def test_they_come_from_the_hub_and_are_pushed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer() as hub:
        hub.use(monkeypatch, tmp_path / "home", "hf_writer")
        hub.add_repo("user/source", source)
        shardconv.convert("user/source", tmp_path / "out", tp=2, check=False)
        require_all(tmp_path / "out", "from the Hub")
        shardconv.push(tmp_path / "out", "user/sharded")
        assert {f"tp-2/{name}" for name in SMALL} <= set(hub.files("user/sharded"))


def test_large_files_are_named() -> None:
    sizes = {"data.jsonl": SMALL_BYTES + 1, "tokenizer.json": SMALL_BYTES + 1, "notes.txt": 3}
    chosen = choose_files(sizes, code=False)
    assert chosen.copied == ("notes.txt", "tokenizer.json")
    assert chosen.left_out == {"data.jsonl": "64 MiB"}
    assert choose_files({"A.txt": 1, "a.txt": 1}, code=False).copied == ("A.txt",)
    many = choose_files({f"data/{i}.txt": 1 for i in range(1500)} | {"dict.txt": 9}, code=False)
    assert "dict.txt" in many.copied
    assert len(many.left_out) == 501
