"""What the tape holds: marks, in-place operators, values that code asks for, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardconv_runtime.errors import SolveError
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from shardconv.dim_analysis.analyze import analyze
from shardconv.dim_analysis.rules import RULES
from shardconv.tracing import values
from shardconv.tracing.functions import TracedInt, traced_ints
from shardconv.tracing.identities import Journal, MetaResults
from shardconv.tracing.tape import Mark, Op, Tape, TensorInfo, draws
from shardconv.tracing.trace import trace
from shardconv.tracing.values import stand_in


class Call(nn.Module):
    """Runs any function as a module."""

    def __init__(self, function: Any, *children: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(children)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.inner, *args, **kwargs)


class Named(nn.Module):
    """Has parameter names."""

    def forward(self, first: Tensor, second: Any = None, **others: Any) -> Any:
        return first


def tape_of(model: nn.Module, **inputs: Tensor) -> Tape:
    """With rules for the operators that are not taken apart."""
    return trace(model, inputs or {"x": torch.arange(6.0).reshape(2, 3)}, RULES)


def marks(tape: Tape, fqn: str) -> list[tuple[str, ...]]:
    """Ports of a module's marks, in order."""
    return [e.ports for e in tape.events if isinstance(e, Mark) and tape.calls[e.call].fqn == fqn]


def ops(tape: Tape) -> list[str]:
    """Names of the operators, without overload."""
    return [e.base for e in tape.events if isinstance(e, Op)]


# Marks -----------------------------------------------------------------------------------------------


def test_positional_arguments_have_their_names() -> None:
    tape = tape_of(Call(lambda inner, x: inner(x, x + 1, third=(x + 2, {"deep": x + 3})), Named()))
    assert marks(tape, "inner.0") == [
        ("input.first",),
        ("input.second",),
        ("input.third.0",),
        ("input.third.1.deep",),
        ("output",),
    ]


def test_one_tensor_at_two_slots_has_one_mark() -> None:
    tape = tape_of(Call(lambda inner, x: inner(x, x), Named()))
    assert marks(tape, "inner.0") == [("input.first", "input.second"), ("output",)]


@dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    nothing: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


def test_model_outputs_dicts_and_tuples() -> None:
    tape = tape_of(Call(lambda x: Output(logits=x + 1, states=(x * 2, x * 3))))
    assert marks(tape, "")[1:] == [("output.logits",), ("output.states.0",), ("output.states.1",)]
    assert len(tape.outputs) == 3
    tape = tape_of(Call(lambda x: ({"a": x + 1}, [x + 2])))
    assert marks(tape, "")[1:] == [("output.0.a",), ("output.1.0",)]


def test_a_module_that_returns_what_it_is_given() -> None:
    tape = tape_of(Call(lambda inner, x: inner(x) + x, nn.Identity()))
    enter, leave = (e for e in tape.events if isinstance(e, Mark) and tape.calls[e.call].fqn == "inner.0")
    assert leave.source == enter.target
    assert analyze(tape).dims[tape.outputs[0]]


def test_a_caller_keeps_the_value_from_before_the_mark() -> None:
    """What happens at a callee's input must not be seen by the caller."""
    tape = tape_of(Call(lambda inner, x: (inner(x), x.neg())[1], Call(lambda x: x + 1)))
    enter = next(e for e in tape.events if isinstance(e, Mark) and tape.calls[e.call].fqn == "inner.0")
    neg = next(e for e in tape.events if isinstance(e, Op) and e.name.startswith("aten.neg"))
    assert neg.inputs == (enter.source,)


def test_a_module_that_is_called_twice() -> None:
    tape = tape_of(Call(lambda inner, x: inner(inner(x)), nn.ReLU()))
    calls = [c for c in tape.calls if c.fqn == "inner.0"]
    assert [c.index for c in calls] == [0, 1]
    assert {c.parent for c in calls} == {0}


def test_parameters_have_no_marks() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(3, device="meta"))
            self.inner = Named()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(self.table)

    assert marks(tape_of(Holder()), "inner") == []


# In place --------------------------------------------------------------------------------------------


def _in_place(x: Tensor) -> Tensor:
    x = x.clone()
    row = x[0]
    row.mul_(2)
    return x + 1


def _written_twice(x: Tensor) -> Tensor:
    x = x.clone()
    row, column = x[0], x[:, 1]
    row.mul_(2)
    column.add_(1)
    return x


