"""One run shows several things that a plan is for; what fails in it is told apart."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
import transformers.integrations.flex_attention
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.steps import Reduce
from shardconv_runtime.errors import SolveError
from shardconv_runtime.format.plan import Plan
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from shardconv import numeric_check
from shardconv.arguments import SolveOptions
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.passes import ModelSolver, solve_plan
from shardconv.simulation import rank_simulation
from shardconv.simulation.model_runs import ReusedModel
from shardconv.simulation.random_weights import USUAL, Draw, RandomWeights
from shardconv.simulation.rank_simulation import Logits, Simulation, Unprovable
from shardconv.verifying import implementations
from shardconv.verifying import proof as proofs
from shardconv.verifying.given_embeddings import with_embeddings
from shardconv.verifying.proof import prove
from shardconv.verifying.proof_case import Case

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


class Hasty(transformers.LlamaForCausalLM):
    """Computes with embeddings what it does not with ids: the number of local rows."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, **kwargs: Any) -> Any:
        """As any decoder."""
        if kwargs.get("inputs_embeds") is not None:
            rows = self.model.layers[0].self_attn.q_proj.weight.shape[0]
            kwargs["inputs_embeds"] = kwargs["inputs_embeds"] * rows
        return super().forward(**kwargs)


def case_of(model_class: type[nn.Module] = transformers.LlamaForCausalLM, tp: int = 2) -> Case:
    """What the ranks of a small model are simulated with."""
    config = transformers.LlamaConfig(**SIZES)
    cases: list[Case] = []

    def kept(case: Case, *rest: Any) -> Any:
        cases.append(case)
        return prove(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numeric_check, "prove", kept)
        solve_plan(ModelSpec("model", config, model_class, "float32"), SolveOptions(tp))
    return cases[0]


