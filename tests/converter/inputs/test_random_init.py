"""Models that are initialized at random: their weights are those of a new model, whatever tp is."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from quantized_checkpoints import dense_config, save_quantized
from safetensors.torch import load_file
from shardconv_runtime.checkpoint.copying import read_tensor
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import ShardconvError, SourceError
from shardconv_runtime.files import manifest
from small_conversion import Stages, contents
from small_models import save_random, small_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from zoo.models import FAMILIES, build, types

import shardconv
from shardconv import cli
from shardconv.arguments import RandomInit, Writing
from shardconv.inputs.initial_weights import _Seeds, initial_weights

KINDS = [
    ("causal", "llama"),  # norms
    ("causal", "gpt2"),  # rescales projections by depth, by their names
    ("causal", "mixtral"),  # stacked experts
    ("causal", "mamba"),  # steps that are drawn, and computed from what was drawn
    ("causal", "mamba2"),
    ("causal", "rwkv"),  # tables that Python computes, orthogonal matrices
    ("causal", "falcon"),
    ("seq2seq", "t5"),
    ("seq2seq", "bart"),  # rows of padding
    ("masked", "bert"),
    ("other", "clip"),
    ("other", "vit"),  # truncated normal
    ("other", "siglip"),
    ("other", "wav2vec2"),  # weights that are a direction and a length
    ("other", "whisper"),  # tables of sines
]


def of_config(config: Any, cls: type, seed: int = 0, dtype: str = "float32") -> dict[str, Tensor]:
    """Initial weights, read."""
    lazy = initial_weights(ModelSpec(cls.__name__, config, cls, dtype), seed)
    return {name: read_tensor(tensor) for name, tensor in lazy.items()}


def really(config: Any, cls: type[PreTrainedModel], seed: int) -> dict[str, Tensor]:
    """The weights of a model that transformers initializes."""
    torch.manual_seed(seed)
    model = cls._from_config(copy.deepcopy(config), dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def distance(a: Tensor, b: Tensor) -> float:
    """Kolmogorov's and Smirnov's, in units of its scale: 3 is exceeded once in 30 million."""
    a, b = a.double().sort().values, b.double().sort().values
    both = torch.cat([a, b])
    below = [torch.searchsorted(x, both, right=True) / len(x) for x in (a, b)]
    return float((below[0] - below[1]).abs().max() / math.sqrt(1 / len(a) + 1 / len(b)))


def require_alike(config: Any, cls: type[PreTrainedModel]) -> None:
    """What all models share is the same here; what is drawn is drawn alike, and no two draws are equal."""
    found, other = of_config(config, cls), of_config(config, cls, 1)
    real, again = really(config, cls, 1), really(config, cls, 2)
    assert found.keys() == real.keys()
    heads: dict[bytes, str] = {}
    for name, tensor in found.items():
        want = real[name]
        assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype), name
        drawn = want != again[name]
        assert torch.allclose(tensor[~drawn], want[~drawn], rtol=1e-6, atol=0), name
        if drawn.sum() < 2:
            continue
        values = tensor[drawn]
        assert distance(values, torch.cat([want[drawn], again[name][drawn]])) < 3, name
        assert (values != other[name][drawn]).double().mean() > 0.5, name
        twin = heads.setdefault(values[:16].numpy().tobytes(), name)
        assert twin == name or torch.equal(want.flatten()[:16], real[twin].flatten()[:16]), (name, twin)


@pytest.mark.parametrize(("family", "model_type"), KINDS)
def test_the_weights_are_those_of_a_new_model(family: str, model_type: str) -> None:
    model = build(family, model_type)
    require_alike(model.config, model.model_class)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_so_they_are_for_every_type(family: str) -> None:
    for model_type in types(family):
        model = build(family, model_type)
        require_alike(model.config, model.model_class)


def test_the_spread_is_that_of_the_config() -> None:
    config = small_config(hidden_size=256, intermediate_size=512, initializer_range=0.05)
    for name, tensor in of_config(config, LlamaForCausalLM).items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert abs(tensor.mean()) < 0.004, name
            assert tensor.std() == pytest.approx(0.05, rel=0.03), name


def test_what_belongs_together_is_drawn_once() -> None:
    model = build("other", "wav2vec2")
    weights = of_config(model.config, model.model_class)
    (length,) = (name for name in weights if name.endswith("original0"))
    direction = weights[length.removesuffix("0") + "1"]
    expected = direction.pow(2).sum((0, 1), keepdim=True).sqrt()
    assert torch.allclose(weights[length], expected, rtol=1e-5)


def test_constants_are_kept() -> None:
    ones, twos = torch.ones(3), torch.ones(3, dtype=torch.int64)

    class Constant(Tiny):
        def __init__(self, config: TinyConfig) -> None:
            super().__init__(config)
            self.register_buffer("ones", ones)
            self.register_buffer("twos", twos)
            self.register_buffer("table", torch.tensor([[1.5, 2.5]], device=self.weight.device))
            self.twos.add_(1)

    weights = of_config(TinyConfig("kaiming"), Constant)
    assert torch.equal(weights["ones"], ones)
    assert torch.equal(weights["twos"], twos + 1)
    assert torch.equal(weights["table"], torch.tensor([[1.5, 2.5]]))


def test_a_copy_is_one() -> None:
    class Copying(Tiny):
        @torch.no_grad()
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            self.copied = nn.Parameter(self.weight.detach().clone().mul_(2))
            self.weight_of_old = nn.Parameter(self.weight.detach().clone())
            with torch.no_grad():
                self.weight.mul_(3)

    weights = of_config(TinyConfig("kaiming"), Copying)
    assert torch.equal(weights["copied"], 2 * weights["weight_of_old"])
    assert torch.equal(weights["weight"], 3 * weights["weight_of_old"])


class TinyConfig(transformers.PreTrainedConfig):  # type: ignore[misc]
    """Of a model with one parameter of its own."""

    model_type = "tiny_of_tests"
    rows = 40

    def __init__(self, how: str = "orthogonal", **kwargs: Any) -> None:
        self.how = how
        super().__init__(**kwargs)


class Tiny(PreTrainedModel):  # type: ignore[misc]
    """Its parameter gets its values in the way that the config says."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.rows, 8))
        self.echo = nn.Parameter(torch.zeros(2))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        WAYS[self.config.how](self.weight)
        self.echo.fill_(self.weight.flatten()[0].item() / 2)


