"""Placeholders look like the modules whose place they take, and return what they are told to."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from shardconv_runtime.comm.collectives import ProcessCommunicator
from shardconv_runtime.parallel.embeddings import attach_embeddings
from shardconv_runtime.pp.placeholders import Placeholder, placeholder_for, swap_for_placeholder
from torch import Tensor, nn


class Scaled(nn.Module):
    """A layer with a module and a value of its own."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.factor = factor

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.inner(states) * self.factor
        return found


def test_it_has_the_class_and_the_attributes_and_no_parameters() -> None:
    layer = Scaled().eval()
    made = placeholder_for(layer, lambda states, mask=None: (states, mask))
    assert isinstance(made, Scaled)
    assert type(made).__name__ == "Scaled"
    assert type(made) is type(placeholder_for(Scaled(), print))
    assert list(inspect.signature(made.forward).parameters) == ["states", "mask"]
    assert not made.training
    assert list(made.named_parameters()) == list(made.children()) == []
    assert made.factor == 2.0
    assert made.inner.weight is layer.inner.weight
    with pytest.raises(AttributeError, match="other"):
        made.other  # noqa: B018
    assert made(3, mask=4) == (3, 4)


def test_its_class_makes_modules_as_that_of_the_layer_does() -> None:
    made = type(placeholder_for(Scaled(), print))
    with pytest.raises(AttributeError, match="absent"):
        made(4.0).absent  # type: ignore[call-arg]  # noqa: B018


def test_code_changes_a_copy_of_what_is_behind_it() -> None:
    model = nn.Sequential(Scaled(), Scaled())
    layer = model[1]
    results = nn.Identity()
    made = swap_for_placeholder(model, "1", results)
    assert model[1] is made
    again = copy.deepcopy(model)
    made.inner.factor = 3.0
    assert not hasattr(layer.inner, "factor")
    assert not hasattr(again[1].inner, "factor")
    assert again[1].inner.weight is layer.inner.weight
    x = torch.ones(2)
    assert again[1](x) is made(x) is x


def test_a_placeholder_can_be_replaced_too() -> None:
    model = nn.Sequential(Scaled(5.0))
    first = swap_for_placeholder(model, "0", lambda states: 1)
    second = swap_for_placeholder(model, "0", lambda states: 2)
    assert isinstance(second, Placeholder)
    assert type(first) is type(second)
    assert (first(0), second(0), second.factor) == (1, 2, 5.0)


def test_a_search_for_embeddings_copies_no_layer() -> None:
    """A model of a hundred layers, of which a few are computed, would copy the others for each rank."""
    model = nn.Sequential(Scaled(), Scaled())
    made = swap_for_placeholder(model, "1", nn.Identity())
    attach_embeddings(model, {}, {}, {}, ProcessCommunicator(0, (1,), {}))
    assert not made._has_own
