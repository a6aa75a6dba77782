"""Fused products in real processes: fewer of them, the same numbers, no more memory, unchanged parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import CONFIGS, HEADS, HIDDEN, LAYERS, VOCAB, save
from distributed import run_processes
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.plan import FusedPlan
from shardconv_runtime.parallel.fused_products import fused_products
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from warm_compiler import warm_up

import shardconv
from shardconv import plan_forms
from shardconv.reporting.html_report import html_report

IDS = torch.arange(2, 16).view(2, 7)

PRODUCTS = {"llama": (7, 4), "one_kv_head": (7, 4), "qwen2": (7, 4), "bart": (16, 11), "gpt2": (4, 4)}
"""Of a layer, by themselves and fused; of bart of a layer of the encoder and one of the decoder."""


def make_model(name: str) -> Any:
    """Random, in float64."""
    torch.manual_seed(0)
    if name == "bart":
        config = transformers.BartConfig(
            vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS,
            encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=96,
            decoder_ffn_dim=96,
        )  # fmt: skip
        return transformers.BartForConditionalGeneration._from_config(config, dtype=torch.float64)
    changes = {"num_key_value_heads": 1} if name == "one_kv_head" else {}
    kind = "llama" if name == "one_kv_head" else name
    config = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind] | changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class Directories:
    """A model, and what was made of it."""

    source: Path
    out: Path


Convert = Callable[[str, int], Directories]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Gives each model, converted once for each number of ranks."""
    root = tmp_path_factory.mktemp("fused")

    @cache
    def source(name: str) -> Path:
        return save(make_model(name), root / name)

    @cache
    def convert(name: str, tp: int) -> Directories:
        out = root / f"{name}-{tp}"
        shardconv.convert(source(name), out, tp=tp, check=False)
        return Directories(source(name), out)

    return convert