def test_all_that_was_written_through_views_arrives() -> None:
    tape = tape_of(Call(_written_twice))
    writes = [e for e in tape.events if isinstance(e, Op) and e.name == "alias_write"]
    (mul,) = (e for e in tape.events if isinstance(e, Op) and e.name.startswith("aten.mul_"))
    (add,) = (e for e in tape.events if isinstance(e, Op) and e.name.startswith("aten.add_"))
    column, everything, again = writes
    assert column.inputs[1] == everything.inputs[1] == mul.outputs[0]
    assert again.inputs == (everything.outputs[0], add.outputs[0])


def test_an_alias_sees_what_was_written() -> None:
    tape = tape_of(Call(_in_place))
    names = ops(tape)
    assert names.index("aten.mul_") < names.index("alias_write") < names.index("aten.add")
    write = next(e for e in tape.events if isinstance(e, Op) and e.name == "alias_write")
    clone = next(e for e in tape.events if isinstance(e, Op) and e.name.startswith("aten.clone"))
    mul = next(e for e in tape.events if isinstance(e, Op) and e.name.startswith("aten.mul_"))
    assert write.inputs == (clone.outputs[0], mul.outputs[0])
    analysis = analyze(tape)
    assert analysis.partial[write.outputs[0]].zero


def test_an_in_place_operator_makes_a_new_value() -> None:
    tape = tape_of(Call(lambda x: x.clone().add_(1).mul_(2)))
    assert len({t for e in tape.events if isinstance(e, Op) for t in e.outputs}) == 3
    assert len(set(tape.outputs)) == 1


def test_assignment_to_a_slice() -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, 1:] = x[:, :-1]
        return out

    tape = tape_of(Call(function))
    assert "aten.copy_" in ops(tape)
    assert "alias_write" in ops(tape)
    assert not analyze(tape).unknown


# Values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda x: x.sum().item(), 15.0),
        (lambda x: int(x.long().max()), 5),
        (lambda x: bool((x > 4).any()), True),
        (lambda x: float(x[1, 0] * 2), 6.0),
        (lambda x: x.clone().add_(1).sum().item(), 21.0),
        (lambda x: torch.arange(4, device=x.device)[2].item(), 2),
        (lambda x: torch.tensor([3, 9]).max().item(), 9),
        (lambda x: x.nonzero().shape[0], 5),
        (lambda x: torch.where(x > 3)[1].tolist(), [1, 2]),
        (lambda x: x[x > 2].tolist(), [3.0, 4.0, 5.0]),
        (lambda x: x[:, [2, 0]].tolist(), [[2.0, 0.0], [5.0, 3.0]]),
        (lambda x: x[[1]].tolist(), [[3.0, 4.0, 5.0]]),
        (lambda x: x[:, [True, False, True]].tolist(), [[0.0, 2.0], [3.0, 5.0]]),
        (lambda x: x.long().unique().tolist(), [0, 1, 2, 3, 4, 5]),
        (lambda x: x.cpu().numpy().sum(), 15.0),
        (lambda x: [int(row.sum()) for row in x], [3, 12]),
        (lambda x: len(x[0].repeat_interleave(x[0].long())), 3),
        (lambda x: x.long().flatten().bincount().tolist(), [1] * 6),
        (lambda x: torch.histc(x, 3, 0, 5).tolist(), [2.0, 2.0, 2.0]),
        (lambda x: torch.equal(x, x.clone()), True),
        (lambda x: _written_twice(x).tolist(), [[0.0, 3.0, 4.0], [3.0, 5.0, 5.0]]),
        (lambda x: torch.zeros_like(x).index_put_((x > 3,), x.new_ones(())).sum().item(), 2.0),
    ],
)
def test_a_value_that_depends_on_inputs_alone_is_the_true_one(function: Any, want: Any) -> None:
    seen: list[Any] = []
    tape = tape_of(Call(lambda inner, x: (seen.append(function(inner(x))), x)[1], nn.Identity()))
    assert seen == [want]
    assert not tape.guesses


