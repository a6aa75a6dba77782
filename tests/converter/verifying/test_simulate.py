"""A plan that is wrong is caught, by the retrace or by the simulated ranks, whatever is wrong with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import models
import pytest
import transformers
from boundaries import boundary
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import PlanError, SolveError
from shardconv_runtime.format.dims import Leaf, Product, Sum, axes_of, to_text
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import (
    AttributeOverride,
    ModulePlan,
    ParameterPlan,
    Plan,
    module_plans,
    parameter_plans,
)
from torch import Tensor, nn

from shardconv import plan_forms
from shardconv.arguments import SolveOptions
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import solve_plan
from shardconv.planning.conflict import Conflict
from shardconv.planning.layout import Layouts
from shardconv.simulation.layer_bypass import Bypass, bypassed_copy
from shardconv.simulation.model_runs import TOLERANCE
from shardconv.tracing.tape import Tape
from shardconv.tracing.trace import trace
from shardconv.verifying import retrace as retracing
from shardconv.verifying.proof_case import Case, simulate
from shardconv.verifying.retrace import retrace


@dataclass(frozen=True)
class Checked:
    """A right plan, and what it is checked with."""

    plan: Plan
    layouts: Layouts
    model: nn.Module
    inputs: TraceInputs
    bypassed: Mapping[str, Bypass]

    def retrace(self, plan: Plan) -> Conflict | None:
        return retrace(plan, self.layouts, self.model, self.inputs, self.bypassed)

    def simulate(self, plan: Plan) -> float:
        return simulate(Case(plan, self.model, self.inputs)).worst


def solved(model: type[models.OddModel], tp: int = 2, **sizes: Any) -> Checked:
    """Solve and keep what the check was given."""
    seen: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_forms, "retrace", lambda *given: seen.append(given))
        plan = models.plan_of(model, tp, **sizes)
    assert seen[-1][0] == replace(plan, memory=None)
    return Checked(*seen[-1])


@pytest.fixture(scope="module")
def fused() -> Checked:
    return solved(models.FusedModel)


@pytest.fixture(scope="module")
def uneven() -> Checked:
    return solved(models.FusedModel, 3)


@pytest.fixture(scope="module")
def parallel() -> Checked:
    return solved(models.ParallelModel)


# Ways to be wrong ------------------------------------------------------------------------------------


def change_parameter(plan: Plan, part: str, change: Callable[[ParameterPlan], ParameterPlan]) -> Plan:
    """Change the entry of the parameters whose names contain ``part``."""
    entries = tuple(change(e) if part in e.names[0] else e for e in plan.parameters)
    assert entries != plan.parameters
    return replace(plan, parameters=entries)


def change_module(plan: Plan, part: str, change: Callable[[ModulePlan], ModulePlan]) -> Plan:
    """Change the entry of the modules whose names end with ``part``."""
    entries = tuple(change(e) if e.names[0].endswith(part) else e for e in plan.modules)
    assert entries != plan.modules
    return replace(plan, modules=entries)


def without(entry: ModulePlan, op: str) -> ModulePlan:
    """Leave a step out."""
    inputs = tuple(b for b in entry.inputs if b.op != op)
    outputs = tuple(b for b in entry.outputs if b.op != op)
    return replace(entry, inputs=inputs, outputs=outputs)


def with_override(entry: ModulePlan, attribute: str, local: tuple[int, ...]) -> ModulePlan:
    """Another local value; none: no override."""
    overrides = [
        e if e.attribute != attribute else AttributeOverride(attribute, e.value, local)
        for e in entry.overrides
    ]
    return replace(entry, overrides=tuple(e for e in overrides if e.local))


def _simulation_rejects(checked: Checked, plan: Plan) -> None:
    with pytest.raises((SolveError, PlanError)):
        checked.simulate(plan)


def _retrace_rejects(checked: Checked, plan: Plan) -> None:
    assert checked.retrace(plan) is not None


def test_the_right_plan_passes(fused: Checked, uneven: Checked, parallel: Checked) -> None:
    for checked in (fused, uneven, parallel):
        assert checked.retrace(checked.plan) is None
        error = checked.simulate(checked.plan)
        assert error is not None
        assert error <= TOLERANCE


WRONG_NUMBERS = {
    "halves of gate and up as one": lambda p: change_parameter(
        p, "both.weight", lambda e: replace(e, dims=(Leaf(192, (0,)), e.dims[1]))
    ),
    "every second row": lambda p: change_parameter(
        p, "both.weight", lambda e: replace(e, dims=(Product((Leaf(96), Leaf(2, (0,)))), e.dims[1]))
    ),
    "fused heads as one": lambda p: change_parameter(
        p, "everything.weight", lambda e: replace(e, dims=(Leaf(96, (0,)), e.dims[1]))
    ),
    "heads in another order": lambda p: change_parameter(
        p, "everything.weight", lambda e: replace(e, dims=(_group_first(), e.dims[1]))
    ),
    "a bias of other rows": lambda p: change_parameter(
        p, "everything.bias", lambda e: replace(e, dims=(Leaf(96, (0,)),))
    ),
    "columns of a row-parallel weight": lambda p: change_parameter(
        p, "back.weight", lambda e: replace(e, dims=(e.dims[0], Product((Leaf(24), Leaf(2, (0,))))))
    ),
    "no reduction": lambda p: change_module(p, ".back", lambda e: without(e, "all_reduce")),
    "no reduction of the embedding": lambda p: change_module(p, "lookup", lambda e: without(e, "all_reduce")),
    "out-of-shard rows kept": lambda p: change_module(p, "speak", lambda e: _other_layout(e)),
}


def _group_first() -> Sum:
    """The second head of each group on the first rank: shapes agree, heads do not."""
    kv = Product((Leaf(4, (0,)), Leaf(6)))
    return Sum((Product((Leaf(4), Leaf(2, (0,)), Leaf(6))), kv, kv))


def _other_layout(entry: ModulePlan) -> ModulePlan:
    steps = tuple(replace(b, layout=Sum((Leaf(51), Leaf(50, (0,))))) for b in entry.outputs)
    return replace(entry, outputs=steps)


@pytest.mark.parametrize("wrong", WRONG_NUMBERS.values(), ids=WRONG_NUMBERS.keys())
def test_simulated_ranks_catch_wrong_numbers(fused: Checked, wrong: Callable[[Plan], Plan]) -> None:
    _simulation_rejects(fused, wrong(fused.plan))


WRONG_SHAPES = {
    "no override of the heads": (".mixer", "many", ()),
    "no override of the sizes": (".mixer", "cuts.1", ()),
    "another number of heads": (".mixer", "few", (4,)),
    "no override of a slice": (".chewer", "half", ()),
    "a slice at another position": (".chewer", "half", (40,)),
}


@pytest.mark.parametrize(("module", "attribute", "local"), WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys())
def test_retrace_catches_wrong_overrides(
    fused: Checked, module: str, attribute: str, local: tuple[int, ...]
) -> None:
    wrong = change_module(fused.plan, module, lambda e: with_override(e, attribute, local))
    conflict = fused.retrace(wrong)
    assert conflict is not None
    assert "stack." in conflict.where
    _simulation_rejects(fused, wrong)


def test_retrace_says_which_dims_are_to_blame(fused: Checked) -> None:
    wrong = change_module(fused.plan, ".chewer", lambda e: with_override(e, "half", (40,)))
    conflict = fused.retrace(wrong)
    assert conflict is not None
    assert conflict.nodes
    assert all(fused.layouts.assignment.axes(node) for node in conflict.nodes)


def test_retrace_catches_overrides_of_another_rank(uneven: Checked) -> None:
    """Ranks 0 and 2 differ: 4, 2 and 2 heads."""
    wrong = change_module(uneven.plan, ".mixer", lambda e: with_override(e, "many", (4, 2, 4)))
    _retrace_rejects(uneven, wrong)


def test_layers_that_are_planned_alike_are_retraced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is wrong: it is run, and the conflict names it."""
    calls: list[set[str]] = []

    def kept(*given: Any) -> Tape:
        tape = trace(*given)
        calls.append({call.fqn for call in tape.calls})
        return tape

    monkeypatch.setattr(retracing, "trace", kept)
    deep = solved(models.FusedModel, repeats=6)
    assert len(deep.bypassed) == 4
    assert deep.retrace(deep.plan) is None
    assert {f"stack.{i}.mixer" for i in range(6)} & calls[-1] == {"stack.0.mixer", "stack.1.mixer"}
    entry = module_plans(deep.plan)["stack.4.chewer"]
    rest = replace(entry, names=tuple(name for name in expand_all(entry.names) if name != "stack.4.chewer"))
    odd = with_override(replace(entry, names=("stack.4.chewer",)), "half", (40,))
    wrong = replace(deep.plan, modules=tuple(m for m in deep.plan.modules if m.names != entry.names))
    conflict = deep.retrace(replace(wrong, modules=(*wrong.modules, rest, odd)))
    assert conflict is not None
    assert conflict.where.startswith("stack.4.chewer")


