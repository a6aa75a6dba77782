"""Stages of models: what is cut, what is sent, what stands in, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import PlanError, ShardconvError, SolveError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.pipeline_stages import PlaceholderDim, StagedModule
from shardconv_runtime.format.plan import Plan, parameter_plans
from shardconv_runtime.format.plan_json import of_sequence
from shardconv_runtime.format.stage_names import held_before, held_names, staged_modules, stages_of
from shardconv_runtime.meta.meta_model import build_model
from small_models import small_config
from torch import Tensor, nn
from zoo.models import build
from zoo.stages_run import specification

from shardconv.arguments import SolveOptions
from shardconv.dim_analysis.rules import RULES
from shardconv.inputs.trace_inputs import TraceInputs, trace_inputs
from shardconv.passes import solve_plan
from shardconv.plan_forms import without_extra_outputs
from shardconv.pp.tape_units import Crossings, TapeUnits, Uncut
from shardconv.reporting.plan_lines import bubble, crossing_bytes, stage_bytes, stage_lines
from shardconv.reporting.report import report
from shardconv.simulation.rank_simulation import Simulation
from shardconv.tracing.trace import trace


def spec(**changes: Any) -> ModelSpec:
    """A Llama of four layers."""
    config = small_config(**({"num_hidden_layers": 4} | changes))
    return ModelSpec("small", config, transformers.LlamaForCausalLM, dtype="float32")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two stages of two ranks; proven when it was solved."""
    return solve_plan(spec(), SolveOptions(2, pp=2))


def simulated(plan: Plan) -> float:
    """How far the last stage of a plan is from the unsharded model."""
    model = build_model(transformers.LlamaForCausalLM, spec().config, torch.float32)
    inputs, _ = trace_inputs(model, RULES)
    return Simulation(plan, model).evaluate_stages(without_extra_outputs(inputs))


def with_module(plan: Plan, name: str, change: Callable[[StagedModule], StagedModule]) -> Plan:
    """The plan with another entry of a module."""
    assert plan.stages is not None
    entry, _ = staged_modules(plan)[name]
    modules = tuple(change(each) if each is entry else each for each in plan.stages.modules)
    return replace(plan, stages=replace(plan.stages, modules=modules))


def test_one_hidden_state_is_sent(plan: Plan) -> None:
    assert plan.stages is not None
    assert plan.stages.layers == ((0, 1), (2, 3))
    assert plan.stages.computed_again == ("model.rotary_emb",)
    sent = {name: entry.sent for name, (entry, _) in staged_modules(plan).items() if entry.sent}
    assert [(v.item, v.to, v.per_token) for v in sent["model.layers.1"]] == [(0, (1,), 32)]
    assert len(sent) == 1
    assert crossing_bytes(plan) == {(0, 1): 32 * 4}


def test_each_stage_holds_its_layers(plan: Plan) -> None:
    names = parameter_plans(plan).keys()
    first, last = (set(held_names(plan, stage, names)) for stage in (0, 1))
    assert not first & last
    assert first | last == set(names)
    assert {n for n in first if "layers" not in n} == {"model.embed_tokens.weight"}
    assert {n for n in last if "layers" not in n} == {"model.norm.weight", "lm_head.weight"}
    assert sum(map(sum, stage_bytes(plan))) == sum(map(sum, stage_bytes(replace(plan, stages=None))))


def test_a_plan_with_stages_is_read_as_it_was_written(plan: Plan) -> None:
    assert plan_json.loads(plan_json.dumps(plan)) == plan


def test_the_report_shows_stages(plan: Plan) -> None:
    text = report(plan)
    assert "STAGES  2, with 2 ranks each" in text
    assert "stage 0 to stage 1: 128 B per token" in text
    assert "loss           from shards of the logits" in text


def test_stages_are_right_on_numbers(plan: Plan) -> None:
    assert simulated(plan) < 1e-12


def test_three_stages_of_given_layers() -> None:
    plan = solve_plan(spec(), SolveOptions(1, pp=3, stages="0-0,1-1,2-3"))
    assert plan.stages is not None
    assert plan.stages.layers == ((0, 0), (1, 1), (2, 3))
    assert simulated(plan) < 1e-12


