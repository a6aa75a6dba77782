"""Ways of generating that failed on several ranks elsewhere: the tokens of one process, eager and compiled.

- Each rank drew its own tokens: https://github.com/openai/gpt-oss/issues/270
- Rank 0 stopped at the end token, and the others went on: https://github.com/NVIDIA/TensorRT-LLM/issues/1767
- A row's tokens depended on the rows beside it: https://github.com/huggingface/transformers/issues/30670
- A longer answer than the first one: https://github.com/huggingface/transformers/issues/30351
- A cache that a first turn had filled: https://github.com/huggingface/transformers/issues/36151,
  https://github.com/QwenLM/Qwen3/issues/819
- A processor with a state of its own, as constrained decoding has: https://github.com/dottxt-ai/outlines/issues/524
- A static cache for the unsharded heads: https://github.com/huggingface/transformers/pull/39164
- Stop strings of one row ended all: https://github.com/bigscience-workshop/lm-evaluation-harness/pull/124
- Penalties over the vocabulary: https://github.com/unslothai/unsloth/issues/1958
- A second call of the model inside of a processor (guidance), and scores of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from captured import capturing
from checkpoints import VOCAB, save_causal
from one_and_ranks import of_one, of_ranks, require_same
from torch import Tensor
from warm_compiler import warm_up

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26], [35, 8, 9, 7, 93]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


def generated(model: Any, ids: Tensor = IDS, mask: Tensor | None = MASK, **options: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    fixed = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    return model.generate(ids, attention_mask=mask, **{**fixed, **options})


def sampled(model: Any) -> Tensor:
    torch.manual_seed(4)
    return torch.cat([generated(model, do_sample=True, temperature=1.5, top_k=0) for _ in range(2)])


def several_samples(model: Any) -> Tensor:
    """Of as many rows as a compiled step has: others draw numbers for rows that are not asked for."""
    torch.manual_seed(4)
    return generated(model, do_sample=True, num_return_sequences=2, top_p=0.9)


def ended(model: Any) -> Tensor:
    """By a token that comes in the first row only."""
    first = generated(model)[0]
    return generated(model, eos_token_id=int(first[8]))


def beside_others(model: Any) -> Tensor:
    """Each row alone, then both."""
    both = generated(model)
    alone = generated(model, IDS[1:, 2:], None)
    assert torch.equal(both[1, 5:], alone[0, 3:])
    return both


def longer_later(model: Any) -> Tensor:
    generated(model, max_new_tokens=3)
    return generated(model, max_new_tokens=40)


def second_turn(model: Any) -> Tensor:
    """A dialog whose cache goes on."""
    cache = transformers.DynamicCache(config=model.config)
    first = generated(model, IDS[:1], None, past_key_values=cache)
    return generated(model, torch.cat([first, IDS[1:]], 1), None, past_key_values=cache)


def cropped_cache(model: Any) -> Tensor:
    """Another answer to the same prompt."""
    cache = transformers.DynamicCache(config=model.config)
    generated(model, IDS[:1], None, past_key_values=cache)
    cache.crop(-8)
    return generated(model, torch.cat([IDS[:1, :4], IDS[1:, :3]], 1), None, past_key_values=cache)


class OnlyOnce(transformers.LogitsProcessor):
    """Forbids what it has seen, by a state of its own that is as wide as the vocabulary."""

    def __init__(self) -> None:
        self.seen = torch.zeros(VOCAB, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape[-1] == VOCAB
        self.seen[input_ids[:, -1]] = True
        return scores.masked_fill(self.seen, -torch.inf)


def constrained(model: Any) -> Tensor:
    return generated(model, logits_processor=[OnlyOnce()])


def allowed_prefixes(model: Any) -> Tensor:
    return generated(model, prefix_allowed_tokens_fn=lambda row, ids: [int(ids[-1] + 1) % VOCAB, 7 + row])


def static_cache(model: Any) -> Tensor:
    return generated(model, cache_implementation="static")


class EndsWith(transformers.StoppingCriteria):
    """Of each row by itself."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] == self.token


def own_criterion(model: Any) -> Tensor:
    first = generated(model)[0]
    return generated(model, stopping_criteria=[EndsWith(int(first[7]))], eos_token_id=2)


def penalties(model: Any) -> Tensor:
    return generated(
        model, repetition_penalty=1.7, no_repeat_ngram_size=2, bad_words_ids=[[5], [7, 9]],
        suppress_tokens=[11, 12], sequence_bias={(20,): 3.0}, eos_token_id=2, min_new_tokens=4,
        exponential_decay_length_penalty=(2, 1.1),
    )  # fmt: skip


def guided(model: Any) -> Tensor:
    return generated(model, IDS[:1], None, guidance_scale=1.5, negative_prompt_ids=IDS[1:])


def scored(model: Any) -> Tensor:
    found = generated(model, output_scores=True, output_logits=True, return_dict_in_generate=True)
    scores = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    return torch.cat([scores.flatten(), *(logits.flatten() for logits in found.logits)])


def beams_with_scores(model: Any) -> Tensor:
    found = generated(
        model, num_beams=3, num_return_sequences=2, output_scores=True, return_dict_in_generate=True
    )
    return torch.cat([found.sequences.flatten().double(), found.sequences_scores.double()])


USES: tuple[Callable[[Any], Tensor], ...] = (
    sampled,
    several_samples,
    ended,
    beside_others,
    longer_later,
    second_turn,
    cropped_cache,
    constrained,
    allowed_prefixes,
    static_cache,
    own_criterion,
    penalties,
    guided,
    scored,
    beams_with_scores,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and its converted directory "out"."""
    root = tmp_path_factory.mktemp("llama")
    shardconv.convert(save_causal("llama", root / "model"), root / "out", tp=2, check=False)
    return root


def test_they_are_those_of_one_process(llama: Path) -> None:
    require_same(USES, of_one(llama / "model", USES), of_ranks(llama / "out", USES))


def test_compiled(llama: Path) -> None:
    warm_up()
    with capturing():
        require_same(USES, of_one(llama / "model", USES), of_ranks(llama / "out", USES, compile=True))
