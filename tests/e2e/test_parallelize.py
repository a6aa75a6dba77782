"""``parallelize``: a model that the caller has in memory becomes the model of each rank."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import torch.nn.functional as F
import transformers
from distributed import run_errors, run_processes
from shardconv_runtime import InputsDifferError, PlanError, SourceError
from small_models import small_config
from torch import Tensor, nn
from training_runs import cpu_mesh

import shardconv

IDS = torch.tensor([[1, 5, 40, 7, 50, 9], [3, 2, 33, 0, 51, 8]])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (f(self.norm(x)).view(batch, length, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Own(nn.Module):
    """A module of nobody's library, with a tied head, a buffer in no file, and one in files."""

    scale: Tensor
    shift: Tensor

    def __init__(self, width: int = 32, heads: int = 4, vocabulary: int = 60) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("shift", torch.full((width,), 0.25))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def own(seed: int = 0) -> Own:
    torch.manual_seed(seed)
    return Own().double()


def causal(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(small_config()).double()


def gradients_of(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    logits.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_own() -> tuple[Tensor, dict[str, Tensor], dict[str, tuple[int, ...]]]:
    model = own()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sharded = shardconv_runtime.parallelize(model, example_inputs={"ids": IDS}, training=True)
    assert type(sharded) is Own
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() == 2:
        begin = 64 * torch.distributed.get_rank()
        shown = f"local weight=(64, 32) on rank {begin // 64} of 2, {begin}:{begin + 64} of dim 0"
        assert f"(up): ColumnParallelLinear(in_features=32, out_features=128, bias=True, {shown})" in repr(
            sharded
        )
    logits = sharded(IDS)
    gradients = gradients_of(sharded, logits)
    torch.optim.SGD(sharded.parameters(), lr=1.0).step()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    return logits.detach(), gradients, {name: tuple(p.shape) for name, p in sharded.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_module_of_ones_own(ranks: int) -> None:
    model = own()
    logits = model(IDS)
    want = gradients_of(model, logits)
    for found, gradients, shapes in run_processes(ranks, run_own):
        torch.testing.assert_close(found, logits.detach(), rtol=0, atol=1e-12)
        assert gradients.keys() == want.keys()
        for name, gradient in gradients.items():
            if gradient.shape == want[name].shape:
                torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-12)
        if ranks == 2:
            assert shapes["blocks.0.up.weight"] == (64, 32)
            assert shapes["embedding.weight"] == (30, 32)


def run_causal(root: str) -> tuple[Tensor, Tensor]:
    model = shardconv_runtime.parallelize(causal(), mesh=cpu_mesh(1, 2))
    with torch.inference_mode():
        logits = model(IDS).logits
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    shardconv_runtime.save(model, Path(root) / "saved")
    model.save_pretrained(Path(root) / "ordinary")
    return logits, tokens


def test_a_model_of_transformers_generates_and_is_saved(tmp_path: Path) -> None:
    model = causal().eval()
    with torch.inference_mode():
        logits = model(IDS).logits
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for found, new in run_processes(2, run_causal, str(tmp_path)):
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-12)
        assert torch.equal(new, tokens)
    shardconv.merge(tmp_path / "saved", tmp_path / "merged")
    assert json.loads((tmp_path / "ordinary" / "config.json").read_text())["dtype"] == "float64"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def run_changed() -> Tensor:
    model = causal()
    width = model.config.hidden_size
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(width, 96), nn.ReLU(), nn.Linear(96, width)).double()
    torch.manual_seed(1)
    for parameter in model.model.layers[0].mlp.parameters():
        nn.init.normal_(parameter, std=0.1)
    want = model.eval()(IDS).logits
    plan = shardconv.plan(model, 2)
    return (shardconv_runtime.parallelize(model, plan=plan)(IDS).logits - want).abs().max()


def run_drawing(path: Path) -> Tensor:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_heads": 4, "head_dim": 8, "num_hidden_layers": 1}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, n_groups=2, state_size=8))
    torch.manual_seed(0)
    shardconv_runtime.parallelize(model).save_pretrained(path)
    return torch.rand(3)


def test_random_states_stay_alike_on_ranks_with_a_model_that_draws_when_it_is_made(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    for drawn in run_processes(2, run_drawing, tmp_path / "saved"):
        assert drawn.equal(expected)


def test_a_model_that_was_changed_in_memory() -> None:
    assert max(run_processes(2, run_changed)) < 1e-12


def run_on_meta() -> tuple[str, Tensor]:
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(small_config()).double()
    model = shardconv_runtime.parallelize(empty)
    device = str(model.lm_head.weight.device)
    model.load_state_dict(shardconv_runtime.parallelize(causal()).state_dict(), assign=True)
    with torch.inference_mode():
        return device, model(IDS).logits


def test_a_model_on_meta() -> None:
    with torch.inference_mode():
        want = causal().eval()(IDS).logits
    for device, logits in run_processes(2, run_on_meta):
        assert device == "meta"
        # In float32, as `from_pretrained` computes them, where the constructor took the model's own dtype.
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-6)


def run_with_other_seeds() -> None:
    shardconv_runtime.parallelize(causal(torch.distributed.get_rank()))


