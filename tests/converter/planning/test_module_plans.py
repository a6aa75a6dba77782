"""What a plan says of each module: categories, boundary steps, partial parameters, ties, logits."""

from __future__ import annotations

import models
import pytest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import to_text
from shardconv_runtime.format.plan import Plan, module_plans, parameter_plans
from shardconv_runtime.parallel.boundary import in_use

SHAPES = [
    models.OddModel,
    models.FusedModel,
    models.InterleavedModel,
    models.ParallelModel,
    models.LoopedModel,
    models.DenseModel,
    models.SquaresModel,
    models.TiedModel,
    models.RmsModel,
    models.OffsetRmsModel,
    models.LayerNormModel,
]


IN_FOUR = (models.FusedModel, models.TiedModel, models.LayerNormModel)
"""Those that four ranks, a mesh of two axes, show; three ranks, which divide nothing, all of them."""
CASES = [
    pytest.param(model, tp, marks=[pytest.mark.slow] * (tp == 2 or (tp == 4 and model not in IN_FOUR)))
    for model in SHAPES
    for tp in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("model", "tp"), CASES)
def test_plans_are_proven_and_can_be_written(model: type[models.OddModel], tp: int) -> None:
    """``solve_plan`` simulates the ranks in float64 and raises where the numbers differ."""
    plan = models.plan_of(model, tp, words=211, tie_word_embeddings=model is models.TiedModel)
    assert plan_json.loads(plan_json.dumps(plan)) == plan
    assert not [n for n in plan.notes if "collectives were accepted" not in n]


def test_a_plan_is_the_same_each_time() -> None:
    assert models.plan_of(models.FusedModel, 4) == models.plan_of(models.FusedModel, 4)


def collectives(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """(port, op) of every module that moves data in the forward pass."""
    found = {
        name: [(b.port, b.op) for b in in_use((*entry.inputs, *entry.outputs), training=False)]
        for name, entry in module_plans(plan).items()
    }
    return {name: steps for name, steps in found.items() if steps}


def test_categories_and_one_reduction_for_each_branch() -> None:
    plan = models.plan_of(models.OddModel, 2)
    modules = module_plans(plan)
    assert {n.rpartition(".")[2]: m.category for n, m in modules.items() if n.startswith("stack.0.")} == {
        "mixer": "boundary", "alpha": "column", "beta": "column", "gamma": "column", "omega": "row",
        "chewer": "boundary", "both": "column", "shut": "row",
    }  # fmt: skip
    reduce = [("output", "all_reduce")]
    assert collectives(plan) == {
        "lookup": [("input.input", "local_rows"), ("output", "zero_out_of_shard"), *reduce],
        **{f"stack.{i}.mixer.omega": reduce for i in (0, 1)},
        **{f"stack.{i}.chewer.shut": reduce for i in (0, 1)},
        "speak": [("output", "all_gather")],
    }
    assert modules["stack.0.mixer.omega"].input_is_parallel
    assert plan.logits is not None
    assert (plan.logits.module, plan.logits.port) == ("speak", "output")


def test_the_bias_of_a_plain_row_parallel_layer_is_added_once_after_the_reduction() -> None:
    entry = parameter_plans(models.plan_of(models.OddModel, 2))["stack.0.mixer.omega.bias"]
    assert entry.partial == ()
    assert "after the reduction" in entry.reason


def test_the_bias_of_a_row_parallel_layer_of_another_class_is_partial() -> None:
    plan = models.plan_of(models.DenseModel, 2)
    parameters = parameter_plans(plan)
    assert parameters["stack.0.chewer.down.offset"].partial == (0,)
    assert [to_text(d) for d in parameters["stack.0.chewer.up.offset"].dims] == ["96@0"]
    assert parameters["stack.0.chewer.up.offset"].partial == ()
    assert module_plans(plan)["stack.0.chewer.down"].category == "row"


def test_a_weight_of_three_dims_is_no_stack_of_experts() -> None:
    plan = models.plan_of(models.HeadsModel, 2)
    categories = {name: entry.category for name, entry in module_plans(plan).items()}
    assert (categories["stack.0.chewer.up"], categories["stack.0.chewer.down"]) == ("column", "row")


def test_side_by_side_branches_share_one_reduction() -> None:
    plan = models.plan_of(models.ParallelModel, 2)
    reductions = [
        name for name, steps in collectives(plan).items() if any(op == "all_reduce" for _, op in steps)
    ]
    assert not any(name.startswith(("stack.0.mixer", "stack.0.chewer")) for name in reductions)
    assert len(reductions) <= 3
    assert parameter_plans(plan)["stack.0.mixer.omega.bias"].partial == (0,)


def test_a_layer_that_is_called_twice_does_the_same_each_time() -> None:
    plan = models.plan_of(models.LoopedModel, 2, zork=16, blip=8)
    assert [to_text(d) for d in parameter_plans(plan)["stack.0.mixer.alpha.weight"].dims] == ["8@0*12", "64"]
    assert collectives(plan)["stack.0.mixer.omega"] == [("output", "all_reduce")]


def test_a_tied_table_is_sharded_once_for_both() -> None:
    plan = models.plan_of(models.TiedModel, 2, words=1009, tie_word_embeddings=True)
    assert plan.tied == (("speak.weight", "lookup.weight"),)
    parameters = parameter_plans(plan)
    assert "speak.weight" not in parameters
    assert [to_text(d) for d in parameters["lookup.weight"].dims] == ["1009@0", "64"]
    assert module_plans(plan)["lookup"].category == "vocab"


def test_a_square_is_reduced_before_it_is_taken() -> None:
    plan = models.plan_of(models.SquaresModel, 2, girth=256)
    entry = parameter_plans(plan)["stack.0.chewer.weight"]
    assert [to_text(d) for d in entry.dims] == ["64@0", "256"]


def test_unused_parameters_stay_replicated() -> None:
    entry = parameter_plans(models.plan_of(models.ParallelModel, 2))["stack.0.between.weight"]
    assert entry.reason == "the traced forward pass does not use it"


def test_alike_layers_are_written_once() -> None:
    plan = models.plan_of(models.OddModel, 2, repeats=5)
    names = {name for entry in plan.parameters for name in entry.names}
    assert "stack.{0..4}.mixer.alpha.weight" in names
    assert set(parameter_plans(plan)) == {
        n for n, _ in models.OddModel(models.OddConfig(repeats=5)).named_parameters()
    }


def test_one_rank_shards_nothing() -> None:
    plan = models.plan_of(models.FusedModel, 1)
    assert plan.mesh == ()
    assert not plan.modules
    assert all(
        not entry.partial and "@" not in "".join(map(to_text, entry.dims)) for entry in plan.parameters
    )


def test_a_module_without_parameters_has_the_same_steps_at_each_call() -> None:
    """Its calls are free to differ until the cheapest solution makes use of that."""
    plan = models.plan_of(models.TwiceTamedModel, 2, repeats=4, words=1001)
    assert plan.training is not None


def test_a_norm_is_not_called_on_shards_and_on_other_tensors() -> None:
    """It has one formula, and a mean over the ranks is not that of a tensor that all of them hold."""
    plan = models.plan_of(models.TwiceNormedModel, 2, girth=256)
    assert not [entry for entry in module_plans(plan).values() if entry.norm]
    assert plan.training is not None