def test_a_tied_embedding_is_held_by_both_ends() -> None:
    plan = solve_plan(spec(tie_word_embeddings=True), SolveOptions(2, pp=2))
    names = ["model.embed_tokens.weight"]
    assert held_names(plan, 0, names) == {names[0]: names[0]}
    assert held_names(plan, 1, names) == {names[0]: "lm_head.weight"}
    assert held_names(plan, (0, 1), names) == {names[0]: names[0]}
    assert (held_before(plan, 0, 2), held_before(plan, 1, 2)) == ({}, {names[0]: "lm_head.weight"})
    assert (stages_of(plan, 1, 2), stages_of(plan, 0, 1)) == ((1,), (0, 1))


def test_a_tensor_that_is_not_sent_is_missed(plan: Plan) -> None:
    with pytest.raises(SolveError, match="the last stage's results differ from the unsharded model's by"):
        simulated(with_module(plan, "model.layers.1", lambda entry: replace(entry, sent=())))


def test_a_cache_that_was_not_traced_is_refused(plan: Plan) -> None:
    wrong = with_module(plan, "model.layers.2", lambda entry: replace(entry, takes_cache=False, cache=()))
    with pytest.raises(SolveError, match="is given a cache, and was traced without one"):
        simulated(wrong)


def test_a_result_of_another_shape_is_not_sent(plan: Plan) -> None:
    def longer(entry: StagedModule) -> StagedModule:
        item = entry.items[0]
        assert item.tensor is not None
        dims = (*item.tensor.dims[:1], PlaceholderDim(size=Leaf(7)), *item.tensor.dims[2:])
        return replace(entry, items=(replace(item, tensor=replace(item.tensor, dims=dims)),))

    with pytest.raises(SolveError, match=r"model\.layers\.1 returns .* another stage cannot receive it"):
        simulated(with_module(plan, "model.layers.1", longer))


def test_a_module_on_the_wrong_stage_gives_other_numbers(plan: Plan) -> None:
    wrong = with_module(plan, "model.norm", lambda entry: replace(entry, stages=(0,)))
    with pytest.raises(SolveError, match="the last stage's results differ from the unsharded model's by"):
        simulated(wrong)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda e: replace(e, stages=(2,)), "expected stages below 2"),
        (lambda e: replace(e, returns="dict"), "expected one of tensor, tuple, list"),
        (lambda e: replace(e, sent=(replace(e.sent[0], item=7),)), "item 7 is not a tensor"),
        (lambda e: replace(e, sent=(replace(e.sent[0], to=(0,)),)), "made on one stage"),
        (
            lambda e: replace(e, cache=(replace(e.cache[0], method="reset"),)),
            "not a method that updates a cache",
        ),
    ],
)
def test_malformed_stages_are_refused(
    plan: Plan, change: Callable[[StagedModule], StagedModule], problem: str
) -> None:
    with pytest.raises(ShardconvError, match=problem):
        plan_json.dumps(with_module(plan, "model.layers.1", change))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ShardconvError, match="which makes 4 stages at most, not 5"):
        solve_plan(spec(), SolveOptions(1, pp=5))


def test_stages_of_the_sequence_parallel_form() -> None:
    """The first layer makes parts of the sequence, the head gathers them; a plan of other ways is refused."""
    plan = solve_plan(spec(), SolveOptions(2, pp=2, sequence_parallel=True))
    form = of_sequence(plan)
    parts = {}
    for fqn, (entry, _) in staged_modules(form).items():
        tensor = entry.items[0].tensor
        assert tensor is not None
        parts[fqn] = [(dim.times, dim.over) for dim in tensor.dims]
    changed = {fqn: dims[1] for fqn, dims in parts.items() if dims[1] != (1, 1)}
    assert changed == {"model.layers.0": (1, 2), "lm_head": (2, 1)}
    assert plan_json.loads(plan_json.dumps(plan)) == plan
    assert plan.training is not None
    assert plan.training.sequence is not None
    sequence = replace(plan.training.sequence, stages=plan.training.sequence.stages[1:])
    wrong = replace(plan, training=replace(plan.training, sequence=sequence))
    with pytest.raises(PlanError, match=r"training\.sequence\.stages: other modules"):
        plan_json.loads(plan_json.dumps(wrong))


