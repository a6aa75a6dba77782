"""Layers of packed weights as one product: transformers' float8 layers, with their kernel in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import plain_kernels
import pytest
import torch
from counted_graphs import compiled_and_counted
from shardconv_runtime.format.plan import PackedDim, PackedTensor, Packing
from shardconv_runtime.packed.formats import fill_module
from shardconv_runtime.packed.packed_format import Part
from shardconv_runtime.packed.stored_weights import WeightSlice
from shardconv_runtime.parallel.fused_products import MAX_ROWS, fused_products, refresh_fused
from shardconv_runtime.parallel.packed_modules import fuse_packed
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

SIZES = {"q": 6, "k": 2, "v": 3}
"""Outputs, in blocks of two: the last weight has a part of a block."""
PACKING = Packing(
    "fp8",
    (
        PackedTensor("*", "float8_e4m3fn", (PackedDim(0, 1), PackedDim(1, 1))),
        PackedTensor("*_scale_inv", "float32", (PackedDim(0, 2), PackedDim(1, 4))),
    ),
)


class Attention(nn.Module):
    """Three products of one input."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        with torch.device("meta"):
            for name, size in SIZES.items():
                setattr(self, name, FP8Linear(8, size, (2, 4), has_bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in SIZES], -1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the weight of each product."""
    plain_kernels.install(monkeypatch.setattr)
    rows: list[int] = []

    def product(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        rows.append(len(weight))
        return plain_kernels.product(x, weight, *others)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", product)
    return rows


@pytest.fixture(params=[False, True], ids=["", "bias"])
def models(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """One whose members are fused, and one whose members are not, with the same numbers."""
    fused, plain = Attention(request.param), Attention(request.param)
    (product,) = fuse_packed(fused, [tuple(SIZES)])
    torch.manual_seed(0)
    for index, (name, size) in enumerate(SIZES.items()):
        values = torch.randn(size, 8).to(torch.float8_e4m3fn)
        tensors = {"*": values, "*_scale_inv": torch.rand(-(-size // 2), 2)}
        part = Part(PACKING, tensors, WeightSlice.whole((size, 8)), torch.float32)
        product.fill(index, part)
        fill_module(plain.get_submodule(name), "weight", part)
        if request.param:
            bias = torch.randn(size)
            for model in (fused, plain):
                model.get_submodule(name).bias = nn.Parameter(bias.clone(), requires_grad=False)
    return fused.eval().requires_grad_(False), plain.eval().requires_grad_(False)


@pytest.fixture
def fused(models: tuple[nn.Module, nn.Module]) -> nn.Module:
    return models[0]


@pytest.fixture
def plain(models: tuple[nn.Module, nn.Module]) -> nn.Module:
    return models[1]


def check(fused: nn.Module, plain: nn.Module, counted: list[int], *rows: int) -> None:
    """The numbers of the members, and the rows of the products by which they are computed."""
    x = torch.randn(2, 3, 8)
    counted.clear()
    found = fused(x)
    assert counted == list(rows or (sum(SIZES.values()),))
    torch.testing.assert_close(found, plain(x))


def test_one_product(fused: nn.Module, plain: nn.Module, counted: list[int]) -> None:
    check(fused, plain, counted)
    with torch.inference_mode():
        check(fused, plain, counted)
    (product,) = fused_products(fused)
    assert product._held is None


def test_members_are_what_they_were_and_have_the_memory_of_the_product(
    fused: nn.Module, plain: nn.Module
) -> None:
    (product,) = fused_products(fused)
    wide: Any = product.wide  # type: ignore[attr-defined]
    assert type(wide) is FP8Linear
    assert repr(fused) == repr(plain)
    state = plain.state_dict()
    assert list(fused.state_dict()) == list(state)
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor.float(), state[name].float())
    for name in ("weight", "weight_scale_inv"):
        address = getattr(wide, name).data_ptr()
        for member in product.members:
            tensor = getattr(member, name)
            assert tensor.data_ptr() == address
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            address += tensor.nbytes


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.k, "weight_scale_inv", nn.Parameter(torch.ones(1, 2), requires_grad=False)),
        lambda m: setattr(m.k.weight, "data", torch.ones(2, 8).to(torch.float8_e4m3fn)),
        lambda m: m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()}, assign=True),
    ],
    ids=["parameter", "data", "assign"],
)
def test_members_with_other_weights_compute_by_themselves(
    fused: nn.Module, plain: nn.Module, counted: list[int], change: Callable[[nn.Module], object]
) -> None:
    for model in (fused, plain):
        change(model)
    check(fused, plain, counted, *SIZES.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.v.weight_scale_inv.mul_(2),
        lambda m: m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()}),
        lambda m: m.q.bias is not None and setattr(m.q.bias, "data", torch.ones(6)),
        lambda m: m.q.bias is not None and m.q.bias.mul_(2),
        lambda m: m.train(),
    ],
    ids=["write", "load", "other bias", "write to bias", "train"],
)
def test_changes_that_the_product_follows(
    fused: nn.Module, plain: nn.Module, counted: list[int], change: Callable[[nn.Module], object]
) -> None:
    for model in (fused, plain):
        change(model)
    check(fused, plain, counted)
    assert fused_products(fused)[0].wide.training == fused.training  # type: ignore[attr-defined]


def test_a_cast_gives_the_product_up(fused: nn.Module) -> None:
    """The library then has plain weights."""
    (product,) = fused_products(fused)
    fused.double()
    assert product.wide is None  # type: ignore[attr-defined]


def test_copies_compute_by_themselves(fused: nn.Module, plain: nn.Module, counted: list[int]) -> None:
    other = copy.deepcopy(fused)
    for tensor in other.state_dict().values():
        tensor.zero_()
    check(fused, plain, counted)
    counted.clear()
    assert not other(torch.randn(3, 8)).any()
    assert counted == list(SIZES.values())


def test_other_inputs(fused: nn.Module, plain: nn.Module, counted: list[int]) -> None:
    handle = fused.k.register_forward_pre_hook(lambda _, args: (2 * args[0],))  # type: ignore[union-attr]
    x = torch.randn(3, 8)
    want = torch.cat([plain.q(x), plain.k(2 * x), plain.v(x)], -1)  # type: ignore[operator]
    counted.clear()
    torch.testing.assert_close(fused(x), want)
    assert counted == [11, 2]
    handle.remove()
    for rows, products in ((MAX_ROWS, [11]), (MAX_ROWS + 1, [6, 2, 3])):
        x = torch.randn(rows, 8)
        counted.clear()
        found = fused(x)
        assert counted == products
        torch.testing.assert_close(found, plain(x))


def test_gradients_are_those_of_each_member(fused: nn.Module, plain: nn.Module, counted: list[int]) -> None:
    gradients = []
    torch.manual_seed(1)
    x = torch.randn(3, 8)
    for model in (fused, plain):
        own = x.clone().requires_grad_()
        counted.clear()
        model(own).square().sum().backward()
        assert counted == [6, 2, 3]
        assert own.grad is not None
        gradients.append(own.grad)
    torch.testing.assert_close(*gradients)


def test_an_input_that_the_library_writes_to(
    fused: nn.Module, plain: nn.Module, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as bitsandbytes: it takes outliers out of the input, and puts them back."""
    kernel = finegrained_fp8.fp8_linear

    def product(x: Tensor, *others: Any) -> Tensor:
        x.add_(0)
        return kernel(x, *others)  # type: ignore[no-any-return]

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", product)
    check(fused, plain, counted)


def test_one_graph(fused: nn.Module, plain: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels.install(monkeypatch.setattr)
    compiled, graphs = compiled_and_counted(fused)
    x = torch.randn(3, 8)
    refresh_fused(fused)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x))
        torch.testing.assert_close(compiled(2 * x), plain(2 * x))
        fused.q.weight_scale_inv.mul_(2)  # type: ignore[union-attr, operator]
        plain.q.weight_scale_inv.mul_(2)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(compiled(x), plain(x))
    assert graphs == [1]


def test_what_cannot_be_joined_is_computed_by_the_members(counted: list[int]) -> None:
    model = Attention(bias=False)
    (product,) = fuse_packed(model, [("k", "v", "q")])
    for index, name in enumerate(("k", "v", "q")):  # v has a part of a block, and is not the last
        size = SIZES[name]
        tensors = {
            "*": torch.randn(size, 8).to(torch.float8_e4m3fn),
            "*_scale_inv": torch.rand(-(-size // 2), 2),
        }
        product.fill(index, Part(PACKING, tensors, WeightSlice.whole((size, 8)), torch.float32))
    model(torch.randn(3, 8))
    assert counted == [6, 2, 3]
