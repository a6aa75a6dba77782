"""Depth is free: a deep model is analyzed as a model with each kind of layer once or twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.meta.meta_model import build_model
from torch import Tensor, nn

from shardconv.arguments import SolveOptions
from shardconv.dim_analysis.analysis import width
from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.dim_trees import find
from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.trace_inputs import trace_inputs
from shardconv.passes import solve_plan
from shardconv.tracing.fold import fold
from shardconv.tracing.tape import Op, reads_and_writes, starred
from shardconv.tracing.trace import trace

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(num_layers: int) -> ModelSpec:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=num_layers)
    return ModelSpec("llama", config, transformers.LlamaForCausalLM, "float32")


def mixture(num_layers: int) -> ModelSpec:
    """Of whose layers the routers are returned, each alone, and put together in a loss."""
    config = transformers.MixtralConfig(
        **SIZES, num_hidden_layers=num_layers, num_local_experts=8, num_experts_per_tok=2
    )
    return ModelSpec("mixture", config, transformers.MixtralForCausalLM, "float32")


def sliding(num_layers: int) -> ModelSpec:
    """Two kinds of layers in turn; the cache of each has a length of its own."""
    config = transformers.Gemma2Config(**SIZES, num_hidden_layers=num_layers, head_dim=8)
    return ModelSpec("sliding", config, transformers.Gemma2ForCausalLM, "float32")


def events(spec: ModelSpec) -> tuple[int, int]:
    """Those in layers, of the full tape and of the folded one; the trace has a cache."""
    inputs, tape = trace_inputs(build_model(spec.model_class, spec.config, torch.float32), RULES)
    assert inputs.options["use_cache"] is True
    return tuple(sum(".layers." in t.calls[e.call].fqn for e in t.events) for t in (tape, fold(tape).tape))


@pytest.mark.parametrize("make", [llama, mixture, sliding])
def test_a_deep_model_is_as_small_as_a_shallow_one(make: Callable[[int], ModelSpec]) -> None:
    full, folded = events(make(24))
    assert folded == events(make(8))[1]
    assert folded < full / 3


class Returning(nn.Module):
    """A stack of which the last layer's result is returned, and those of some others.

    Args:
        also: indices of the others.
    """

    def __init__(self, *also: int) -> None:
        super().__init__()
        self.also = also
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(8))

    def forward(self, x: Tensor) -> list[Tensor]:
        made = []
        for layer in self.layers:
            x = layer(x)
            made.append(x)
        return [x, *(made[i] for i in self.also)]


@pytest.mark.parametrize(
    ("also", "alone"), [((), []), ((0, 1, 2, 3, 4, 5, 6), ["layers.7"]), ((3,), ["layers.3"])]
)
def test_layers_of_which_the_model_returns_the_same_are_of_one_kind(
    also: tuple[int, ...], alone: list[str]
) -> None:
    folded = fold(trace(Returning(*also).to("meta"), {"x": torch.randn(3, 11, 12)}, RULES))
    assert [layer for layer, weight in folded.weights.items() if weight == 1] == alone
    made = {t for e in folded.tape.events for t in reads_and_writes(e)[1]}
    assert set(folded.tape.outputs) <= made


STAGES = ((12, 4), (14, 5), (16, 7))
"""The width of each stage, and how many layers it has."""


class Staged(nn.Module):
    """Three stages of which no two are alike, and stacks of layers that are."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Sequential(*(nn.Linear(n, n) for _ in range(depth)))) for n, depth in STAGES
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = F.pad(stage(x), (0, 2))
        return x


def test_stacks_in_stages_that_cannot_be_folded_are() -> None:
    folded = fold(trace(Staged().to("meta"), {"x": torch.randn(3, 11, 12)}, RULES))
    both_kept = {layer: weight for layer, weight in folded.weights.items() if weight > 1}
    expected = {f"stages.{i}.0.{j}": depth / 2 for i, (_, depth) in enumerate(STAGES) for j in (0, 1)}
    assert both_kept == expected


