"""Whatever is wrong with a plan is found before it is written.

Right plans are corrupted at random (``mutations``). Each corrupted plan goes through what stands between
the solver and the disk: the codec's checks, the retrace and the simulated ranks. If all of them let it
pass, it is run by other means: weights of another seed and size, cut by the tests' own code, other tokens
and another length. Its outputs must then be those of the unsharded model; else the check has a hole.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import models
import pytest
import torch
import transformers
from converted import local_part
from kept_checks import keeping_checks
from mutations import MUTATIONS, mutations
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.comm.collectives import Communicator
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Leaf, Sum
from shardconv_runtime.format.names import expand_all
from shardconv_runtime.format.plan import LogitsInfo, Plan, module_plans, parameter_plans
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.format.typed_json import MalformedError
from shardconv_runtime.parallel.build import owner_of, parallelize, retie, stored_tensors
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from shardconv import plan_forms
from shardconv.arguments import SolveOptions
from shardconv.inputs.trace_inputs import TraceInputs
from shardconv.numeric_check import NumericCheck
from shardconv.passes import solve_plan
from shardconv.planning.layout import Layouts
from shardconv.simulation.model_runs import Float64
from shardconv.simulation.rank_threads import run_ranks
from shardconv.verifying import small_shapes
from shardconv.verifying.proof import prove
from shardconv.verifying.retrace import _unlike_ranks, retrace

MUTANTS = int(os.environ.get("SHARDCONV_MUTANTS", "8"))
"""Corrupted plans of each model in the slow tests; many more for a long search."""
FEW = 3
"""The same in the default run, of the models that are in ``EVERY_DAY``."""
TOLERANCE = 1e-9


SIZES = {
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(config_class: type[transformers.PreTrainedConfig], **changes: Any) -> ModelSpec:
    """A type of transformers, small and in float64."""
    config = config_class(**{**SIZES, **changes})
    model_class = transformers.AutoModelForCausalLM._model_mapping[config_class]
    return ModelSpec(config_class.__name__, config, model_class, "float64")


def odd(model_class: type[models.OddModel], **sizes: Any) -> ModelSpec:
    """A model of the tests' own, in float64."""
    return ModelSpec(model_class.__name__, models.OddConfig(**sizes), model_class, "float64")


def encoder() -> ModelSpec:
    """A bidirectional model."""
    return ModelSpec("encoder", transformers.BertConfig(**SIZES), transformers.BertForMaskedLM, "float64")