class CountedProducts(TorchDispatchMode):
    """Counts the products with matrices of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)
        return func(*args, **(kwargs or {}))


def run(model: Any, *, inference: bool = False) -> tuple[int, Tensor]:
    """The number of products of a forward pass, and the logits."""
    mode = torch.inference_mode() if inference else nullcontext()
    with torch.no_grad(), mode, CountedProducts() as counted:
        logits = model(IDS, use_cache=False).logits
    return counted.count, logits.clone()


def on_rank(found: Directories) -> list[tuple[int, Tensor]]:
    """Products and logits of models that were loaded or changed in different ways; the first is not fused."""
    plain = shardconv_runtime.load(found.out, fuse=False)
    fused = shardconv_runtime.load(found.out, fuse=True)
    assert list(fused.state_dict()) == list(plain.state_dict())
    # A default for GPUs: CPUs gain nothing.
    assert not fused_products(shardconv_runtime.load(found.out, compile=True))
    assert all(torch.equal(a, b) for a, b in zip(fused.parameters(), plain.parameters(), strict=True))
    for product in fused_products(fused):
        assert product.weight is not None
        assert product.weight.data_ptr() == product.members[0].weight.data_ptr()
    by_plan = shardconv_runtime.load(found.source, plan=found.out, fuse=True)
    other = copy.deepcopy(fused)
    other.load_state_dict({name: tensor.clone() for name, tensor in plain.state_dict().items()}, assign=True)
    cast = shardconv_runtime.load(found.out, dtype="float32", fuse=True).to(torch.float64)
    return [run(plain), run(fused), run(fused, inference=True), run(by_plan), run(other), run(cast)]


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 1),
        *((name, 2) for name in PRODUCTS if name != "llama"),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in PRODUCTS if name != "llama"),
    ],
)
def test_fewer_products_and_the_same_logits(converted: Convert, name: str, tp: int) -> None:
    found = converted(name, tp)
    model_class = type(make_model(name))
    want = run(model_class.from_pretrained(found.source, dtype=torch.float64).eval())[1]
    separate, fused = PRODUCTS[name]
    for results in run_processes(tp, on_rank, found) if tp > 1 else [on_rank(found)]:
        counts = [count - 1 for count, _ in results]
        assert counts == [LAYERS * separate] + [LAYERS * fused] * 5
        for index, (_, logits) in enumerate(results):
            tolerance = 1e-12 if index < 5 else 1e-4
            torch.testing.assert_close(logits, want, rtol=0, atol=tolerance * float(want.abs().max()))


def generated(found: Directories) -> list[Any]:
    """Tokens of both, and the tensors that the fused model holds at the end of a call."""
    plain = shardconv_runtime.load(found.out, fuse=False)
    fused = shardconv_runtime.load(found.out, fuse=True)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    tokens = [model.generate(IDS, **options) for model in (plain, fused)]
    return [*tokens, [product._held for product in fused_products(fused)]]


def test_the_same_tokens(converted: Convert) -> None:
    for plain, fused, held in run_processes(2, generated, converted("llama", 2)):
        assert torch.equal(plain, fused)
        assert held == [None] * 2 * LAYERS


def mapped_bytes(found: Directories) -> tuple[int, int]:
    """Bytes of private memory that loading took, as it is on disk and as the plan was made for it."""
    taken = []
    for fuse in (False, True):
        before = _anonymous_bytes()
        model = shardconv_runtime.load(found.out, fuse=fuse)
        taken.append(_anonymous_bytes() - before)
        del model
    return taken[0], taken[1]


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads Linux's list of mappings")
def test_weights_stay_in_the_mapped_file(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**CONFIGS["llama"] | {"hidden_size": 1024, "intermediate_size": 4096})
    torch.manual_seed(0)
    source = save(transformers.LlamaForCausalLM(config), tmp_path / "large")
    shardconv.convert(source, tmp_path / "out", tp=1, check=False)
    ((plain, fused),) = run_processes(1, mapped_bytes, Directories(source, tmp_path / "out"))
    num_bytes = (tmp_path / "out").joinpath("common/model-00001-of-00001.safetensors").stat().st_size
    assert num_bytes > 100 << 20
    assert fused - plain < num_bytes / 10


def test_files_without_groups_are_joined_in_memory(converted: Convert, tmp_path: Path) -> None:
    """Such as those of a directory whose plan had none, once it is replanned."""
    found = converted("llama", 1)
    plan = plan_json.read(found.out / "plan.json")
    older = tmp_path / "older"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_forms, "fused_plans", lambda *_: ())
        shardconv.convert(found.source, older, tp=1, check=False)
    assert not plan_json.read(older / "plan.json").fused
    before = run(shardconv_runtime.load(older, fuse=True))
    shardconv.replan(older, check=False)
    assert plan_json.read(older / "plan.json") == plan
    after = run(shardconv_runtime.load(older, fuse=True))
    assert (before[0], after[0]) == (1 + LAYERS * 7, 1 + LAYERS * 4)
    torch.testing.assert_close(after[1], before[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("groups", "num_products"),
    [
        ((("k_proj", "q_proj", "v_proj"),), 6),
        ((("v_proj", "k_proj", "q_proj"),), 7),
        ((("q_proj", "v_proj"),), 6),
    ],
)
def test_groups_in_another_order_are_slower_and_right(
    converted: Convert, tmp_path: Path, groups: Any, num_products: int
) -> None:
    """Nothing but the number of products depends on which layers a plan groups."""
    found = converted("llama", 1)
    plan = plan_json.read(found.out / "plan.json")
    entries = tuple(
        FusedPlan(tuple((f"model.layers.{{0,1}}.self_attn.{name}",) for name in group)) for group in groups
    )
    across = FusedPlan((("model.layers.0.mlp.gate_proj",), ("model.layers.1.mlp.gate_proj",)))
    path = tmp_path / "plan.json"
    plan_json.write(dataclasses.replace(plan, fused=(*entries, across)), path)
    count, logits = run(shardconv_runtime.load(found.source, plan=path, fuse=True))
    assert count == 1 + LAYERS * num_products
    torch.testing.assert_close(
        logits, run(shardconv_runtime.load(found.out, fuse=True))[1], rtol=1e-12, atol=1e-12
    )


def test_training_is_not_fused(converted: Convert) -> None:
    model = shardconv_runtime.load(converted("llama", 1).out, training=True)
    assert not fused_products(model)
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_page_lists_the_groups(converted: Convert) -> None:
    plan = plan_json.read(converted("llama", 2).out / "plan.json")
    page = html_report(plan, "<svg></svg>")
    assert "gate_proj + up_proj (4 products become 2)" in page


def test_what_is_saved_and_merged(converted: Convert, tmp_path: Path) -> None:
    found = converted("qwen2", 1)
    model = shardconv_runtime.load(found.out, fuse=True)
    shardconv_runtime.save(model, tmp_path / "saved")
    name = "common/model-00001-of-00001.safetensors"
    assert (tmp_path / "saved" / name).read_bytes() == (found.out / name).read_bytes()
    shardconv.merge(converted("qwen2", 2).out, tmp_path / "merged")
    shardconv.verify(converted("qwen2", 2).out, against=found.source, numerics=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(run(merged)[1], run(model)[1], rtol=1e-12, atol=1e-12)


def compiled(found: Directories) -> tuple[Tensor, Tensor, int]:
    """Logits of the compiled model before and after weights were replaced, and the number of graphs."""
    without_code = functools.partial(torch.compile, backend="eager")
    with mock.patch.object(torch, "compile", without_code):
        model = shardconv_runtime.load(found.out, compile=True, fuse=True)
    counters.clear()
    with torch.no_grad():
        first = model(IDS, use_cache=False).logits
        key = model.model.layers[0].self_attn.k_proj
        key.weight.data = torch.zeros_like(key.weight)
        second = model(IDS, use_cache=False).logits
    return first, second, counters["stats"]["unique_graphs"]


def replaced(found: Directories) -> list[Tensor]:
    """The same of a model that is neither compiled nor fused."""
    model = shardconv_runtime.load(found.out, fuse=False)
    first = run(model)[1]
    key = model.model.layers[0].self_attn.k_proj
    key.weight.data = torch.zeros_like(key.weight)
    return [first, run(model)[1]]


def test_one_graph(converted: Convert) -> None:
    found = converted("llama", 2)
    warm_up()
    wants = run_processes(2, replaced, found)
    results = run_processes(2, compiled, found)
    for want, (first, second, num_graphs) in zip(wants, results, strict=True):
        assert num_graphs == 1
        torch.testing.assert_close(first, want[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(second, want[1], rtol=1e-6, atol=1e-6)