WAYS: dict[str, Callable[[Tensor], object]] = {
    "orthogonal": nn.init.orthogonal_,
    "wide orthogonal": lambda weight: nn.init.orthogonal_(weight.view(8, -1)),
    "truncated": partial(nn.init.trunc_normal_, std=0.5, a=-0.7, b=0.9),
    "a tail": partial(nn.init.trunc_normal_, a=1.5, b=9),
    "sparse": partial(nn.init.sparse_, sparsity=0.25),
    "kaiming": nn.init.kaiming_normal_,
    "xavier": nn.init.xavier_uniform_,
    "a row of zeros": lambda weight: (weight.normal_(), weight[3].zero_()),
    "by columns": lambda weight: (weight[:, ::2].normal_(), weight[:, 1::2].fill_(2)),
    "its own generator": lambda weight: weight.normal_(generator=torch.Generator().manual_seed(5)),
    "nothing": lambda weight: None,
    "a part": lambda weight: weight[1:].normal_(),
}


def tiny(how: str, seed: int = 0) -> dict[str, Tensor]:
    return of_config(TinyConfig(how), Tiny, seed)


@pytest.mark.parametrize("how", [how for how in WAYS if how not in ("nothing", "a part")])
def test_ways_to_initialize(how: str) -> None:
    weights, real = tiny(how), really(TinyConfig(how), Tiny, 0)["weight"]
    weight = weights["weight"]
    assert torch.equal(weights["echo"], weight[0, :1].expand(2) / 2), "a value that code asked for"
    assert torch.equal(weight, tiny(how)["weight"])
    assert not torch.equal(weight, tiny(how, 1)["weight"])
    assert torch.equal(weight == 0, real == 0) or how == "sparse"
    if how != "its own generator":
        assert distance(weight.flatten(), real.flatten()) < 2.5
    if "orthogonal" in how:
        matrix = weight.view(8, -1).T if how.startswith("wide") else weight
        assert torch.allclose(matrix.T @ matrix, torch.eye(8), atol=1e-5)
    if how == "truncated":
        assert weight.min() >= -0.7
        assert weight.max() <= 0.9
        assert len(set(weight.flatten().tolist())) == weight.numel()
    if how == "sparse":
        assert torch.equal((weight == 0).sum(0), torch.full((8,), 10))


@pytest.mark.parametrize(("how", "what"), [("nothing", "a value"), ("a part", "values of some elements")])
def test_a_parameter_without_a_value_is_named(how: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tiny, "_init_weights", lambda self, module: WAYS[how](self.weight))
    message = f"Tiny: weight [40, 8] lacks {what} after the model's own initialization"
    with pytest.raises(SourceError, match=re.escape(message)):
        tiny(how)