def test_a_value_that_depends_on_parameters_is_a_guess() -> None:
    linear = nn.Linear(3, 3, device="meta")
    seen: list[Any] = []

    def function(linear: nn.Module, x: Tensor) -> Tensor:
        y = linear(x)
        seen.extend([bool((y > 0).any()), y.sum().item(), float((y + 1).sum())])
        return y

    tape = tape_of(Call(function, linear))
    assert seen[0] is (stand_in(TensorInfo((2, 3), torch.float32, "value")) > 0).any().item()
    assert seen[2] == seen[1] + 6
    asked = ["bool", "float32", "float32"]
    assert tape.guesses == [f"the model: the value of a torch.{dtype} scalar" for dtype in asked]


def test_a_question_behind_many_residual_layers_is_a_guess_at_once() -> None:
    """Each of the tensors is read three times by the next: they must not be walked again for each reader."""
    linear = nn.Linear(3, 3, device="meta")
    seen: list[Any] = []

    def function(linear: nn.Module, x: Tensor) -> Tensor:
        x = linear(x)
        for _ in range(300):
            x = x * x + x
        seen.append(bool(x.any()))
        return x

    assert len(tape_of(Call(function, linear)).guesses) == 1
    assert seen == [True]


def _routed(linear: nn.Module, x: Tensor, seen: list[Any]) -> Tensor:
    _, chosen = linear(x).softmax(-1).topk(2, dim=-1)
    sizes = chosen.flatten().bincount(minlength=5).tolist()
    masks = torch.nn.functional.one_hot(chosen, 5).sum(1).T
    places = [torch.where(mask)[0] for mask in masks]
    seen.append((sizes, [len(p) for p in places], [int(mask.sum()) for mask in masks]))
    order = chosen.flatten().argsort(stable=True)
    parts = x.repeat_interleave(2, dim=0)[order].split(sizes)
    assert [p.shape[0] for p in parts] == sizes
    return torch.cat(parts)


