"""Runs in lockstep: who goes on when, and which module's output differs first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from shardconv_runtime.format.dims import Dim, parse
from shardconv_runtime.format.plan import CodeInfo, ModelInfo, ParameterPlan, Plan
from shardconv_runtime.format.slices import ranges
from torch import Tensor

from shardconv.simulation.lockstep import UNSHARDED, ModuleOutputs
from shardconv.simulation.rank_threads import BESIDE, ThreadCommunicator, Turn, run_ranks
from shardconv.tracing.tape import ModuleCall, Tape

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


def first(found: Plan, ranks: Sequence[Tensor]) -> float | None:
    """By how much the output of a module differs that gives ``WANT``."""
    modules = ModuleOutputs(found, Tape(calls=[ModuleCall("", 0, -1), ModuleCall("a", 0, 0)]), 1e-9)
    modules.leave(UNSHARDED, ("a", 0), [WANT])
    for rank, output in enumerate(ranks):
        assert modules.first is None
        modules.leave(rank, ("a", 0), [output])
    return None if modules.first is None else modules.first.worst


class TestExplanations:
    """What a rank may hold of a module's output."""

    def test_all_of_it(self) -> None:
        assert first(plan((2,), "12@0"), [WANT, WANT]) is None
        assert first(plan((2,), "12@0"), [WANT, 1.5 * WANT]) == pytest.approx(0.5)

    @pytest.mark.parametrize("layout", ["12@0", "12@1", "12@0.1", "4@0*3", "6@1 + 3 + 3@0"])
    def test_a_part(self, layout: str) -> None:
        ranks = held(parse(layout), (2, 2), -1)
        assert first(plan((2, 2), "8@0", layout), ranks) is None
        ranks[3] = 2 * ranks[3]
        worst = first(plan((2, 2), "8@0", layout), ranks)
        assert worst is not None
        assert worst > 0.1

    def test_a_leaf_of_a_known_layout(self) -> None:
        """Heads that are a dim of their own."""
        assert first(plan((3,), "8@0*64"), held(parse("8@0"), (3,), 1)) is None

    def test_a_term_of_a_sum(self) -> None:
        assert first(plan((2,), "7@0"), [0.25 * WANT, 0.75 * WANT]) is None
        shares = [
            part * share for part, share in zip(held(parse("8@0"), (2, 2), 1), (0.1, 0.9) * 2, strict=True)
        ]
        assert first(plan((2, 2), "8@0"), shares) is None
        assert first(plan((2, 2), "8@0"), shares[::-1]) is not None

    def test_shapes_that_nothing_explains(self) -> None:
        """Nothing is said of them."""
        assert first(plan((2,), "7@0"), held(parse("8@0"), (2,), 1)) is None

    def test_outputs_are_those_at_the_end_of_the_call(self) -> None:
        modules = ModuleOutputs(plan((1,)), Tape(calls=[ModuleCall("a", 0, -1)]), 1e-9)
        output = WANT.clone()
        modules.leave(0, ("a", 0), [output])
        output.zero_()
        modules.leave(UNSHARDED, ("a", 0), [WANT])
        assert modules.first is None


class TestTheFirst:
    """Modules are compared in the order in which the unsharded model leaves them."""

    calls = (ModuleCall("a", 0, -1), ModuleCall("a.b", 0, 0), ModuleCall("a.b", 1, 0), ModuleCall("c", 0, -1))

    def test_the_innermost(self) -> None:
        modules = ModuleOutputs(plan((1,)), Tape(calls=list(self.calls)), 1e-9)
        order = [("a.b", 0), ("a.b", 1), ("a", 0), ("c", 0)]
        for call in order:
            modules.leave(UNSHARDED, call, [WANT])
        for call in reversed(order):
            modules.leave(0, call, [WANT + (call != ("a.b", 0))])
        assert modules.first is not None
        assert modules.first.fqn == "a.b"

    def test_calls_that_a_rank_leaves_out_are_dropped(self) -> None:
        modules = ModuleOutputs(plan((1,)), Tape(calls=list(self.calls)), 1e-9)
        modules.enter(UNSHARDED, 1)
        modules.leave(UNSHARDED, ("a.b", 0), [WANT])
        modules.enter(0, 1)
        assert modules._held
        modules.enter(UNSHARDED, 3)
        assert modules._held
        modules.enter(0, 2)
        assert not modules._held
        modules.leave(0, ("other", 0), [WANT])
        assert not modules._held
