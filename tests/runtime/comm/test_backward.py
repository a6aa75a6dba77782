"""Backwards of the steps: the adjoint of what all ranks do together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from boundaries import boundary
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Leaf, parse, size
from shardconv_runtime.format.module_steps import ModuleStep
from shardconv_runtime.format.plan import ParameterPlan
from shardconv_runtime.format.slices import Mesh, local_segments
from shardconv_runtime.format.stored_layout import sums
from shardconv_runtime.parallel.boundary import step
from shardconv_runtime.training.gates import Gated, GradientGate, attach_gates
from torch import Tensor, nn

from shardconv.simulation.rank_threads import run_ranks

Made = list[tuple[Tensor, Tensor, Tensor, Tensor]]
"""For each rank: input, output, gradient of the output, gradient of the input."""


def run(mesh: Mesh, boundary: ModuleStep, make: Callable[[Communicator], Tensor], *, same: bool) -> Made:
    """Run one step forward and backward, from gradients that are the same on all ranks if ``same``."""

    def rank(comm: Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = make(comm).requires_grad_()
        y = step(boundary, comm, training=True)(x)
        seed = 0 if same else comm.rank
        gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y.backward(gradient)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.detach(), y.detach(), gradient, x.grad

    return run_ranks(mesh, rank)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def local_shape(text: str, mesh: Mesh, rank: int) -> int:
    return sum(stop - start for (start, stop), _ in local_segments(parse(text), mesh, rank))


LAYOUTS = [("8@0", (2,)), ("7@0", (3,)), ("2@0", (3,)), ("4@0*2 + 2@0 + 3@0*2", (2,)), ("6@0.1", (2, 3))]


@pytest.mark.parametrize(("text", "mesh"), LAYOUTS)
@pytest.mark.parametrize("dim", [0, -1])
def test_partial_gradients_take_the_adjoint(text: str, mesh: Mesh, dim: int) -> None:
    """The sum over ranks of <output, gradient> is that of <input, its gradient>: what an adjoint is."""
    layout = parse(text)
    axes = tuple(range(len(mesh)))
    full = size(layout)

    def shape(n: int) -> tuple[int, int]:
        return (n, 3) if dim == 0 else (3, n)

    cases = {
        "all_gather": lambda c: random(*shape(local_shape(text, mesh, c.rank)), seed=c.rank),
        "slice": lambda c: random(*shape(full), seed=7),
        "reduce_scatter": lambda c: random(*shape(full), seed=c.rank),
    }
    for op, make in cases.items():
        fields = {} if op == "reduce_scatter" else {"grad_axes": axes}
        made = run(mesh, boundary("output", op, dim=dim, layout=layout, **fields), make, same=False)
        given = sum(float((y * g).sum()) for _, y, g, _ in made)
        taken = sum(float((x * g).sum()) for x, _, _, g in made)
        assert given == pytest.approx(taken, rel=1e-12), op


@pytest.mark.parametrize(("text", "mesh"), LAYOUTS)
def test_replicated_gradients_cost_no_sum(text: str, mesh: Mesh) -> None:
    """Of a gradient that is the same on all ranks, a gather's is a slice, and a slice's is gathered."""
    layout = parse(text)
    gather = boundary("output", "all_gather", dim=1, layout=layout)
    sliced = boundary("output", "slice", dim=1, layout=layout)
    made = run(mesh, gather, lambda c: random(3, local_shape(text, mesh, c.rank), seed=c.rank), same=True)
    again = run(mesh, sliced, lambda c: made[0][2].clone(), same=True)
    for (_, _, _, found), (_, expected, _, _) in zip(made, again, strict=True):
        assert torch.equal(found, expected)
    slices = run(mesh, sliced, lambda c: random(3, size(layout), seed=1), same=False)
    assert all(torch.equal(each[3], slices[0][3]) for each in slices)
    partial = boundary("output", "slice", dim=1, layout=layout, grad_axes=tuple(range(len(mesh))))
    summed = run(mesh, partial, lambda c: random(3, size(layout), seed=1), same=False)
    assert torch.equal(torch.stack([each[3] for each in summed]).sum(0), slices[0][3])


def test_a_reduction_and_its_conjugate() -> None:
    both = {
        boundary("output", "all_reduce", axes=(0,)): lambda gs, r: gs[r],
        boundary("output", "all_reduce", axes=(0,), grad_axes=(0,)): lambda gs, r: sum(gs),
        boundary("output", "grad_all_reduce", axes=(0,)): lambda gs, r: sum(gs),
        boundary("output", "grad_divide", axes=(0,)): lambda gs, r: gs[r] / 3,
        boundary("output", "keep_on_first", axes=(0,)): lambda gs, r: gs[r],
    }
    for each, expected in both.items():
        made = run((3,), each, lambda c: random(2, 2, seed=c.rank), same=False)
        gradients = [g for _, _, g, _ in made]
        for rank, (_, _, _, found) in enumerate(made):
            torch.testing.assert_close(found, expected(gradients, rank), rtol=1e-12, atol=1e-12)


def test_open_layouts_are_sharded_evenly_or_refused() -> None:
    layout = parse("?@0.1")
    gather = boundary("output", "all_gather", dim=1, layout=layout, grad_axes=(0, 1))
    made = run((2, 2), gather, lambda c: random(2, 3, seed=c.rank), same=False)
    assert made[0][1].shape == (2, 12)
    total = torch.stack([g for _, _, g, _ in made]).sum(0)
    for rank, (_, _, _, found) in enumerate(made):
        torch.testing.assert_close(found, total[:, 3 * rank : 3 * rank + 3])
    with pytest.raises(PlanError, match="a sequence of 5 positions cannot be sharded evenly over 4 ranks"):
        run((2, 2), boundary("output", "slice", dim=1, layout=layout), lambda c: torch.ones(2, 5), same=False)


def test_partially_sharded_gathers_divide_replicated_segments() -> None:
    """[sharded | replicated]: a gradient, partial on both sides, adds up over the replicated segment."""
    layout = parse("4@0 + 3")
    for local, scale in (((), 1.0), ((0,), 0.5)):
        gather = boundary("output", "all_gather", dim=1, layout=layout, grad_axes=(0,), local_grad_axes=local)
        made = run((2,), gather, lambda c: random(2, 5, seed=3), same=False)
        total = made[0][2] + made[1][2]
        for rank, (_, _, _, found) in enumerate(made):
            torch.testing.assert_close(found[:, :2], total[:, 2 * rank : 2 * rank + 2])
            torch.testing.assert_close(found[:, 2:], total[:, 4:] * scale)


def test_replicated_segments_of_an_inner_factor_are_divided_too() -> None:
    """``2*(1 + 2@0)``: of each of two groups the first position is replicated."""
    layout = parse("2*(1 + 2@0)")
    gather = boundary("output", "all_gather", dim=1, layout=layout, grad_axes=(0,), local_grad_axes=(0,))
    made = run((2,), gather, lambda c: random(2, 4, seed=3), same=False)
    total = made[0][2] + made[1][2]
    for rank, (_, _, _, found) in enumerate(made):
        torch.testing.assert_close(found[:, ::2], total[:, ::3] / 2)
        torch.testing.assert_close(found[:, 1::2], total[:, [1 + rank, 4 + rank]])


def test_a_gate_sums_only_what_is_held_alike() -> None:
    entry = ParameterPlan(("w",), (parse("4@0 + 2"), Leaf(3)), "float64", grad_axes=(0,))
    assert [s.axes for s in sums(entry, (2,), 0, (0,))] == [(0,)]
    assert sums(entry, (2,), 0, (0,))[0].positions == (((2, 4),), ((0, 3),))

    def rank(comm: Communicator) -> Tensor:
        module = nn.Linear(3, 4, bias=False).double()
        gate = GradientGate(comm, entry, (0,))
        attach_gates(module, [Gated(module, "weight", "weight", gate)])
        module(random(1, 3, seed=comm.rank)).sum().backward()
        assert isinstance(module.weight, nn.Parameter)
        assert module.weight.grad is not None
        return module.weight.grad

    first, second = run_ranks((2,), rank)
    a, b = random(1, 3, seed=0), random(1, 3, seed=1)
    torch.testing.assert_close(first, torch.cat([a, a, a + b, a + b]))
    torch.testing.assert_close(second, torch.cat([b, b, a + b, a + b]))


def test_a_partial_parameter_has_a_gradient_where_it_has_values() -> None:
    entry = ParameterPlan(("b",), (Leaf(4),), "float64", partial=(0,))

    def rank(comm: Communicator) -> Tensor:
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        GradientGate(comm, entry, ())(x).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    first, second = run_ranks((2,), rank)
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [0.0] * 4


def test_a_parameter_that_is_exchanged_inside_of_its_gate_is_an_error() -> None:
    entry = ParameterPlan(("w",), (Leaf(3), Leaf(3)), "float64", grad_axes=(0,))

    def rank(comm: Communicator) -> None:
        inner = nn.Linear(3, 3, bias=False).double()
        outer = nn.Sequential(inner)
        attach_gates(outer, [Gated(inner, "weight", "0.weight", GradientGate(comm, entry, (0,)))])

        def exchange(module: nn.Module, args: object) -> None:
            module._parameters["weight"] = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))

        inner.register_forward_pre_hook(exchange)
        outer(torch.ones(1, 3, dtype=torch.float64))

    with pytest.raises(PlanError, match=r"0\.weight was replaced"):
        run_ranks((2,), rank)


@pytest.mark.parametrize(("axes", "keep"), [((0,), {0, 1, 2}), ((1,), {0, 3}), ((0, 1), {0})])
def test_the_first_rank_keeps_what_becomes_a_term(axes: tuple[int, ...], keep: set[int]) -> None:
    each = boundary("output", "keep_on_first", axes=axes)
    made = run((2, 3), each, lambda c: random(2, 2, seed=1), same=True)
    for rank, (x, y, gradient, found) in enumerate(made):
        assert torch.equal(y, x if rank in keep else torch.zeros_like(x))
        assert torch.equal(found, gradient)
