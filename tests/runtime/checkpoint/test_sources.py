"""Resolving a model and reading its weights; every bad input is one error with its remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint import model_location
from shardconv_runtime.checkpoint.checkpoint_weights import lazy_weights, select
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.recording_tensors import LARGE
from shardconv_runtime.checkpoint.resolve import ModelSpec, resolve
from shardconv_runtime.errors import SourceError
from shardconv_runtime.hub_options import Hub
from small_models import make_custom, save_random, small_config

Change = Callable[[Path], object]


def change_config(path: Path, **values: object) -> None:
    """Set fields of config.json; None removes one."""
    file = path / "config.json"
    changed = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def change_tensors(path: Path, **values: torch.Tensor | None) -> None:
    """Set tensors of model.safetensors (``__`` for a dot); None removes one."""
    file = path / "model.safetensors"
    changed = load_file(file) | {name.replace("__", "."): value for name, value in values.items()}
    save_file({k: v for k, v in changed.items() if v is not None}, file, {"format": "pt"})


def read_weights(spec: ModelSpec, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Parameters in memory."""
    return {name: read_tensor(lazy) for name, lazy in select(spec, lazy_weights(spec).tensors, names).items()}


def read(path: Path) -> dict[str, torch.Tensor]:
    """All parameters, by the names that the class gives them."""
    spec = resolve(path)
    with torch.device("meta"):
        names = [name for name, _ in spec.model_class(spec.config).named_parameters()]
    return read_weights(spec, names)


def test_a_directory_gives_its_class_dtype_and_files(llama_dir: Path) -> None:
    spec = resolve(llama_dir)
    assert isinstance(spec, ModelSpec)
    assert spec.model_class is transformers.LlamaForCausalLM
    assert spec.class_name == "transformers.models.llama.modeling_llama:LlamaForCausalLM"
    assert spec.dtype == "float32"
    assert spec.directory == llama_dir
    assert spec.weight_files == (llama_dir / "model.safetensors",)
    assert spec.revision is None


def test_a_config_object_needs_no_directory() -> None:
    spec = resolve(small_config(dtype="bfloat16"), need_weights=False)
    assert (spec.directory, spec.dtype, spec.weight_files) == (None, "bfloat16", ())
    assert spec.model_class is transformers.LlamaForCausalLM
    with pytest.raises(SourceError, match="has no weights; name a directory"):
        resolve(small_config())


def test_an_encoder_is_built_as_its_config_names_it() -> None:
    config = transformers.BertConfig(architectures=["BertModel"])
    assert resolve(config, need_weights=False).model_class is transformers.BertModel


@pytest.mark.parametrize("architectures", [None, ["NoSuchClass"], ["AutoConfig"]])
def test_unusable_architectures_fall_back_to_the_auto_mappings(architectures: list[str] | None) -> None:
    config = small_config(architectures=architectures)
    assert resolve(config, need_weights=False).model_class is transformers.LlamaForCausalLM


@pytest.mark.parametrize("dtype", ["float16", "torch.float16"])
def test_dtype_overrides_what_is_stored(llama_dir: Path, dtype: str) -> None:
    spec = resolve(llama_dir, dtype=dtype)
    assert spec.dtype == "float16"
    assert read_weights(spec, ["lm_head.weight"])["lm_head.weight"].dtype == torch.float16
    with pytest.raises(SourceError, match="dtype 'int4' is not one of float64"):
        resolve(llama_dir, dtype="int4")


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_dtype_is_the_checkpoint_s_where_the_config_has_none(
    llama_dir: Path, stored: torch.dtype, file: str
) -> None:
    tensors = {name: value.to(stored) for name, value in load_file(llama_dir / "model.safetensors").items()}
    (llama_dir / "model.safetensors").unlink()
    if file == "model.safetensors":
        save_file(tensors, llama_dir / file, {"format": "pt"})
    else:
        torch.save(tensors, llama_dir / file)
    change_config(llama_dir, dtype=None)
    spec = resolve(llama_dir)
    assert f"torch.{spec.dtype}" == str(stored)
    read_back = read_weights(spec, ["model.norm.weight"])["model.norm.weight"]
    assert torch.equal(read_back, tensors["model.norm.weight"])