def test_interleaving_waits_less() -> None:
    assert bubble(4, 4) == pytest.approx(3 / 7)
    assert bubble(4, 16, 2) == pytest.approx(1.5 / 17.5)


def test_a_report_says_how_long_processes_of_several_stages_wait() -> None:
    lines = [
        line for line in stage_lines(solve_plan(spec(), SolveOptions(2, pp=4, check=False))) if "idle" in line
    ]
    assert lines == [
        "  idle           42.9% with 4 microbatches (GPipe, 1F1B)",
        "  idle           11.1% with 4 microbatches on 4 processes with 2 stages each (interleaved)",
        "  idle           15.8% with 16 microbatches (GPipe, 1F1B)",
        "  idle           3.0% with 16 microbatches on 4 processes with 2 stages each (interleaved)",
    ]


# Models that cannot be cut ---------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer that may leave its keys to later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(8, 8)

    def forward(self, x: Tensor, shared: list[Tensor] | None = None) -> Tensor:
        """x: [B, S, 8]."""
        keys = self.keys(x)
        if shared is not None:
            shared.append(keys)
            keys = shared[0]
        return x + keys.tanh()


class Stack(nn.Module):
    """Layers that are run in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [B, S]."""
        x = self.embedding(input_ids)
        shared: list[Tensor] | None = [] if self.way == "shared" else None
        for _ in range(2 if self.way == "loop" else 1):
            for layer in self.layers:
                x = layer(x, shared) if shared is not None else layer(x)
        return x @ self.layers[0].keys.weight if self.way == "reads weights" else x


def crossings(way: str) -> Crossings:
    """Of a stack, traced."""
    with torch.device("meta"):
        model = Stack(way)
    inputs = TraceInputs({"input_ids": torch.arange(9).view(3, 3)}, {})
    tape = trace(model, inputs.tensors, RULES)
    return Crossings(TapeUnits(tape, {name: name for name, _ in model.named_parameters()}))


def test_borders_lie_behind_layers() -> None:
    found = crossings("plain")
    assert [border.layer for border in found.units.borders] == [f"layers.{i}" for i in range(4)]
    assert [found.conflict(border.position) for border in found.units.borders[:-1]] == [""] * 3
    (value,) = found.needed(found.units.borders[1].position, len(found.tape.events))
    assert (value.unit, value.port) == ("layers.1", "output")


def test_keys_that_layers_share_cannot_cross() -> None:
    found = crossings("shared")
    assert "keys computes inside of layers." in found.conflict(found.units.borders[1].position)


def test_weights_of_another_stage_cannot_be_read() -> None:
    found = crossings("reads weights")
    with pytest.raises(Uncut, match=r"reads the parameter layers\.0\.keys\.weight of layers\.0"):
        found.needed(found.units.borders[1].position, len(found.tape.events))


def test_layers_of_a_loop_are_known() -> None:
    layers = [call.fqn for call in crossings("loop").tape.calls if call.fqn == "layers.0"]
    assert len(layers) == 2


@pytest.mark.parametrize("model_type", ["bloom", "gptj"])
def test_layers_that_return_more_than_hidden_states(model_type: str) -> None:
    """The proof leaves out layers that are planned alike, also those whose results are sent."""
    sizes = {"n_layer": 6, "n_head": 4, "n_embd": 64, "hidden_size": 64, "rotary_dim": 4}
    config = transformers.CONFIG_MAPPING[model_type](vocab_size=256, **sizes)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    plan = solve_plan(ModelSpec("small", config, model_class, dtype="float32"), SolveOptions(2, pp=3))
    assert plan.stages is not None
    assert plan.training is not None


def test_a_part_of_a_model_that_asks_its_parameters_for_their_dtype() -> None:
    """On a stage that holds none of them, as here in the proof, where its layers are left out."""
    model = build("causal", "openai-gpt", n_layer=6)
    plan = solve_plan(specification(model), SolveOptions(2, pp=3))
    assert plan.stages is not None
    assert not plan.inference_only
