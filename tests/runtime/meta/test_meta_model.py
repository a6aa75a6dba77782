"""Models built without parameters have the buffers of models built with them."""

from __future__ import annotations

import copy
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from shardconv_runtime.errors import PlanError
from shardconv_runtime.meta.lazy_init import LazyInit
from shardconv_runtime.meta.meta_model import build_model, find_class
from torch import Tensor, nn

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
GATED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", GATED),
    (
        "Llama",
        {
            **GATED,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    ("GPT2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}),
    ("Bloom", {"n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 64}),
    (
        "DeepseekV3",
        {**GATED, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "moe_intermediate_size": 8},
    ),
    ("Mixtral", {**GATED, "num_local_experts": 4}),
    ("Gemma2", {**GATED, "head_dim": 8}),
    ("Gemma3Text", {**GATED, "head_dim": 8}),
    ("Mpt", {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 64, "max_seq_len": 32}),
    ("GPTNeoX", {**SMALL, "intermediate_size": 48}),
    ("Bert", {**SMALL, "intermediate_size": 48}),
    ("Mamba2", {"num_hidden_layers": 2, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "vocab_size": 64}),
]


def classes(name: str) -> tuple[Any, Any]:
    stem = name.removesuffix("Text")
    found = (getattr(transformers, stem + s, None) for s in ("ForCausalLM", "LMHeadModel", "Model"))
    return getattr(transformers, f"{name}Config"), next(cls for cls in found if cls is not None)


def persistent(model: nn.Module) -> set[str]:
    return set(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "values"), MODELS)
def test_buffers_equal_those_of_a_normal_model(name: str, values: dict[str, Any], dtype: torch.dtype) -> None:
    config_class, model_class = classes(name)
    normal = model_class._from_config(config_class(**values), dtype=dtype)
    lazy = build_model(model_class, config_class(**values), dtype)
    assert all(p.is_meta for p in lazy.parameters())
    shapes = {n: (p.shape, p.dtype) for n, p in lazy.named_parameters()}
    assert shapes == {n: (p.shape, p.dtype) for n, p in normal.named_parameters()}
    buffers, expected = dict(lazy.named_buffers()), dict(normal.named_buffers())
    assert buffers.keys() == expected.keys()
    for key, buffer in buffers.items():
        if key in persistent(lazy):
            assert buffer.is_meta
        else:
            torch.testing.assert_close(buffer, expected[key], rtol=0, atol=0, equal_nan=True)
    assert lazy.config._attn_implementation == normal.config._attn_implementation
    assert not lazy.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_buffers_equal_those_of_a_loaded_model(dtype: torch.dtype, tmp_path: Path) -> None:
    """A constructor divides these positions in the model's dtype, ``from_pretrained`` in float32."""
    config = transformers.GPTJConfig(n_layer=1, n_embd=32, n_head=4, rotary_dim=4, vocab_size=64)
    transformers.GPTJForCausalLM(config).to(dtype).save_pretrained(tmp_path)
    loaded = transformers.GPTJForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    built = dict(build_model(transformers.GPTJForCausalLM, config, dtype).named_buffers())
    for name, buffer in loaded.named_buffers():
        assert torch.equal(built[name], buffer), name


def test_the_config_is_not_changed_and_the_random_state_neither() -> None:
    config = transformers.LlamaConfig(**GATED)
    before, state = config.to_dict(), torch.get_rng_state()
    model = build_model(transformers.LlamaForCausalLM, config, torch.float16)
    assert config.to_dict() == before
    assert model.config.dtype == torch.float16
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32


def test_tied_weights_are_tied() -> None:
    model = build_model(
        transformers.LlamaForCausalLM, transformers.LlamaConfig(**GATED, tie_word_embeddings=True)
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_threads_take_turns() -> None:
    def build(dtype: torch.dtype) -> torch.dtype:
        model = build_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**GATED), dtype)
        return model.lm_head.weight.dtype

    dtypes = [torch.float64, torch.float16, torch.float32, torch.bfloat16] * 3
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(build, dtypes)) == dtypes
    assert torch.get_default_dtype() == torch.float32


def test_a_405b_model_is_built_in_well_under_a_second() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=126,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    begin = time.process_time()
    model = build_model(transformers.LlamaForCausalLM, config, torch.bfloat16)
    assert time.process_time() - begin < 2  # a quarter of a second on an idle core
    assert sum(p.numel() for p in model.parameters()) > 405e9


class Odd(nn.Module):
    """All the ways in which constructors compute."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1000, 1000))
        rates = [x.item() for x in torch.linspace(0, 0.5, 4)]
        self.register_buffer("rates", torch.tensor(rates), persistent=False)
        base = torch.zeros(4, 4)
        base[1:3].fill_(2.0)
        base[:, 0] = torch.tensor([5.0, 6.0, 7.0, 8.0])
        self.register_buffer("row", base[1], persistent=False)
        base.mul_(10)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril()[None], persistent=False)
        self.register_buffer("seen", torch.zeros(2), persistent=True)
        self.register_buffer("chosen", torch.arange(6)[torch.arange(6) % 2 == 0].nonzero(), persistent=False)
        self.register_buffer(
            "angle", torch.polar(torch.ones(2).float(), torch.ones(2).float()).conj(), persistent=False
        )
        self.register_buffer("positions", torch.arange(5).expand(1, -1), persistent=False)
        self.register_buffer("halves", torch.arange(3) / 2, persistent=False)
        self.register_buffer(
            "by_numpy", torch.from_numpy(torch.ones(2).double().numpy() * 3), persistent=False
        )
        self.register_buffer("none", None, persistent=False)
        self.plain = torch.full((2,), 4.0)
        self.several = [torch.arange(2).tolist(), torch.ones(1).data]
        self.view = self.weight.t()


def test_every_kind_of_operation_is_replayed() -> None:
    torch.manual_seed(0)
    normal, lazy = Odd(), build_model(Odd, None)
    for name, buffer in normal.named_buffers():
        if name != "seen":
            built = getattr(lazy, name)
            assert torch.equal(built, buffer), name
            assert built.dtype == buffer.dtype
            assert built.stride() == buffer.stride()
    assert lazy.none is None
    assert lazy.seen.is_meta
    assert torch.equal(lazy.plain, normal.plain)
    assert lazy.several == [[0, 1], torch.ones(1)]
    assert lazy.weight.is_meta
    assert lazy.view.is_meta  # of a parameter, which has no value yet


def test_low_precision_default_dtype_is_replayed() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        normal = Odd()
    finally:
        torch.set_default_dtype(before)
    lazy = build_model(Odd, None, torch.bfloat16)
    assert lazy.halves.dtype == torch.bfloat16
    assert torch.equal(lazy.rates, normal.rates)


def test_random_buffers_are_alike_on_every_rank() -> None:
    class Random(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(8), persistent=False)

    tables = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tables.append(build_model(Random, None).table)
    assert torch.equal(*tables)


def test_values_are_there_while_building() -> None:
    with LazyInit() as lazy:
        x = torch.arange(4) * 2
        assert x.is_meta
        assert x.sum().item() == 12
        assert x.tolist() == [0, 2, 4, 6]
        assert bool((x > 5).any())
        x += 1
        assert float(x[1]) == 3.0
        y = x.to("cpu", torch.float64)
    assert lazy.materialize(y).dtype == torch.float64
    assert lazy.materialize(nn.Parameter(y)).tolist() == [1, 3, 5, 7]
    assert lazy.materialize(x[2:]).tolist() == [5, 7]


def test_imaginary_parts_of_conjugates_are_views() -> None:
    def make() -> tuple[Tensor, Tensor]:
        pairs = torch.polar(torch.arange(1.0, 5.0), torch.arange(4.0))
        imaginary = pairs.conj().imag[1:]
        imaginary.mul_(2)  # it writes to the pairs
        return pairs, imaginary

    expected = make()
    with LazyInit() as lazy:
        metas = make()
    for meta, real in zip(metas, expected, strict=True):
        assert torch.equal(lazy.materialize(meta), real)


def test_tensors_from_before_are_constants() -> None:
    before = torch.arange(3.0)
    with LazyInit() as lazy:
        after: Tensor = before + 1
    assert lazy.materialize(after).tolist() == [1, 2, 3]
    assert lazy.materialize(before) is not None
    assert before.tolist() == [0, 1, 2]


def test_an_unknown_meta_tensor_cannot_be_materialized() -> None:
    outside = torch.empty(3, device="meta")
    with LazyInit() as lazy:
        y = outside + 1
    with pytest.raises(PlanError, match=r"shape \(3,\) cannot be computed"):
        lazy.materialize(y)


@pytest.mark.parametrize(
    "fill",
    [
        lambda tensor: nn.init.uniform_(tensor, -2, 3),
        lambda tensor: nn.init.normal_(tensor, mean=5, std=0.1),
        lambda tensor: nn.init.kaiming_uniform_(tensor, a=5**0.5),
        nn.init.xavier_normal_,
        lambda tensor: tensor.bernoulli_(0.5),
    ],
)
def test_random_fills_are_replayed_where_they_were_made(fill: Callable[[Tensor], Tensor]) -> None:
    def make() -> tuple[Tensor, Tensor, Tensor]:
        base = torch.ones(6, 8)
        filled = fill(base[1:5])
        row = base[2] * 2
        base[3].zero_()
        return base, filled, row

    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = make()
    with LazyInit() as lazy:
        metas = make()
        inside = lazy.materialize(metas[2])
    assert all(meta.is_meta for meta in metas)
    assert torch.equal(inside, expected[2])
    for meta, real in zip(metas, expected, strict=True):
        assert torch.equal(lazy.materialize(meta), real)


def test_a_fill_of_a_constant_leaves_it_as_it_is() -> None:
    before = torch.zeros(4, 4)
    with LazyInit() as lazy:
        after: Tensor = nn.init.normal_(before) + 1
    assert not before.any()
    assert lazy.materialize(after).std() > 0.1


class Kinds(nn.Module):
    """A module with sets of strings, whose order no process has in common with another one."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.kinds = {f"kind {i}" for i in range(9)}


def test_sets_are_iterated_in_one_order() -> None:
    model = build_model(Kinds, None)
    for each in (model, copy.deepcopy(model)):
        assert [*each.kinds] == sorted(Kinds(None).kinds)  # type: ignore[misc, arg-type]
        assert each.kinds == Kinds(None).kinds


def test_errors_of_the_constructor_are_its_own() -> None:
    class Broken(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            torch.zeros(2, 3) @ torch.zeros(2, 3)

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        build_model(Broken, None)


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn:Nothing",
        "torch.nn:Linear",
        "no.such.module:Class",
        "math:pi",
        "",
        "os:system",
        "transformers.models.llama.modeling_llama:nn",
        "transformers.models.llama.modeling_llama:LlamaMLP",
        "transformers.models.llama.modeling_nothing:LlamaModel",
    ],
)
def test_what_is_no_model_class_is_a_plan_error(name: str) -> None:
    with pytest.raises(PlanError):
        find_class(name)


@pytest.mark.parametrize(
    "name", ["planted", "antigravity", "transformers.models.planted", "planted.modeling_x"]
)
def test_no_other_module_is_imported_for_a_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that lies in the current directory, which may be the repository that was downloaded."""
    (tmp_path / "planted.py").write_text("raise SystemExit('code of the directory was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(PlanError, match="import its module before"):
        find_class(f"{name}:Model")
    assert name not in sys.modules


def test_a_class_is_found_by_name() -> None:
    name = "transformers.models.llama.modeling_llama:LlamaForCausalLM"
    assert find_class(name) is transformers.LlamaForCausalLM


def test_a_class_of_a_module_that_was_imported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somebodys_models")
    module.Model = transformers.LlamaForCausalLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_models", module)
    assert find_class("somebodys_models:Model") is transformers.LlamaForCausalLM
