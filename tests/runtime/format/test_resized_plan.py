"""The plan of a model whose vocabulary got another size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardconv_runtime.errors import OptionError, RefusedCallError
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Leaf, Product
from shardconv_runtime.format.plan import AttributeOverride, Plan, global_shape, module_plans, parameter_plans
from shardconv_runtime.format.resized_plan import resized_plan
from small_models import HIDDEN, VOCAB, hand_plan, small_config

TABLES = ("model.embed_tokens", "lm_head")


def resized(plan: Plan, size: int = 120, num_parameters: int = 7) -> Plan:
    return resized_plan(plan, {f"{t}.weight": (size, HIDDEN) for t in TABLES}, TABLES, num_parameters)


def test_only_the_vocabulary_changes() -> None:
    plan = hand_plan(small_config(), tp=2)
    other = resized(plan)
    before, after = parameter_plans(plan), parameter_plans(other)
    changed = {name for name in before if before[name].dims != after[name].dims}
    assert changed == {f"{table}.weight" for table in TABLES}
    assert all(global_shape(after[name]) == (120, HIDDEN) for name in changed)
    modules = module_plans(other)
    layouts = [
        s.layout
        for table in TABLES
        for s in modules[table].inputs + modules[table].outputs
        if hasattr(s, "layout")
    ]
    assert layouts == [Leaf(120, (0,))] * 2
    assert other.model.num_parameters == 7
    assert resized(other, VOCAB, plan.model.num_parameters).parameters == plan.parameters
    assert plan_json.loads(plan_json.dumps(other)) == other


def test_what_cannot_be_resized_is_refused() -> None:
    plan = hand_plan(small_config(), tp=2)
    with pytest.raises(OptionError, match="2 ranks cannot share a vocabulary of 1 tokens"):
        resized(plan, 1)
    with pytest.raises(RefusedCallError, match="in several sizes"):
        resized_plan(plan, {"lm_head.weight": (120, HIDDEN + 1)}, TABLES, 7)
    with pytest.raises(RefusedCallError, match=r"model.layers.0.mlp.up_proj: a step of the plan"):
        _with_entry(plan, "model.layers.0.mlp.up_proj")
    head = module_plans(plan)["lm_head"]
    entry = replace(head, overrides=(AttributeOverride("out_features", VOCAB, (VOCAB // 2,)),))
    others = tuple(m for m in plan.modules if m is not head)
    with pytest.raises(RefusedCallError, match="lm_head: the plan overrides an attribute"):
        resized(replace(plan, modules=(*others, entry)))
    parts = Product((Leaf(VOCAB, (0,)), Leaf(1)))
    parameters = tuple(
        replace(p, dims=(parts, *p.dims[1:])) if "lm_head.weight" in p.names else p for p in plan.parameters
    )
    with pytest.raises(RefusedCallError, match="laid out in several parts"):
        resized(replace(plan, parameters=parameters))


def _with_entry(plan: Plan, fqn: str) -> Plan:
    """Resize a plan in which a layer of another part gathers as many positions as there are tokens."""
    gather = next(s for s in module_plans(plan)["lm_head"].outputs if s.op == "all_gather")
    entry = module_plans(plan)[fqn]
    single = replace(entry, names=(fqn,), outputs=(gather,))
    return resized(replace(plan, modules=(*(m for m in plan.modules if m is not entry), single)))
