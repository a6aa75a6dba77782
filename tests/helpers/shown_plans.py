"""Plans that tests show to people: of tiny models that differ in what there is to see, and hostile ones."""

from __future__ import annotations

import copy
import dataclasses
from functools import lru_cache
from typing import TypeVar

from boundaries import boundary
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.plan import ModulePlan, ParameterPlan, Plan
from small_models import hand_plan, small_config
from zoo.models import build

from shardconv.arguments import SolveOptions
from shardconv.passes import solve_plan

ZOO = (
    ("causal", "llama", 4, "tp"),
    ("causal", "mixtral", 8, "tp"),
    ("causal", "mixtral", 4, "ep"),
    ("causal", "deepseek_v3", 4, "tp"),
    ("causal", "falcon_h1", 2, "tp"),
    ("causal", "qwen3_next", 8, "tp"),
    ("causal", "gpt2", 4, "tp"),
    ("seq2seq", "t5", 4, "tp"),
    ("masked", "bert", 8, "tp"),
    ("other", "llava", 2, "tp"),
)
"""Family, type, tp and how experts are split."""


@lru_cache
def zoo_plan(family: str, model_type: str, tp: int, experts: str = "tp") -> Plan:
    """The plan of a tiny model."""
    model = build(family, model_type)
    spec = ModelSpec(name=model_type, config=model.config, model_class=model.model_class, dtype="float32")
    return solve_plan(spec, SolveOptions(tp, experts=experts, check=False))


EVIL = "<script>alert(1)<b onload='x'>&amp;\"`|_*[x](y)"
"""A name that is markup in HTML, in XML and in Markdown."""


T = TypeVar("T")


def unchecked(value: T, **changes: object) -> T:
    """A changed copy of a frozen value, whose fields are not checked."""
    changed = copy.copy(value)
    for name, new in changes.items():
        object.__setattr__(changed, name, new)
    return changed


def evil_plan() -> Plan:
    """A plan whose every text is ``EVIL``, as far as a plan may hold it."""
    plan = hand_plan(small_config(), 2)
    dims = (Leaf(64, (0,)), Leaf(32))
    reduce = boundary("output", "all_reduce", axes=(0,), per_token=32)
    return dataclasses.replace(
        plan,
        model=unchecked(plan.model, class_name=f"module:{EVIL}"),
        code=dataclasses.replace(plan.code, torch=EVIL, transformers=EVIL),
        parameters=(
            *plan.parameters,
            ParameterPlan((f"model.layers.{{0..1}}.{EVIL}.weight",), dims, "float32"),
            ParameterPlan((f"{EVIL}.{EVIL}",), dims, "float32"),
            ParameterPlan((f"{EVIL}.scale",), (Leaf(32),), "float32", reason=EVIL),
        ),
        modules=(*plan.modules, ModulePlan((EVIL,), "row", outputs=(reduce,))),
        training=None,
        inference_only=EVIL,
        notes=(EVIL,),
    )


def wide_plan() -> Plan:
    """A plan for 64 ranks with very long names and kinds of layers without end."""
    plan = hand_plan(small_config(num_hidden_layers=3), 64)
    long = ".".join(["a_module_with_a_long_name_WWWWWWWWWWWWWWWW"] * 5)
    more = [
        ParameterPlan((f"{long}_{i}.weight",), (Leaf(4096 + i), Leaf(4096, (0,))), "float32")
        for i in range(80)
    ]
    kinds = [
        ParameterPlan((f"stack_{i}.0.inner.weight",), (Leaf(128 + i, (0,)), Leaf(64)), "float32")
        for i in range(40)
    ]
    vectors = [
        ParameterPlan((f"norms_{i}.{long}.bias",), (Leaf(4096),), "float32", reason="r") for i in range(40)
    ]
    return dataclasses.replace(plan, parameters=(*plan.parameters, *more, *kinds, *vectors))
