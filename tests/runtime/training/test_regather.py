"""Gathered activations of which parts are kept: the same gradients, from fewer bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.comm.steps import Gather, ReduceScatter
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.training import regather
from shardconv_runtime.training.regather import attach_regather
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardconv.simulation.rank_threads import ThreadCommunicator, run_ranks

RANKS, LENGTH, WIDTH = 2, 6, 4
SEQUENCE = Leaf(0, (0,))


class Block(nn.Module):
    """A residual block whose two matrices get one gathered tensor."""

    def __init__(self, comm: Communicator, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gather, self.scatter = Gather(comm, 1, SEQUENCE, (0,)), ReduceScatter(comm, 1, SEQUENCE, ())
        self.change = change
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        part = x * 2  # nothing but the gather needs it
        full = self.change(self.gather(part))
        return x + self.scatter(self.first(full) * F.silu(self.second(full)))


class Model(nn.Module):
    """Blocks, and a matrix behind the last gather."""

    def __init__(
        self,
        comm: Communicator,
        num_blocks: int = 2,
        run: Callable[..., Tensor] = lambda block, x: block(x),
        change: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        super().__init__()
        torch.manual_seed(comm.rank)
        self.blocks = nn.ModuleList(Block(comm, change) for _ in range(num_blocks))
        self.gather = Gather(comm, 1, SEQUENCE, (0,))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.gather(x)).square().sum()


def part_of(rank: int) -> Tensor:
    """A rank's ``[B, S / RANKS, H]``."""
    generator = torch.Generator().manual_seed(7)
    full = torch.randn(3, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return full.chunk(RANKS, 1)[rank].clone().requires_grad_()


def gradients(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    model.zero_grad()
    return list(torch.autograd.grad(model(x), [x, *model.parameters()], **options))


class Counted:
    """The gathers of a rank, by what they were called for."""

    def __init__(self, comm: ThreadCommunicator) -> None:
        self.num_calls = 0
        self._concatenate = comm._concatenate
        comm._concatenate = self  # type: ignore[assignment]

    def __call__(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        self.num_calls += 1
        return self._concatenate(x, axes)


class Saved:
    """Bytes of the distinct tensors that a forward pass saves, and that have the shape of activations."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}

    def watching(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        self.found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x.detach()


def both(comm: Any, **options: Any) -> tuple[Any, Any]:
    """Two models of the same weights: one that gathers again, and one that does not."""
    again, plain = Model(comm, **options), Model(comm, **options)
    attach_regather(again, comm, min_bytes=0)
    return again, plain


def require_same(found: list[Tensor], want: list[Tensor]) -> None:
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_gradients_are_the_same_and_parts_are_kept() -> None:
    def rank(comm: ThreadCommunicator) -> list[int]:
        counted, x, numbers, found = Counted(comm), part_of(comm.rank), [], []
        for model in both(comm):
            before, saved = counted.num_calls, Saved()
            with saved.watching():
                loss = model(x)
            found.append(list(torch.autograd.grad(loss, [x, *model.parameters()])))
            numbers += [counted.num_calls - before, sum(saved.found.values())]
        require_same(*found)
        return numbers

    full = 3 * LENGTH * WIDTH * 8
    for gathers, num_bytes, plain_gathers, plain_bytes in run_ranks((RANKS,), rank):
        assert gathers == plain_gathers + 2, "once for each block, and not for the last gather"
        assert plain_bytes - num_bytes == 2 * full // RANKS


def test_a_graph_is_differentiated_twice() -> None:
    def rank(comm: Communicator) -> None:
        again, plain = both(comm)
        x = part_of(comm.rank)
        want = gradients(plain, x)
        loss = again(x)
        for retained in (True, False):
            found = torch.autograd.grad(loss, [x, *again.parameters()], retain_graph=retained)
            require_same(list(found), want)

    run_ranks((RANKS,), rank)


def test_nothing_is_kept_after_the_backward_pass() -> None:
    """Though the loss still is."""

    def rank(comm: Communicator) -> tuple[int, int]:
        model, _ = both(comm)
        loss = model(part_of(comm.rank))
        before = num_records()
        loss.backward()
        return before, num_records()

    def num_records() -> int:
        gc.collect()
        return sum(isinstance(each, regather._Gathered) for each in gc.get_objects())

    found = run_ranks((RANKS,), rank)
    assert min(before for before, _ in found) > 0
    assert min(after for _, after in found) == 0, "of the rank that ends last"


def test_gradients_of_some_weights() -> None:
    """What is begun is not always needed, nor by all that saved it."""

    def rank(comm: Communicator) -> None:
        again, plain = both(comm)
        x = part_of(comm.rank)
        for chosen in ("blocks.1.first.weight", "blocks.0.second.weight", "head.bias"):
            found, want = (
                torch.autograd.grad(model(x), [model.get_parameter(chosen)]) for model in (again, plain)
            )
            require_same(list(found), list(want))
        for model in (again, plain):
            model.blocks.requires_grad_(requires_grad=False)
        require_same(*([torch.autograd.grad(m(x), [x])[0]] for m in (again, plain)))

    run_ranks((RANKS,), rank)


def test_recomputed_blocks_gather_as_they_did() -> None:
    def rank(comm: ThreadCommunicator) -> list[int]:
        counted, x, numbers, found = Counted(comm), part_of(comm.rank), [], []
        for model in both(comm, run=lambda block, x: checkpoint(block, x, use_reentrant=False)):
            before = counted.num_calls
            found.append(gradients(model, x))
            numbers.append(counted.num_calls - before)
        require_same(*found)
        require_same(gradients(Model(comm), x), found[0])
        return numbers

    for found in run_ranks((RANKS,), rank):
        assert found[0] == found[1]


def test_a_model_that_is_recomputed() -> None:
    def rank(comm: Communicator) -> None:
        again, plain = both(comm)
        x = part_of(comm.rank)
        loss = checkpoint(again, x, use_reentrant=False)
        require_same(list(torch.autograd.grad(loss, [x, *again.parameters()])), gradients(plain, x))

    run_ranks((RANKS,), rank)


def test_what_is_changed_is_kept() -> None:
    """Code may write to what was gathered, before anything has saved it."""

    def rank(comm: ThreadCommunicator) -> tuple[int, int]:
        counted, x = Counted(comm), part_of(comm.rank)
        again, plain = both(comm, change=lambda full: full.mul_(3))
        found = gradients(again, x)
        first = counted.num_calls
        require_same(found, gradients(plain, x))
        return first, counted.num_calls - first

    for found in run_ranks((RANKS,), rank):
        assert found[0] == found[1]


def test_changes_after_saving_are_errors() -> None:
    """As without hooks, which leave this check to those that add them."""

    def rank(comm: Communicator) -> list[str]:
        messages = []
        for model in both(comm):
            x = part_of(comm.rank) * 1
            loss = model(x)
            weight = model.blocks[0].first.weight
            with torch.no_grad():
                weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                torch.autograd.grad(loss, [x])
            messages.append(str(caught.value))
        return messages

    run_ranks((RANKS,), rank)


def test_small_tensors_are_kept() -> None:
    def rank(comm: ThreadCommunicator) -> int:
        model, counted = Model(comm), Counted(comm)
        attach_regather(model, comm, min_bytes=3 * LENGTH * WIDTH * 8 + 1)
        gradients(model, part_of(comm.rank))
        return counted.num_calls

    per_block, last = 2, 1
    assert set(run_ranks((RANKS,), rank)) == {2 * per_block + last}
