"""Answers that follow a JSON schema, whatever the model would say."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hostile_requests import CHARACTERS, letters
from shardconv_runtime.openai_api.schemas import BadRequest, CompletionRequest, Constraint, Sampling
from shardconv_runtime.serving.grammars import MOST_CHARACTERS, Grammars
from shardconv_runtime.serving.request_sampling import RequestProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

pytest.importorskip("xgrammar")

END, VOCABULARY = 2, 60
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["paris", "rome"]}, "size": {"type": "integer"}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return letters()


@pytest.fixture
def processor(tokenizer: Any) -> RequestProcessor:
    found = RequestProcessor(None)
    found.grammars = Grammars(tokenizer, VOCABULARY, [END])
    return found


def answer(processor: RequestProcessor, states: list[RequestState], steps: int) -> None:
    """As transformers' loop, with a model that says anything."""
    for _ in range(steps):
        going = [state for state in states if END not in state.generated_tokens]
        processor.prepare_tensor_args([FutureRequestState(state, True, {}, 1) for state in going])
        scores = processor(3 * torch.randn(len(going), VOCABULARY), torch.zeros(len(going)))
        for state, token in zip(going, scores.argmax(-1).tolist(), strict=True):
            state.generated_tokens.append(token)


def asked(name: str, sampling: Sampling) -> RequestState:
    return RequestState(name, [5, 6], logit_processor_kwargs={"sampling": sampling, "num_prompt_tokens": 2})


def test_answers_follow_their_schemas(processor: RequestProcessor, tokenizer: Any) -> None:
    """Greedy and drawn ones, beside one that follows none."""
    torch.manual_seed(0)
    # Numbers end sometime, since the others' tokens are made likely.
    bias = tuple((index, -4.0) for index, text in enumerate(("", "", "", *CHARACTERS)) if text.isdigit())
    states = [
        asked("a", Sampling(0, constraint=Constraint(SCHEMA), logit_bias=bias)),
        asked("b", Sampling(1, constraint=Constraint(SCHEMA), logit_bias=bias, seed=3)),
        asked("c", Sampling(1)),
    ]
    answer(processor, states, 60)
    for state in states[:2]:
        assert state.generated_tokens[-1] == END
        found = json.loads(tokenizer.decode(state.generated_tokens[:-1]))
        assert found["city"] in ("paris", "rome")
        assert isinstance(found["size"], int)
    assert not tokenizer.decode(states[2].generated_tokens).startswith("{")


def test_a_request_that_begins_anew_goes_on(processor: RequestProcessor, tokenizer: Any) -> None:
    torch.manual_seed(1)
    state = asked("a", Sampling(0, constraint=Constraint(SCHEMA)))
    answer(processor, [state], 6)
    again = state.create_equivalent_initial_request()
    answer(processor, [again], 30)
    text = tokenizer.decode(state.generated_tokens + again.generated_tokens)
    assert text.replace(" ", "").startswith(('{"city":"paris', '{"city":"rome"'))


@pytest.mark.parametrize(
    ("schema", "message"),
    [('{"type": "nonsense"}', "cannot be followed"), ('"' + "a" * MOST_CHARACTERS + '"', "more than")],
)
def test_schemas_that_cannot_be_followed(processor: RequestProcessor, schema: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        processor.grammars.require(Constraint(schema))
    processor.grammars.require(Constraint(SCHEMA))


def test_what_a_request_says() -> None:
    def schema(response_format: Any, **fields: Any) -> str | None:
        request = CompletionRequest.model_validate(
            {"prompt": "a", "response_format": response_format, **fields}
        )
        constraint = request.sampling(Sampling()).constraint
        return None if constraint is None else constraint.text

    assert schema({"type": "text"}) is None
    assert schema(None) is None
    assert schema({"type": "json_object"}) == '{"type": "object"}'
    given = {"name": "x", "strict": True, "schema": {"type": "array"}}
    assert schema({"type": "json_schema", "json_schema": given}) == '{"type": "array"}'
    with pytest.raises(BadRequest, match="ends where"):
        schema({"type": "json_object"}, ignore_eos=True)
    for wrong in ({"type": "json_schema"}, {"type": "yaml"}, {"type": "text", "json_schema": given}):
        with pytest.raises(ValueError, match="response_format"):
            schema(wrong)


@pytest.mark.parametrize("reason", ["no end", "no such tokenizer"])
def test_where_nothing_follows_schemas_the_server_starts(tokenizer: Any, reason: str) -> None:
    from shardconv_runtime.serving.server import grammars_of

    ends = None if reason == "no end" else [END, 3]
    text = SimpleNamespace(vocab_size=VOCABULARY)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=ends),
        config=SimpleNamespace(get_text_config=lambda decoder: text),
    )
    assert grammars_of(model, tokenizer if reason == "no end" else object()) is None
    model.generation_config.eos_token_id = END
    assert isinstance(grammars_of(model, tokenizer), Grammars)
