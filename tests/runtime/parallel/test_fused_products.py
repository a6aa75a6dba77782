"""Fused linear layers: one product where the members get one tensor, their own products everywhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_graphs import compiled_and_counted
from safetensors.torch import save_model
from shardconv_runtime.errors import PlanError
from shardconv_runtime.parallel.fused_products import (
    MAX_ROWS,
    FusedLinear,
    fuse,
    fused_products,
    refresh_fused,
)
from shardconv_runtime.parallel.layers import RowParallelLinear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = (6, 2, 4)
GROUP = ("q", "k", "v")


class Attention(nn.Module):
    """Three products of one input."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        for name, size in zip(GROUP, SIZES, strict=True):
            setattr(self, name, nn.Linear(8, size, bias, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


@pytest.fixture(params=[False, True], ids=["", "bias"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    found = Attention(request.param).eval().requires_grad_(False)
    fuse(found, [GROUP])
    return found


@contextmanager
def products() -> Iterator[list[int]]:
    """Counts the products of matrices."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[0] += any(part in str(func) for part in ("mm", "linear"))
            return func(*args, **(kwargs or {}))

    counted = [0]
    with Count():
        yield counted


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """What the layers compute by themselves."""
    layers = [model.get_submodule(name) for name in GROUP]
    return torch.cat([nn.functional.linear(x, m.weight, m.bias) for m in layers], -1)  # type: ignore[arg-type]


def check(model: nn.Module, num_products: int = 1) -> None:
    x = torch.randn(2, 3, 8, dtype=next(model.parameters()).dtype)
    with products() as counted:
        found = model(x)
    assert counted == [num_products]
    torch.testing.assert_close(found, expected(model, x))


def test_one_product(model: nn.Module) -> None:
    check(model)
    with torch.inference_mode():
        check(model)


def test_parameters_keep_names_and_have_storages_of_their_own(model: nn.Module, tmp_path: Path) -> None:
    plain = Attention(model.q.bias is not None)  # type: ignore[union-attr]
    assert list(model.state_dict()) == list(plain.state_dict())
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    (product,) = fused_products(model)
    assert product.weight is not None
    assert product.weight.data_ptr() == model.q.weight.data_ptr()  # type: ignore[union-attr]
    save_model(model, str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.float(),
        lambda m: m.to(torch.float64),
        lambda m: m.half().double(),
        lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}),
        lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}, assign=True),
        lambda m: setattr(m.k, "weight", nn.Parameter(torch.ones_like(m.k.weight), requires_grad=False)),
        lambda m: setattr(m.k.weight, "data", torch.ones_like(m.k.weight)),
        lambda m: m.v.weight.zero_(),
        lambda m: m.to_empty(device="cpu") and [p.fill_(0.5) for p in m.parameters()],
    ],
    ids=["float", "to", "half", "load", "assign", "parameter", "data", "write", "to_empty"],
)
def test_changed_parameters_are_joined_again(model: nn.Module, change: Callable[[nn.Module], object]) -> None:
    change(model)
    check(model)


def test_members_of_different_dtypes_compute_by_themselves() -> None:
    model = Attention().requires_grad_(False)
    fuse(model, [GROUP])
    model.k.float()
    (product,) = fused_products(model)
    product.refresh()
    assert product.weight is None
    model.k.double()
    check(model)


def test_a_copy_shares_nothing_with_the_original(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.zero_()
    check(other)
    check(model)
    assert fused_products(other) != fused_products(model)


def test_other_inputs(model: nn.Module) -> None:
    """A hook that replaces the input, a write to it, and calls by themselves or in another order."""
    x = torch.randn(3, 8, dtype=torch.float64)
    (product,) = fused_products(model)
    handle = model.k.register_forward_pre_hook(lambda _, args: (2 * args[0],))  # type: ignore[union-attr]
    want = expected(model, x)
    twice = expected(model, 2 * x)
    torch.testing.assert_close(model(x), torch.cat([want[:, :6], twice[:, 6:8], want[:, 8:]], -1))
    handle.remove()
    model.q(x)
    x.mul_(2)
    torch.testing.assert_close(model.k(x), twice[:, 6:8])
    torch.testing.assert_close(model.v(x), twice[:, 8:])
    torch.testing.assert_close(model.k(x), twice[:, 6:8])
    model(x)
    assert product._held is None


def test_large_inputs_are_multiplied_layer_by_layer(model: nn.Module) -> None:
    for rows, num_products in ((MAX_ROWS, 1), (MAX_ROWS + 1, 3), (2, 1)):
        x = torch.randn(rows, 8, dtype=torch.float64)
        with products() as counted:
            found = model(x)
        assert counted == [num_products]
        torch.testing.assert_close(found, expected(model, x))
        torch.testing.assert_close(copy.deepcopy(model)(x), found)


def test_gradients_of_weights_are_those_of_each_layer() -> None:
    model = Attention(bias=True)
    fuse(model, [GROUP])
    model(torch.randn(3, 8, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.requires_grad_(False)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with products() as counted:
        y = model(x)
    y.sum().backward()
    assert counted == [3]
    assert x.grad is not None


def test_compiled_code_takes_parameters_that_were_joined_again(model: nn.Module) -> None:
    compiled, graphs = compiled_and_counted(model)
    x = torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(model, x))
        torch.testing.assert_close(compiled(2 * x), expected(model, 2 * x))
        model.k.weight.data = torch.ones_like(model.k.weight)  # type: ignore[union-attr, arg-type]
        refresh_fused(model)
        torch.testing.assert_close(compiled(x), expected(model, x))
    assert graphs == [1]


def test_what_cannot_be_fused() -> None:
    model = Attention()
    model.k = RowParallelLinear(8, 2, False)
    with pytest.raises(PlanError, match=r"^k: the plan fuses it, and it is a RowParallelLinear"):
        fuse(model, [GROUP])
    with pytest.raises(PlanError, match=r"^z: this module of the plan is missing"):
        fuse(model, [("q", "z")])


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Attention(bias=True)
        fuse(model, [GROUP])
        assert model(torch.empty(2, 3, 8, dtype=torch.float64)).shape == (2, 3, 12)
    assert isinstance(model.q, FusedLinear)
