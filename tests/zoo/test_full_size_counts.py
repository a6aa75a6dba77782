"""What planning at true widths takes and gives, in numbers that do not depend on the machine.

A change that makes planning slower, or a plan worse, moves one of them. If it was meant to, record them anew
and look at the difference::

    SHARDCONV_RECORD=1 pytest tests/zoo/test_full_size_counts.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.format.plan import Plan
from transformers import CONFIG_MAPPING

from shardconv import passes, plan_forms
from shardconv.arguments import SolveOptions
from shardconv.planning.axis_variables import AxisVariables
from shardconv.reporting.summary import summarize

RECORDED = Path(__file__).with_name("full_size_counts.json")
RECORD = "SHARDCONV_RECORD"
TP = 8

MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "dense": (
        "llama",
        "LlamaForCausalLM",
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "latent attention, shared and routed experts": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 12},
    ),
    "fused projections, fewer key/value heads than ranks": (
        "phi3",
        "Phi3ForCausalLM",
        {
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 10,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "pad_token_id": 0,
        },
    ),
    "experts with biases, sinks": ("gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 8}),
    "sliding and full attention": (
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
        },
    ),
    "state-space layers, attention, experts": (
        "jamba",
        "JambaForCausalLM",
        {"num_hidden_layers": 16, "num_key_value_heads": 8},
    ),
    "encoder and decoder": (
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 6},
    ),
    "images and text": (
        "llava",
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", "num_hidden_layers": 8},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 6,
                "num_attention_heads": 16,
                "patch_size": 14,
                "image_size": 336,
                "projection_dim": 768,
            },
        },
    ),
}
"""What a model shows -> its type, its class, and arguments of its config: true widths, few layers."""


def spec(name: str) -> ModelSpec:
    """The model in bfloat16, without weights."""
    model_type, class_name, arguments = MODELS[name]
    config = CONFIG_MAPPING[model_type](**arguments)
    return ModelSpec(model_type, config, getattr(transformers, class_name), "bfloat16")


def counts(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Plan a model, and count what that takes."""
    taken = {"events": 0, "folded events": 0, "variables": 0, "rounds": 0}

    def fold(tape: Any, **options: Any) -> Any:
        folded = plain_fold(tape, **options)
        taken["events"], taken["folded events"] = len(tape.events), len(folded.tape.events)
        return folded

    def solve(*arguments: Any, **options: Any) -> Any:
        taken["rounds"] += 1
        return plain_solve(*arguments, **options)

    def solve_axis(problem: AxisVariables) -> Any:
        taken["variables"] += len(problem.keys)
        return plain_solve_axis(problem)

    plain_fold, plain_solve, plain_solve_axis = passes.fold, plan_forms.solve, AxisVariables.solve
    monkeypatch.setattr(passes, "fold", fold)
    monkeypatch.setattr(plan_forms, "solve", solve)
    monkeypatch.setattr(AxisVariables, "solve", solve_axis)
    plan = passes.solve_plan(model, SolveOptions(TP, check=False))
    return {**taken, **facts(plan)}


def facts(plan: Plan) -> dict[str, float]:
    """What the plan says, in numbers."""
    summary = summarize(plan)
    replicated = sum(group.num_bytes for group in summary.replicated)
    return {
        "overrides": sum(len(module.overrides) for module in plan.modules),
        "collectives": sum(collective.count for collective in summary.collectives),
        "replicated, in millionths": round(1e6 * replicated / summary.total_bytes),
    }


def recorded() -> dict[str, Any]:
    """The versions that the numbers were recorded with, and the numbers of each model."""
    document: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return document


def versions() -> dict[str, str]:
    """The numbers of a tape depend on them."""
    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def record(name: str, found: Mapping[str, float]) -> None:
    """Write the numbers of one model; those of others stay."""
    models = {**recorded().get("models", {}), name: found}
    document = {
        "versions": versions(),
        "models": {known: models[known] for known in MODELS if known in models},
    }
    RECORDED.write_text(json.dumps(document, indent=1) + "\n")


@pytest.mark.parametrize("name", MODELS)
def test_planning_takes_and_gives_what_was_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = counts(spec(name), monkeypatch)
    if os.environ.get(RECORD):
        record(name, found)
    document = recorded()
    assert found == document["models"][name], (
        f"recorded with {document['versions']}, this is {versions()}; if the change is meant, set {RECORD}=1 "
        "and run this file, and say in the commit why a number grew"
    )
