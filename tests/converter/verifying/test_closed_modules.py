"""Modules of a layer that need not be run where only shapes of the layer are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.simulation.layer_bypass import closed_modules, repeat_results
from shardconv.tracing.tape import Tape
from shardconv.tracing.trace import trace

INPUTS = TraceInputs({"x": torch.randn(3, 8)}, {})


class Long(nn.Module):
    """Does much, and returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.seen: list[Tensor] = []
        self.number_of_calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.number_of_calls += 1
        for _ in range(12):
            x = self.inner(x)
        return x, x.sum(-1).double()


class Layer(nn.Module):
    """Two long modules, of which the second may be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Long()
        self.two = nn.ModuleDict({"long": Long()})

    def forward(self, x: Tensor) -> Tensor:
        x, scores = self.one(x)
        return self.two["long"](x)[0] + scores[:, None].to(x.dtype)


class Model(nn.Module):
    """Collects results of the second modules by hooks."""

    def __init__(self, collects: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.collects = collects

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        hooks = [
            layer.two["long"].register_forward_hook(lambda m, args, out: found.append(out[1]))
            for layer in self.layers
            if isinstance(layer, Layer) and self.collects
        ]
        for layer in self.layers:
            x = layer(x)
        for hook in hooks:
            hook.remove()
        return (x, *found)


def taped(collects: bool) -> tuple[Model, Tape]:
    """A model on meta, and its tape."""
    model = Model(collects).to("meta")
    return model, trace(model, INPUTS.tensors, ())


def test_modules_whose_results_alone_are_read_in_the_layer_are_closed() -> None:
    assert closed_modules(taped(False)[1], {"layers.1"}) == {"layers.1": ("one", "two.long")}


def test_a_module_whose_result_is_read_behind_the_layer_is_not_closed() -> None:
    found = closed_modules(taped(True)[1], {"layers.1", "layers.2"})
    assert found == {"layers.1": ("one",), "layers.2": ("one",)}


def test_what_returns_others_than_tensors_is_not_closed() -> None:
    class Odd(Long):
        def forward(self, x: Tensor) -> Any:
            return {"first": super().forward(x)[0]}

    class Reads(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.one(x)["first"] + self.two["long"](x)[0]

    model = Model(False)
    for name in "012":
        layer = Reads()
        layer.one = Odd()
        setattr(model.layers, name, layer)
    tape = trace(model.to("meta"), INPUTS.tensors, ())
    assert closed_modules(tape, {"layers.1"}) == {"layers.1": ("two.long",)}


def test_repeated_results_are_tensors_of_the_same_form() -> None:
    model, _ = taped(True)
    want = [(t.shape, t.dtype) for t in model(torch.empty(3, 8, device="meta"))]
    counts = [layer.one.number_of_calls for layer in model.layers]
    repeat_results(model, {"layers.1.one": "layers.0.one", "layers.2.one": "layers.0.one"})
    assert [(t.shape, t.dtype) for t in model(torch.empty(3, 8, device="meta"))] == want
    more = [layer.one.number_of_calls - n for layer, n in zip(model.layers, counts, strict=True)]
    assert more == [1, 0, 0]
