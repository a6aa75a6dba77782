"""Each request's tokens are those of ``generate`` for it alone, whoever shares its batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from converted import random_llama
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.openai_api.schemas import Sampling
from shardconv_runtime.serving.request_sampling import RequestProcessor, processor_of, serving_config
from torch import Tensor
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

NEW = 12


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    return random_llama().eval()


def state(name: str, prompt: list[int], sampling: Sampling | None) -> RequestState:
    options = {} if sampling is None else {"sampling": sampling, "num_prompt_tokens": len(prompt)}
    return RequestState(name, list(prompt), logit_processor_kwargs=options)


def step(processor: RequestProcessor, states: list[RequestState], logits: Tensor) -> list[int]:
    """As transformers' loop: arguments, processors, and a draw from what they leave."""
    rows = [FutureRequestState(each, True, {}, 1) for each in states]
    arguments = processor.prepare_tensor_args(rows)
    scores = processor(logits.clone(), arguments)
    assert (scores > -torch.inf).sum(-1).tolist() == [1] * len(states)
    return torch.multinomial(scores.softmax(-1), 1).flatten().tolist()


def answer(
    model: Any, requests: list[tuple[list[int], Sampling]]
) -> tuple[list[list[int]], RequestProcessor]:
    """The tokens of all requests in one batch, and the processor."""
    processor = RequestProcessor(None)
    states = [state(str(index), *request) for index, request in enumerate(requests)]
    for index, (_, sampling) in enumerate(requests):
        if sampling.num_logprobs is not None:
            processor.watch(str(index))
    for _ in range(NEW):
        with torch.no_grad():
            logits = [
                model(torch.tensor([each.initial_tokens + each.generated_tokens])).logits[0, -1]
                for each in states
            ]
        for each, token in zip(states, step(processor, states, torch.stack(logits).float()), strict=True):
            each.generated_tokens.append(token)
    return [each.generated_tokens for each in states], processor


def generated(model: Any, prompt: list[int], sampling: Sampling, **options: Any) -> list[int]:
    draws = not sampling.is_greedy
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, do_sample=draws, **options
    )
    torch.manual_seed(sampling.seed or 0)
    out = model.generate(torch.tensor([prompt]), generation_config=config)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


CASES: list[tuple[Sampling, dict[str, Any]]] = [
    (Sampling(0), {}),
    (Sampling(0, repetition_penalty=1.7), {"repetition_penalty": 1.7}),
    (Sampling(0, logit_bias=((5, 3.0), (9, -50.0))), {"sequence_bias": [[[5], 3.0], [[9], -50.0]]}),
    (Sampling(1.3, seed=11), {"temperature": 1.3, "top_k": 0}),
    (
        Sampling(0.8, 0.9, 20, 0.05, 1.2, seed=12),
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2},
    ),
    (Sampling(1.0, top_k=3, seed=13), {"top_k": 3}),
]


def test_many_that_ask_for_different_things(model: Any) -> None:
    prompts = [[3 + index, 7, 20 + index] for index in range(len(CASES))]
    unseeded = [([1, 2], Sampling(0.9)), ([1, 2], Sampling(0.9))]
    asked = [(prompt, sampling) for prompt, (sampling, _) in zip(prompts, CASES, strict=True)]
    torch.manual_seed(0)
    found, _ = answer(model, [unseeded[0], *asked, unseeded[1]])
    for prompt, (sampling, options), tokens in zip(prompts, CASES, found[1:-1], strict=True):
        assert tokens == generated(model, prompt, sampling, **options), sampling
    assert found[0] != found[-1], "drawn apart"


def test_the_first_of_equal_logits_is_the_most_likely_one() -> None:
    logits = torch.zeros(2, 50)
    logits[:, [7, 30]] = 1.0
    states = [state(name, [1], Sampling(0)) for name in "ab"]
    assert {tuple(step(RequestProcessor(None), states, logits)) for _ in range(5)} == {(7, 7)}


def test_rows_of_no_request_are_left_to_the_loop() -> None:
    processor = RequestProcessor(None)
    arguments = processor.prepare_tensor_args(
        [FutureRequestState(state("a", [1], Sampling(0)), False, {}, 1)]
    )
    assert processor(torch.randn(3, 50), arguments).softmax(-1).isfinite().all()
    states = [state("a", [1], Sampling(0))]
    processor.prepare_tensor_args([FutureRequestState(states[0], True, {}, 1)])
    scores = processor(torch.randn(3, 50), arguments)
    assert (scores > -torch.inf).sum(-1).tolist() == [1, 50, 50]