class Remembering(nn.Module):
    """Makes a state for each layer, and writes what each one returns to it before it calls the next.

    Args:
        sizes: of the states.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in sizes)

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [x.new_zeros(()) + torch.zeros(3, 12 * n, device=x.device) for n in self.sizes]
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x)
            state[:, :12].copy_(x[:, 0])
        return [x, *states]


class Adds(nn.Linear):
    """Reads the state that it is given."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return super().forward(x) + state


class Reading(Remembering):
    """Whose layers read their states, each of which begins with a number."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = numbers
        self.layers = nn.ModuleList(Adds(12, 12) for _ in numbers)

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [torch.full((12,), n, device=x.device, dtype=x.dtype) for n in self.numbers]
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state)
            state.copy_(x[0, 0])
        return [x, *states]


def test_operators_between_layers_stay_and_read_of_the_layers_that_do() -> None:
    folded = fold(trace(Remembering(1, 1, 1, 1, 1, 2).to("meta"), {"x": torch.randn(3, 11, 12)}, RULES))
    assert len(folded.instances) < 4
    names = [e.name for e in folded.tape.events if isinstance(e, Op)]
    assert names.count("aten.copy_.default") == 6
    made = {t for e in folded.tape.events for t in reads_and_writes(e)[1]}
    inputs = {t for t, info in enumerate(folded.tape.tensors) if info.kind != "value"}
    assert {t for e in folded.tape.events for t in reads_and_writes(e)[0]} <= made | inputs


@pytest.mark.parametrize(("numbers", "kept"), [((0.0,) * 8, 3), ((0.0,) * 5 + (1.0,) + (0.0,) * 2, 5)])
def test_layers_whose_states_were_made_alike_are_of_one_kind(numbers: tuple[float, ...], kept: int) -> None:
    folded = fold(trace(Reading(*numbers).to("meta"), {"x": torch.randn(3, 11, 12)}, RULES))
    assert len(folded.instances) == kept
    assert len(folded.same) == 8 - kept
    analysis = analyze(folded.tape, folded.ties, folded.same)
    for a, b in folded.same:
        assert [find(d) for d in analysis.dims[a]] == [find(d) for d in analysis.dims[b]]


class Scaling(nn.Linear):
    """Scales its result by the numbers that it is given."""

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return super().forward(x) * numbers


class Parts(nn.Module):
    """Gives each layer its part of a tensor.

    Args:
        num_layers: of its layers.
        odd: index of a layer that gets a part of another tensor, if there is one.
    """

    def __init__(self, num_layers: int, odd: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaling(12, 12) for _ in range(num_layers))
        self.numbers = nn.Parameter(torch.randn(num_layers, 12))
        self.others = nn.Parameter(torch.randn(num_layers, 12))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, (self.others if index == self.odd else self.numbers)[index])
        return x


@pytest.mark.parametrize(("odd", "kept"), [(-1, 2), (4, 4)])
def test_layers_that_get_parts_of_one_tensor_are_of_one_kind(odd: int, kept: int) -> None:
    folded = fold(trace(Parts(8, odd).to("meta"), {"x": torch.randn(3, 11, 12)}, RULES))
    assert len(folded.instances) == kept
    analysis = analyze(folded.tape, folded.ties, folded.same)
    assert len(folded.same) == 8 - kept
    for a, b in folded.same:
        assert [find(d) for d in analysis.dims[a]] == [find(d) for d in analysis.dims[b]]


class Keeping(nn.Linear):
    """Returns its result, and another result that it keeps, or those that it is given in place of it."""

    def forward(self, x: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return (x + y, y) if kept is None else (x + y * kept, kept)


class Sharing(nn.Module):
    """Of its layers, the last ones read what an earlier one keeps.

    Args:
        sources: for each layer, the index of the layer whose result it reads; itself for none.
    """

    def __init__(self, *sources: int) -> None:
        super().__init__()
        self.sources = sources
        self.layers = nn.ModuleList(Keeping(12, 12) for _ in sources)

    def forward(self, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        for index, (layer, source) in enumerate(zip(self.layers, self.sources, strict=True)):
            x, kept = layer(x) if source == index else layer(x, results[source])
            results.append(kept)
        return x


def test_layers_that_read_of_one_layer_before_are_of_one_kind() -> None:
    """The layer of which they read is of a kind of its own, and stays."""
    tape = trace(Sharing(*range(6), *(4,) * 8).to("meta"), {"x": torch.randn(3, 11, 12)}, RULES)
    folded = fold(tape)
    assert set(folded.instances) > {"layers.4"}
    assert folded.instances["layers.4"] == ("layers.4",)
    assert sorted(len(layers) for layers in folded.instances.values())[-2:] == [3, 7]
    read = {t for e in folded.tape.events for t in reads_and_writes(e)[0]}
    made = {t for e in folded.tape.events for t in reads_and_writes(e)[1]}
    inputs = {t for t, info in enumerate(folded.tape.tensors) if info.kind != "value"}
    assert read <= made | inputs


def test_layers_that_read_of_different_layers_are_of_different_kinds() -> None:
    tape = trace(Sharing(*range(8), *range(8)).to("meta"), {"x": torch.randn(3, 11, 12)}, RULES)
    assert {f"layers.{n}" for n in range(8, 16)} <= set(fold(tape).instances)


class Interrupted(nn.Module):
    """Adds to what some layers return, before the next one reads it.

    Args:
        places: indices of these layers.
    """

    def __init__(self, num_layers: int, *places: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(num_layers))
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        added = x * 2
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index in self.places:
                x = x + added
        return x


@pytest.mark.parametrize(
    ("places", "kept"), [((), {0, 1}), ((0, 1), {0, 1, 2, 3, 4}), ((4,), {0, 1, 4, 5, 6})]
)
def test_layers_around_other_code_stay(places: tuple[int, ...], kept: set[int]) -> None:
    folded = fold(trace(Interrupted(9, *places).to("meta"), {"x": torch.randn(3, 11, 12)}, RULES))
    assert {int(fqn.rpartition(".")[2]) for fqn in folded.instances} == kept


class Scaled(nn.Linear):
    """A layer that scales what it adds by a number, or adds the number."""

    def __init__(self, number: float, added: bool) -> None:
        super().__init__(12, 12)
        self.number = number
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y + self.number if self.added else x + y * self.number


class Deep(nn.Module):
    """Some layers, one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("added", "zero", "is_folded"), [(False, 9, True), (False, 4, False), (True, 9, False)]
)
def test_layers_may_scale_by_numbers_of_their_own(added: bool, zero: int, is_folded: bool) -> None:
    """Zero makes anything a term of a sum, and so do numbers that are added."""
    model = Deep([Scaled(0.0 if n == zero else 1.0 / n, added) for n in range(1, 9)])
    folded = fold(trace(model.to("meta"), {"x": torch.randn(3, 11, 12)}, RULES))
    assert (len(folded.instances) == 2) is is_folded


def test_routers_of_many_layers_are_no_majority() -> None:
    """The width of a model, which decides what a collective costs, is not the number of its experts."""
    spec = mixture(40)
    _, tape = trace_inputs(build_model(spec.model_class, spec.config, torch.float32), RULES)
    assert width(fold(tape).tape) == 32


@pytest.mark.parametrize("make", [llama, mixture])
@pytest.mark.parametrize("num_layers", [2, pytest.param(3, marks=pytest.mark.slow), 9])
def test_the_plan_is_for_all_layers(make: Callable[[int], ModelSpec], num_layers: int) -> None:
    """That of a deep model says of each layer what that of a shallow one says."""
    plan = solve_plan(make(num_layers), SolveOptions(2))
    rows = [n for m in plan.modules if m.category in ("row", "experts") for n in expand_all(m.names)]
    assert len(rows) == 2 * num_layers
    assert {n.split(".")[2] for n in rows} == {str(i) for i in range(num_layers)}
    other = solve_plan(make(2), SolveOptions(2))
    assert [(starred(next(iter(expand_all(m.names)))), m.category) for m in plan.modules] == [
        (starred(next(iter(expand_all(m.names)))), m.category) for m in other.modules
    ]