@pytest.mark.parametrize("kept_bytes", [None, 0])
def test_guesses_about_one_tensor_agree(kept_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes add up to the number of tokens, masks have as many positions, and no expert is left out.

    Also where guesses are dropped as soon as they are given, and are computed again.
    """
    if kept_bytes is not None:
        monkeypatch.setattr(values, "_MOST_BYTES", kept_bytes)
    seen: list[Any] = []
    linear = nn.Linear(3, 5, device="meta")
    tape = tape_of(Call(lambda linear, x: _routed(linear, x, seen), linear), x=torch.randn(10, 3))
    ((sizes, places, counts),) = seen
    assert sizes == places == counts == [4] * 5
    assert tape.tensors[tape.outputs[0]].shape == (20, 3)


def test_a_rank_gets_the_same_answers() -> None:
    """Where a tensor was gathered, its values are unknown; the answers are those of the unsharded model."""
    seen: list[Any] = []
    linear = nn.Linear(3, 5, device="meta")
    model = Call(lambda linear, x: _routed(linear, x, seen), linear)
    unsharded = tape_of(model, x=torch.randn(10, 3))
    linear.weight = nn.Parameter(torch.empty(5, 3, device="meta"))
    model.function = lambda linear, x: _routed(lambda y: torch.zeros_like(linear(y)), x, seen)
    again = trace(model, {"x": torch.randn(10, 3)}, RULES, like=unsharded)
    assert seen[1][0] != seen[0][0], "zeros depend on no parameter: the true values"
    model.function = lambda linear, x: _routed(lambda y: linear(y).neg(), x, seen)
    trace(model, {"x": torch.randn(10, 3)}, RULES, like=unsharded)
    assert seen[2] == seen[0]
    assert again.answers == {}


@given(columns=st.integers(2, 40), more=st.integers(0, 60))
def test_a_stand_in_prefers_each_column_as_often(columns: int, more: int) -> None:
    ramp = stand_in(TensorInfo((columns + more, columns), torch.float64, "value"))
    counts = ramp.argmax(-1).bincount(minlength=columns)
    assert counts.max() - counts.min() <= 1
    assert ramp.abs().max() <= 1
    assert all(row.unique().numel() == columns for row in ramp)


@given(columns=st.integers(8, 1000), rows=st.integers(5, 60))
def test_few_columns_of_a_stand_in_are_preferred_from_the_first_to_the_last(columns: int, rows: int) -> None:
    ramp = stand_in(TensorInfo((rows, columns), torch.float64, "value"), few_chosen=True)
    preferred = ramp.argmax(-1).unique().tolist()
    assert preferred[0] == 0
    assert preferred[-1] == columns - 1
    assert len(preferred) == 5


@given(st.lists(st.tuples(st.sampled_from(["set", "pop"]), st.integers(0, 5), st.integers(0, 99))), st.data())
def test_a_journal_goes_back(changes: list[tuple[str, int, int]], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(changes)))
    journal: Journal[int, int] = Journal()
    kept, length = {}, 0
    for index, (what, key, value) in enumerate([*changes, ("set", 0, 0)]):
        if index == stop:
            kept, length = dict(journal), len(journal.log)
        if what == "set":
            journal[key] = value
        else:
            journal.pop(key)
    journal.rewind(length)
    assert journal == kept


def test_buffers_are_constants_with_values() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(3))
            self.register_buffer("lost", torch.full((3,), 2.0), persistent=False)
            self.got: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.got.append(float(self.lost.sum()))
            return x * self.kept + self.lost

    model = Table()
    tape = tape_of(model)
    kinds = {i.name: i.kind for i in tape.tensors if i.name}
    assert (kinds["kept"], kinds["lost"], kinds["x"]) == ("buffer", "constant", "input")
    assert model.got == [6.0]


def test_factories_without_a_device_are_on_meta() -> None:
    tape = tape_of(Call(lambda x: x + torch.ones(3) + torch.zeros(2, 1) + torch.tensor([1.0, 2.0, 3.0])))
    assert tape.tensors[tape.outputs[0]].shape == (2, 3)


def test_literals_keep_their_values_on_any_device() -> None:
    def forward(x: Tensor) -> Tensor:
        sizes = torch.tensor([2, int(x.dim())], device=x.device).tolist()
        rows = torch.tensor([x[0].long().sum(), 1], device=x.device).tolist()
        return x.reshape(sizes[1], 3) + sizes[0] + rows[0]

    tape = tape_of(Call(forward))
    assert tape.guesses == []
    assert tape.tensors[tape.outputs[0]].shape == (2, 3)
    added = [op.args[1] for op in tape.events if isinstance(op, Op) and op.name.startswith("aten.add")]
    assert added == [2, 3]


def test_a_tensor_of_tensors_keeps_their_values() -> None:
    def forward(x: Tensor) -> Tensor:
        return x + torch.tensor([torch.ones(2).sum(), torch.ones(3).sum()]).long().tolist()[1]

    tape = tape_of(Call(forward))
    assert tape.guesses == []
    assert [op.args[1] for op in tape.events if isinstance(op, Op) and op.name.startswith("aten.add")] == [3]


def test_a_range_that_a_tensor_gives_is_one_of_numbers() -> None:
    def forward(x: Tensor) -> Tensor:
        count = torch.ones(2, dtype=torch.long).sum()
        return x.narrow(1, 0, count) + torch.narrow(x, 1, count - 1, length=2)

    tape = tape_of(Call(forward))
    assert tape.guesses == []
    cuts = [op for op in tape.events if isinstance(op, Op) and op.name.startswith("aten.narrow")]
    assert [op.args[1:] for op in cuts] == [(1, 0, 2), (1, 1, 2)]


def test_sizes_that_tensors_give_are_numbers() -> None:
    def forward(x: Tensor) -> Tensor:
        count = torch.ones(3, dtype=torch.long).sum()
        return x + torch.zeros(2, count) + torch.arange(count).float()

    tape = tape_of(Call(forward))
    assert tape.guesses == []
    assert tape.tensors[tape.outputs[0]].shape == (2, 3)


@pytest.mark.parametrize("like", [Tensor.expand_as, Tensor.view_as])
def test_a_shape_that_a_tensor_gives_leaves_values_known(like: Any) -> None:
    def forward(inner: nn.Module, x: Tensor) -> Tensor:
        mask = like(torch.tensor([[True, False, False, False]] * 2), inner(x))
        return x + inner(x)[mask].numel()

    tape = tape_of(Call(forward, nn.Linear(3, 4, device="meta")))
    assert tape.guesses == []
    assert [op.args[1] for op in tape.events if isinstance(op, Op) and op.name.startswith("aten.add")] == [2]


def test_composite_operators_without_a_rule_are_taken_apart() -> None:
    tape = tape_of(Call(lambda x: torch.nn.functional.instance_norm(x[None])))
    assert all(not name.startswith("aten.instance_norm") for name in ops(tape))
    linear = tape_of(Call(lambda inner, x: inner(x), nn.Linear(3, 4, device="meta")))
    assert "aten.linear" in ops(linear)


def test_the_code_that_called_is_named() -> None:
    assert __name__ in tape_of(Call(lambda x: x + 1)).sources()


# Ints ------------------------------------------------------------------------------------------------


class Attributes(nn.Module):
    """Ints in all the places where modules keep them."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.rows = 2
        self.sizes = (1, 2)
        self.listed = [3, 2]
        self.flag = True
        self.empty: tuple[int, ...] = ()
        self.mixed = (1, "a")
        self.config = models.OddConfig(width=3)
        self.fail = fail
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        values = (self.rows, self.sizes[1], self.listed[0], self.config.width, x.shape[1])
        self.seen.extend(values)
        y = x.view(self.rows, self.config.width)
        y.split(self.sizes, dim=1)
        if self.fail:
            raise ValueError("no")
        self.counter = 1
        return y.reshape(x.shape[0] * self.listed[0])


def state(model: nn.Module) -> dict[str, Any]:
    """Everything but what the test itself writes."""
    attributes = {k: v for k, v in model.__dict__.items() if k not in ("seen", "counter")}
    return {k: dict(v) if isinstance(v, dict) else v for k, v in attributes.items()}


def test_ints_are_traced_and_calls_that_use_them_recorded() -> None:
    model = Attributes()
    tape = tape_of(model)
    assert all(type(v) is TracedInt for v in model.seen)
    assert [v.expr[:3] for v in model.seen[:4]] == [
        ("attr", "", "rows"),
        ("attr", "", "sizes.1"),
        ("attr", "", "listed.0"),
        ("attr", "", "config.width"),
    ]
    assert model.seen[4].expr[0] == "size"
    assert [r.function.__name__ for r in tape.replays] == ["view", "split", "reshape"]
    read = {s.expr[2] for s in traced_ints(tuple(r.args for r in tape.replays)) if s.expr[0] == "attr"}
    assert read == {"rows", "config.width", "sizes.0", "sizes.1"}


class Headed(nn.Module):
    """Cuts what it is given as a config in its own says, as a model of several parts has."""

    def __init__(self) -> None:
        super().__init__()
        self.config = models.OddConfig()
        self.config.inner = models.OddConfig(width=3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.inner is self.config.inner
        return x[..., : self.config.inner.width]


def test_ints_of_a_config_in_the_config_are_traced() -> None:
    model = Headed()
    inner = model.config.inner
    tape = tape_of(model)
    (read,) = (s.expr for s in traced_ints(tuple(r.args for r in tape.replays)))
    assert read == ("attr", "", "config.inner.width", 3)
    assert model.config.inner is inner
    assert type(inner.width) is int


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_it_was(fail: bool) -> None:
    model = Attributes(fail)
    before, config = state(model), model.config
    names = set(copy.copy(model.__dict__))
    if fail:
        with pytest.raises(SolveError, match="no"):
            tape_of(model)
    else:
        tape_of(model)
    assert state(model) == before
    assert model.config is config
    assert set(model.__dict__) == names
    assert all(type(v) is int for v in (model.rows, *model.sizes, *model.listed, model.config.width))
    assert type(config) is models.OddConfig
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_hooks_that_a_forward_pass_registers_are_removed() -> None:
    class Watches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3, device="meta")
            self.is_watching = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_watching:
                self.is_watching = True
                self.inner.register_forward_hook(lambda module, args, output: output + 1)
            return self.inner(x)

    model = Watches()
    first, second = tape_of(model), tape_of(model)
    assert ops(first) == ops(second)
    assert not model.inner._forward_hooks
    assert not model.is_watching


class Caches(nn.Module):
    """Keeps a table by device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 6))
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if str(x.device) not in self.tables:
            self.tables[str(x.device)] = self.table * 2
        return x + self.tables[str(x.device)]


def test_what_a_forward_pass_puts_into_a_dict_is_taken_out() -> None:
    model = Caches().to("meta")
    trace(model, {"x": torch.randn(4, 6)}, RULES)
    assert not model.tables


class Table:
    """Is no module, and keeps what it made of a list."""

    @cached_property
    def rows(self) -> Tensor:
        return torch.tensor([1, 0])


class Maps(nn.Module):
    """Reads a table that an object keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        return x[self.table.rows]


def test_what_objects_of_a_model_keep_is_taken_out() -> None:
    model = Maps()
    trace(model, {"x": torch.randn(2, 3)}, RULES)
    assert "rows" not in vars(model.table)


def test_tracing_twice_gives_the_same() -> None:
    model = models.FusedModel(models.OddConfig()).to("meta")
    inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    first, second = (trace(model, inputs, RULES) for _ in range(2))
    assert first.tensors == second.tensors
    assert first.calls == second.calls
    assert [(type(e), getattr(e, "name", ""), getattr(e, "ports", ())) for e in first.events] == [
        (type(e), getattr(e, "name", ""), getattr(e, "ports", ())) for e in second.events
    ]
    assert all(p.device.type == "meta" for p in model.parameters())


def test_a_failing_forward_names_the_module() -> None:
    model = Call(lambda inner, x: inner(x), nn.Linear(5, 5, device="meta"))
    with pytest.raises(SolveError, match=r"inner\.0.*cannot be traced"):
        tape_of(model)


def test_the_rotary_table_of_a_tied_model_is_named_once() -> None:
    """Tied parameters are one tensor under their first name."""
    model = models.TiedModel(models.OddConfig(tie_word_embeddings=True)).to("meta")
    model.tie_weights()
    tape = trace(model, {"input_ids": torch.zeros(2, 6, dtype=torch.long)}, RULES)
    names = [i.name for i in tape.tensors if i.kind == "parameter"]
    assert "lookup.weight" in names
    assert "speak.weight" not in names


def test_a_buffer_that_is_written_through_a_view_has_a_new_value() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4, 3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen[:2].copy_(x)
            return self.seen + 1

    tape = trace(Counter(), {"x": torch.ones(2, 3)}, RULES)
    writes = [e for e in tape.events if isinstance(e, Op) and e.name == "alias_write"]
    assert len(writes) == 1
    (add,) = (e for e in tape.events if isinstance(e, Op) and e.name.startswith("aten.add"))
    assert add.inputs == writes[0].outputs


def test_parameters_that_code_casts_are_those_that_were_cast() -> None:
    """``Module.to`` makes new parameters on the memory of what it cast; afterwards the old ones are back."""
    model = Call(lambda inner, x: inner.to(torch.float32)(x), nn.Linear(3, 5, device="meta").half())
    tape = tape_of(model)
    (linear,) = [e for e in tape.events if isinstance(e, Op) and e.name == "aten.linear.default"]
    casts = {e.outputs[0]: e.inputs[0] for e in tape.events if isinstance(e, Op) and ".to." in e.name}
    assert [tape.tensors[casts[t]].name for t in linear.inputs[1:]] == ["inner.0.weight", "inner.0.bias"]
    assert model.inner[0].weight.dtype == torch.float16


def test_operators_that_draw_random_numbers() -> None:
    def forward(x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5, training=False)
        return x + torch.randn(x.shape) + torch.rand_like(x)

    assert [op.name for op in draws(tape_of(Call(forward)))] == [
        "aten.randn.default",
        "aten.rand_like.default",
    ]


def test_what_a_trace_made_is_freed_without_the_garbage_collector() -> None:
    """Solving runs without it; the tape alone stays."""
    held: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        y = torch.cat([x + 1, x])
        held.append(weakref.ref(y))
        x[0] = y[1]
        return x.sum()

    gc.collect()
    gc.disable()
    try:
        tape = tape_of(Call(forward))
        assert len(held) == 1
        assert held[0]() is None
    finally:
        gc.enable()
    assert tape.events


def test_results_on_meta_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all traces: by all that they depend on, and not without an end."""
    results, made = MetaResults(), []

    def ones(*size: int, device: str) -> Tensor:
        made.append(size)
        return torch.ones(size, device=device)

    for dtype in (torch.float32, torch.float64, torch.float32):
        monkeypatch.setattr(torch, "get_default_dtype", lambda dtype=dtype: dtype)
        results.run(ones, (2, 3), {"device": "meta"})
    assert made == [(2, 3)] * 2
    monkeypatch.setattr(MetaResults, "MOST", 2)
    results.run(ones, (4,), {"device": "meta"})
    results.run(ones, (2, 3), {"device": "meta"})
    assert made == [(2, 3), (2, 3), (4,), (2, 3)]