def test_layers_whose_results_are_collected_are_all_retraced() -> None:
    """An encoder returns all hidden states: those of layers that are left out would be one tensor."""
    config = transformers.DebertaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4, vocab_size=120
    )
    seen: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_forms, "retrace", lambda *given: seen.append(given))
        solve_plan(ModelSpec("model", config, transformers.DebertaForMaskedLM, "float32"), SolveOptions(2))
    checked = Checked(*seen[-1])
    assert checked.bypassed
    assert checked.retrace(checked.plan) is None


def test_a_slice_at_a_wrong_start_of_the_right_length_is_caught(fused: Checked) -> None:
    """Both halves of gate and up would have the right shape if the second began too early."""
    wrong = change_parameter(
        fused.plan,
        "both.weight",
        lambda e: replace(e, dims=(Sum((Leaf(64, (0,)), Leaf(128, (0,)))), e.dims[1])),
    )
    assert fused.retrace(wrong) is None
    _simulation_rejects(fused, wrong)


def test_a_reduction_twice_is_caught(parallel: Checked) -> None:
    def add(entry: ModulePlan) -> ModulePlan:
        return replace(entry, outputs=(*entry.outputs, boundary("output", "all_reduce", axes=(0,))))

    _simulation_rejects(parallel, change_module(parallel.plan, "before", add))


