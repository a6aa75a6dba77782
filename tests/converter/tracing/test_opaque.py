"""Modules that cannot be traced: one replicated operator each, named in the plan, equal on numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models
import numpy as np
import pytest
import torch
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import axes_of
from shardconv_runtime.format.plan import Plan, parameter_plans
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.rules import RULES
from shardconv.tracing.tape import Mark, Op, Tape
from shardconv.tracing.trace import trace


def untraceable(x: Tensor) -> None:
    """Needs memory, which a meta tensor has none of."""
    np.asarray(torch.zeros(1).untyped_storage().tolist())
    x.detach().untyped_storage()[0]


class Opaque(nn.Module):
    """A linear layer behind code that cannot be traced; what it returns is up to ``form``."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any] = lambda x, y: y, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        untraceable(y)
        return self.form(x, y)


class Around(nn.Module):
    """Two layers, and whatever is in between."""

    def __init__(self, middle: nn.Module, use: Callable[[Any], Any] = lambda y: y) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.middle = middle
        self.after = nn.Linear(6, 6)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.use(self.middle(self.before(x))))


def tape_of(model: nn.Module, like: Tape | None = None) -> Tape:
    return trace(model.to("meta"), {"x": torch.randn(5, 6)}, RULES, like=like)


def opaque_ops(tape: Tape) -> list[tuple[str, Op]]:
    """FQNs of modules that are one operator, with the operator."""
    return [(tape.calls[e.call].fqn, e) for e in tape.events if isinstance(e, Op) and e.name == "opaque"]


# The tape --------------------------------------------------------------------------------------------


def test_the_innermost_module_becomes_one_operator_of_its_inputs_and_parameters() -> None:
    tape = tape_of(Around(Opaque()))
    ((fqn, op),) = opaque_ops(tape)
    assert fqn == "middle"
    assert list(tape.opaque) == [("middle", 0)]
    enter = next(e for e in tape.events if isinstance(e, Mark) and tape.calls[e.call].fqn == "middle")
    assert op.inputs[0] == enter.target
    assert [tape.tensors[t].name for t in op.inputs[1:]] == ["middle.inner.weight", "middle.inner.bias"]
    assert [tape.tensors[t].shape for t in op.outputs] == [(5, 6)]
    assert [c.fqn for c in tape.calls] == ["", "before", "middle", "after"]
    assert len({t for e in tape.events for t in (e.outputs if isinstance(e, Op) else (e.target,))}) == len(
        [t for e in tape.events for t in (e.outputs if isinstance(e, Op) else (e.target,))]
    )


def test_its_tensors_are_replicated() -> None:
    tape = tape_of(Around(Opaque()))
    analysis = analyze(tape)
    ((_, op),) = opaque_ops(tape)
    assert all(d.blocked for t in (*op.inputs, *op.outputs) for d in analysis.dims[t])
    assert all(analysis.partial[t].zero for t in (*op.inputs, *op.outputs))
    assert not analysis.unknown


@dataclass
class Output(ModelOutput):
    first: Tensor | None = None
    nothing: Tensor | None = None
    rest: tuple[Any, ...] | None = None


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda x, y: (y, x), lambda out: out[0] + out[1]),
        (lambda x, y: {"a": [y, 3], "b": None}, lambda out: out["a"][0] * out["a"][1]),
        (lambda x, y: Output(first=y, rest=(x, "name")), lambda out: out.first + out["rest"][0]),
    ],
)
def test_the_structure_of_the_output_is_kept(form: Any, read: Any) -> None:
    tape = tape_of(Around(Opaque(form), read))
    assert [fqn for fqn, _ in opaque_ops(tape)] == ["middle"]
    assert tape.tensors[tape.outputs[0]].shape == (5, 6)


def test_an_input_that_is_returned_stays_the_input() -> None:
    tape = tape_of(Around(Opaque(lambda x, y: (x, y)), lambda out: out[0] + out[1]))
    ((_, op),) = opaque_ops(tape)
    assert len(op.outputs) == 1
    leave = next(e for e in tape.events if isinstance(e, Mark) and e.ports == ("output.0",))
    assert leave.source == op.inputs[0]


def test_an_input_that_is_written_to_has_a_new_value() -> None:
    tape = tape_of(Around(Opaque(lambda x, y: x.add_(y))))
    ((_, op),) = opaque_ops(tape)
    leave = next(
        e for e in tape.events if isinstance(e, Mark) and e.is_output and tape.calls[e.call].fqn == "middle"
    )
    assert leave.source == op.outputs[0]


def test_tensors_that_it_reads_from_elsewhere_are_inputs() -> None:
    shared: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shared[:] = [x * 2]
            return x

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + (shared[0] if shared[0].device == x.device else 1)
            untraceable(y)
            return y

    tape = tape_of(Around(nn.Sequential(Keeps(), Reads())))
    ((fqn, op),) = opaque_ops(tape)
    mul = next(e for e in tape.events if isinstance(e, Op) and e.name.startswith("aten.mul"))
    assert fqn == "middle.1"
    assert mul.outputs[0] in op.inputs


def test_if_it_fails_on_numbers_too_the_parent_is_tried() -> None:
    class Child(nn.Module):
        def forward(self, x: Tensor, limit: Any) -> Tensor:
            return x * limit.real_value()

    class Parent(nn.Module):
        """Its child cannot run without what the parent gives it: neither on meta nor from a copied call."""

        def __init__(self) -> None:
            super().__init__()
            self.child = Child()

        def forward(self, x: Tensor) -> Tensor:
            class Limit:
                def real_value(self) -> float:
                    return float(x.untyped_storage()[0])

            return self.child(x, Limit())

    tape = tape_of(Around(Parent()))
    assert [fqn for fqn, _ in opaque_ops(tape)] == ["middle"]
    assert [c.fqn for c in tape.calls] == ["", "before", "middle", "after"]
    assert "middle.child" not in tape_of(Around(Parent())).opaque


