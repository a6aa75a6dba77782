"""Modules of a process with several stages: which passes call them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from shardconv_runtime import PlanError
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.pipeline_stages import (
    PlaceholderDim,
    PlaceholderItem,
    PlaceholderTensor,
    PortDim,
    StagedModule,
)
from shardconv_runtime.pp.stage_link import Crossing, Handover, StageLink, Transport
from shardconv_runtime.pp.stage_units import StagedUnit, StageRank, give_way, is_elsewhere
from torch import Tensor, nn

CPU = torch.device("cpu")


class SilentTransport(Transport):
    """Sends nothing."""

    def send(self, crossing: Crossing, x: Tensor, stages: Sequence[int]) -> None:
        raise AssertionError("nothing is sent")

    def receive(self, crossing: Crossing, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        raise AssertionError("nothing is received")

    def share(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError("nothing is shared")


def silent_link(place: int) -> StageLink:
    """Of the first or second process of two, with two of four stages each."""
    return StageLink(place, 4, SilentTransport(), 2)


def unit(link: StageLink, *stages: int) -> StagedUnit:
    """Of a linear layer that returns ``[rows of its input, 3]``, on these stages."""
    dims = (PlaceholderDim((PortDim("input.input", 0),)), PlaceholderDim(size=Leaf(3)))
    entry = StagedModule(("layer",), stages, "tensor", (PlaceholderItem(PlaceholderTensor(dims)),))
    return StagedUnit(StageRank(link, (1,), 0, CPU, torch.float32), "layer", entry, 0, ["input"], {})


def giving_way(link: StageLink, *stages: int) -> nn.Module:
    """A linear layer of these stages."""
    layer = nn.Linear(2, 3)
    give_way(layer, unit(link, *stages))
    return layer


def test_a_process_has_every_second_stage() -> None:
    link = silent_link(1)
    assert (link.stages, link.stage, link.is_last) == ((1, 3), 3, True)
    with link.through(Handover({}), 1):
        assert (link.stage, link.is_last, link.is_scheduled()) == (1, False, True)
        link.share_results([torch.ones(1)])
    assert (link.stage, link.is_scheduled()) == (3, False)
    with pytest.raises(AssertionError, match="nothing is shared"):
        link.share_results([torch.ones(1)])
    with link.keeping_results():
        link.share_results([torch.ones(1)])


@pytest.mark.parametrize("change", [lambda layer: layer, copy.deepcopy], ids=["itself", "a copy"])
def test_a_pass_of_another_stage_does_not_call_the_module_or_its_hooks(change: Any) -> None:
    link, called = silent_link(0), []
    layer = change(giving_way(link, 2))
    layer.register_forward_hook(lambda *_: called.append("hook"))
    x = torch.randn(5, 2)
    want = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), want)  # outside of a call of the model
    with link.calling(), link.through(Handover({}), 2):
        assert not is_elsewhere(layer)
        assert torch.equal(layer(x), want)
    assert called == ["hook", "hook"]
    layer.eval()
    with link.calling(), link.through(Handover({}), 0):
        assert is_elsewhere(layer)
        found = layer(x)
    assert torch.equal(found, torch.zeros(5, 3))
    assert found.grad_fn is None
    assert len(called) == 2


def test_it_is_what_it_was_for_those_who_look() -> None:
    first, second = (giving_way(silent_link(0), 2) for _ in range(2))
    assert isinstance(first, nn.Linear)
    assert type(first) is type(second)
    assert type(first).__name__ == "Linear"
    assert [name for name, _ in first.named_parameters()] == ["weight", "bias"]
    assert list(first.modules()) == [first]


def test_two_names_are_on_the_same_stages() -> None:
    link = silent_link(0)
    layer = giving_way(link, 2)
    give_way(layer, unit(link, 2))
    with pytest.raises(PlanError, match=r"runs on stages \[2\] by one and on \[0\] by the other"):
        give_way(layer, unit(link, 0))


def test_a_class_that_cannot_be_changed_is_refused() -> None:
    class Fixed(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise TypeError("object layout differs")
            super().__setattr__(name, value)

    with pytest.raises(PlanError, match=r"a Fixed cannot give way to passes of other stages \(object layout"):
        give_way(Fixed(2, 3), unit(silent_link(0), 2))