def test_a_partial_bias_that_is_added_on_every_rank_is_caught(parallel: Checked) -> None:
    wrong = change_parameter(parallel.plan, "omega.bias", lambda e: replace(e, partial=()))
    _simulation_rejects(parallel, wrong)


def test_a_gather_left_out_is_caught(parallel: Checked) -> None:
    wrong = change_module(parallel.plan, "speak", lambda e: without(e, "all_gather"))
    _retrace_rejects(parallel, wrong)
    _simulation_rejects(parallel, wrong)


def test_the_model_is_left_on_meta(fused: Checked) -> None:
    fused.simulate(fused.plan)
    assert {p.device.type for p in fused.model.parameters()} == {"meta"}
    shapes = {n: tuple(p.shape) for n, p in fused.model.named_parameters()}
    assert shapes["stack.0.mixer.everything.weight"] == (96, 64)
    assert to_text(fused.plan.parameters[0].dims[0]) == "101@0"


class Changing(nn.Module):
    """A layer that a model changes when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.kind = "sparse"

    def change(self) -> None:
        self.kind, self.inner = "full", nn.Linear(2, 2)
        self.inner.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return self.inner(x)


def test_code_that_changes_a_bypassed_layer_changes_no_other_copy() -> None:
    model = nn.Sequential(Changing(), Changing())
    inner = model[1].inner
    copied = bypassed_copy(model, {"1": Bypass((("output", "0"),), 0, (), like="0")})
    again = copy.deepcopy(copied)
    copied[1].inner.extra = 1
    copied[1].change()
    copied[1].inner.extra = 2
    assert model[1].inner is inner
    assert not hasattr(inner, "extra")
    assert model[1].kind == again[1].kind == "sparse"
    assert again[1].inner.weight is inner.weight


def test_code_may_write_to_its_weights_when_it_is_first_called() -> None:
    """Behind every second layer activations are halved, and weights divided for good before."""
    config = transformers.RwkvConfig(
        hidden_size=32,
        attention_hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        vocab_size=64,
        context_length=32,
        rescale_every=2,
    )
    spec = ModelSpec("rescaled", config, transformers.RwkvForCausalLM, "float32")
    plan = solve_plan(spec, SolveOptions(2))
    assert plan.training is not None


def test_a_linear_layer_that_is_called_input_embeddings_gets_no_ids() -> None:
    """The tower of images embeds patches by a product, whose weight is sharded by its rows."""
    part = {"hidden_size": 768, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Siglip2Config(
        text_config={**part, "vocab_size": 64, "projection_size": 768},
        vision_config={**part, "num_patches": 16},
    )
    spec = ModelSpec("images", config, transformers.Siglip2Model, "float32")
    plan = solve_plan(spec, SolveOptions(2))
    entry = parameter_plans(plan)["vision_model.embeddings.patch_embedding.weight"]
    assert axes_of(entry.dims[0])


def test_a_replicated_layer_that_is_given_terms_of_a_sum_adds_its_bias_once() -> None:
    """The sum is delayed until behind a classifier of two labels, since it is small there."""
    config = transformers.SEWConfig(
        num_hidden_layers=2,
        hidden_size=96,
        intermediate_size=64,
        conv_dim=(16,) * 3,
        conv_kernel=(10, 3, 2),
        conv_stride=(5, 2, 2),
    )
    spec = ModelSpec("sounds", config, transformers.SEWForSequenceClassification, "float32")
    plan = solve_plan(spec, SolveOptions(2))
    assert module_plans(plan)["projector"].category == "row"
    assert parameter_plans(plan)["classifier.bias"].partial