def test_stacked_experts_are_put_together_as_transformers_does(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        num_local_experts=4,
    )
    model = save_random(config, transformers.MixtralForCausalLM, tmp_path)
    found = read(tmp_path)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach()), name
    change_tensors(tmp_path, model__layers__0__block_sparse_moe__experts__1__w1__weight=None)
    with pytest.raises(
        SourceError, match=r"that these parameters consist of.*model\.layers\.0\.mlp\.experts\.gate_up_proj"
    ):
        read(tmp_path)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    save_random(small_config(tie_word_embeddings=True), transformers.LlamaForCausalLM, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in read(tmp_path)


def test_what_transformers_ignores_is_not_extra(llama_dir: Path) -> None:
    change_tensors(llama_dir, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    assert "lm_head.weight" in read(llama_dir)


BAD_CONFIGS: dict[str, tuple[Change, str]] = {
    "none": (lambda p: (p / "config.json").unlink(), "no config.json in .*; name the directory"),
    "invalid JSON": (lambda p: (p / "config.json").write_text("{"), "cannot be read as JSON: .*; restore"),
    "a list": (lambda p: (p / "config.json").write_text("[]"), "does not hold a JSON object; restore"),
    "no type": (lambda p: change_config(p, model_type=None), "lacks model_type"),
    "unknown": (
        lambda p: change_config(p, model_type="mystery"),
        r"config\.json: unknown architecture 'mystery' in .*; install a transformers that has it",
    ),
    "custom code": (
        lambda p: change_config(p, model_type="mystery", auto_map={"AutoConfig": "configuration.Mystery"}),
        "model type 'mystery' is defined by the repository's own code; .* pass --trust-remote-code",
    ),
    "wrong field": (lambda p: change_config(p, hidden_size="wide"), "not a valid config: .*'hidden_size'"),
    "quantized": (
        lambda p: change_config(p, quantization_config={"quant_method": "aqlm"}),
        r"is quantized \(aqlm\), which cannot be sharded; convert the unquantized model",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(llama_dir: Path, case: str) -> None:
    change, message = BAD_CONFIGS[case]
    change(llama_dir)
    with pytest.raises(SourceError, match=message) as caught:
        resolve(llama_dir)
    assert ("--trust-remote-code" in str(caught.value)) == (case == "custom code")


def truncate(path: Path) -> None:
    """Cut the end off the weights."""
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def corrupt(path: Path) -> None:
    """Overwrite a part of the header."""
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"x" * 50 + content[58:])


BROKEN = r"model\.safetensors: not an intact safetensors file: .*; download or copy it again"

BAD_WEIGHTS: dict[str, tuple[Change, str]] = {
    "none": (
        lambda p: (p / "model.safetensors").unlink(),
        r"no weights in .*: expected model\.safetensors or pytorch_model\.bin .*; download them",
    ),
    "of torch": (
        lambda p: (p / "model.safetensors").rename(p / ".metadata"),
        r"a checkpoint of torch\.distributed\.checkpoint .*; let that write safetensors",
    ),
    "missing": (
        lambda p: change_tensors(p, model__norm__weight=None, model__layers__1__mlp__up_proj__weight=None),
        r"lacks 2 tensors: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight; download it again",
    ),
    "extra": (
        lambda p: change_tensors(p, model__layers__1__mlp__up_proj__scale=torch.zeros(3)),
        r"1 tensor that \w+ does not use, although it uses .*: model\.layers\.1\.mlp\.up_proj\.scale; remove",
    ),
    "shape": (
        lambda p: change_tensors(p, model__norm__weight=torch.zeros(33)),
        r"disagrees with config\.json: model\.norm\.weight is \[33\], not \[32\]; use the config\.json",
    ),
    "truncated": (
        truncate,
        BROKEN,
    ),
    "corrupt": (corrupt, BROKEN),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(llama_dir: Path, case: str) -> None:
    change, message = BAD_WEIGHTS[case]
    change(llama_dir)
    with pytest.raises(SourceError, match=message) as caught:
        read(llama_dir)
    assert "\n" not in str(caught.value)


def test_a_truncated_pickle_is_named(llama_dir: Path) -> None:
    torch.save(load_file(llama_dir / "model.safetensors"), llama_dir / "pytorch_model.bin")
    (llama_dir / "model.safetensors").unlink()
    file = llama_dir / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(SourceError, match="cannot be read"):
        read(llama_dir)


class TestCustomCode:
    """The repository's own code runs only where it is trusted."""

    def test_it_is_refused_by_default(self, llama_dir: Path) -> None:
        make_custom(llama_dir)
        with pytest.raises(SourceError, match="read that code, then pass --trust-remote-code"):
            resolve(llama_dir)

    def test_its_class_is_named_relative_to_the_directory(self, llama_dir: Path) -> None:
        make_custom(llama_dir)
        spec = resolve(llama_dir, trust_remote_code=True)
        assert spec.class_name == "modeling_mine:MyModel"
        assert spec.trust_remote_code
        assert issubclass(spec.model_class, transformers.LlamaForCausalLM)
        assert "lm_head.weight" in read_weights(spec, ["lm_head.weight"])

    def test_trust_does_not_make_a_transformers_class_custom(self, llama_dir: Path) -> None:
        assert not resolve(llama_dir, trust_remote_code=True).trust_remote_code

    def test_code_that_does_not_import_is_one_line(self, llama_dir: Path) -> None:
        make_custom(llama_dir)
        (llama_dir / "modeling_mine.py").write_text("import math\nraise RuntimeError('two\\nlines')\n")
        with pytest.raises(SourceError, match=r"'modeling_mine\.MyModel' .* cannot be imported: two lines"):
            resolve(llama_dir, trust_remote_code=True)


class TestIndex:
    """Checkpoints of several files."""

    @pytest.fixture
    def split_dir(self, tmp_path: Path) -> Path:
        path = tmp_path / "split"
        model = save_random(small_config(), transformers.LlamaForCausalLM, path)
        (path / "model.safetensors").unlink()
        model.save_pretrained(path, max_shard_size="30kB")
        return path

    def test_all_files_are_found(self, split_dir: Path) -> None:
        spec = resolve(split_dir)
        assert len(spec.weight_files) > 1
        assert len(read(split_dir)) == 21

    def test_a_missing_file_is_named(self, split_dir: Path) -> None:
        lost = resolve(split_dir).weight_files[1]
        lost.unlink()
        with pytest.raises(SourceError, match=rf"{lost.name}, named by .*, is missing; download"):
            resolve(split_dir)

    @pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", ""])
    def test_names_may_not_leave_the_directory(self, split_dir: Path, name: str) -> None:
        index = split_dir / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(SourceError, match="not a file of its directory"):
            resolve(split_dir)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": [1]}}'])
    def test_a_malformed_index_is_named(self, split_dir: Path, text: str) -> None:
        (split_dir / "model.safetensors.index.json").write_text(text)
        with pytest.raises(SourceError, match=r"index\.json is not an index of weights; download"):
            resolve(split_dir)


class TestHub:
    """What is not a directory is looked for on the Hub, or refused as a path."""

    @pytest.mark.parametrize(
        "name", ["./absent", "/absent/model", "a/b/c", "absent/", "two words", "~/absent"]
    )
    def test_paths_are_not_looked_for(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_location, "snapshot_download", lambda *a, **k: pytest.fail("downloads"))
        with pytest.raises(SourceError, match=r"no such directory: .* check the path"):
            resolve(name)

    def test_a_file_is_not_a_model(self, llama_dir: Path) -> None:
        with pytest.raises(SourceError, match="is a file; give the directory"):
            resolve(llama_dir / "config.json")

    def test_an_uncached_repository_is_refused_offline(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="not in the local cache; allow downloads"):
            resolve("nobody/nothing", Hub(local_files_only=True, cache_dir=tmp_path))

    def test_only_what_is_needed_is_downloaded(
        self, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[str, dict[str, object]]] = []

        def download(repo_id: str, **options: object) -> str:
            calls.append((repo_id, options))
            return str(llama_dir)

        monkeypatch.setattr(model_location, "snapshot_download", download)
        spec = resolve("org/name", Hub(revision="v1", token="secret"), need_weights=False)
        assert (spec.name, spec.directory, spec.revision) == ("org/name", llama_dir, llama_dir.name)
        assert [repo_id for repo_id, _ in calls] == ["org/name"]
        assert (calls[0][1]["revision"], calls[0][1]["token"]) == ("v1", "secret")
        assert "*.py" not in calls[0][1]["allow_patterns"]

        resolve("org/name", trust_remote_code=True)
        assert "*.py" in calls[1][1]["allow_patterns"]
        assert calls[2][1]["allow_patterns"] == ["model.safetensors", "pytorch_model.bin"]


def test_a_large_weight_of_a_parametrized_convolution(tmp_path: Path) -> None:
    """transformers fills what the checkpoint's two tensors make together, in vain; both are read."""
    config = transformers.Wav2Vec2Config(
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        conv_dim=(16,),
        conv_stride=(5,),
        conv_kernel=(10,),
        num_conv_pos_embedding_groups=16,
    )
    model = transformers.Wav2Vec2ForCTC(config)
    model.save_pretrained(tmp_path)
    name = "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original1"
    found = read(tmp_path)[name]
    assert found.numel() >= LARGE
    assert torch.equal(found, model.state_dict()[name])