def test_an_error_that_is_a_bug_keeps_its_words_and_the_module_that_raised_it() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dim() != 7:
                raise ValueError("expected seven dims")
            return x

    with pytest.raises(SolveError, match=r"middle\.0: .*expected seven dims"):
        tape_of(Around(nn.Sequential(Wrong())))


def test_an_error_about_its_inputs_is_raised_without_running_the_modules_around() -> None:
    """A model of billions of parameters would be run on numbers once for each module around it."""
    calls = []

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x.device.type)
            raise ValueError("expected seven dims")

    with pytest.raises(SolveError, match=r"middle\.0\.0: .*expected seven dims"):
        tape_of(Around(nn.Sequential(nn.Sequential(Wrong()))))
    assert calls == ["meta", "cpu"]


def test_the_model_itself_is_never_opaque() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            untraceable(x)
            return x

    with pytest.raises(SolveError, match="cannot be traced"):
        tape_of(Root())


def test_on_request_nothing_is_run_on_numbers() -> None:
    model = Around(Opaque()).to("meta")
    assert opaque_ops(trace(model, {"x": torch.randn(5, 6)}, RULES))
    with pytest.raises(SolveError, match=r"middle: .*cannot be traced"):
        trace(model, {"x": torch.randn(5, 6)}, RULES, on_numbers=False)


def test_parameters_of_equal_rows_share_memory_on_numbers() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, width) for width in (9, 5, 6))

        def forward(self, x: Tensor) -> Tensor:
            memory.append({layer.weight.untyped_storage()._cdata for layer in self.layers})
            untraceable(x)
            return x

    memory: list[set[int]] = []
    tape_of(Around(Wide()))
    assert len(memory[-1]) == 1


def test_attributes_that_were_set_before_it_failed_are_taken_back() -> None:
    class Counts(Opaque):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6), persistent=False)
            self.calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            if self.calls > 1:
                raise ValueError("called twice")
            self.seen += 1
            return super().forward(x)

    model = Around(Counts())
    tape = tape_of(model)
    ((_, op),) = opaque_ops(tape)
    assert model.middle.calls == 0
    names = [tape.tensors[t].name for t in op.inputs]
    assert "middle.seen" in names
    assert len(op.outputs) == 2, "the buffer that was written, and the result"


def test_the_second_call_alone_may_be_opaque() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor, again: bool) -> Tensor:
            y = self.inner(x)
            if again:
                untraceable(y)
            return y

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Sometimes()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.part(x, False), True)

    tape = tape_of(Twice())
    assert list(tape.opaque) == [("part", 1)]
    assert [(c.fqn, c.index) for c in tape.calls] == [
        ("", 0),
        ("part", 0),
        ("part.inner", 0),
        ("part", 1),
    ]


def test_a_copy_is_made_of_the_module_as_it_was() -> None:
    """Hooks, wrapped ints and configs of the tracer must not be in what runs on numbers."""
    seen: list[type] = []

    class Looks(Opaque):
        def __init__(self) -> None:
            super().__init__()
            self.config = models.OddConfig(width=6)

        def forward(self, x: Tensor) -> Any:
            if x.device.type == "cpu":
                seen.extend([type(self.config), type(self.inner.forward)])
                assert len(self._forward_hooks) <= 1
            return super().forward(x)

    model = Around(Looks())
    tape_of(model)
    assert seen[0] is models.OddConfig
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# Retracing -------------------------------------------------------------------------------------------


def test_a_rank_is_traced_like_the_unsharded_model() -> None:
    unsharded = tape_of(Around(Opaque()))
    again = tape_of(Around(Opaque()), like=unsharded)
    assert [type(e) for e in again.events] == [type(e) for e in unsharded.events]
    assert [f for f, _ in opaque_ops(again)] == ["middle"]


def test_on_a_rank_nothing_else_becomes_opaque() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0

    unsharded = tape_of(Around(Plain()))
    with pytest.raises(SolveError, match=r"middle"):
        tape_of(Around(Opaque()), like=unsharded)


# Plans -----------------------------------------------------------------------------------------------


class Detour(nn.Module):
    """A feed-forward part that looks at its input in numpy."""

    def __init__(self, config: models.OddConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.girth)
        self.down = nn.Linear(config.girth, config.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).relu()
        untraceable(y)
        return self.down(y)


class Detoured(models.OddModel):
    mlp = Detour


@pytest.fixture(scope="module")
def plan() -> Plan:
    return models.plan_of(Detoured, 2, repeats=4)


def test_the_plan_replicates_it_and_says_so_once(plan: Plan) -> None:
    notes = [n for n in plan.notes if n.startswith("opaque: ")]
    assert len(notes) == 1
    assert re.fullmatch(r"opaque: .*\*\.chewer could not be traced \(.+\): it is replicated", notes[0])
    entries = parameter_plans(plan)
    inside = {n: e for n, e in entries.items() if ".chewer." in n}
    assert inside
    assert not any(axes_of(d) for e in inside.values() for d in e.dims)
    assert {e.reason for e in inside.values()} == {notes[0].split(" (")[0].removeprefix("opaque: ")}


def test_the_rest_is_split(plan: Plan) -> None:
    entries = parameter_plans(plan)
    rest = {n: e for n, e in entries.items() if ".mixer." in n and len(e.dims) > 1}
    assert rest
    assert all(any(axes_of(d) for d in e.dims) for e in rest.values())