class Loud(nn.Embedding):
    """A class of its own, which the runtime wraps instead of replacing it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class PlacedModel(models.OddModel):
    """Has more positions than are traced."""

    def __init__(self, config: models.OddConfig) -> None:
        super().__init__(config)
        self.places = Loud(120, config.width)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.lookup(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.stack:
            x = layer(x)
        return CausalLMOutput(logits=self.speak(x))


CASES: dict[str, tuple[Callable[[], ModelSpec], int]] = {
    "fused projections": (lambda: odd(models.FusedModel), 2),
    "fused projections, uneven": (lambda: odd(models.FusedModel), 3),
    "biases that are partial": (lambda: odd(models.DenseModel), 2),
    "branches side by side": (lambda: odd(models.ParallelModel), 2),
    "tied head": (lambda: odd(models.TiedModel, tie_word_embeddings=True), 2),
    "rms norm over a sharded dim": (lambda: odd(models.OffsetRmsModel), 3),
    "layer norm over a sharded dim": (lambda: odd(models.LayerNormModel), 2),
    "many layers": (lambda: odd(models.InterleavedModel, repeats=6), 2),
    "grouped heads, a mesh of two axes": (lambda: small(transformers.LlamaConfig, num_key_value_heads=2), 4),
    "uneven heads and words": (lambda: small(transformers.LlamaConfig, vocab_size=251), 3),
    "transposed fused weights": (lambda: small(transformers.GPT2Config), 2),
    "experts": (lambda: small(transformers.MixtralConfig, num_local_experts=4), 2),
    "whole experts": (lambda: small(transformers.MixtralConfig, num_local_experts=4), 2),
    "an embedding of its own class": (lambda: odd(PlacedModel), 2),
    "an encoder": (encoder, 2),
}
EVERY_DAY = ("rms norm over a sharded dim", "grouped heads, a mesh of two axes", "experts")


# What stands between the solver and the disk ---------------------------------------------------------


@dataclass(frozen=True)
class Solved:
    """A right plan with all that it is checked with."""

    plan: Plan
    layouts: Layouts
    model: nn.Module
    inputs: TraceInputs
    check: NumericCheck

    def reason_against(self, plan: Plan) -> str:
        """Which check refuses a plan; empty if none does."""
        for check in (self._format, self._retrace, self._simulate):
            try:
                check(plan)
            except Exception:  # whatever is raised, nothing is written
                return check.__name__
        return ""

    @staticmethod
    def _format(plan: Plan) -> None:
        assert plan_json.loads(plan_json.dumps(plan)) == plan

    def _retrace(self, plan: Plan) -> None:
        assert retrace(plan, self.layouts, self.model, self.inputs, self.check.bypassed) is None

    def _simulate(self, plan: Plan) -> None:
        proof = prove(self.check.case(plan))
        assert not proof.wrong_gradient  # such a plan is written, but for inference only


def solved(spec: ModelSpec, tp: int, experts: str = "tp") -> Solved:
    """Solve, and keep what the checks were given."""
    retraced: list[tuple[Any, ...]] = []

    def kept(*given: Any) -> Any:
        retraced.append(given)
        return retrace(*given)

    with pytest.MonkeyPatch.context() as patch, keeping_checks() as checks:
        patch.setattr(plan_forms, "retrace", kept)
        plan = solve_plan(spec, SolveOptions(tp, experts=experts))
    _, layouts, model, inputs, _ = retraced[-1]
    return Solved(plan, layouts, model, inputs, checks[-1])


# Running a plan by other means -----------------------------------------------------------------------


@dataclass
class Truth:
    """The unsharded model on random weights, and what it returns for some tokens."""

    model: nn.Module
    inputs: list[dict[str, Tensor]]
    state: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        unsharded = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(1)
        for name, tensor in stored_tensors(unsharded):
            if tensor.is_floating_point():
                random = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                self.state[name] = random * (0.2 if tensor.dim() > 1 else 1.0)
            else:
                self.state[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, first in _ties(unsharded).items():
            self.state[name] = self.state[first]
        _fill(unsharded, self.state)
        self.outputs = _run(unsharded, self.inputs)

    def difference(self, plan: Plan) -> float:
        """Largest difference of what the plan's ranks return, relative to the largest value.

        Raises:
            Exception: the plan cannot be run.
        """
        results = run_ranks(plan.mesh, lambda comm: _run(self._rank(plan, comm), self.inputs))
        return max(_error(x, y) for mine in results for x, y in zip(mine, self.outputs, strict=True))

    def shard_difference(self, plan: Plan) -> float:
        """The same of the logits that each rank keeps for itself."""
        assert plan.logits is not None
        steps = module_plans(plan)[plan.logits.module].outputs
        layout = next(b.layout for b in steps if (b.port, b.op) == (plan.logits.port, "all_gather"))
        results = run_ranks(plan.mesh, lambda comm: _run(self._rank(plan, comm, False), self.inputs))
        worst = 0.0
        for rank, mine in enumerate(results):
            for got, want in zip(mine, self.outputs, strict=True):
                held = torch.tensor(
                    [i for a, b in ranges(layout, plan.mesh, rank) for i in range(a, b)], dtype=torch.long
                )
                worst = max(worst, _error(got, want.index_select(-1, held)))
        return worst

    def _rank(self, plan: Plan, comm: Communicator, gather_logits: bool = True) -> nn.Module:
        local = parallelize(copy.deepcopy(self.model), plan, comm, gather_logits)
        entries = parameter_plans(plan)
        _fill(local, {n: local_part(self.state[n], e, plan.mesh, comm.rank) for n, e in entries.items()})
        retie(local, plan)
        return local


def _ties(model: nn.Module) -> dict[str, str]:
    """Name of a parameter -> the first name of the same tensor."""
    first: dict[int, str] = {}
    out = {}
    for name, tensor in stored_tensors(model):
        if first.setdefault(id(tensor), name) != name:
            out[name] = first[id(tensor)]
    return out


def _fill(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        owner, attribute = owner_of(model, name)
        if attribute in owner._parameters:
            owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[attribute] = tensor


def _run(model: nn.Module, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
    with torch.inference_mode(), Float64():
        results = [model(**given) for given in inputs]
    return [r.logits for r in results]


def _error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    error = (got - want).abs().max() / want.abs().max()
    return float(error) if error.isfinite() else float("inf")


def other_inputs(solved: Solved) -> list[dict[str, Tensor]]:
    """Every token of the vocabulary, in texts longer and shorter than those that were traced."""
    words = solved.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randperm(words, generator=torch.Generator().manual_seed(2))
    long = ids[: words // 37 * 37].reshape(-1, 37)
    short = ids[-9:].reshape(1, 9)
    if "attention_mask" not in solved.inputs.tensors:
        return [{"input_ids": long}, {"input_ids": short}]
    mask = torch.ones_like(long)
    mask[1, :5] = 0
    return [{"input_ids": long, "attention_mask": mask}, {"input_ids": short}]


# The tests -------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the corrupted plans."""

    cases: set[str] = field(default_factory=set)
    caught: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)


