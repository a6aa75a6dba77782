"""Attention weights of all heads, in real processes: those of the unsharded model, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_processes
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Dim, Leaf, Product
from small_models import save_random, small_config
from torch import Tensor
from torch.utils import _pytree
from zoo.measure import judge
from zoo.models import build
from zoo.tasks import specification

import shardconv
from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

pytestmark = pytest.mark.usefixtures("other_attentions")

IDS = torch.tensor([[1, 5, 100, 7, 50], [3, 2, 99, 0, 51]])


def grouped(path: Path) -> Any:
    """Six heads in three groups, which two ranks share unevenly and four share in two ways."""
    config = small_config(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    return save_random(config, transformers.LlamaForCausalLM, path)


def encoder_decoder(path: Path) -> Any:
    """A position bias for each head, and attention over the encoder's states."""
    sizes = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 5}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return save_random(config, transformers.T5ForConditionalGeneration, path)


def weights(output: Any) -> list[Tensor]:
    """The attention weights of an output, in a fixed order."""
    return [t for name in sorted(output) if "attentions" in name for t in _pytree.tree_leaves(output[name])]


def of_calls(model: Any) -> list[Tensor]:
    """The weights that calls return which ask for them, of those that do not, and the norm of a gradient."""
    given = {"decoder_input_ids": IDS[:, :3]} if model.config.is_encoder_decoder else {}
    part = model.get_encoder() if given else model.base_model
    with torch.no_grad():
        asked = weights(model(IDS, **given, output_attentions=True))
        assert not weights(model(IDS, **given))
        asked += weights(part(input_ids=IDS, output_attentions=True))
        options = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
        asked += weights(model.generate(IDS, max_new_tokens=3, **options))
    return asked


def gradient(model: Any) -> Tensor:
    """Norms of gradients by a loss that tells heads and positions apart, also of the weights themselves."""
    given = {"decoder_input_ids": IDS[:, :3]} if model.config.is_encoder_decoder else {}
    found = weights(model(IDS, **given, output_attentions=True, use_cache=False))
    terms = [t.pow(3).mean((0, 2, 3)) @ torch.arange(1.0, t.shape[1] + 1, dtype=t.dtype) for t in found]
    for weights_of_layer in found:
        weights_of_layer.retain_grad()
    torch.stack(terms).sum().backward()
    retained = [t.grad.norm() for t in found if t.grad is not None]
    assert len(retained) == len(found)
    norms = [p.grad.norm() for p in model.parameters() if p.dim() == 1 and p.grad is not None]
    return torch.stack([*norms, *retained])


def on_rank(out: Path) -> tuple[list[Tensor], Tensor]:
    def load(**options: Any) -> Any:
        model = shardconv_runtime.load(out, dtype=torch.float64, **options)
        model.set_attn_implementation("eager")
        return model

    return of_calls(load()), gradient(load(training=True)).detach()


@pytest.mark.parametrize(
    ("make", "tp"),
    [(grouped, 2), pytest.param(encoder_decoder, 3, marks=pytest.mark.slow)],
    ids=["grouped 2", "encoder-decoder 3"],
)
def test_weights_of_all_heads_are_those_of_the_unsharded_model(
    make: Callable[[Path], Any], tp: int, tmp_path: Path
) -> None:
    model = make(tmp_path / "in").double()
    model.set_attn_implementation("eager")
    shardconv.convert(tmp_path / "in", tmp_path / "out", tp=tp)
    want, want_gradient = of_calls(model), gradient(model)
    assert len(want) >= 10
    for asked, norms in run_processes(tp, on_rank, tmp_path / "out"):
        assert len(asked) == len(want)
        for got, right in zip(asked, want, strict=True):
            torch.testing.assert_close(got, right)
        torch.testing.assert_close(norms, want_gradient)


@pytest.mark.parametrize(
    ("tp", "heads"),
    [(2, Product((Leaf(3, (0,)), Leaf(2)))), (4, Product((Leaf(3, (0,)), Leaf(2, (1,)))))],
)
def test_a_gather_has_the_layout_of_the_heads(tp: int, heads: Dim, tmp_path: Path) -> None:
    grouped(tmp_path)
    plan = shardconv.plan(tmp_path, tp=tp, check=True)
    (entry,) = plan.attentions
    assert entry.names == ("model.layers.{0,1}.self_attn",)
    assert [(step.port, step.dim, step.layout) for step in entry.outputs] == [("output.1", 1, heads)]  # type: ignore[union-attr]
    assert plan_json.loads(plan_json.dumps(plan)) == plan
    assert not shardconv.plan(tmp_path, tp=tp, check=False).attentions


PIXELS = torch.arange(2 * 3 * 32 * 32, dtype=torch.float64).view(2, 3, 32, 32).cos()


def one_head_and_two(path: Path) -> Any:
    """In the first stage all ranks compute the weights of one head, whose gradients are terms of a sum."""
    sizes = {"num_encoder_blocks": 2, "depths": [2, 1], "hidden_sizes": [16, 32], "sr_ratios": [2, 1]}
    more = {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "patch_sizes": [7, 3], "strides": [4, 2]}
    config = transformers.SegformerConfig(**sizes, **more)
    return save_random(config, transformers.SegformerModel, path)


def gradients_of_images(model: Any) -> list[Tensor]:
    """The weights, their gradients by a loss of them and the output, and the norm of all gradients."""
    output = model(PIXELS, output_attentions=True)
    of_layers = weights(output)
    for each in of_layers:
        each.retain_grad()
    losses = [each.pow(3).mean() for each in of_layers]
    (torch.stack(losses).sum() + output.last_hidden_state.pow(2).mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    return [*(each.detach() for each in of_layers), *(each.grad for each in of_layers), norm]


def of_images_on_rank(out: Path) -> list[Tensor]:
    model = shardconv_runtime.load(out, dtype=torch.float64, training=True)
    model.set_attn_implementation("eager")
    return gradients_of_images(model.eval())


def test_weights_that_all_ranks_have_send_back_a_term_of_their_gradient(tmp_path: Path) -> None:
    model = one_head_and_two(tmp_path / "in").double().eval()
    model.set_attn_implementation("eager")
    plan = shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert {step.op for entry in plan.attentions for step in entry.outputs} == {"all_gather", "grad_divide"}
    want = gradients_of_images(model)
    for result in run_processes(2, of_images_on_rank, tmp_path / "out"):
        for got, right in zip(result, want, strict=True):
            torch.testing.assert_close(got, right)


def test_weights_of_code_that_chooses_its_attention_when_it_is_built(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_random(transformers.FalconConfig(**sizes), transformers.FalconForCausalLM, tmp_path)
    assert "output_attentions" in shardconv.plan(tmp_path, tp=2, check=True).proven_arguments


def test_weights_with_heads_and_samples_in_one_dim() -> None:
    """Their heads are factors of a dim whose number of samples is known in a call only."""
    model = build("causal", "got_ocr2")
    plan = solve_plan(specification(model), SolveOptions(2))
    layouts = [step.layout for entry in plan.attentions for step in entry.outputs if step.op == "all_gather"]
    assert Product((Leaf(0), Leaf(8, (0,)))) in layouts
    assert judge(plan, model).status == "equal"
