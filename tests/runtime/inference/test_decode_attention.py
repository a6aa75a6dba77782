"""Attention of a decoding step: the numbers of ``sdpa``, and a cache that no operator repeats."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import transformers
from captured import capturing
from checkpoints import CONFIGS
from shardconv_runtime.comm.mesh import Launch
from shardconv_runtime.inference.compiling import compile_model
from shardconv_runtime.inference.decode_attention import NAME, attending_once, decode_attention
from shardconv_runtime.inference.generation import DECODER, prepare_generation
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from warm_compiler import warm_up

SLOTS = 9
MASKS = {
    "none": None,
    "bool": torch.arange(SLOTS) < torch.tensor([4, 7])[:, None, None, None],
    "added": torch.randn(2, 1, 1, SLOTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "of heads": torch.randn(1, 6, 1, SLOTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [6, 3, 2, 1])
def test_it_is_sdpa(groups: int, mask: str) -> None:
    torch.manual_seed(1)
    module = nn.Module()
    module.num_key_value_groups = 6 // groups  # type: ignore[assignment]
    query = torch.randn(2, 6, 1, 8, dtype=torch.float64)
    key = torch.randn(2, groups, SLOTS, 8, dtype=torch.float64)
    value = torch.randn(2, groups, SLOTS, 5, dtype=torch.float64)
    got, _ = decode_attention(module, query, key, value, MASKS[mask], scaling=0.3)
    want, _ = sdpa_attention_forward(module, query, key, value, MASKS[mask], scaling=0.3)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("length", [1, 3])
def test_other_calls_are_those_of_sdpa(length: int) -> None:
    """More than one query, or a bias of positions, which only the ordinary function knows."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, 2, n, 8) for n in (length, SLOTS, SLOTS))
    more: dict[str, Any] = (
        {"is_causal": False} if length > 1 else {"position_bias": torch.randn(1, 2, 1, SLOTS)}
    )
    got, _ = decode_attention(nn.Module(), query, key, value, None, **more)
    want, _ = sdpa_attention_forward(nn.Module(), query, key, value, None, **more)
    assert torch.equal(got, want)


def test_a_row_that_sees_nothing_stays_finite() -> None:
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, SLOTS, 8)
    mask = torch.zeros(1, 1, 1, SLOTS, dtype=torch.bool)
    assert decode_attention(nn.Module(), query, key, key, mask)[0].isfinite().all()


def test_the_name_of_the_attention_comes_back() -> None:
    config = transformers.LlamaConfig(**CONFIGS["llama"], attn_implementation="sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with contextlib.suppress(KeyError), attending_once(model):
        assert model.model.layers[0].self_attn.config._attn_implementation != "sdpa"
        raise KeyError
    assert model.model.layers[0].self_attn.config._attn_implementation == "sdpa"


class _Kept:
    """Keeps the shapes of all tensors of captured graphs."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor):
                self.shapes.append(tuple(value.shape))
        return graph.forward


def _grouped() -> tuple[Any, Any]:
    """A model with 8 heads for 2 keys, and a copy that is not compiled yet."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**CONFIGS["llama"] | sizes)
    )
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=None, pad_token_id=0, max_new_tokens=3
    )
    twin = copy.deepcopy(model.eval())
    options = copy.deepcopy(model.generation_config)
    prepare_generation(twin, options, Launch(0, 1, torch.device("cpu")), gather_logits=True)
    return model, twin


def _generate(model: Any) -> Tensor:
    ids = torch.arange(3, 9)[None]
    tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids))
    return tokens


def test_a_model_with_another_attention_decodes_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are one graph all the same, and its tokens are right."""
    warm_up()
    model, twin = _grouped()

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, weights = decode_attention(*args, **kwargs)
        return -out, weights

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, NAME, wrong)
    with capturing():
        compile_model(twin, cuda_graphs=False)
        assert torch.equal(_generate(twin), _generate(model))
        assert vars(twin)[DECODER].num_recordings == 2
        assert torch.equal(_generate(twin), _generate(model))
    assert len(vars(twin)[DECODER]._recorded) == 1
    assert vars(twin)[DECODER].num_recordings == 2


def test_no_step_repeats_its_cache() -> None:
    """No tensor of the step has more elements than the keys of a layer."""
    warm_up()
    model, twin = _grouped()
    with capturing(_Kept()) as kept:
        compile_model(twin, cuda_graphs=False)
        got = _generate(twin)
    assert torch.equal(got, _generate(model))
    ((state, _),) = vars(twin)[DECODER]._recorded.values()
    keys = state.cache.layers[0].keys
    caches = [shape for shape in kept.shapes if keys.shape[-2] in shape and keys.shape[-1] in shape]
    assert keys.shape in caches
    assert max(torch.Size(shape).numel() for shape in caches) == keys.numel()
