"""A representative part of the coverage run: one type for each mechanism, its ranks as threads.

``scripts/coverage models`` does the same for every type and writes docs/coverage.md.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from .generation import CACHES, generates
from .measure import measure, shares
from .models import build
from .tasks import specification
from .variants import grouped

SAMPLE: dict[tuple[str, str], str] = {
    ("causal", "bamba"): "state-space mixer, depthwise convolution, gated norm over a sharded dim",
    ("causal", "bloom"): "fused heads, ALiBi",
    ("causal", "cohere2"): "parallel residual, sliding window",
    ("causal", "deepseek_v3"): "latent attention, shared and routed experts, dense first layer",
    ("causal", "falcon"): "one key/value head in a fused projection",
    ("causal", "gemma2"): "soft caps, sliding and full attention",
    ("causal", "gpt_bigcode"): "multi-query",
    ("causal", "gpt_oss"): "sinks, biases of experts",
    ("causal", "hrm_text"): "a stack that is looped",
    ("causal", "jetmoe"): "sizes that depend on the router",
    ("causal", "llama4_text"): "chunked attention, dense scores for experts",
    ("causal", "mamba2"): "norm over groups",
    ("causal", "mpt"): "ALiBi from a buffer",
    ("causal", "olmo2"): "norm across heads",
    ("causal", "qwen3_next"): "gated delta net, gated attention, shared expert with a gate",
    ("causal", "recurrent_gemma"): "linear recurrence",
    ("causal", "rwkv"): "time mixing",
    ("causal", "zamba2"): "blocks that layers share, adapters of their own",
    ("masked", "deberta-v2"): "relative positions in attention",
    ("masked", "mobilebert"): "bottlenecks",
    ("seq2seq", "bart"): "cross attention",
    ("seq2seq", "switch_transformers"): "experts as modules, called one by one",
    ("seq2seq", "t5"): "relative position bias that layers share",
    ("other", "clip"): "two towers",
    ("other", "llava"): "image tokens in a prompt",
    ("other", "vit"): "patches",
    ("other", "whisper"): "sounds",
    ("other", "bert/question answering"): "another head",
    ("other", "llama/sequence classification"): "another head",
}
FLOAT32_INSIDE = {
    "bamba",
    "deepseek_v3",
    "llama4_text",
    "olmo2",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "zamba2",
}
"""Types whose code casts to float32 on paths that a sum over ranks reaches."""
ENOUGH = 0.95

GROUPED = [
    ("llama", 3),
    ("phi3", 4),
    *(
        pytest.param(model_type, tp, marks=pytest.mark.slow)
        for model_type, tp in (
            *(
                (model_type, 4)
                for model_type in ("falcon", "gemma2", "gpt_oss", "llama", "olmo2", "qwen3_next")
            ),
            ("falcon", 3),
        )
    ),
]
GENERATING = ("bamba", "deepseek_v3", "mamba2", "qwen3_next", "recurrent_gemma", "rwkv")
IN_PROCESSES = ("bloom", "gemma2", "olmo2", "deberta-v2", "gpt_oss", "t5", "clip", "llava", "vit", "whisper")
"""Types that real processes run: in ``test_processes.py``, and in ``test_models.py`` and
``test_other_inputs.py`` of ``e2e``."""
LIKE_OTHERS = ("bart", "cohere2", "gpt_bigcode", "hrm_text", "mobilebert", "bert/question answering")
"""As t5, falcon, falcon, ``LoopedModel`` of ``planning/test_module_plans.py``, bert, and the other head."""


def once(family: str, model_type: str, tp: int) -> ParameterSet:
    """A case, a slow one where another test shows the same of the type."""
    is_shown = tp == 2 or model_type in (*GENERATING, *IN_PROCESSES, *LIKE_OTHERS)
    return pytest.param(family, model_type, tp, marks=[pytest.mark.slow] if is_shown else [])


@pytest.mark.parametrize(
    ("family", "model_type", "tp"), [once(*case, tp) for tp in (2, 3) for case in SAMPLE]
)
def test_the_ranks_equal_the_whole(family: str, model_type: str, tp: int) -> None:
    """All outputs, in float64, on other weights and inputs than the converter's own check had.

    Three ranks divide nothing: two show the same, and are those that generate below.
    """
    result = measure(build(family, model_type), tp)
    allowed = ("equal", "float32") if model_type in FLOAT32_INSIDE else ("equal",)
    assert result.status in allowed, f"{result.status}, {result.error}: {result.message}"
    assert result.sharded >= ENOUGH, result.replicated
    assert result.collectives


@pytest.mark.parametrize(("model_type", "tp"), GROUPED)
def test_fewer_key_value_heads_than_ranks(model_type: str, tp: int) -> None:
    model = grouped("causal", model_type)
    assert model is not None
    result = measure(model, tp)
    assert result.status in ("equal", "float32"), f"{result.status}, {result.error}: {result.message}"
    assert result.sharded >= ENOUGH - 0.02, result.replicated


@pytest.mark.parametrize("tp", [pytest.param(6, marks=pytest.mark.slow), 12])
def test_many_ranks(tp: int) -> None:
    """Meshes of two and three prime axes: two key/value heads, and groups of four that are uneven."""
    model = grouped("causal", "llama")
    assert model is not None
    assert measure(model, tp).status == "equal"


@pytest.mark.parametrize(
    ("model_type", "sizes", "tp"),
    [
        pytest.param("llama", {"intermediate_size": 131, "vocab_size": 257}, 4, marks=pytest.mark.slow),
        ("mixtral", {"num_local_experts": 3, "num_key_value_heads": 1}, 5),
        ("phi3", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, 6),
        pytest.param(
            "llama",
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2", {"vocab_size": 5027}, 8, marks=pytest.mark.slow),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(model_type: str, sizes: dict[str, int], tp: int) -> None:
    result = measure(build("causal", model_type, **sizes), tp)
    assert result.status == "equal", f"{result.status}, {result.error}: {result.message}"
    assert result.sharded >= ENOUGH, result.replicated


@pytest.mark.parametrize(
    "model_type", [*GENERATING, *(pytest.param(t, marks=pytest.mark.slow) for t in ("bloom", "gemma2"))]
)
def test_generation(model_type: str) -> None:
    """Greedy tokens of a padded batch with each cache, from the plan that was solved on a prefill."""
    from shardconv.arguments import SolveOptions
    from shardconv.passes import solve_plan

    model = build("causal", model_type)
    plan = solve_plan(specification(model), SolveOptions(2))
    sharded, replicated = shares(plan)
    assert sharded >= ENOUGH, replicated
    assert {cache: generates(plan, model, cache) for cache in CACHES} == dict.fromkeys(CACHES, "same")
