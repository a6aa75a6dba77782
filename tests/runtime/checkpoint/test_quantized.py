"""Block-scaled float8 checkpoints: values and factors are sliced together; all else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from quantized_checkpoints import (
    SUFFIX,
    dense_config,
    dequantized,
    experts_config,
    save_quantized,
    set_method,
)
from safetensors.torch import load_file, save_file
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.packed_plan import with_packings
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.errors import PlanError, SourceError
from shardconv_runtime.files import manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing, parameter_plans
from shardconv_runtime.format.stored_layout import is_common, stored_plans
from small_models import hand_plan, save_random, small_config

import shardconv
from shardconv.converted.shards import read
from shardconv.writing.writer import shard


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A mixture of experts with latent attention, per-expert files."""
    save_quantized(experts_config(), transformers.DeepseekV3ForCausalLM, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A dense model whose last blocks are cut short in the hidden dim."""
    save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", ["experts", pytest.param("dense", marks=pytest.mark.slow)])
def test_each_rank_has_the_factors_of_its_values(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    plan = shardconv.convert(model, tmp_path / "out", 2, check=False)
    shardconv.convert(tmp_path / "model-plain", tmp_path / "plain", 2, check=False)
    assert plan_json.read(tmp_path / "out" / "plan.json") == plan
    stored, plain = read(tmp_path / "out"), read(tmp_path / "plain").weights()
    entries = parameter_plans(plan)
    scaled = {name: entry for name, entry in entries.items() if entry.packing}
    assert len(scaled) >= 2 * 6
    split = 0
    for rank, tensors in stored.tensors.items():
        for name in tensors.keys() & entries.keys():
            expected = read_tensor(shard(entries[name], plain[name], plan.mesh, rank or 0))
            found = read_tensor(tensors[name])
            if name in scaled:
                factors = read_tensor(tensors[name + SUFFIX])
                assert (found.dtype, factors.dtype) == (torch.float8_e4m3fn, torch.float32)
                found = dequantized(found, factors)
                split += rank is not None
            assert torch.equal(found, expected), (rank, name)
    assert split >= 2 * 6
    (note,) = (note for note in plan.notes if "token by token" in note)
    assert "packed weights whose inputs are sharded" in note


def test_with_a_dtype_the_factors_are_multiplied_in(experts: Path, tmp_path: Path) -> None:
    shardconv.convert(experts, tmp_path / "out", 2, dtype="bfloat16", check=False)
    shardconv.convert(tmp_path / "model-plain", tmp_path / "plain", 2, check=False)
    shards = [entry.path for entry in manifest.read(tmp_path / "plain").files if "safetensors" in entry.path]
    assert len(shards) == 3
    for path in shards:
        assert (tmp_path / "out" / path).read_bytes() == (tmp_path / "plain" / path).read_bytes()
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("kind", ["experts", pytest.param("dense", marks=pytest.mark.slow)])
def test_few_blocks_for_many_ranks(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Widths of 2, 5 and 6 blocks for 4 ranks."""
    model = request.getfixturevalue(kind)
    plan = shardconv.convert(model, tmp_path / "out", 4, check=False)
    shardconv.convert(tmp_path / "model-plain", tmp_path / "plain", 4, check=False)
    scaled = [name for name, entry in parameter_plans(plan).items() if entry.packing]
    assert sum(not is_common(stored_plans(plan)[name]) for name in scaled) > len(scaled) / 2
    expected = read(tmp_path / "plain").weights()
    stored = read(tmp_path / "out").weights()
    for name, entry in parameter_plans(plan).items():
        found = read_tensor(stored[name])
        if entry.packing:
            found = dequantized(found, read_tensor(stored[name + SUFFIX]))
        assert torch.equal(found, read_tensor(expected[name])), name


def test_a_plan_that_tears_blocks_is_refused() -> None:
    plan = hand_plan(small_config(), 4)
    threes = {
        name: Packing("x", (PackedTensor("*", "int8", tuple(PackedDim(i, 3) for i in range(len(e.dims)))),))
        for name, e in parameter_plans(plan).items()
    }
    with pytest.raises(PlanError, match=r"sharded inside of the 3 .*another tp than 4, or pass --dtype"):
        with_packings(plan, threes)


def change(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace or remove a tensor."""
    tensors = load_file(directory / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_values_and_factors_must_fit(dense: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(dense, name + SUFFIX, torch.ones(6, 4))
    with pytest.raises(
        SourceError, match=rf"{name}{SUFFIX} is float32 \[6, 4\], and should be .* \[6, 5\] for a"
    ):
        shardconv.convert(dense, tmp_path / "out", 2, check=False)
    change(dense, name + SUFFIX, None)
    with pytest.raises(SourceError, match=rf"{name} is in float8 and lacks {name}{SUFFIX}"):
        shardconv.convert(dense, tmp_path / "out", 2, check=False)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "hqq", "nbits": 4}, "hqq"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"bits": 4}, "an unnamed method"),
    ],
)
def test_other_methods_are_refused_by_name(dense: Path, settings: dict[str, object], method: str) -> None:
    set_method(dense, **settings)
    for need_weights in (True, False):
        with pytest.raises(
            SourceError, match=rf"is quantized \({method}\), which cannot be sharded; convert"
        ):
            resolve(dense, need_weights=need_weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"load_in_4bit": True},
        {"quant_method": "fp8"},
        {"quant_method": "gptq", "bits": 4},
    ],
    ids=lambda settings: str(settings.get("quant_method")),
)
def test_plain_weights_that_the_config_calls_quantized_are_refused(
    settings: dict[str, object], tmp_path: Path
) -> None:
    """Such a config quantizes while from_pretrained loads; here the weights would stay as they are."""
    save_random(small_config(), transformers.LlamaForCausalLM, tmp_path / "model")
    set_method(tmp_path / "model", **settings)
    method = settings.get("quant_method", "bitsandbytes")
    message = rf"says that the weights are quantized \({method}\), and all are plain; .* convert with --dtype"
    with pytest.raises(SourceError, match=message):
        shardconv.plan(tmp_path / "model", 2)
    with pytest.raises(SourceError, match=message):
        shardconv.convert(tmp_path / "model", tmp_path / "out", 2, check=False)
    assert not (tmp_path / "out" / "plan.json").exists()


def test_plain_weights_are_taken_with_a_dtype(tmp_path: Path) -> None:
    save_random(small_config(), transformers.LlamaForCausalLM, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "plain", 2, check=False)
    set_method(tmp_path / "model", load_in_8bit=True)
    plan = shardconv.convert(tmp_path / "model", tmp_path / "out", 2, dtype="float32", check=False)
    assert any("are quantized (bitsandbytes), and all are plain" in note for note in plan.notes)
    shards = [file.relative_to(tmp_path / "plain") for file in (tmp_path / "plain").rglob("*.safetensors")]
    assert len(shards) == 3
    for shard_path in shards:
        assert (tmp_path / "out" / shard_path).read_bytes() == (tmp_path / "plain" / shard_path).read_bytes()


@pytest.mark.parametrize("layer", ["attn.c_proj", "mlp.c_fc"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_layers_whose_plain_weight_is_transposed_are_refused(
    layer: str, dtype: str | None, tmp_path: Path
) -> None:
    """Quantizers store theirs the other way round; a square one would be loaded as its transpose."""
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64, n_positions=32)
    transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    name = f"transformer.h.0.{layer}"
    weight = load_file(tmp_path / "model" / "model.safetensors")[f"{name}.weight"].T
    factors = weight.float().abs().amax(1)
    change(
        tmp_path / "model", f"{name}.weight", (weight * (127 / factors[:, None])).round().char().contiguous()
    )
    change(tmp_path / "model", f"{name}.SCB", factors)
    change(tmp_path / "model", f"{name}.weight_format", torch.tensor(0, dtype=torch.uint8))
    set_method(tmp_path / "model", quant_method="bitsandbytes", load_in_8bit=True)
    with pytest.raises(
        SourceError, match=rf"{name}.weight of .* is packed, and belongs to a Conv1D, not to a"
    ):
        shardconv.convert(tmp_path / "model", tmp_path / "out", 2, dtype=dtype, check=False)