@pytest.fixture(scope="module")
def llama() -> Case:
    return case_of()


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[tuple[str, ...]]]:
    """How models of ranks are made, and the inputs of evaluations and backward passes, from now on."""
    made: list[str] = []
    runs: list[tuple[str, ...]] = []

    def counting(name: str) -> None:
        make = getattr(rank_simulation, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return make(*args, **kwargs)

        monkeypatch.setattr(rank_simulation, name, wrapped)

    counting("parallelize")
    counting("parallelize_for_training")
    evaluate, wrong = Simulation.evaluate, Simulation.wrong_gradient

    def evaluated(self: Simulation, inputs: TraceInputs, **how: Any) -> Any:
        runs.append(tuple(sorted(inputs.tensors)))
        return evaluate(self, inputs, **how)

    def differentiated(self: Simulation, inputs: TraceInputs) -> str:
        runs.append(("gradients", *sorted(inputs.tensors)))
        return wrong(self, inputs)

    monkeypatch.setattr(Simulation, "evaluate", evaluated)
    monkeypatch.setattr(Simulation, "wrong_gradient", differentiated)
    return made, runs


def test_few_runs_show_all(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made, runs = counted(monkeypatch)
    found = prove(replace(llama))
    assert found.attentions is not None
    assert found == proofs.Proof(
        found.case, "", True, ("inputs_embeds",), (), proofs.LabelsProof(), found.attentions
    )
    tokens, embeddings = ("attention_mask", "input_ids"), ("attention_mask", "inputs_embeds")
    assert runs == [
        (*tokens, "labels"),
        ("gradients", *tokens, "labels"),
        embeddings,
        ("gradients", *embeddings),
        tokens,  # flex attention
    ]
    assert sorted(made) == ["parallelize"] * 6 + ["parallelize_for_training"] * 4  # on two ranks


def test_nothing_is_compiled(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor alone takes longer to import than this proof; later calls of this process compile as ever."""

    def compiled(function: Any = None, **options: Any) -> None:
        raise AssertionError(f"{function} is compiled")

    attention = transformers.integrations.flex_attention.WrappedFlexAttention
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(attention, "_instance", None)
    ran: list[str] = []
    evaluate = Simulation.evaluate

    def evaluated(self: Simulation, inputs: TraceInputs, **how: Any) -> Any:
        ran.append(self.model.config._attn_implementation)
        return evaluate(self, inputs, **how)

    monkeypatch.setattr(Simulation, "evaluate", evaluated)
    assert not implementations.wrong_others(llama)
    assert ran == ["flex_attention"]
    assert torch.compile is compiled
    with pytest.raises(AssertionError, match="flex_attention"):
        attention(False)()()


def test_one_thread_computes_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(ModelSolver, "_solved", lambda *_: found.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        spec = ModelSpec("model", transformers.LlamaConfig(**SIZES), transformers.LlamaForCausalLM, "float32")
        solve_plan(spec, SolveOptions(2))
        assert (found, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(1)


def test_plain_parts_that_embeddings_leave_out_are_run_too(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model takes embeddings only without its other inputs, these have a run of their own."""

    def alone(case: Case, names: Collection[str]) -> list[TraceInputs]:
        (given,) = with_embeddings(case, names)
        return [replace(given, tensors={n: t for n, t in given.tensors.items() if n == "inputs_embeds"})]

    _, runs = counted(monkeypatch)
    monkeypatch.setattr(proofs, "with_embeddings", alone)
    assert prove(replace(llama)).arguments == ("inputs_embeds",)
    assert runs[2:4] == [("inputs_embeds",), ("attention_mask", "input_ids")]


def test_embeddings_with_which_the_plan_does_not_hold() -> None:
    found = prove(case_of(Hasty))
    assert found.arguments == ()
    assert found.parallel_loss
    assert not found.wrong_gradient
    assert not found.wrong


class Strict(transformers.LlamaForCausalLM):
    """Takes no embeddings, though its forward names them."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, **kwargs: Any) -> Any:
        """As any decoder."""
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("ids are needed")
        return super().forward(**kwargs)


def test_a_model_that_takes_no_embeddings_is_shown_at_once_too() -> None:
    """The other implementations, own logits and attention weights are, with ids."""
    told: list[str] = []
    found = prove(replace(case_of(Strict)), told.append)
    assert told == ["outputs, loss and gradients", "other implementations and inputs"]
    assert (found.wrong_gradient, found.arguments, found.wrong) == ("", (), ())
    assert found.parallel_loss
    assert found.attentions is not None


def test_embeddings_that_only_the_usual_implementations_take(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are proven by themselves."""
    evaluate = Simulation.evaluate

    def evaluated(self: Simulation, inputs: TraceInputs, **options: Any) -> Any:
        if "inputs_embeds" in inputs.tensors and inputs.options.get("output_attentions"):
            raise Unprovable("no embeddings beside attention weights")
        return evaluate(self, inputs, **options)

    monkeypatch.setattr(Simulation, "evaluate", evaluated)
    assert prove(replace(llama)).arguments == ("inputs_embeds",)


def test_gradients_that_are_wrong_with_embeddings_alone(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Simulation.wrong_gradient

    def broken(self: Simulation, inputs: TraceInputs) -> str:
        return "wrong" if "inputs_embeds" in inputs.tensors else wrong(self, inputs)

    monkeypatch.setattr(Simulation, "wrong_gradient", broken)
    found = prove(replace(llama))
    assert (found.wrong_gradient, found.arguments, found.parallel_loss) == ("", (), True)


def test_gradients_that_are_wrong_without_labels_alone(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With embeddings they are wrong as well, but nobody trains such a model."""
    monkeypatch.setattr(
        Simulation, "wrong_gradient", lambda self, inputs: "" if "labels" in inputs.tensors else "wrong"
    )
    found = prove(replace(llama))
    assert (found.wrong_gradient, found.arguments) == ("wrong", ("inputs_embeds",))


def test_a_loss_that_is_not_the_models(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Simulation.wrong_gradient
    monkeypatch.setattr(
        Simulation,
        "wrong_gradient",
        lambda self, inputs: "wrong" if "labels" in inputs.tensors else wrong(self, inputs),
    )
    found = prove(replace(llama))
    refused = proofs.LabelsProof(("labels",), "wrong")
    assert found == proofs.Proof(found.case, "", False, ("inputs_embeds",), (), refused, found.attentions)


def test_own_logits_that_are_wrong(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    own = rank_simulation._with_its_logits

    def broken(model: nn.Module, plan: Plan, comm: Any) -> nn.Module:
        model = own(model, plan, comm)
        model.get_output_embeddings().register_forward_hook(lambda *given: given[-1] * 2)  # type: ignore[operator]
        return model

    monkeypatch.setattr(rank_simulation, "_with_its_logits", broken)
    with pytest.raises(Exception, match="simulated ranks differ from the unsharded model"):
        prove(replace(llama))


def test_two_evaluations_make_models_once(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = counted(monkeypatch)
    simulation = Simulation(llama.plan, llama.model)
    first = simulation.evaluate(llama.inputs, calls=2, logits=Logits.GATHERED)
    assert simulation.evaluate(llama.inputs, calls=2, logits=Logits.GATHERED) == first
    assert made == ["parallelize"] * 2


class Keeping(nn.Module):
    """Keeps what it was called with, in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(1))
        self.replaced = self.added = None

    def forward(self, x: Tensor) -> Tensor:
        """Something else in each call."""
        y = x * self.weight * (1 + self.count) + (0 if self.replaced is None else self.replaced)
        if self.replaced is None:
            self.register_forward_hook(lambda *given: given[-1] + 1)
        self.count += 1
        self.replaced = x
        self.added_later = x
        return y


def test_a_reused_model_begins_as_it_was_made() -> None:
    reused = ReusedModel(Keeping())
    x = torch.ones(2)
    first = reused.fresh()(x)
    first.sum().backward()
    model = reused.fresh()
    assert not hasattr(model, "added_later")
    assert model.weight.grad is None
    assert torch.equal(model(x), first)


def plan_of_small() -> Plan:
    """With its proof."""
    config = transformers.LlamaConfig(**SIZES)
    spec = ModelSpec("model", config, transformers.LlamaForCausalLM, "float32")
    return solve_plan(spec, SolveOptions(2))


def failing_until(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[Case]:
    """Let the unsharded model fail on the weights of other seeds; what is tried."""
    tried: list[Case] = []

    def proven(case: Case, *rest: Any) -> proofs.Proof:
        tried.append(case)
        if case.draw.seed != seed:
            raise Unprovable("division by zero")
        return prove(case)

    monkeypatch.setattr(numeric_check, "prove", proven)
    return tried


def test_other_weights_are_tried_where_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = failing_until(monkeypatch, 2)
    (note,) = plan_of_small().notes
    assert note == (
        "proven with weights of seed 2, matrices times 0.25; the unsharded model fails with "
        "weights of seed 0: division by zero; weights of seed 1: division by zero; "
        "weights of seed 4, vectors times 0.02: division by zero"
    )
    assert [case.draw.seed for case in tried] == [0, 1, 4, 2]


class Brittle(models.DenseModel):
    """The sine of large numbers, unless its gain is as small as it is initialized: rounding decides."""

    usual = 0.02

    def __init__(self, config: models.OddConfig) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.empty(1))

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """As of its base class."""
        logits = super().forward(input_ids).logits
        assert logits is not None
        return CausalLMOutput(logits=torch.sin(logits * (self.gain / self.usual) ** 8))


class MoreBrittle(Brittle):
    """Whatever its gain is."""

    usual = 1e-6


def brittle(model_class: type[Brittle]) -> Plan:
    """The plan of such a model."""
    return solve_plan(ModelSpec("brittle", models.OddConfig(), model_class, "float32"), SolveOptions(2))


def test_numbers_that_amplify_rounding_prove_nothing() -> None:
    (note,) = (note for note in brittle(Brittle).notes if note.startswith("proven with"))
    assert note.startswith("proven with weights of seed 4, vectors times 0.02; the unsharded model fails")
    assert "weights of seed 0: it amplifies rounding" in note
    with pytest.raises(Unprovable, match=r"seed 0: it amplifies rounding; .*pass --no-check"):
        brittle(MoreBrittle)


def test_a_wrong_plan_of_a_usual_model_is_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only results that the last digits of weights change are rounding."""
    monkeypatch.setattr(Reduce, "__call__", lambda self, x: x)
    spec = ModelSpec("dense", models.OddConfig(), models.DenseModel, "float32")
    with pytest.raises(SolveError, match="the plan is wrong: simulated ranks differ"):
        solve_plan(spec, SolveOptions(2))


def test_an_error_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = failing_until(monkeypatch, 9)
    with pytest.raises(Unprovable, match=r"seed 0: division by zero; .* reverse order: division by zero"):
        plan_of_small()
    first, *_, last = tried
    assert torch.equal(first.inputs.tensors["input_ids"].flip(1), last.inputs.tensors["input_ids"])
    assert last.inputs.tensors["attention_mask"] is first.inputs.tensors["attention_mask"]


def test_other_seeds_and_scales_are_other_weights(llama: Case) -> None:
    def drawn(draw: Draw) -> Tensor:
        with torch.device("meta"):
            model = nn.ModuleDict({"lm_head": nn.Linear(3, 4, bias=False)})
        RandomWeights(llama.plan, draw).put_into(model, None, torch.float32, gradients=False)
        return model["lm_head"].weight  # type: ignore[return-value]

    assert torch.equal(drawn(Draw()), drawn(USUAL))
    assert not torch.equal(drawn(Draw(1)), drawn(USUAL))
    assert torch.allclose(drawn(Draw(1, 4.0)), 4 * drawn(Draw(1)))