def run_in_group() -> None:
    cpu_mesh(1, 2)
    run_with_other_seeds()


def test_other_values_on_another_rank_are_refused() -> None:
    for error in run_errors(2, run_in_group):
        assert isinstance(error, InputsDifferError)
        assert "has other values on rank 1 than on rank 0" in str(error)


class Encoder(nn.Module):
    """torch's own layers, which compute from the weights of their submodules if no gradient is needed."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def encoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Encoder().eval(), torch.randn(2, 5, 32)


def run_encoder() -> Tensor:
    model, x = encoder()
    sharded = shardconv_runtime.parallelize(model, example_inputs={"x": x})
    assert sharded.layers.layers[0].linear1.weight.shape == (32, 32)
    with torch.inference_mode():
        return sharded(x=x)


def test_layers_of_torch_with_a_path_around_their_submodules() -> None:
    model, x = encoder()
    with torch.inference_mode():
        want = model(x)
    for found in run_processes(2, run_encoder):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def run_parametrized() -> float:
    model = own()
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    model.blocks[1].up.weight.requires_grad_(False)
    want = model(IDS)
    sharded = shardconv_runtime.parallelize(model, example_inputs={"ids": IDS}, training=True)
    found = sharded(IDS)
    found.sum().backward()
    assert sharded.blocks[1].up.weight.grad is None
    return float((found - want).detach().abs().max())


def test_parametrized_and_frozen_weights() -> None:
    assert max(run_processes(2, run_parametrized)) < 1e-12


def without_generation() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return transformers.ResNetModel(config).double().eval(), torch.randn(1, 3, 32, 32, dtype=torch.float64)


def run_without_generation() -> tuple[Tensor, int]:
    model, image = without_generation()
    sharded = shardconv_runtime.parallelize(model)
    with torch.inference_mode():
        return sharded(pixel_values=image).last_hidden_state, sum(p.numel() for p in sharded.parameters())


def test_a_model_that_does_not_generate() -> None:
    model, image = without_generation()
    with torch.inference_mode():
        want = model(pixel_values=image).last_hidden_state
    for found, held in run_processes(2, run_without_generation):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-10)
        assert held < 0.6 * sum(p.numel() for p in model.parameters())


def test_a_config_that_cannot_be_saved_is_named() -> None:
    """A model may run with values that the class of its config refuses only when it is saved."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.Phi3Config(vocab_size=32, pad_token_id=0, **sizes)
    config.rope_parameters |= {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(SourceError, match=r"the config of this Phi3Model cannot be saved.*rope_parameters"):
        shardconv_runtime.parallelize(transformers.Phi3Model(config))


def old_weight_norm(model: Own) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.blocks[0].up)
    return model


def with_hook(model: Own) -> nn.Module:
    model.blocks[0].up.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_hook, r"blocks\.0\.up has a hook \(with_hook.*register it on the model that is returned"),
        (old_weight_norm, "cannot be copied .*parametrizations"),
        (torch.compile, "is compiled; pass the module before torch.compile"),
        (nn.DataParallel, "pass the module inside"),
        (lambda model: torch.jit.script(nn.Linear(2, 2)), "pass the module before torch.jit"),
        (lambda model: nn.LazyLinear(3), "is a UninitializedParameter"),
    ],
)
def test_models_that_are_refused(change: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        shardconv_runtime.parallelize(change(own()), example_inputs={"ids": IDS})


def test_a_part_is_not_parallelized_again() -> None:
    part = shardconv_runtime.parallelize(own(), example_inputs={"ids": IDS})
    with pytest.raises(SourceError, match="is a rank's part already"):
        shardconv_runtime.parallelize(part, example_inputs={"ids": IDS})
    with pytest.raises(SourceError, match="the example inputs are a tuple; give a dict"):
        shardconv_runtime.parallelize(own(), example_inputs=(IDS,))


def test_what_cannot_be_parallelized() -> None:
    with pytest.raises(PlanError, match=r"takes an nn\.Module, got a str"):
        shardconv_runtime.parallelize("model")  # type: ignore[type-var]
    with pytest.raises(SourceError, match="its inputs are not known; pass example_inputs="):
        shardconv_runtime.parallelize(own())
    with pytest.raises(SourceError, match="its inputs are not known; pass example_inputs="):
        shardconv.plan(nn.Module(), 2)
    with pytest.raises(SourceError, match="a dict is no model"):
        shardconv.plan({}, 2)
    with torch.device("meta"):
        empty = Own()
    with pytest.raises(SourceError, match="scale of Own is on meta and in no state dict"):
        shardconv_runtime.parallelize(empty, example_inputs={"ids": IDS})
    mixed = own()
    mixed.blocks[0].up.to("meta")
    with pytest.raises(PlanError, match=r"blocks\.0\.up\.weight of Own is on meta, and other"):
        shardconv_runtime.parallelize(mixed, example_inputs={"ids": IDS})
    plan = shardconv.plan(own(), 1, example_inputs={"ids": IDS})
    with pytest.raises(PlanError, match=r"the plan is for a .*:Own, and the model is a"):
        shardconv_runtime.parallelize(causal(), plan=plan)
