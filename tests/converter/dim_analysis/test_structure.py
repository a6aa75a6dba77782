"""How wide and how long a model's tensors are, whatever it is called with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardconv.dim_analysis.analysis import num_tokens, weighted_leaves, width
from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.dim_trees import find
from shardconv.dim_analysis.rules import RULES
from shardconv.tracing.tape import Mark
from shardconv.tracing.trace import trace


class Pictures(nn.Module):
    """Patches of images through three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, 48, 4, 4)
        self.layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(self.see(pixels).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("images", [2, 5])
def test_tokens_of_images_are_their_patches(images: int) -> None:
    tape = trace(Pictures().to("meta"), {"pixels": torch.randn(images, 3, 8, 12)}, RULES)
    assert width(tape) == 48
    assert num_tokens(tape) == images * 2 * 3


class Named(nn.Module):
    """Has a parameter name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


def test_tokens_of_text_are_batch_times_length() -> None:
    model = nn.Sequential(nn.Embedding(20, 48), nn.Linear(48, 48), nn.Linear(48, 20)).to("meta")
    tape = trace(Named(model), {"ids": torch.zeros(3, 11, dtype=torch.long)}, RULES)
    assert width(tape) == 48
    assert num_tokens(tape) == 33


class Stateful(nn.Module):
    """Layers that each take and return many more states than hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeps() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        states = [x.new_zeros(x.shape[0], 48, 5) for _ in range(4)]
        for layer in self.layers:
            x, states = layer(x, states)
        return x


class Keeps(nn.Module):
    """One of these layers."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(48, 48)

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return self.map(x), [s + 1 for s in states]


def test_states_that_layers_pass_on_are_no_majority() -> None:
    """The width decides what a collective costs: it is that of the matrices."""
    tape = trace(Stateful().to("meta"), {"x": torch.randn(3, 11, 48)}, RULES)
    assert width(tape) == 48
    assert num_tokens(tape) == 33


class Placed(nn.Module):
    """Patches with a table of positions, which two modules see."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Adds()
        self.project = nn.Linear(48, 48)

    def forward(self, patches: Tensor) -> Tensor:
        return self.project(self.embed(patches))


class Adds(nn.Module):
    """Adds the table."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(10, 48))

    def forward(self, patches: Tensor) -> Tensor:
        return patches + self.positions


def test_positions_are_no_dims_of_parameters_behind_the_module_that_has_a_table_of_them() -> None:
    tape = trace(Placed().to("meta"), {"patches": torch.randn(3, 10, 48)}, RULES)
    analysis = analyze(tape, ())
    weighted = weighted_leaves(analysis)
    (table,) = (t for t, info in enumerate(tape.tensors) if info.name == "embed.positions")
    assert all(find(dim) in weighted for dim in analysis.dims[table])
    assert [find(dim) in weighted for dim in analysis.dims[tape.outputs[0]]] == [False, False, True]


class Chooses(nn.Module):
    """Experts whose matrices lie in one parameter, each handed to a module that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.empty(4 * 24, 48))
        self.expert = Multiplies()

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        first = numbers[0]
        return self.expert(tokens, self.matrices.view(4, 24, 48)[first])


class Multiplies(nn.Module):
    """Multiplies by a matrix and its transpose."""

    def forward(self, tokens: Tensor, matrix: Tensor) -> Tensor:
        return (tokens @ matrix.T).relu() @ matrix


def test_a_matrix_that_a_module_is_given_may_be_sharded_there_too() -> None:
    inputs = {"tokens": torch.randn(3, 48), "numbers": torch.tensor([1, 2])}
    tape = trace(Chooses().to("meta"), inputs, RULES)
    analysis = analyze(tape, ())
    weighted = weighted_leaves(analysis)
    (inner,) = (e.target for e in tape.events if isinstance(e, Mark) and e.ports == ("input.matrix",))
    assert all(find(dim) in weighted for dim in analysis.dims[inner])
