"""Modules of the formats' own libraries compute with packed weights: the numbers of the unsharded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_kernels
import pytest
import torch
import transformers
from library_checkpoints import (
    save_awq,
    save_by_transformers,
    save_compressed,
    save_gptq,
    save_torchao,
)
from packed_ranks import Checkpoint, held_bytes, in_float32
from shardconv_runtime.comm.collectives import Communicator, ProcessCommunicator
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Leaf, Product
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing, parameter_plans
from shardconv_runtime.packed.formats import fill_module
from shardconv_runtime.packed.packed_format import Part
from shardconv_runtime.packed.stored_weights import WeightSlice

from shardconv.simulation.rank_threads import run_ranks

IDS = torch.tensor([[1, 5, 60, 7, 50, 3, 8], [9, 2, 6, 33, 1, 0, 4]])
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
"""Two ranks' parts are whole blocks of 64."""


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Libraries that compile parts of their modules do not."""
    with torch.compiler.set_stance("force_eager"):
        yield


def save_bnb(directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import modules

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)  # its kernel computes in bfloat16
    save_by_transformers(directory, transformers.BitsAndBytesConfig(**settings), **SIZES)


def compare(directory: Path, tolerance: float, extra_bytes: float = 0.02, unsharded: Any = None) -> list[Any]:
    """Logits, tokens and memory of two ranks, with those of an unsharded model; the ranks' models."""
    checkpoint = Checkpoint.of(directory, 2)
    unsharded = unsharded or in_float32(directory)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def rank(comm: Communicator) -> tuple[Any, ...]:
        model, num_bytes = checkpoint.build(comm)
        held = held_bytes(model)
        return model(IDS).logits, model.generate(IDS, **options), held / num_bytes, model

    with torch.no_grad():
        expected, tokens = unsharded(IDS).logits, unsharded.generate(IDS, **options)
        found = run_ranks(checkpoint.plan.mesh, rank)
    for logits, drawn, overhead, _ in found:
        error = float((logits - expected).abs().max() / expected.abs().max())
        print(f"{directory.name}: {error:.2e}, memory {overhead:.4f}")
        assert error <= tolerance
        assert overhead <= 1 + extra_bytes
        assert torch.equal(drawn, tokens)
    return [model for *_, model in found]


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bnb(tmp_path / "q", monkeypatch, load_in_4bit=True, bnb_4bit_quant_type=kind)
    model = compare(tmp_path / "q", 1e-5)[0]
    assert type(model.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"


@pytest.mark.formats
def test_nested_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bnb(
        tmp_path / "q",
        monkeypatch,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )
    compare(tmp_path / "q", 1e-5, extra_bytes=0.1)


@pytest.mark.formats
def test_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bnb(tmp_path / "q", monkeypatch, load_in_8bit=True)
    compare_rounded(tmp_path / "q", lambda linear: linear.weight * linear.state.SCB[:, None] / 127)


@pytest.mark.formats
def test_float8_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")
    plain_kernels.install(monkeypatch.setattr)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    save_compressed(tmp_path / "q", {".*_proj": weights})
    change_settings(tmp_path / "q", use_optimized_inference=True)
    compare_rounded(tmp_path / "q", lambda linear: linear.weight.float() * linear.weight_scale.T)


def compare_rounded(directory: Path, plain: Callable[[Any], torch.Tensor]) -> None:
    """Where activations are quantized token by token: columns have the same bits, rows another rounding.

    Args:
        plain: the dequantized weight of an unsharded layer.
    """
    checkpoint, unsharded = Checkpoint.of(directory, 2), in_float32(directory)

    def rank(comm: Communicator) -> tuple[Any, torch.Tensor]:
        model, num_bytes = checkpoint.build(comm)
        assert held_bytes(model) <= 1.02 * num_bytes
        return model, model(IDS).logits

    with torch.no_grad():
        found = run_ranks((2,), rank)
        whole = unsharded(IDS).logits
    torch.manual_seed(0)
    full, parts = unsharded.model.layers[0].mlp, [model.model.layers[0].mlp for model, _ in found]
    x, y = (torch.randn(5, layer.in_features).bfloat16() for layer in (full.up_proj, full.down_proj))
    with torch.no_grad():
        columns = torch.cat([part.up_proj.forward(x) for part in parts], -1)
        halves = zip(parts, y.chunk(2, -1), strict=True)
        rows = sum(part.down_proj.forward(half).float() for part, half in halves)
        assert torch.equal(columns, full.up_proj(x))
        expected = full.down_proj(y).float()
        exact = y.float() @ plain(full.down_proj).T
    assert (rows - exact).norm() <= 1.2 * (expected - exact).norm()
    for _, logits in found:
        assert (logits - whole).abs().max() <= 0.05 * whole.abs().max()


@pytest.mark.formats
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(act_order: bool, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    save_gptq(tmp_path / "q", 4, 32, act_order=act_order)
    change_settings(tmp_path / "q", backend="gptq_torch")
    compare(tmp_path / "q", 1e-5)


@pytest.mark.formats
def test_awq(tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    save_awq(tmp_path / "q", 32)
    change_settings(tmp_path / "q", backend="torch_awq")
    compare(tmp_path / "q", 2e-3)  # its kernel computes in float16


def change_settings(directory: Path, **settings: object) -> None:
    """Choose kernels: those that compute in the dtype of the activations, where there are such."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= settings
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.formats
@pytest.mark.parametrize(("rows", "fits"), [(64, True), (40, False)])
def test_a_kernel_that_cannot_take_the_local_rows_is_not_used(
    rows: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of bitsandbytes for CPUs takes 32 rows at a time."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    layer = bitsandbytes.nn.Linear4bit(64, rows)
    codes, state = bitsandbytes.functional.quantize_4bit(torch.randn(rows, 64), quant_type="nf4")
    tensors = {"*": codes, **{f"*.{name}": value for name, value in state.as_dict(packed=True).items()}}
    values = PackedTensor("*", "uint8", (PackedDim(0, 1), PackedDim(1, 2)))
    part = Part(Packing("bnb_4bit", (values,)), tensors, WeightSlice.whole((rows, 64)), torch.float32)
    fill_module(layer, "weight", part)
    assert layer.support_avx512bf16_for_cpu == fits


@pytest.mark.formats
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(kind: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    save_torchao(tmp_path / "q", getattr(quantization, kind)())
    model = compare(tmp_path / "q", 1e-5, unsharded=dequantized(tmp_path / "q"))[0]
    assert type(model.model.layers[0].mlp.down_proj.weight).__name__ in ("Int8Tensor", "Float8Tensor")


def dequantized(directory: Path) -> Any:
    """The plain model in float32; the library computes in the dtype of the unquantized checkpoint."""
    model = in_float32(directory)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "qdata"):
            values = weight.qdata.float() * weight.scale
            module.weight = torch.nn.Parameter(values, requires_grad=False)
    return model


# --- what does not fit


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of bitsandbytes with a plan for two ranks."""
    pytest.importorskip("bitsandbytes")
    directory = tmp_path_factory.mktemp("four") / "q"
    save_by_transformers(directory, transformers.BitsAndBytesConfig(load_in_4bit=True), **SIZES)
    return Checkpoint.of(directory, 2)


def without(checkpoint: Checkpoint, end: str, **changes: Any) -> Checkpoint:
    """The checkpoint with another entry of the one parameter whose name ends so."""
    (name,) = (name for name in parameter_plans(checkpoint.plan) if name.endswith(end))
    entries = [replace(e, **changes) if e.names == (name,) else e for e in checkpoint.plan.parameters]
    return replace(checkpoint, plan=replace(checkpoint.plan, parameters=tuple(entries)))


def second_rank() -> Communicator:
    return ProcessCommunicator(1, (2,), {})


@pytest.mark.formats
def test_a_packed_weight_that_stays_plain_in_transformers_is_refused(four_bits: Checkpoint) -> None:
    change_settings(four_bits.directory, llm_int8_skip_modules=["down_proj", "lm_head"])
    with pytest.raises(PlanError, match=r"mlp.down_proj: its weight is packed, but transformers"):
        four_bits.build(second_rank())
    change_settings(four_bits.directory, llm_int8_skip_modules=None)


@pytest.mark.formats
def test_a_plain_weight_that_transformers_packs_is_refused(four_bits: Checkpoint) -> None:
    with pytest.raises(PlanError, match=r"mlp.up_proj: transformers would .* the plan has a plain one"):
        without(four_bits, "up_proj.weight", packing=None).build(second_rank())


@pytest.mark.formats
def test_a_rank_without_any_of_a_packed_weight_is_told(four_bits: Checkpoint) -> None:
    dims = (Leaf(256), Product((Leaf(1, (0,)), Leaf(512))))
    with pytest.raises(PlanError, match=r"down_proj.weight .* too few groups .* rank 1 holds none of it"):
        without(four_bits, "down_proj.weight", dims=dims).build(second_rank())