TALLY = Tally()


@pytest.mark.parametrize(
    ("case", "count"),
    [
        *((case, FEW) for case in EVERY_DAY),
        *(pytest.param(case, MUTANTS, marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(case, 10 * MUTANTS, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_no_corruption_escapes(case: str, count: int) -> None:
    TALLY.cases.add(case)
    count += 4 * ("norm" in case)  # some kinds of corruptions are possible there alone
    make, tp = CASES[case]
    right = solved(make(), tp, "ep" if case == "whole experts" else "tp")
    truth = Truth(right.model, other_inputs(right))
    assert right.reason_against(right.plan) == ""
    assert truth.difference(right.plan) < TOLERANCE
    assert right.plan.logits is None or truth.shard_difference(right.plan) < TOLERANCE
    assert not escaped(right, truth, Random(case), count, TALLY)


WIDTHS = {"hidden_size": 160, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 1033}
WIDE_CASES: dict[str, tuple[Callable[[], ModelSpec], int]] = {
    "dense, a mesh of two axes": (
        lambda: small(transformers.LlamaConfig, **WIDTHS, num_key_value_heads=2, head_dim=16),
        4,
    ),
    "dense, uneven": (lambda: small(transformers.LlamaConfig, **WIDTHS, head_dim=16), 3),
    "fused": (lambda: small(transformers.Phi3Config, **WIDTHS, num_key_value_heads=4, pad_token_id=700), 4),
    "transposed fused": (lambda: small(transformers.GPT2Config, **WIDTHS), 2),
    "experts": (
        lambda: small(transformers.MixtralConfig, **WIDTHS, num_local_experts=4, head_dim=16),
        2,
    ),
    "whole experts": (
        lambda: small(transformers.MixtralConfig, **WIDTHS, num_local_experts=4, head_dim=16),
        2,
    ),
}
"""Wide enough that a smaller model stands for them."""


@pytest.mark.parametrize(
    ("case", "count"),
    [
        *(pytest.param(case, MUTANTS // 2, marks=pytest.mark.slow) for case in WIDE_CASES),
        *(pytest.param(case, 40 * MUTANTS, marks=pytest.mark.slow) for case in WIDE_CASES),
    ],
)
def test_no_corruption_of_a_wide_model_escapes_the_smaller_one(
    case: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_shapes, "ENOUGH", 0)
    make, tp = WIDE_CASES[case]
    right = solved(make(), tp, "ep" if case == "whole experts" else "tp")
    smaller = right.check.case(right.plan).model
    assert num_elements(smaller) < num_elements(right.model) / 10
    truth = Truth(right.model, other_inputs(right))
    assert right.reason_against(right.plan) == ""
    tally = Tally()
    assert not escaped(right, truth, Random(case), count, tally)
    assert tally.caught["_simulate"] + tally.caught["_retrace"] >= count // 4


def num_elements(model: nn.Module) -> int:
    """Of all parameters."""
    return sum(p.numel() for p in model.parameters())


def escaped(right: Solved, truth: Truth, random: Random, count: int, tally: Tally) -> str:
    """The corruptions that no check refuses and that change the result, one on each line."""
    found = []
    for kind, plan in mutations(right.plan, random, count):
        if isinstance(plan, MalformedError):
            tally.kinds.setdefault(kind, Counter())["_format"] += 1
            tally.caught["_format"] += 1
            continue
        verdict = right.reason_against(plan)
        if not verdict:
            verdict = harm(truth, plan) or "harmless"
        if verdict not in ("harmless", "_format", "_retrace", "_simulate"):
            found.append(f"{kind}: {verdict}: {changes(right.plan, plan)}")
        tally.kinds.setdefault(kind, Counter())[verdict] += 1
        tally.caught[verdict] += 1
    return "\n".join(found)


def harm(truth: Truth, plan: Plan) -> str:
    """What is wrong with a plan that no check refuses; empty if nothing is."""
    try:
        difference = truth.difference(plan)
        if plan.logits is not None:
            difference = max(difference, truth.shard_difference(plan))
    except Exception as error:
        return f"fails when it is run ({error})"
    return "" if difference < TOLERANCE else f"the ranks differ by {difference:.1e}"


def changes(right: Plan, wrong: Plan) -> str:
    """The entries that were changed."""
    parts = []
    for name in ("mesh", "parameters", "modules", "tied", "logits"):
        a, b = getattr(right, name), getattr(wrong, name)
        if a != b:
            new = [x for x in b if x not in a] if isinstance(b, tuple) else b
            old = [x for x in a if x not in b] if isinstance(a, tuple) else a
            parts.append(f"{name}: {old} -> {new}")
    return "; ".join(parts)


@pytest.mark.slow
def test_most_corruptions_matter_and_each_check_is_needed() -> None:
    """Of a few hundred corruptions, few are harmless."""
    for case in CASES.keys() - TALLY.cases:  # those that another worker has run, or nobody
        test_no_corruption_escapes(case, MUTANTS)
    print(dict(TALLY.caught))
    for kind, found in sorted(TALLY.kinds.items()):
        print(kind, dict(found))
    assert min(TALLY.caught[name] for name in ("_format", "_retrace", "_simulate")) > 2 * MUTANTS
    assert TALLY.caught["harmless"] < sum(TALLY.caught.values()) / 4
    assert set(TALLY.kinds) == {m.__name__ for m in MUTATIONS}


# Holes that random corruptions found -----------------------------------------------------------------


def test_a_layer_is_run_if_its_plan_is_not_that_of_the_layer_that_stands_for_it() -> None:
    """No reduction in one layer of many: the shapes are right, and the layer used to be left out."""
    right = solved(odd(models.InterleavedModel, repeats=6), 2)
    name = "stack.4.chewer.shut"
    assert "stack.4" in right.check.bypassed
    entries = []
    for entry in right.plan.modules:
        names = expand_all(entry.names)
        if name in names:
            rest = tuple(n for n in names if n != name)
            entries += [replace(entry, names=rest)] if rest else []
            entry = replace(entry, names=(name,), outputs=())
        entries.append(entry)
    wrong = replace(right.plan, modules=tuple(entries))
    assert right.reason_against(wrong) == "_simulate"


def test_a_parameter_of_another_dtype_is_refused() -> None:
    """All parameters of simulated ranks have one dtype, whatever the plan says."""
    right = solved(odd(models.ParallelModel), 2)
    entries = [replace(e, dtype="float32") for e in right.plan.parameters]
    wrong = replace(right.plan, parameters=(entries[0], *right.plan.parameters[1:]))
    with pytest.raises(PlanError, match=r"lookup\.weight: the plan says torch\.float32"):
        right._retrace(wrong)


def test_rows_that_are_never_looked_up_are_compared() -> None:
    """On rank 0 the first 50 positions are right, and on rank 1 none of them is its own."""
    right = solved(odd(PlacedModel), 2)
    layout = Sum((Leaf(100, (0,)), Leaf(20, (0,))))
    entry = module_plans(right.plan)["places"]
    assert entry.inputs[0].op == "local_rows"
    wrong_entry = replace(entry, inputs=(replace(entry.inputs[0], layout=layout),))
    wrong = replace(right.plan, modules=tuple(wrong_entry if m == entry else m for m in right.plan.modules))
    with pytest.raises(PlanError, match="places: local_rows has another layout"):
        right._retrace(wrong)


@pytest.mark.parametrize(("tp", "ranks"), [(2, [0]), (3, [0, 2]), (5, [0, 1, 3])])
def test_one_rank_of_each_kind_is_traced(tp: int, ranks: list[int]) -> None:
    """101 words and 8 heads: on 5 ranks, one has 21 words, and three have two heads."""
    plan = models.plan_of(models.InterleavedModel, tp, girth=30 * tp, words=101 if tp == 5 else 30 * tp)
    assert _unlike_ranks(plan) == ranks


def test_the_shard_of_the_logits_is_run_too() -> None:
    """With gathered logits it does not show that another gather is taken for theirs."""
    right = solved(encoder(), 2)
    assert right.plan.logits == LogitsInfo("cls.predictions.decoder", "output")
    wrong = replace(right.plan, logits=LogitsInfo("cls.predictions.transform.dense", "output"))
    assert right.reason_against(wrong) == "_simulate"