def test_penalties_are_of_the_answer_alone() -> None:
    """As OpenAI's API says: once for a token that was there, and for each time; the prompt does not count."""
    sampling = Sampling(0, presence_penalty=0.5, frequency_penalty=0.2)
    logits = torch.tensor([[0.0, 1.0, 0.9, 0.15]])
    asked = state("a", [1, 1, 1], sampling)
    found = []
    for _ in range(5):
        (token,) = step(RequestProcessor(None), [asked], logits)
        asked.generated_tokens.append(token)
        found.append(token)
    # 1 has 1.0, then 0.3, then 0.1; 2 has 0.9, then 0.2, then 0.0; 3 has 0.15.
    assert found == [1, 2, 1, 2, 3]


def test_a_request_that_begins_anew_goes_on(model: Any) -> None:
    """One that was taken out of a full cache is computed again: its answer so far is a part of its prompt."""
    sampling = Sampling(1.1, repetition_penalty=1.3, presence_penalty=0.4, seed=5)
    whole, _ = answer(model, [([4, 5], sampling)])
    half = state("0", [4, 5], sampling)
    half.generated_tokens = whole[0][:6]
    again = half.create_equivalent_initial_request()
    processor = RequestProcessor(None)
    for _ in range(6):
        with torch.no_grad():
            logits = model(torch.tensor([again.initial_tokens + again.generated_tokens])).logits[:, -1]
        again.generated_tokens.append(step(processor, [again], logits.float())[0])
    assert again.generated_tokens == whole[0][6:]


def test_logprobs_are_those_of_the_model(model: Any) -> None:
    sampling = Sampling(0, repetition_penalty=1.5, num_logprobs=2)
    (tokens, _), processor = answer(model, [([3, 4], sampling), ([5], Sampling(0))])
    assert list(processor.logprobs) == ["0"]
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, *tokens]])).logits[0, 1:-1].log_softmax(-1)
    for position, entry in enumerate(processor.logprobs["0"]):
        assert entry.token == tokens[position]
        assert entry.logprob == pytest.approx(float(logits[position, entry.token]), abs=1e-5)
        values, ids = logits[position].topk(2)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
    processor.forget("0")
    assert not processor.logprobs
    step(processor, [state("0", [3, 4], sampling)], logits[:1])  # one that is over, or of another rank
    assert not processor.logprobs


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "no token"])
def test_logits_that_are_not_numbers_are_one_requests_failure(wrong: Any) -> None:
    logits = torch.randn(3, 50)
    if wrong == "no token":
        logits[1] = -torch.inf
    else:
        logits[1, 4] = wrong
    processor = RequestProcessor(None)
    states = [state(name, [1], Sampling(0)) for name in "abc"]
    for each in states:
        processor.watch(each.request_id)
    first, _, last = step(processor, states, logits)
    assert processor.failed == {"b"}
    assert [first, last] == [int(logits[0].argmax()), int(logits[2].argmax())]
    processor.forget("b")
    assert not processor.failed
    processor.is_with_rank_0 = False
    with pytest.raises(ShardconvError, match="b: the model's logits are not numbers"):
        step(processor, states, logits)


def test_other_processors_beside_it_are_an_error(model: Any) -> None:
    pages = transformers.ContinuousBatchingConfig(per_request_processors=True, num_blocks=4)
    config = serving_config(SimpleNamespace(eos_token_id=None))
    manager = model.init_continuous_batching(config, continuous_batching_config=pages)
    assert isinstance(processor_of(manager), RequestProcessor)
    assert not manager.generation_config.do_sample  # what the processor chose is not drawn once more
    config.do_sample, config.top_k = True, 4
    manager = model.init_continuous_batching(config, continuous_batching_config=pages)
    with pytest.raises(ShardconvError, match="chooses tokens by RequestProcessor, ContinuousBatchingTopK"):
        processor_of(manager)


def test_seeds_differ_between_the_answers_to_one_request() -> None:
    from shardconv_runtime.serving.answers import AnswerOptions

    options = AnswerOptions(5, Sampling(1, seed=7))
    assert [options.of_choice(n).sampling.seed for n in range(3)] == [7, 8, 9]
    assert replace(options, sampling=Sampling(1)).of_choice(2).sampling.seed is None
