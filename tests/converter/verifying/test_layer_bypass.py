"""Layers that are left out return what the layer would have returned, in its form, or none is left out."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from shardconv_runtime.checkpoint.resolve import resolve
from shardconv_runtime.parallel import build
from torch import Tensor, nn

from shardconv.arguments import ExampleInputs, SolveOptions
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import solve_plan
from shardconv.simulation.layer_bypass import Bypass, bypassed_copy, working_bypasses
from shardconv.tracing.fold import fold
from shardconv.tracing.trace import trace

Pair = namedtuple("Pair", ["states", "unread"])


class Kept:
    """A cache of the model's own kind."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Layer(nn.Module):
    """Returns a named tuple, as some layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, states: Tensor, kept: Kept) -> Pair:
        kept.items.append(states)
        return Pair(self.inner(states), states.mean())


class Stack(nn.Module):
    """Reads the results of its layers by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.run_layers(x, Kept())

    def run_layers(self, x: Tensor, kept: Kept) -> Tensor:
        """All layers, one after another; each keeps what it is given."""
        for layer in self.layers:
            x = layer(x, kept).states
        return x


class Counts(Stack):
    """Finds too few items if layers are left out."""

    def forward(self, x: Tensor) -> Tensor:
        kept = Kept()
        x = self.run_layers(x, kept)
        if len(kept.items) != len(self.layers):
            raise IndexError("an item for each layer, please")
        return x


def bypasses_of(model: nn.Module) -> dict[str, Bypass]:
    """How the layers of a model on meta are left out."""
    inputs = TraceInputs({"x": torch.randn(3, 8)}, {})
    tape = trace(model.to("meta"), inputs.tensors, ())
    return working_bypasses(model, inputs, tape, fold(tape).representatives())


def test_a_named_tuple_stays_one() -> None:
    model = Stack().to("meta")
    found = bypasses_of(model)
    assert len(found) > 1
    left_out = bypassed_copy(model, found).get_submodule(next(iter(found)))
    x = torch.empty(3, 8, device="meta")
    result = left_out(x, Kept())
    assert isinstance(result, Pair)
    assert result.states is x


def test_no_layer_is_left_out_of_a_model_that_counts_them() -> None:
    assert bypasses_of(Counts()) == {}


def test_one_layer_of_which_the_result_is_collected_with_another_is_marked() -> None:
    """In its place the result of the layer before would be collected twice."""

    class Collected(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            kept = Kept()
            return (self.run_layers(x, kept), *kept.items[1:])

    class Reads(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.stack = Collected()
            self.stack.layers = nn.ModuleList(Layer() for _ in range(number))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(self.stack(x)).mean(0)

    for number in (4, 5):
        found = bypasses_of(Reads(number))
        assert len(found) == number - 3
        assert all(how.is_read_elsewhere for how in found.values())


class Block(nn.Module):
    """Two products, which are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, states: Tensor, kept: Kept) -> Tensor:
        kept.items.append(states.relu())
        hidden: Tensor = self.down(self.up(states).relu())
        return states + hidden


class Blocks(nn.Module):
    """Layers that do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.run_layers(x, Kept())

    def run_layers(self, x: Tensor, kept: Kept) -> Tensor:
        """All layers, one after another; each keeps an inner result."""
        for layer in self.layers:
            x = layer(x, kept)
        return x


class AsksForSizes(Blocks):
    """Its code reads a size of each layer."""

    def forward(self, x: Tensor) -> Tensor:
        assert all(layer.up.out_features for layer in self.layers)
        return super().forward(x)


class Collects(Blocks):
    """Returns a result of each layer that is not passed on."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        kept = Kept()
        return self.run_layers(x, kept), *kept.items


class Sums(Collects):
    """Computes with these results."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, *items = super().forward(x)
        return x, torch.stack(items).sum(0)


@pytest.mark.parametrize(
    ("kind", "applied"), [(Blocks, [2]), (AsksForSizes, [2, 6]), (Collects, [2]), (Sums, [2, 6])]
)
def test_a_plan_is_applied_to_the_layers_that_run(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], applied: list[int]
) -> None:
    """And to all of them if code would see a difference."""
    counts: list[int] = []
    apply = build.apply_plan

    def counted(model: nn.Module, *args: Any, **options: Any) -> None:
        apply(model, *args, **options)
        counts.append(sum(name.endswith("up.weight") for name, _ in model.named_parameters()))

    monkeypatch.setattr(build, "apply_plan", counted)
    with torch.device("meta"):
        model = kind()
    example = ExampleInputs("the test", lambda config: {"x": torch.randn(3, 8)})
    solve_plan(
        resolve(model, need_weights=False), SolveOptions(2, check=False, measure=False, example=example)
    )
    assert counts == applied
