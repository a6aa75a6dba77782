"""Runs in lockstep: who goes on when, and which module differs first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from shardconv_runtime.format.dims import Dim, parse
from shardconv_runtime.format.module_steps import AllGatherStep, AllReduceStep, GradAllReduceStep, SliceStep
from shardconv_runtime.format.plan import CodeInfo, ModelInfo, ModulePlan, ParameterPlan, Plan
from shardconv_runtime.format.slices import ranges
from torch import Tensor

from shardconv.simulation.explanations import UNKNOWN, Explanations, Placement
from shardconv.simulation.model_runs import PRECISIONS
from shardconv.simulation.module_comparison import BEFORE, UNSHARDED, ModuleComparison, Observation
from shardconv.simulation.rank_threads import BESIDE, ThreadCommunicator, Turn, run_ranks

WANT = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class TestTurns:
    """A thread that has come further waits for the others."""

    def test_all_come_equally_far(self) -> None:
        seen: list[tuple[int, int]] = []

        def walk(turn: Turn) -> None:
            for position in range(1, 5):
                turn.wait_for_others(position)
                seen.append((position, turn.number))

        run_ranks((3,), lambda comm: walk(comm.turn), walk)
        assert seen == [(position, number) for position in range(1, 5) for number in (BESIDE, 0, 1, 2)]

    def test_a_thread_that_leaves_out_a_step_waits_at_the_next(self) -> None:
        seen: list[tuple[int, int]] = []

        def rank(comm: ThreadCommunicator) -> None:
            for position in (1, 4) if comm.rank == 0 else (1, 2, 3, 4):
                comm.turn.wait_for_others(position)
                seen.append((position, comm.rank))

        run_ranks((2,), rank)
        assert seen == [(1, 0), (1, 1), (2, 1), (3, 1), (4, 0), (4, 1)]

    def test_collectives_in_between(self) -> None:
        def rank(comm: ThreadCommunicator) -> int:
            total = 0
            for position in range(4):
                comm.turn.wait_for_others(position)
                total += int(comm.all_reduce(torch.tensor([comm.rank]), (0,)))
            return total

        assert run_ranks((3,), rank, lambda turn: turn.wait_for_others(9)) == [12] * 3

    @pytest.mark.parametrize("number", [BESIDE, 1])
    def test_all_stop_when_one_fails(self, number: int) -> None:
        def walk(turn: Turn) -> None:
            for position in range(100):
                turn.wait_for_others(position)
                if (turn.number, position) == (number, 3):
                    raise ValueError(f"thread {number}")
            pytest.fail("the others have not stopped")

        with pytest.raises(ValueError, match=f"thread {number}"):
            run_ranks((2,), lambda comm: walk(comm.turn), walk)


def plan(mesh: tuple[int, ...], *layouts: str) -> Plan:
    """One with parameters of these layouts."""
    entries = tuple(ParameterPlan((f"p{i}",), (parse(text),), "float32") for i, text in enumerate(layouts))
    model, code = ModelInfo("m:M", "float32", 0), CodeInfo("2", "5", (), "0" * 64)
    return Plan(torch.Size(mesh).numel(), mesh, model, code, entries, ())


def held(layout: Dim, mesh: tuple[int, ...], dim: int) -> list[Tensor]:
    """What each rank holds of ``WANT``."""
    spans = [ranges(layout, mesh, rank) for rank in range(torch.Size(mesh).numel())]
    return [torch.cat([WANT.narrow(dim, a, b - a) for a, b in each], dim) for each in spans]


def difference(found: Plan, ranks: Sequence[Tensor], placed: Placement = UNKNOWN) -> float:
    """By how much a tensor of ranks differs from ``WANT``; 0 within rounding."""
    error = Explanations(found).difference(WANT, ranks, placed)
    return error if error > 1e-9 else 0.0


class TestExplanations:
    """What a rank may hold of a tensor."""

    def test_all_of_it(self) -> None:
        assert not difference(plan((2,), "12@0"), [WANT, WANT])
        assert difference(plan((2,), "12@0"), [WANT, 1.5 * WANT]) == pytest.approx(0.5)

    @pytest.mark.parametrize("layout", ["12@0", "12@1", "12@0.1", "4@0*3", "6@1 + 3 + 3@0"])
    def test_a_part(self, layout: str) -> None:
        ranks = held(parse(layout), (2, 2), -1)
        assert not difference(plan((2, 2), "8@0", layout), ranks)
        ranks[3] = 2 * ranks[3]
        assert difference(plan((2, 2), "8@0", layout), ranks) > 0.1

    def test_parts_of_two_dims(self) -> None:
        rows = [torch.split(WANT, 4, 1)[rank // 2] for rank in range(4)]
        ranks = [torch.split(part, 6, 2)[rank % 2] for rank, part in enumerate(rows)]
        assert not difference(plan((2, 2), "8@0", "12@1"), ranks)
        assert difference(plan((2, 2), "8@0", "12@1"), [ranks[0], ranks[0], *ranks[2:]]) > 0.1

    def test_a_leaf_of_a_known_layout(self) -> None:
        """Heads that are a dim of their own."""
        assert not difference(plan((3,), "8@0*64"), held(parse("8@0"), (3,), 1))

    def test_a_part_of_a_sequence(self) -> None:
        assert not difference(plan((2,), "?@0"), held(parse("8@0"), (2,), 1))
        assert difference(plan((2,), "?@0"), held(parse("8@0"), (2,), 1)[::-1]) > 0.1

    def test_a_term_of_a_sum(self) -> None:
        assert not difference(plan((2,), "7@0"), [0.25 * WANT, 0.75 * WANT])
        shares = [
            part * share for part, share in zip(held(parse("8@0"), (2, 2), 1), (0.1, 0.9) * 2, strict=True)
        ]
        assert not difference(plan((2, 2), "8@0"), shares)
        assert difference(plan((2, 2), "8@0"), shares[::-1])

    def test_a_term_of_a_sum_where_positions_are_not_sharded(self) -> None:
        """The gradient of keys that all heads of a rank share."""
        ranks = [x.clone() for x in held(parse("8@0 + 4"), (2,), -1)]
        for rank, share in zip(ranks, (0.1, 0.9), strict=True):
            rank[..., -4:] *= share
        assert not difference(plan((2,), "8@0 + 4"), ranks)

    def test_shapes_that_nothing_explains(self) -> None:
        """Nothing is said of them."""
        assert not difference(plan((2,), "7@0"), held(parse("8@0"), (2,), 1))

    def test_what_the_plan_says(self) -> None:
        """A sum that it makes is no explanation any more, and neither is a dim that it gathers."""
        terms = [0.25 * WANT, 0.75 * WANT]
        assert difference(plan((2,), "7@0"), terms, Placement(complete=frozenset({0}))) > 0.1
        assert difference(plan((2,), "7@0"), [WANT, WANT], Placement(summed=frozenset({0}))) > 0.1
        parts = held(parse("12@0"), (2,), -1)
        assert difference(plan((2,), "12@0"), parts, Placement({-1: None})) == float("inf")
        assert not difference(plan((2,)), parts, Placement({-1: parse("12@0")}))


def entry(text: str) -> ModulePlan:
    """The plan of module ``a`` with one step."""
    steps = {
        "sum": AllReduceStep("output", axes=(0,)),
        "gather": AllGatherStep("output", dim=-1, layout=parse("12@0"), grad_axes=(0,)),
        "slice": SliceStep("input.x", dim=-1, layout=parse("12@0")),
        "sum of the gradient": GradAllReduceStep("input.x", axes=(0,)),
    }
    step = steps[text]
    inputs, outputs = ((step,), ()) if step.port.startswith("input") else ((), (step,))
    return ModulePlan(("a",), "boundary", inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(
    ("step", "observed", "gradients", "placed"),
    [
        ("sum", Observation("a", 0, "output"), False, Placement(complete=frozenset({0}))),
        ("sum", Observation("a", 0, "output", BEFORE), False, UNKNOWN),
        ("sum", Observation("a", 0, "output.1"), False, UNKNOWN),
        ("sum", Observation("b", 0, "output"), False, UNKNOWN),
        ("gather", Observation("a", 0, "output"), False, Placement({-1: None}, complete=frozenset({0}))),
        ("gather", Observation("a", 0, "output"), True, Placement({-1: None}, frozenset({0}))),
        ("gather", Observation("a", 0, "output", BEFORE), True, Placement({-1: parse("12@0")})),
        (
            "slice",
            Observation("a", 0, "input.x"),
            False,
            Placement({-1: parse("12@0")}, complete=frozenset({0})),
        ),
        (
            "slice",
            Observation("a", 0, "input.x", BEFORE),
            True,
            Placement({-1: None}, complete=frozenset({0})),
        ),
        ("sum of the gradient", Observation("a", 0, "input.x"), True, Placement(summed=frozenset({0}))),
        (
            "sum of the gradient",
            Observation("a", 0, "input.x", BEFORE),
            True,
            Placement(complete=frozenset({0})),
        ),
    ],
)
def test_what_a_step_says(step: str, observed: Observation, gradients: bool, placed: Placement) -> None:
    comparison = ModuleComparison(plan((2,)), {"a": entry(step)}, PRECISIONS[0], gradients=gradients)
    assert comparison.placement(observed) == placed


class TestTheFirst:
    """Modules are compared in the order in which the unsharded model reports them."""

    def test_the_innermost(self) -> None:
        modules = ModuleComparison(plan((1,)), {}, PRECISIONS[0])
        order = [
            Observation("a.b", 0, "output"),
            Observation("a.b", 1, "output"),
            Observation("a", 0, "output"),
        ]
        for observed in order:
            modules.report(UNSHARDED, observed, WANT)
        for observed in reversed(order):
            modules.report(0, observed, WANT + (observed != order[0]))
        assert modules.first is not None
        assert modules.first.fqn == "a.b"
        assert modules.first.what.startswith("its output differs by ")

    def test_who_has_made_a_tensor(self) -> None:
        """A wrong input is the caller's; a wrong gradient of an output, too."""
        for gradients, observed, blamed in (
            (False, Observation("a.b", 0, "input.x", BEFORE, caller="a"), "a"),
            (False, Observation("a.b", 0, "input.x", caller="a"), "a.b"),
            (False, Observation("a.b", 0, "output", caller="a"), "a.b"),
            (True, Observation("a.b", 0, "output", caller="a"), "a"),
            (True, Observation("a.b", 0, "output", BEFORE, caller="a"), "a.b"),
            (True, Observation("a.b", 0, "input.x", BEFORE, caller="a"), "a.b"),
        ):
            modules = ModuleComparison(plan((1,)), {}, PRECISIONS[0], gradients=gradients)
            modules.report(UNSHARDED, observed, WANT)
            modules.report(0, observed, 2 * WANT)
            assert modules.first is not None
            assert modules.first.fqn == blamed

    def test_tensors_are_those_at_the_end_of_the_call(self) -> None:
        modules = ModuleComparison(plan((1,)), {}, PRECISIONS[0])
        output = WANT.clone()
        modules.report(UNSHARDED, Observation("a", 0, "output"), WANT)
        modules.report(0, Observation("a", 0, "output"), output)
        output.zero_()
        assert modules.first is None

    def test_calls_that_a_rank_leaves_out_are_dropped(self) -> None:
        modules = ModuleComparison(plan((1,)), {}, PRECISIONS[0])
        for fqn in ("a", "b"):
            modules.enter(UNSHARDED, (fqn, 0))
            modules.report(UNSHARDED, Observation(fqn, 0, "output"), WANT)
            modules.leave(UNSHARDED, (fqn, 0))
        modules.enter(0, ("a", 0))
        assert len(modules._waiting) == 2
        modules.enter(0, ("b", 0))
        modules.enter(UNSHARDED, ("c", 0))
        assert [observed.fqn for observed in modules._waiting] == ["b"]
