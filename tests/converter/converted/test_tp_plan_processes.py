"""transformers' own tensor parallelism with our ``tp_plan``, in real processes.

``from_pretrained`` reads a checkpoint with the rules of a plan; the logits must be those of the unsharded
model, each rank must hold what the plan gives to it, and communicate as often.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_processes
from shardconv_runtime.format import slices
from shardconv_runtime.format.plan import Plan, module_plans, parameter_plans
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tp_plan_cases import built, random_model, solved, with_gathered_mlp, with_whole_mlp

from shardconv.exports.tp_plan import to_json, tp_plan

CASES: dict[str, tuple[str, int, Callable[[Plan], Plan]]] = {
    "llama": ("llama", 2, lambda plan: plan),
    "llama-4": ("llama", 4, lambda plan: plan),
    "biases": ("qwen2", 2, lambda plan: plan),
    "tied": ("gemma2", 2, lambda plan: plan),
    "norms of heads": ("qwen3", 2, lambda plan: plan),
    "fused heads, bias of a sum": ("gpt_neox", 2, lambda plan: plan),
    "fused halves": ("glm", 2, lambda plan: plan),
    "experts": ("mixtral", 2, lambda plan: plan),
    "experts-4": ("qwen3_moe", 4, lambda plan: plan),
    "shared experts": ("qwen2_moe", 2, lambda plan: plan),
    "other experts": ("aria_text", 2, lambda plan: plan),
    "whole mlp": ("llama", 2, with_whole_mlp),
    "gathered mlp": ("llama", 2, with_gathered_mlp),
}
SHOWN_BY_OTHERS = ("llama-4", "experts", "experts-4", "norms of heads", "whole mlp")
"""Slow tests: the rules of two ranks on four, and types without a rule that others lack."""
IDS = torch.tensor([[11, 45, 3, 37, 30, 9, 21], [8, 7, 61, 58, 5, 54, 19]])
NEW_TOKENS = 6
COLLECTIVES = {
    "c10d.allreduce_.default": "all_reduce",
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
}
QUIET = ("_c10d_functional.wait_tensor.default", "_c10d_functional._wrap_tensor_autograd.default")


@dataclass(frozen=True)
class Measured:
    """What one rank, or the unsharded model, does."""

    logits: Tensor
    greedy: Tensor
    collectives: Counter[str]
    """Of one forward pass."""
    held: dict[str, Tensor]
    """Local parameters."""


class Counting(TorchDispatchMode):
    """Counts collectives, those inside of DTensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if "c10d" in str(func) and str(func) not in QUIET:
            self.counts[COLLECTIVES.get(str(func), str(func))] += 1
        return func(*args, **(kwargs or {}))


def measure(model: Any) -> Measured:
    from torch.distributed.tensor import DTensor

    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product has no float64 on CPUs
    with torch.no_grad(), Counting() as counting:
        logits = model(IDS).logits
    greedy = model.generate(IDS, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    named = dict(model.named_parameters())
    held = {n: (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for n, p in named.items()}
    return Measured(logits, greedy, counting.counts, held)


def measure_rank(path: Path, tp: int, rules: dict[str, str]) -> Measured:
    import transformers.integrations.accelerate as integration
    from transformers.distributed import DistributedConfig

    # from_pretrained asks that accelerate be installed, and uses nothing of it here
    integration.is_accelerate_available = lambda: True
    transformers.logging.disable_progress_bar()
    wanted = DistributedConfig(tp_size=tp, tp_plan=rules)
    return measure(
        transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, distributed_config=wanted
        ).eval()
    )


def part(whole: Tensor, plan: Plan, name: str, rank: int) -> Tensor:
    """What the plan gives to a rank."""
    entry = parameter_plans(plan)[dict(plan.tied).get(name, name)]
    for i, dim in enumerate(entry.dims):
        held = [torch.arange(a, b) for a, b in slices.ranges(dim, plan.mesh, rank)]
        whole = whole.index_select(i, torch.cat(held))
    return whole


def planned_collectives(plan: Plan) -> Counter[str]:
    steps = (step for m in module_plans(plan).values() for step in (*m.inputs, *m.outputs))
    return Counter(step.op for step in steps if step.op in COLLECTIVES.values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Measured]]:
    known: dict[str, tuple[Path, Measured]] = {}

    def make(model_type: str) -> tuple[Path, Measured]:
        if model_type not in known:
            path = tmp_path_factory.mktemp("checkpoint") / model_type
            random_model(model_type).save_pretrained(path)
            load = transformers.AutoModelForCausalLM.from_pretrained
            known[model_type] = path, measure(load(path, dtype=torch.float64).eval())
        return known[model_type]

    return make


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SHOWN_BY_OTHERS)) for c in CASES]
)
def test_transformers_does_what_the_plan_says(
    case: str, checkpoint: Callable[[str], tuple[Path, Measured]]
) -> None:
    model_type, tp, change = CASES[case]
    path, whole = checkpoint(model_type)
    plan = change(solved(model_type, tp))
    rules = json.loads(to_json(tp_plan(plan, built(model_type))))
    ranks = run_processes(tp, measure_rank, path, tp, rules)
    for rank, got in enumerate(ranks):
        assert (got.logits - whole.logits).abs().max() < 1e-12 * whole.logits.abs().max()
        assert torch.equal(got.greedy, whole.greedy)
        assert got.collectives == planned_collectives(plan)
        assert got.held.keys() == whole.held.keys()
        for name, tensor in got.held.items():
            assert torch.equal(tensor, part(whole.held[name], plan, name, rank)), name
    assert len(whole.greedy[:, -NEW_TOKENS:].unique()) > 2, "the tokens must depend on what came before"


def test_a_wrong_rule_is_seen(checkpoint: Callable[[str], tuple[Path, Measured]]) -> None:
    """The comparison above can fail: without one style, or with the rules of another layout."""
    path, whole = checkpoint("glm")
    rules = tp_plan(solved("glm", 2), built("glm"))
    wrong = {n: "colwise" if style == "packed_colwise" else style for n, style in rules.items()}
    assert wrong != rules
    for got in run_processes(2, measure_rank, path, 2, wrong):
        assert (got.logits - whole.logits).abs().max() > 1e-3 * whole.logits.abs().max()
