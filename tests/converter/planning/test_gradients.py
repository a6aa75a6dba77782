"""Where gradients are summed, and where activations are split over the sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.dims import Leaf, axes_of
from shardconv_runtime.format.module_steps import ReduceScatterStep
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import ModulePlan, Plan, parameter_plans
from shardconv_runtime.format.plan_json import of_sequence
from shardconv_runtime.parallel.boundary import in_use
from zoo.models import build
from zoo.tasks import specification
from zoo.variants import grouped

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

LAYERS = 2


def steps(modules: tuple[ModulePlan, ...]) -> Counter[tuple[str, str]]:
    """How often each op runs at each kind of module, over all layers."""
    return Counter(
        (name.rpartition(".")[2], step.op)
        for module in modules
        for name in expand_all(module.names)
        for step in (*module.inputs, *module.outputs)
        if step.op not in ("local_rows", "zero_out_of_shard")
    )


@pytest.fixture(scope="module")
def llama() -> Plan:
    return solve_plan(specification(build("causal", "llama")), SolveOptions(2, sequence_parallel=True))


def test_a_plain_decoder_gets_the_conjugates_of_its_reductions(llama: Plan) -> None:
    assert llama.training is not None
    assert llama.training.parallel_loss
    found = steps(llama.modules)
    assert found["self_attn", "grad_all_reduce"] == LAYERS
    assert found["mlp", "grad_all_reduce"] == LAYERS
    assert sum(n for (_, op), n in found.items() if op.startswith("grad_")) == 2 * LAYERS + 1  # and the head
    assert not any(p.grad_axes for p in llama.parameters)


def test_sequence_parallelism_moves_what_a_reduction_does(llama: Plan) -> None:
    assert llama.training is not None
    assert llama.training.sequence is not None
    found = steps(llama.training.sequence.modules)
    assert not any(op in ("all_reduce", "grad_all_reduce") for _, op in found)
    assert found["o_proj", "reduce_scatter"] == found["down_proj", "reduce_scatter"] == LAYERS
    assert found["self_attn", "all_gather"] == found["mlp", "all_gather"] == LAYERS
    norms = {name for g in llama.training.sequence.gradients for name in expand_all(g.names)}
    assert norms == {n for n in parameter_plans(llama) if "norm" in n}


def test_the_model_itself_has_all_positions_of_the_logits_for_its_loss() -> None:
    plan = solve_plan(specification(build("causal", "roc_bert")), SolveOptions(2, sequence_parallel=True))
    around = [module for module in of_sequence(plan).modules if "" in module.names]
    assert [step.op for module in around for step in module.outputs] == []


def test_padding_that_is_cut_off_before_the_loss_is_gathered_with_the_scores() -> None:
    """If only the scores were, the head's gradient would be full in them and partial in the padding."""
    of_type = build("causal", "inkling_text", unpadded_vocab_size=200)
    plan = solve_plan(specification(of_type), SolveOptions(2))
    assert plan.inference_only == ""
    assert plan.training is not None
    assert any(map(axes_of, parameter_plans(plan)["lm_head.weight"].dims))


def test_norms_over_split_heads_are_summed() -> None:
    plan = solve_plan(specification(build("causal", "qwen3")), SolveOptions(2))
    summed = {n for n, p in parameter_plans(plan).items() if p.grad_axes}
    assert summed == {n for n in parameter_plans(plan) if "q_norm" in n or "k_norm" in n}


def test_shared_heads_are_summed_over_the_ranks_that_share_them() -> None:
    """Two key/value heads on four ranks: each is held by two, along the second axis of the mesh."""
    model = grouped("causal", "llama")
    assert model is not None
    plan = solve_plan(specification(model), SolveOptions(4))
    assert plan.mesh == (2, 2)
    axes = {n.split(".")[-2]: p.grad_axes for n, p in parameter_plans(plan).items() if "self_attn" in n}
    assert axes == {"q_proj": (), "k_proj": (1,), "v_proj": (1,), "o_proj": ()}


def test_inference_leaves_the_steps_of_gradients_out(llama: Plan) -> None:
    for module in llama.modules:
        kept = in_use(module.inputs, training=False)
        assert not any(step.op.startswith("grad_") for step in kept)
        assert in_use(module.inputs, training=True) == list(module.inputs)


@pytest.mark.parametrize("tp", [5, 16])
def test_the_number_of_ranks_need_not_divide_the_usual_length(tp: int) -> None:
    config = build("causal", "llama", num_attention_heads=16, num_key_value_heads=16).config
    spec = replace(specification(build("causal", "llama")), config=config)
    plan = solve_plan(spec, SolveOptions(tp, sequence_parallel=True, check=tp == 5))
    assert plan.training is not None
    assert plan.training.sequence is not None


def test_the_sequence_is_of_any_length_behind_images_too() -> None:
    spec = specification(build("other", "llava"))
    plan = solve_plan(spec, SolveOptions(2, sequence_parallel=True, check=False))
    assert plan.training is not None
    assert plan.training.sequence is not None
    steps = [b for m in plan.training.sequence.modules for b in (*m.inputs, *m.outputs)]
    layouts = {b.layout for b in steps if isinstance(b, ReduceScatterStep)}
    assert layouts == {Leaf(0, (0,))}


def test_a_model_without_a_sequence_form_is_refused() -> None:
    with pytest.raises(SolveError, match=r"takes no token ids.*convert without sequence parallelism"):
        solve_plan(specification(build("other", "whisper")), SolveOptions(2, sequence_parallel=True))


def test_a_model_that_computes_something_else_without_a_cache_is_refused() -> None:
    with pytest.raises(SolveError, match="results change where no cache is filled"):
        solve_plan(specification(build("seq2seq", "fsmt")), SolveOptions(2, sequence_parallel=True))


@pytest.mark.parametrize(
    ("family", "name", "may_pad"),
    [("causal", "llama", True), ("causal", "git", False), ("seq2seq", "t5", False)],
)
def test_padding_is_tried(family: str, name: str, may_pad: bool) -> None:
    plan = solve_plan(specification(build(family, name)), SolveOptions(2, sequence_parallel=True))
    assert plan.training is not None
    assert plan.training.sequence is not None
    assert plan.training.sequence.may_pad is may_pad  # images before the text: what is returned is longer
