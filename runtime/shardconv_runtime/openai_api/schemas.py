"""The JSON of requests, declared once for checks and for the API's description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

COMPLETION_TOKENS = 16
"""New tokens of a completion that names no number; the API's default."""

MOST_CHOICES = 128
"""Answers to one request."""

ALMOST_GREEDY = 1e-5
"""A temperature below this one counts as 0: logits that are divided by it would overflow."""

LEAST_REPETITION_PENALTY = 0.01
"""Logits that are divided by a much smaller one would overflow."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
}
"""Fields of the API that the server does not know, with the values that ask for nothing."""


class BadRequest(Exception):
    """A request that cannot be answered."""

    def __init__(self, message: str, parameter: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.status = status


@dataclass(frozen=True)
class Constraint:
    """The texts that an answer may have.

    Attributes:
        text: a JSON schema, or xgrammar's structural tag as JSON.
        parameter: the field of the request that asks for it.
    """

    text: str
    parameter: str = "response_format"
    is_tag: bool = False


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drawn."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and the biases of their logits."""
    seed: int | None = None
    """The seed of the request's own draws."""
    constraint: Constraint | None = None
    grammar: bytes | None = field(default=None, repr=False)
    """The constraint as it was compiled."""
    num_logprobs: int | None = None
    """Number of likely tokens to return with logarithmic probabilities, next to each chosen token with its
    own; None: return none."""

    @property
    def is_greedy(self) -> bool:
        """Return whether nothing is drawn."""
        return self.temperature < ALMOST_GREEDY

    @property
    def changes_scores(self) -> bool:
        """Return whether a bias or a penalty gives tokens other scores than the model's."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or self.repetition_penalty != 1 or any(penalties)

    @property
    def warping(self) -> tuple[float, int, float, float]:
        """Return temperature, ``top_k``, ``top_p`` and ``min_p`` in the types that transformers expects."""
        return float(self.temperature), self.top_k, float(self.top_p), float(self.min_p)


DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of ``Sampling`` that a model's generation config may set for requests that do not set them."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token, and its log probability in the model, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at its position, the first ones first, with theirs."""


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
LogprobCount = Annotated[int, Field(ge=0, le=20)]


class Fields(BaseModel):
    """Fields of a request; others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Fields):
    """Options of a stream of pieces of an answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Fields):
    """A schema of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str = ""
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    """The form of an answer: text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "json_schema goes with the type json_schema")
        return self

    @property
    def value_schema(self) -> dict[str, Any] | None:
        """Return the schema of the answer; None for any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.content


class GenerationRequest(Fields):
    """Fields of completions and chats."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_REPETITION_PENALTY, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[TokenText, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    response_format: ResponseFormat | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Token] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        for name, allowed in WITHOUT_EFFECT.items():
            if value.get(name) is not None and value[name] not in allowed:
                raise PydanticCustomError("unsupported", f"{name} is not supported", {"parameter": name})
        return {n: v for n, v in value.items() if v is not None and n not in WITHOUT_EFFECT}

    @property
    def limit(self) -> int | None:
        """Return the most new tokens."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of likely tokens to return with their log probabilities; None for none."""
        return None

    def sampling(self, defaults: Sampling) -> Sampling:
        """Return how tokens are drawn, with ``defaults`` for missing fields."""
        said: dict[str, Any] = {n: v for n in DEFAULT_FIELDS if (v := getattr(self, n)) is not None}
        said |= {n: getattr(self, n) for n in ("presence_penalty", "frequency_penalty", "seed")}
        bias = tuple((int(token), value) for token, value in self.logit_bias.items())
        constraint = self.constraint
        if constraint is not None and self.ignore_eos:
            raise BadRequest("an answer that follows a schema ends where that does", "ignore_eos")
        return replace(
            defaults, **said, logit_bias=bias, constraint=constraint, num_logprobs=self.num_logprobs
        )

    @property
    def constraint(self) -> Constraint | None:
        """Return the texts that ``response_format`` allows; None for any."""
        schema = None if self.response_format is None else self.response_format.value_schema
        # In its order: properties come in the order in which they are named.
        return None if schema is None else Constraint(json.dumps(schema))


class CompletionRequest(GenerationRequest):
    """A request to ``/v1/completions``."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    logprobs: LogprobCount | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See ``GenerationRequest``."""
        return self.logprobs

    @property
    def has_text(self) -> bool:
        """Return whether a prompt is a text."""
        return isinstance(self.prompt, str) or any(isinstance(each, str) for each in self.prompt)

    def token_ids(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt, which is a text or ids."""
        return prompt_token_ids(self.prompt, tokenizer)


def prompt_token_ids(prompt: str | list[Any], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each of several prompts, or of one; each is a text or ids."""
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if is_one else list(prompt)
    return [list(tokenizer(each)["input_ids"]) if isinstance(each, str) else each for each in prompts]


class ErrorBody(BaseModel):
    """The error message."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The form of every error."""

    error: ErrorBody
