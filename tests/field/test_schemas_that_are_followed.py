"""A schema is followed, or refused with the reason: never in parts, and never at the cost of other requests.

- Keywords without effect: https://github.com/sgl-project/sglang/issues/40083,
  https://github.com/mlc-ai/xgrammar/issues/104
- Patterns and references that crash the compiler: https://github.com/ggml-org/llama.cpp/issues/12252,
  https://github.com/sgl-project/sglang/issues/7639
- Properties in the order of the alphabet: https://github.com/vllm-project/vllm/issues/3283
- A grammar that does not compile ended the engine: https://github.com/vllm-project/vllm/pull/47312
- A token that the grammar does not take ended it: https://github.com/vllm-project/vllm/issues/11044
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hostile_requests import letters, nested
from shardconv_runtime.openai_api.schemas import BadRequest, CompletionRequest, Constraint, Sampling
from shardconv_runtime.serving.bounded_calls import BoundedCalls, CallEndedError, ForkServer
from shardconv_runtime.serving.grammars import NO_TOKEN, SLOW, Grammars, prepare_calls
from shardconv_runtime.serving.request_sampling import RequestProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

xgrammar = pytest.importorskip("xgrammar")

END, VOCABULARY = 2, 60


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """Schemas are compiled in 0.5 s of processor time, or refused."""
    server = ForkServer()
    found = Grammars(letters(), VOCABULARY, [END], BoundedCalls(server, 0.5, 2, keeps_processes=False))
    server.prepare(prepare_calls, letters(), *found.tokens)
    yield found
    server.close()


REFUSED: dict[str, tuple[Any, str]] = {
    "a reference to itself": ({"$ref": "#"}, "no token can begin"),
    "a cycle": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "no token can begin",
    ),
    "parentheses": ({"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}, "too many levels"),
    "levels": (nested(200), "more than 100 levels"),
    "repetitions": (
        {"type": "string", "pattern": "^((a|b|c){0,10000}d?){0,10000}$"},
        "takes too long for each token|takes more than 0.5 s",
    ),
    "a type": ({"type": "nonsense"}, 'Unsupported type "nonsense"'),
    "nothing": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "cannot accept any value"),
    "all of two": ({"allOf": [{"type": "object"}, {"properties": {"b": {}}}]}, "allOf"),
    "looking ahead": ({"type": "string", "pattern": "^(?=a)a$"}, "Lookahead"),
    "other documents": ({"$ref": "http://127.0.0.1/schema"}, "URI should"),
    "unique": ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
    "contained": ({"properties": {"a": {"type": "array", "contains": {}}}}, "contains"),
    "negated": ({"anyOf": [{"not": {}}]}, "not"),
    "beside a reference": ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {}}}, "minimum beside [$]ref"),
    "beside alternatives": ({"anyOf": [{"type": "integer"}], "type": "string"}, "type beside anyOf"),
    "a value of another type": ({"enum": [1, "a"], "type": "integer"}, "type beside enum"),
    "no type": ({"minimum": 5}, "minimum without type"),
    "no properties": ({"type": "object", "required": ["a"]}, "required 'a'"),
    "length of a pattern": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "pattern combined"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(grammars: Grammars, name: str) -> None:
    """At once the second time, and without file names and assertions of the library."""
    schema, reason = REFUSED[name]
    for _ in range(2):
        with pytest.raises(BadRequest, match=reason) as error:
            grammars.require(Constraint(json.dumps(schema)))
        assert error.value.status == 400
        assert ".cc" not in str(error.value)


OPEN: tuple[Any, ...] = (
    {},
    {"type": "object"},
    {"type": "string", "enum": ["a", "b"], "description": "letters"},
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "size"},
    {"$ref": "#/$defs/a", "description": "it", "$defs": {"a": {"type": ["integer", "null"], "minimum": 5}}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "uniqueItems": False},
    {"type": "object", "properties": {"not": {"type": "string"}, "enum": {"type": "integer"}}},
)


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_others_are_compiled(grammars: Grammars, schema: Any) -> None:
    assert grammars.require(Constraint(json.dumps(schema)))


def test_a_call_that_does_not_end_leaves_the_next_one_alone() -> None:
    server = ForkServer()
    server.prepare(tuple)
    calls = BoundedCalls(server, 0.2, 1, keeps_processes=True)
    assert calls.call(echo, b"a") == b"a"
    for badly in (spin, crash, fill):
        with pytest.raises(CallEndedError):
            calls.call(badly)
        assert calls.call(echo, b"b") == b"b"
    with pytest.raises(BadRequest, match="levels"):
        calls.call(echo, nested(50_000))
    assert server.is_running()
    server.close()
    assert not server.is_running()
    with pytest.raises((OSError, CallEndedError)):
        calls.call(echo, b"c")


def echo(_: Any, content: bytes) -> bytes:
    return content


def spin(_: Any) -> bytes:
    while True:
        pass


def crash(_: Any) -> bytes:
    import ctypes

    return ctypes.string_at(0)


def fill(_: Any) -> bytes:
    return b"x" * 2**40


class Step:
    """As the loop of rank 0 with requests for a model that likes all tokens alike."""

    def __init__(self, grammars: Grammars, asked: dict[str, Sampling]) -> None:
        self.processor = RequestProcessor(None)
        self.processor.grammars = grammars
        self.states = {
            name: RequestState(
                name, [5], logit_processor_kwargs={"sampling": sampling, "num_prompt_tokens": 1}
            )
            for name, sampling in asked.items()
        }
        for name in asked:
            self.processor.watch(name)

    def take(self, logits: torch.Tensor) -> None:
        states = list(self.states.values())
        self.processor.prepare_tensor_args([FutureRequestState(state, True, {}, 1) for state in states])
        scores = self.processor(logits.clone(), torch.zeros(len(states)))
        for state, token in zip(states, scores.argmax(-1).tolist(), strict=True):
            state.generated_tokens.append(token)


def test_properties_come_in_the_order_of_the_schema(grammars: Grammars) -> None:
    properties = {name: {"enum": [1]} for name in ("why", "answer")}
    schema = {"type": "object", "properties": properties, "required": ["why", "answer"]}
    request = CompletionRequest.model_validate(
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        }
    )
    steps = Step(grammars, {"a": request.sampling(Sampling(0))})
    for _ in range(60):
        if END not in steps.states["a"].generated_tokens:
            steps.take(torch.zeros(1, VOCABULARY))
    text = letters().decode(steps.states["a"].generated_tokens, skip_special_tokens=True)
    assert list(json.loads(text)) == ["why", "answer"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("schema", [{"enum": ["Yes", "No"]}, {"enum": ["y\u00e9s"]}], ids=str)
def test_a_request_that_no_token_continues_fails_alone(
    grammars: Grammars, schema: Any, temperature: float
) -> None:
    followed = Sampling(0, constraint=Constraint('{"enum": ["yes"]}'))
    asked = {
        "a": Sampling(0),
        "b": Sampling(temperature, constraint=Constraint(json.dumps(schema)), seed=1),
        "c": followed,
    }
    steps = Step(grammars, asked)
    torch.manual_seed(0)
    logits = torch.randn(6, 3, VOCABULARY)
    for each in logits:
        if END in steps.states["c"].generated_tokens:
            break
        steps.take(each)
    assert grammars.failures == {"b": NO_TOKEN}
    grammars.failures.clear()
    assert steps.states["a"].generated_tokens == logits[:, 0].argmax(-1).tolist()
    assert letters().decode(steps.states["c"].generated_tokens) == '"yes"<end>'


def test_a_schema_that_takes_long_for_each_token_fails_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("shardconv_runtime.serving.grammars.time.thread_time", lambda: next(clock) / 10)
    steps = Step(grammars, {"a": Sampling(0), "b": Sampling(0, constraint=Constraint('{"type": "object"}'))})
    steps.take(torch.zeros(2, VOCABULARY))
    assert grammars.failures == {}
    steps.take(torch.zeros(2, VOCABULARY))
    assert grammars.failures == {"b": SLOW}
    grammars.failures.clear()


@pytest.mark.parametrize("temperature", [0, 1])
def test_scores_that_a_penalty_makes_infinite_are_one_requests_failure(temperature: float) -> None:
    sampling = Sampling(temperature, repetition_penalty=0.01)
    steps = Step(None, {"a": sampling, "b": Sampling(0)})  # type: ignore[arg-type]
    logits = torch.zeros(2, VOCABULARY)
    logits[0, 5], logits[1, 7] = 3e38, 1.0
    steps.take(logits)
    assert steps.processor.failed == {"a"}
    assert steps.states["b"].generated_tokens == [7]
