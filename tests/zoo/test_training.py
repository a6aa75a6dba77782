"""One training step of a few types in every form; ``scripts/coverage training`` does it for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.fully_sharded import train_fully_sharded
from zoo.models import build
from zoo.trainer_habits import HABITS, try_habits
from zoo.training import ADAPTER, FORMS, ROUTERS, Form, train
from zoo.variants import grouped

CASES = [
    ("llama", 3, ""),  # uneven heads
    ("qwen3", 4, "grouped"),  # norms over split heads, fewer key/value heads than ranks
    ("gpt2", 2, ""),  # biases, fused projections, learned positions, tied embedding
    ("mixtral", 4, ROUTERS),
    ("deepseek_v3", 2, ""),  # latent attention: torn gathers, whole low-rank projections
    ("falcon_h1", 2, ""),  # a parameter that is read outside of its module
    ("phimoe", 2, ""),  # a router that draws random numbers in training
    ("rwkv", 2, ""),  # no backward pass where a cache is filled
    ("mixtral", 2, ADAPTER),  # of experts too, whose parameters it replaces while they run
    ("lfm2", 3, ""),  # code that picks positions of a sequence beside a dim that is sharded anyway
]
SLOW_CASES = [
    ("gpt_oss", 3, ADAPTER),
    ("falcon", 4, ""),  # one key/value head, parallel residual
    ("phi", 2, ""),  # biases behind reductions that are scattered
    ("gemma2", 2, ""),  # sliding windows, norms behind the blocks
    ("mixtral", 2, ""),
    ("gpt_oss", 2, ROUTERS),  # biases of routers and experts
]


PAIRS = tuple(form for form in FORMS if (form.sequence + form.parallel_loss + form.checkpointing) % 2 == 0)
"""Forms with every pair of choices."""
HALVES = (PAIRS[::3], PAIRS[1:3])
"""Every other type has one half of them: each choice is made both ways, and all types have all pairs."""


@pytest.mark.parametrize(
    ("model_type", "tp", "variant", "forms"),
    [
        *((*case, HALVES[number % 2]) for number, case in enumerate(CASES)),
        *(pytest.param(*case, FORMS, marks=pytest.mark.slow) for case in (*CASES, *SLOW_CASES)),
    ],
)
def test_gradients_are_those_of_the_unsharded_model(
    model_type: str, tp: int, variant: str, forms: tuple[Form, ...]
) -> None:
    model = grouped("causal", model_type) if variant == "grouped" else build("causal", model_type)
    assert model is not None
    found = list(train(model, tp, variant, forms))
    assert [(r.form, r.status, r.message) for r in found if r.status != "equal"] == []
    assert len(found) == len(forms)


@pytest.mark.parametrize(
    ("family", "model_type"),
    [
        ("other", "llava"),
        pytest.param("other", "qwen2_vl", marks=pytest.mark.slow),
        ("seq2seq", "t5"),
        pytest.param("seq2seq", "bart", marks=pytest.mark.slow),
    ],
)
def test_sharded_sequences_with_images_and_of_two_kinds(family: str, model_type: str) -> None:
    forms = tuple(Form(True, False, checkpointing) for checkpointing in (False, True))
    found = list(train(build(family, model_type), 2, forms=forms))
    assert [(r.status, r.message) for r in found if r.status != "equal"] == []


@pytest.mark.parametrize("model_type", ["gpt_oss", pytest.param("bamba", marks=pytest.mark.slow)])
def test_an_adapter_in_replicas_that_hold_parts(model_type: str, tmp_path: Path) -> None:
    found = train_fully_sharded(build("causal", model_type), tmp_path)
    assert (found.status, found.message) == ("equal", found.message)


@pytest.mark.parametrize(
    ("model_type", "refused"),
    [
        ("cohere", ""),
        pytest.param("blt", "", marks=pytest.mark.slow),  # it writes to its embeddings
        ("gemma4_text", "a part of a tensor"),  # a norm of what has two dims of channels
        ("xlm", ""),  # it writes to its norms
        pytest.param("gpt_oss", "", marks=pytest.mark.slow),
    ],
)
def test_what_trainers_do(model_type: str, refused: str) -> None:
    found = try_habits(build("causal", model_type))
    assert len(found) == len(HABITS)
    others = [row for row in found if row.status != "equal"]
    assert [row.status for row in others] == ["refused"] * bool(refused), others
    assert all(row.form.startswith("hook on the last norm") and refused in row.message for row in others)


@pytest.mark.slow
def test_modules_that_are_not_called_in_training_are_no_boundaries() -> None:
    forms = tuple(form for form in PAIRS if not form.sequence)
    found = list(train(build("causal", "gemma3n_text"), 2, forms=forms))
    assert [r.status for r in found] == ["equal"] * len(forms)


@pytest.mark.parametrize(("model_type", "why"), [("reformer", "has no backward pass")])
def test_what_cannot_be_trained_says_why(model_type: str, why: str) -> None:
    (found,) = train(build("causal", model_type), 2)
    assert found.status == "refused"
    assert why in found.message