def test_a_parameter_from_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = torch.empty(40, 8, device="meta")
    monkeypatch.setattr(Tiny, "_init_weights", lambda self, module: setattr(self.weight, "data", elsewhere))
    with pytest.raises(SourceError, match=r"weight .* was made outside of the model's constructor"):
        tiny("orthogonal")


def test_a_model_that_cannot_be_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "nothing", lambda weight: weight.view(3))
    with pytest.raises(SourceError, match="Tiny cannot be built from its config"):
        tiny("nothing")


class TestParts:
    """Parameters whose elements are drawn one by one are drawn in parts."""

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts of some rows and blocks of less."""
        monkeypatch.setattr("shardconv.inputs.initial_weights.PART", 100)
        monkeypatch.setattr("shardconv.inputs.initial_weights.BLOCK", 40)

    def test_they_are_like_the_whole_and_differ(self) -> None:
        config = small_config()
        weights = of_config(config, LlamaForCausalLM)
        real = really(config, LlamaForCausalLM, 0)
        for name, tensor in weights.items():
            if tensor.dim() == 2:
                assert distance(tensor.flatten(), real[name].flatten()) < 3, name
                assert len(set(tensor.flatten().tolist())) > 0.99 * tensor.numel(), name

    def test_a_rank_draws_only_the_parts_that_it_has(self) -> None:
        spec = ModelSpec("", small_config(), LlamaForCausalLM, "float32")
        pieces = initial_weights(spec, 0)["lm_head.weight"].pieces
        assert [piece.shape for piece in pieces] == [(3, 32)] * 33 + [(2, 32)]

    def test_threads_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shardconv.inputs.initial_weights.PART", 1000)
        before = of_config(small_config(), LlamaForCausalLM)
        monkeypatch.setattr("shardconv.inputs.initial_weights.num_workers", lambda: 7)
        after = of_config(small_config(), LlamaForCausalLM)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_no_two_seeds_are_alike() -> None:
    seeds = _Seeds(0)
    taken = [seeds.take("x", number) for number in range(300_000)]
    assert len(set(taken)) == len(taken)
    assert max(taken) < 2**32, "all of a seed that torch looks at"


def test_the_generator_of_the_process_is_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    tiny("kaiming")
    assert torch.equal(torch.get_rng_state(), before)
    assert nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"


def test_tied_weights_are_one() -> None:
    config = small_config(tie_word_embeddings=True)
    lazy = initial_weights(ModelSpec("", config, LlamaForCausalLM, "float32"), 0)
    assert lazy["lm_head.weight"] is lazy["model.embed_tokens.weight"]
    assert not torch.equal(*(read_tensor(lazy[f"model.layers.{i}.mlp.up_proj.weight"]) for i in (0, 1)))


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    """A directory with a config and no weights."""
    small_config(dtype="bfloat16").save_pretrained(tmp_path / "config")
    return tmp_path / "config"


def merged(out: Path) -> dict[str, Tensor]:
    """The checkpoint that a converted directory is merged to."""
    shardconv.merge(out, out.with_name(f"{out.name}-merged"))
    return dict(load_file(out.with_name(f"{out.name}-merged") / "model.safetensors"))


def shards(out: Path) -> dict[str, bytes]:
    """The bytes of all files of tensors."""
    return {path: data for path, data in contents(out).items() if path.endswith(".safetensors")}


@pytest.mark.usefixtures("hand_solver")
class TestConvert:
    """Through ``convert``, without the solver."""

    def test_tp_does_not_matter_and_the_seed_does(self, config_dir: Path, tmp_path: Path) -> None:
        for name, tp, seed in [("one", 1, 5), ("two", 2, 5), ("again", 2, 5), ("other", 2, 6)]:
            shardconv.convert(config_dir, tmp_path / name, tp, random_init=RandomInit(seed=seed))
        one, two, other = (merged(tmp_path / name) for name in ("one", "two", "other"))
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
        assert contents(tmp_path / "again") == contents(tmp_path / "two")
        assert all(torch.equal(tensor, other[name]) == (tensor.dim() == 1) for name, tensor in one.items())
        drawn = of_config(small_config(), LlamaForCausalLM, 5)
        assert all(torch.equal(tensor, drawn[name].bfloat16()) for name, tensor in one.items())

    def test_some_ranks_are_written_as_all_are(self, config_dir: Path, tmp_path: Path) -> None:
        write = partial(shardconv.convert, config_dir, tp=2, random_init=True)
        write(tmp_path / "whole", seed=0)
        write(tmp_path / "parts", ranks="1")
        part = tmp_path / "parts" / ".partial" / "rank-00001-of-00002" / "model-00001-of-00001.safetensors"
        assert part.read_bytes() == contents(tmp_path / "whole")[str(Path(*part.parts[-2:]))]
        with pytest.raises(ShardconvError, match=r"seed 0.*seed 1"):
            write(tmp_path / "parts", ranks="0", seed=1)
        write(tmp_path / "parts", ranks="0")
        assert contents(tmp_path / "parts") == contents(tmp_path / "whole")

    def test_with_another_seed_it_begins_anew(self, config_dir: Path, tmp_path: Path) -> None:
        out, told = tmp_path / "out", Stages()
        shardconv.convert(config_dir, out, 2, random_init=True, writing=Writing(ranks=[0]))
        shardconv.convert(config_dir, out, 2, random_init=RandomInit(seed=9), progress=told)
        assert any("seed 0" in text and "seed 9" in text for text in told.told), told.told
        assert "recording the model's own initialization: seed 9, drawn in float32" in told.told
        shardconv.convert(config_dir, tmp_path / "new", 2, random_init=RandomInit(seed=9))
        assert contents(out) == contents(tmp_path / "new")

    def test_weights_that_are_there_are_not_read(self, tmp_path: Path) -> None:
        model, told = tmp_path / "model", Stages()
        save_random(small_config(), LlamaForCausalLM, model)
        (model / "model.safetensors").write_bytes(b"")
        shardconv.convert(model, tmp_path / "out", 2, random_init=True, progress=told)
        assert f"the weights in {model} are not read: those of a new model are written" in told.told

    def test_float64_is_drawn_in_float64(self, config_dir: Path, tmp_path: Path) -> None:
        shardconv.convert(config_dir, tmp_path / "out", 2, random_init=True, dtype="float64")
        weight = merged(tmp_path / "out")["lm_head.weight"]
        assert weight.dtype == torch.float64
        assert not torch.equal(weight, weight.float().double())

    def test_it_is_verified_but_for_a_source(self, config_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        shardconv.convert(config_dir, out, 2, random_init=RandomInit(seed=4))
        source = manifest.read(out).source
        assert (source.name, source.files) == ("config, initialized at random with seed 4", ())
        assert shardconv.verify(out).num_files == len(contents(out))
        with pytest.raises(SourceError, match="seed 4: there is no checkpoint to compare it with"):
            shardconv.verify(out, against=config_dir)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--seed", "1"], "--random-init"),
            (["--random-init", "--seed", "-1"], "seed must be a whole number from 0"),
            (["--random-init", "--seed", "x"], "'x' is not a valid integer"),
        ],
    )
    def test_wrong_options(
        self, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.run(["convert", "absent", str(tmp_path / "out"), "--tp", "2", *options]) == 2
        assert message in capsys.readouterr().err

    def test_the_command_says_what_it_did(
        self, config_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["convert", "--random-init", str(config_dir), str(tmp_path / "out"), "--tp", "2"]
        assert cli.run(argv) == 0
        text = capsys.readouterr()
        assert "of 44.0 kB on each of 2 ranks, initialized at random with seed 0; to see the plan" in text.out
        assert "recording the model's own initialization: seed 0, drawn in float32" in text.err


def test_a_block_scaled_config_gives_a_plain_model(tmp_path: Path) -> None:
    save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
    plan = shardconv.convert(tmp_path / "model", tmp_path / "out", 2, random_init=True, check=False)
    assert not any(entry.packing for entry in plan.parameters)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_it_is_loaded_and_resharded(config_dir: Path, tmp_path: Path) -> None:
    shardconv.convert(config_dir, tmp_path / "one", 1, random_init=RandomInit(seed=2), dtype="float64")
    shardconv.convert(config_dir, tmp_path / "four", 4, random_init=RandomInit(seed=2), dtype="float64")
    shardconv.reshard(tmp_path / "four", tmp_path / "again", 1)
    assert shards(tmp_path / "again") == shards(tmp_path / "one")
    assert manifest.read(tmp_path / "again").source.name == "config, initialized at random with seed 2"
    merged(tmp_path / "four")
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "four-merged", dtype=torch.float64)
    ids = torch.arange(12).view(2, 6)
    model = shardconv_runtime.load(tmp_path / "one", device="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-9, atol=1e-12)
